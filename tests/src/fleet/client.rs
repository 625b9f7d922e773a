//! One simulated agent and its connection.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use mio::{Interest, Registry, Token, net::TcpStream};
use rustls::ClientConfig;
use socket2::{Domain, SockRef, Socket, Type};

use super::{
    Break, Member,
    agent::{Agent, Reference},
    http2::{Broken, End, Http2},
    latency::{Histogram, Timetable},
    tls::Tls,
    tracker::{Effect, Mode, Point, Received},
};

/// The largest number of earlier versions in an ACK (`Ack.earlier` in discovery.proto).
const MAX_EARLIER: usize = 64;
/// The shortest time between two ACKs if a batch asks for an ACK without a pause (discovery.proto,
/// section 18).
const AT_ONCE: Duration = Duration::from_millis(20);

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Lost {
    /// The connection failed, the server closed the connection or ended the stream, or the
    /// handshake timed out.
    Ended(String),
    /// The agent closed the connection, because the server violated the contract.
    Violation(String),
}

/// Buffers that all agents of the fleet's thread share.
pub(super) struct Scratch {
    /// Bytes read from a socket.
    pub(super) incoming: Box<[u8]>,
    /// Bytes to encrypt.
    plain: Vec<u8>,
    /// Encrypted bytes to write.
    cipher: Vec<u8>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self { incoming: vec![0; 256 << 10].into(), plain: Vec::new(), cipher: Vec::new() }
    }
}

/// Measurements that all agents of the fleet's thread share.
pub(super) struct Gauge {
    pub(super) timetable: Arc<Timetable>,
    pub(super) is_recording: bool,
    pub(super) latency: Histogram,
    /// The number of welcomes and first snapshots of all agents so far. Each of these events gets
    /// the number that this counter has after the event.
    pub(super) moments: u64,
}

impl Gauge {
    fn moved(&mut self, before: &Point, after: &Point, now: Instant) {
        if before.version == 0 {
            // The first snapshot is not a change.
            return;
        }
        for version in before.slices() + 1..=after.slices() {
            if let Some(microseconds) = self.timetable.receive(version, now) {
                self.latency.record(microseconds);
            }
        }
    }
}

struct Link {
    socket: TcpStream,
    tls: Tls,
    http2: Http2,
    /// Bytes that the socket has not accepted yet.
    out: Vec<u8>,
    is_open: bool,
    /// Whether the server has closed its side. One event may report the last bytes and the end, so
    /// reading must continue until the end of file.
    has_ended: bool,
    since: Instant,
    last_heard: Instant,
}

/// One simulated agent. The agent's state survives its connections.
pub struct Client {
    pub(super) member: Member,
    config: Arc<ClientConfig>,
    agent: Agent,
    link: Option<Link>,
    next_replica: usize,
    /// The replica that asked the agent to move. The next connection avoids this replica.
    left: Option<SocketAddr>,
    pub(super) failures: u32,
    next_ack: Option<Instant>,
    last_ack: Option<Instant>,
    /// The versions that the next ACK covers, and the times at which they were received.
    programmed: Vec<(u64, Instant)>,
    pub(super) ack_is_scheduled: bool,
    pub(super) violation: Option<String>,
    pub(super) is_suspended: bool,
    earlier: Received,
    counts: Counts,
    welcomed: Option<u64>,
    first_snapshot: Option<(u64, u64)>,
}

/// Counts for all connections of an agent, including ended connections.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Full TLS handshakes.
    pub full_handshakes: u64,
    /// TLS handshakes that resumed a session.
    pub resumed_handshakes: u64,
    /// Sent ACKs.
    pub acks: u64,
    /// Attempts to connect.
    pub connections: u64,
    /// Bytes read from sockets.
    pub wire_bytes: u64,
}

impl Client {
    pub(super) fn new(member: Member, config: Arc<ClientConfig>) -> Self {
        let agent = Agent::new(&member.node, member.is_full);
        Self {
            member,
            config,
            agent,
            link: None,
            next_replica: 0,
            left: None,
            failures: 0,
            next_ack: None,
            last_ack: None,
            programmed: Vec::new(),
            ack_is_scheduled: false,
            violation: None,
            is_suspended: false,
            earlier: Received::default(),
            counts: Counts::default(),
            welcomed: None,
            first_snapshot: None,
        }
    }

    /// The description that was given when the agent was added.
    #[must_use]
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// The agent's state.
    #[must_use]
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Counts for all connections of the agent.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Counts of the messages on all streams of the agent.
    #[must_use]
    pub fn received(&self) -> Received {
        let mut all = self.earlier;
        all += *self.agent.tracker().received();
        all
    }

    /// Two event numbers: of the agent's first welcome, and of its first snapshot. One counter
    /// numbers these events of all agents in the order in which they happen. `None` before the
    /// first snapshot.
    #[must_use]
    pub fn first_snapshot(&self) -> Option<(u64, u64)> {
        self.first_snapshot
    }

    /// How the present stream began; `None` if the agent has no stream.
    #[must_use]
    pub fn mode(&self) -> Option<Mode> {
        self.link.as_ref().and_then(|_| self.agent.tracker().mode())
    }

    /// Whether the agent has a stream and has completed the resume.
    #[must_use]
    pub fn is_following(&self) -> bool {
        self.link.is_some() && self.agent.tracker().is_following()
    }

    /// Whether the agent follows a stream and has reached the source position `slices`, which
    /// counts changes of EndpointSlices.
    #[must_use]
    pub fn has(&self, slices: u64) -> bool {
        self.is_following() && self.agent.tracker().point().is_some_and(|point| point.slices() >= slices)
    }

    /// Whether the agent is healthy: it reads, and is not suspended.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        !self.member.never_reads && !self.is_suspended
    }

    pub(super) fn is_handshaking(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.is_open)
    }

    pub(super) fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// Replaces the agent's replicas. The present connection stays.
    pub(super) fn set_replicas(&mut self, replicas: &[SocketAddr]) {
        self.member.replicas = replicas.to_vec();
        self.next_replica = 0;
        self.failures = 0;
    }

    /// The address of the next replica. If the agent has several replicas, this function skips the
    /// replica that asked the agent to move.
    fn next_address(&mut self) -> Result<SocketAddr> {
        let left = self.left.take();
        let replicas = &self.member.replicas;
        let address = |number: usize| replicas.get(number % replicas.len().max(1)).copied();
        if address(self.next_replica) == left {
            self.next_replica += 1;
        }
        let address = address(self.next_replica).context("the agent has no replicas")?;
        self.next_replica += 1;
        Ok(address)
    }

    /// Begins a connection to the next replica.
    pub(super) fn connect(&mut self, registry: &Registry, token: Token) -> Result<()> {
        let address = self.next_address()?;
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        if let Some(source) = self.member.source {
            socket.bind(&SocketAddr::new(source, 0).into())?;
        }
        match socket.connect(&address.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let mut socket = TcpStream::from_std(socket.into());
        registry.register(&mut socket, token, Interest::READABLE | Interest::WRITABLE)?;
        let mut tls = Tls::new(Arc::clone(&self.config))?;
        let mut out = Vec::new();
        tls.take(&mut [], &mut out, |_| Ok(())).map_err(anyhow::Error::msg)?;
        let now = Instant::now();
        let http2 = Http2::new();
        self.link =
            Some(Link { socket, tls, http2, out, is_open: false, has_ended: false, since: now, last_heard: now });
        self.counts.connections += 1;
        self.ack_is_scheduled = false;
        Ok(())
    }

    /// Prepares to leave the replica and returns true, if `connection` is the number of the present
    /// connection. Otherwise does nothing and returns false.
    pub(super) fn leaves(&mut self, connection: u64) -> bool {
        let leaves = self.link.is_some() && self.counts.connections == connection;
        if leaves {
            self.left = self.link.as_ref().and_then(|link| link.socket.peer_addr().ok());
        }
        leaves
    }

    /// Closes the connection.
    pub(super) fn disconnect(&mut self, how: Break) {
        let Some(link) = self.link.take() else { return };
        self.earlier += self.agent.end_stream();
        self.programmed.clear();
        if how == Break::Reset
            && let Err(error) = SockRef::from(&link.socket).set_linger(Some(Duration::ZERO))
        {
            eprintln!("warning: a connection cannot be closed with a TCP reset: {error}");
        }
    }

    /// Records that the server has closed its side. Bytes that the server has already sent can
    /// still be read.
    pub(super) fn on_closed(&mut self) {
        if let Some(link) = &mut self.link {
            link.has_ended = true;
        }
    }

    /// Writes pending bytes, when the socket is writable.
    pub(super) fn on_writable(&mut self) -> Result<(), Lost> {
        let Some(link) = &mut self.link else { return Ok(()) };
        if let Ok(Some(error)) = link.socket.take_error() {
            return Err(Lost::Ended(format!("connection: {}", error.kind())));
        }
        link.flush()
    }

    /// Reads available bytes, and processes their messages. Returns the ACK or move that the worker
    /// must make later, if any.
    pub(super) fn on_readable(
        &mut self,
        scratch: &mut Scratch,
        gauge: &mut Gauge,
        ack_interval: Duration,
        reference: Option<&Reference>,
    ) -> Result<Outcome, Lost> {
        let (mut wants_ack, mut move_at) = (false, None);
        loop {
            let Some(link) = &mut self.link else { return Ok(Outcome::default()) };
            let Scratch { incoming, plain, cipher } = scratch;
            let held = link.tls.partial().len();
            incoming[..held].copy_from_slice(link.tls.partial());
            let room = incoming.len() - held;
            let count = match link.socket.read(&mut incoming[held..held + room]) {
                Ok(0) => return Err(link.closed()),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::NotConnected => break,
                Err(error) => return Err(Lost::Ended(format!("connection: {}", error.kind()))),
            };
            self.counts.wire_bytes += count as u64;
            let now = Instant::now();
            link.last_heard = now;
            plain.clear();
            cipher.clear();
            let (http2, agent, is_measured) = (&mut link.http2, &mut self.agent, self.member.is_measured);
            let (welcomed, first_snapshot) = (&mut self.welcomed, &mut self.first_snapshot);
            let programmed = &mut self.programmed;
            let mut broken = None;
            let mut on_message = |message: &[u8]| {
                let effect = agent.on_message(message).map_err(|violation| violation.to_string())?;
                match effect {
                    Effect::None => {}
                    // After a resume from the log, the replica possibly has no change to send. The
                    // agent therefore acknowledges its version now.
                    Effect::Welcomed => {
                        wants_ack |= agent.tracker().mode() == Some(Mode::Log);
                        gauge.moments += 1;
                        welcomed.get_or_insert(gauge.moments);
                    }
                    Effect::Node => wants_ack = true,
                    Effect::Drained(within_ms) => {
                        move_at = Some(now + Duration::from_millis(within_ms).mul_f64(fastrand::f64()));
                    }
                    Effect::Moved(before) => {
                        wants_ack = true;
                        if first_snapshot.is_none() {
                            gauge.moments += 1;
                            *first_snapshot = welcomed.map(|welcomed| (welcomed, gauge.moments));
                        }
                        if programmed.len() > MAX_EARLIER {
                            programmed.remove(0);
                        }
                        programmed.extend(agent.tracker().point().map(|point| (point.version, now)));
                        if let (true, true, Some(after)) = (is_measured, gauge.is_recording, agent.tracker().point()) {
                            gauge.moved(&before, &after, now);
                        }
                    }
                }
                Ok(())
            };
            let taken = link.tls.take(&mut incoming[..held + count], cipher, |data| {
                http2.feed(data, plain, &mut on_message).map_err(|error| {
                    broken = Some(error);
                    String::new()
                })
            });
            let progress = match (taken, broken) {
                (_, Some(error)) => return Err(Lost::of(&error)),
                // A TLS alert: the server refuses the agent or its bytes.
                (Err(error), None) => return Err(Lost::Ended(error)),
                (Ok(progress), None) => progress,
            };
            if progress.has_opened {
                link.is_open = true;
                match link.tls.is_resumed() {
                    Some(true) => self.counts.resumed_handshakes += 1,
                    _ => self.counts.full_handshakes += 1,
                }
                Http2::open("control-plane", plain);
                (self.next_ack, self.last_ack) = (None, None);
                let hello = self.agent.hello(reference);
                if !link.http2.send(&hello, plain) {
                    return Err(Lost::Violation("the server's windows are too small for Hello".to_owned()));
                }
            }
            if let Some(end) = link.http2.end.take() {
                return Err(Lost::Ended(shown(&end)));
            }
            link.encrypt_and_flush(plain, cipher)?;
            if count < room && !link.has_ended {
                break;
            }
        }
        let outcome = if wants_ack { self.answer(scratch, ack_interval)? } else { Outcome::default() };
        Ok(Outcome { move_at: move_at.map(|at| (at, self.counts.connections)), ..outcome })
    }

    /// Sends an ACK, or returns the time at which the ACK is due.
    fn answer(&mut self, scratch: &mut Scratch, ack_interval: Duration) -> Result<Outcome, Lost> {
        if self.member.is_mute {
            return Ok(Outcome::default());
        }
        let is_urgent = self.agent.tracker().is_urgent();
        let next = if is_urgent { self.last_ack.map(|at| at + AT_ONCE) } else { self.next_ack };
        match next.filter(|due| *due > Instant::now()) {
            Some(_) if self.ack_is_scheduled && !is_urgent => Ok(Outcome::default()),
            Some(due) => {
                self.ack_is_scheduled = true;
                Ok(Outcome { ack_at: Some(due), ..Outcome::default() })
            }
            None => self.acknowledge(scratch, ack_interval).map(|()| Outcome::default()),
        }
    }

    /// Sends an ACK of the present version. The next ACK is due after `ack_interval`. A random
    /// factor shortens or lengthens this time by up to 40 %, as in a real agent.
    pub(super) fn acknowledge(&mut self, scratch: &mut Scratch, ack_interval: Duration) -> Result<(), Lost> {
        self.ack_is_scheduled = false;
        let Some(ack) = self.agent.ack(&self.programmed).filter(|_| self.is_following()) else { return Ok(()) };
        if self.send(&ack, scratch)? {
            let now = Instant::now();
            self.last_ack = Some(now);
            self.next_ack = Some(now + ack_interval.mul_f64(0.6 + 0.8 * fastrand::f64()));
            self.programmed.clear();
            self.counts.acks += 1;
        }
        Ok(())
    }

    /// Sends a message. Returns false if the server's windows are too small now.
    pub(super) fn send(&mut self, message: &[u8], scratch: &mut Scratch) -> Result<bool, Lost> {
        let Some(link) = self.link.as_mut().filter(|link| link.is_open) else { return Ok(false) };
        scratch.plain.clear();
        scratch.cipher.clear();
        let is_sent = link.http2.send(message, &mut scratch.plain);
        link.encrypt_and_flush(&mut scratch.plain, &mut scratch.cipher)?;
        Ok(is_sent)
    }

    /// Returns an error if the handshake takes too long, or if the server has sent nothing for
    /// three heartbeat intervals.
    pub(super) fn check_silence(&self, now: Instant, handshake_limit: Duration) -> Result<(), Lost> {
        let Some(link) = &self.link else { return Ok(()) };
        if !link.is_open {
            let is_late = now.duration_since(link.since) > handshake_limit;
            return if is_late { Err(Lost::Ended("the TLS handshake did not end in time".to_owned())) } else { Ok(()) };
        }
        let limit = Duration::from_millis(3 * self.agent.tracker().heartbeat_interval_ms());
        if !limit.is_zero() && now.duration_since(link.last_heard) > limit {
            return Err(Lost::Violation("the server sent nothing for three heartbeat intervals".to_owned()));
        }
        Ok(())
    }
}

/// What the worker has to do after reading.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Outcome {
    /// When to send the next ACK, if it is not scheduled yet.
    pub(super) ack_at: Option<Instant>,
    /// When to move to another replica, and the number of the connection to leave.
    pub(super) move_at: Option<(Instant, u64)>,
}

impl Lost {
    fn of(error: &Broken) -> Self {
        Self::Violation(error.to_string())
    }
}

fn shown(end: &End) -> String {
    match end {
        End::Status { code, message } => format!("status {code}: {message}"),
        End::Reset(code) => format!("RST_STREAM {code}"),
    }
}

impl Link {
    fn closed(&self) -> Lost {
        let how = if self.http2.goes_away { "GOAWAY" } else { "closed" };
        Lost::Ended(format!("connection: {how}"))
    }

    /// Encrypts `plain`, appends the result to `cipher`, and writes `cipher` to the socket.
    fn encrypt_and_flush(&mut self, plain: &mut Vec<u8>, cipher: &mut Vec<u8>) -> Result<(), Lost> {
        if !plain.is_empty() {
            self.tls.encrypt(plain, cipher).map_err(Lost::Ended)?;
            plain.clear();
        }
        if cipher.is_empty() {
            return if self.tls.is_closed { Err(self.closed()) } else { Ok(()) };
        }
        self.out.append(cipher);
        self.flush()
    }

    fn flush(&mut self) -> Result<(), Lost> {
        let mut written = 0;
        while written < self.out.len() {
            match self.socket.write(&self.out[written..]) {
                Ok(count) => written += count,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Lost::Ended(format!("connection: {}", error.kind()))),
            }
        }
        self.out.drain(..written);
        Ok(())
    }
}
