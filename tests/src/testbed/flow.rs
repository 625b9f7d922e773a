//! UDP clients that keep one socket, so that all their packets match one conntrack entry.

use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use super::{
    Answer, Outcome, Request, Testbed, Transport, client::from_a_port, manifests::Via, plan::Family,
    turn::ask_and_pause,
};

/// Longest wait until a flow follows a change. A flow usually needs some milliseconds.
const GUARD: Duration = Duration::from_secs(60);
/// How long to wait for an answer to a request that is sent again.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(250);
/// How long clients may take for one more request each, even on a busy machine.
const MORE: Duration = Duration::from_secs(60);
/// How long to wait for the answer to a request that is sent only once. A busy machine may pause
/// for seconds.
const ONLY_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// A UDP client with one connected socket.
#[derive(Debug)]
pub struct Flow {
    socket: UdpSocket,
    name: String,
}

impl Flow {
    /// Opens a client on the machine `from`, connected to `to`. Its port is new: with the port of
    /// an earlier client, its packets would match the conntrack entry of that client.
    pub fn open(bed: &Testbed, from: &str, to: SocketAddr) -> Result<Self> {
        let socket = bed.machines().machine(from)?.run(|| {
            let socket = from_a_port(&Request::new(Transport::Udp, to), UdpSocket::bind)?;
            socket.connect(to)?;
            Ok(socket)
        })?;
        Ok(Self { socket, name: format!("{from} asking {to}") })
    }

    /// Sends one request.
    pub fn ask(&self) -> Outcome {
        self.ask_within(ANSWER_TIMEOUT)
    }

    fn ask_within(&self, limit: Duration) -> Outcome {
        // Discard late answers and pending errors of earlier requests.
        while self.drain() {}
        let asked = self.socket.set_read_timeout(Some(limit)).and_then(|()| self.socket.send(b"who"));
        let mut buffer = [0; 512];
        match asked.and_then(|_| self.socket.recv(&mut buffer)) {
            Ok(length) => match std::str::from_utf8(&buffer[..length]).unwrap_or_default().parse() {
                Ok(answer) => Outcome::Answered(answer),
                Err(error) => Outcome::Broken(format!("{error:#}")),
            },
            Err(error) => match error.kind() {
                ErrorKind::ConnectionRefused => Outcome::Refused,
                // A rule of the client's own machine rejected or dropped the packet.
                ErrorKind::PermissionDenied => Outcome::Refused,
                ErrorKind::TimedOut | ErrorKind::WouldBlock => Outcome::TimedOut,
                ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Outcome::Unreachable,
                _ => Outcome::Broken(error.to_string()),
            },
        }
    }

    fn drain(&self) -> bool {
        let mut buffer = [0; 512];
        let waiting = self.socket.set_nonblocking(true).is_ok()
            && !matches!(self.socket.recv(&mut buffer), Err(error) if error.kind() == ErrorKind::WouldBlock);
        waiting && self.socket.set_nonblocking(false).is_ok() || {
            let _ = self.socket.set_nonblocking(false);
            false
        }
    }

    /// Repeats the request until `is_so` accepts the outcome, and returns this outcome. `wanted`
    /// describes the expected outcome in the error.
    pub fn until(&self, wanted: &str, is_so: impl Fn(&Outcome) -> bool) -> Result<Outcome> {
        let deadline = Instant::now() + GUARD;
        loop {
            let outcome = self.ask();
            if is_so(&outcome) {
                return Ok(outcome);
            }
            if Instant::now() > deadline {
                bail!("{}: expected {wanted}, found {outcome}", self.name);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Repeats the request until `server` answers.
    pub fn until_answered_by(&self, server: &str) -> Result<Answer> {
        let is_so = |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if answer.server == server);
        match self.until(&format!("answered by {server}"), is_so)? {
            Outcome::Answered(answer) => Ok(answer),
            other => bail!("{}: {other}", self.name),
        }
    }

    /// Repeats the request until no server answers.
    pub fn until_unanswered(&self) -> Result<()> {
        self.until("no answer", |outcome| !matches!(outcome, Outcome::Answered(_))).map(drop)
    }

    /// Sends one request and returns the name of the server that answers. No answer is an error.
    pub fn server(&self) -> Result<String> {
        match self.ask_within(ONLY_ANSWER_TIMEOUT) {
            Outcome::Answered(answer) => Ok(answer.server),
            other => bail!("{}: {other}", self.name),
        }
    }
}

/// Opens a client for each of `ways` (machine and kind of address) and each family, connected to
/// the service's port `udp`.
pub fn open_all(bed: &Testbed, service: &str, ways: &[(&str, Via)]) -> Result<Vec<Flow>> {
    let mut flows = Vec::new();
    for family in Family::BOTH {
        for (from, via) in ways {
            let to = bed.address(service, *via, family, "udp")?;
            flows.push(Flow::open(bed, from, to).with_context(|| format!("{from} by {via:?}"))?);
        }
    }
    Ok(flows)
}

/// Runs `work` while all clients send requests, each on its own thread. There are as many requests
/// as clients before `work` begins, and as many after it has ended.
///
/// # Errors
/// `work` fails, or the clients send too few requests in a minute.
pub fn while_asking(flows: &[Flow], work: impl FnOnce() -> Result<()>) -> Result<()> {
    let (stop, asked) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for flow in flows {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    ask_and_pause(flows.len(), PAUSE, || flow.ask());
                    asked.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let more = || {
            let (enough, until) = (asked.load(Ordering::Relaxed) + flows.len(), Instant::now() + MORE);
            while asked.load(Ordering::Relaxed) < enough {
                ensure!(Instant::now() < until, "{} clients hardly send requests", flows.len());
                std::thread::sleep(PAUSE);
            }
            Ok(())
        };
        // The threads must also end if `work` panics.
        let all = || more().and_then(|()| work()).and_then(|()| more());
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(all));
        stop.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
