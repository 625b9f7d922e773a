//! `userspace-failures`: the agent in mode userspace hangs, is killed, and is upgraded, while 2,000
//! connections carry bytes and clients open new connections.
//!
//! The agent drains for at most 25 s when it stops. The connections of an upgrade end within this
//! time. The bench fails if the upgrade loses one of them, or if a new connection fails.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread::{self, Scope, ScopedJoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;

use super::{
    Bench, SETTLE,
    load::{self, ECHO, ONCE},
};
use crate::{
    bench::report::Figure,
    testbed::{netns::Namespace, process::Process},
};

const CONNECTIONS: usize = 2_000;
/// Threads that send bytes on the connections, one connection after the other.
const CARRIERS: usize = 8;
/// The pause of each thread after it has used all its connections.
const CARRIER_PAUSE: Duration = Duration::from_millis(50);
/// The pause between the beginnings of new connections.
const OPENER_PAUSE: Duration = Duration::from_millis(10);
/// A new connection that is not answered within this time has failed.
const LONGEST_OPENING: Duration = Duration::from_secs(5);
/// The time of a hang, and the time during which connections are observed after each failure.
const OBSERVED: Duration = Duration::from_secs(4);
/// The longest wait for a byte on an open connection. It is longer than [`OBSERVED`].
const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// Runs the bench.
///
/// # Errors
/// A program does not start, or the upgrade loses a connection.
pub fn run() -> Result<Vec<Figure>> {
    // New connections are open, too.
    let bench = Bench::new(CONNECTIONS * 2)?;
    ensure!(bench.connections == CONNECTIONS * 2, "the limit of open files is too low: raise it (ulimit -Hn)");
    let mut figures = Vec::new();
    let mut agent = bench.start_agent()?;
    thread::sleep(SETTLE);
    let hang = observe(&bench, |_| {
        agent.signal(Signal::SIGSTOP)?;
        thread::sleep(OBSERVED);
        agent.signal(Signal::SIGCONT)
    })?;
    agent.check_running()?;
    hang.report("hang", &mut figures);
    let mut agent = Some(agent);
    let kill = observe(&bench, |_| {
        agent.take().map_or(Ok(()), Process::kill)?;
        thread::sleep(OBSERVED);
        Ok(())
    })?;
    kill.report("kill", &mut figures);
    // The kernel keeps entries of connections that the kill reset for 10 s. It leads a SYN from the
    // same port to the same listener (docs/userspace.md). A new namespace has no such entries.
    drop(bench);
    let bench = Bench::new(CONNECTIONS * 2)?;
    let agent = bench.start_agent()?;
    thread::sleep(SETTLE);
    let upgrade = upgrade(&bench, agent)?;
    upgrade.report("upgrade", &mut figures);
    ensure!(
        upgrade.lost == 0 && upgrade.failed == 0,
        "the upgrade lost {} of {} connections, and {} of {} new connections failed, which began within {:?} after its beginning",
        upgrade.lost,
        upgrade.connections,
        upgrade.failed,
        upgrade.opened.len() + upgrade.failed,
        upgrade.failures
    );
    Ok(figures)
}

/// Ends the agent and starts the next one after it has ended, as a DaemonSet does.
fn upgrade(bench: &Bench, agent: Process) -> Result<Seen> {
    let mut next = None;
    let seen = observe(bench, |clients| {
        let ended = thread::scope(|scope| {
            let ending = scope.spawn(|| agent.terminate());
            thread::sleep(OBSERVED);
            // The clients close their connections now, so the old agent ends.
            clients.close.store(true, Relaxed);
            ending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        ensure!(ended.success(), "the old agent ended with {ended}");
        next = Some(bench.start_agent()?);
        thread::sleep(OBSERVED);
        Ok(())
    })?;
    next.map_or(Ok(()), Process::kill)?;
    Ok(seen)
}

/// What clients saw.
struct Seen {
    connections: usize,
    /// Connections that ended before the clients closed them.
    lost: usize,
    /// For each new connection that was answered: when it began, as the time since the failure, and
    /// how long the answer took.
    opened: Vec<(Duration, Duration)>,
    failed: usize,
    /// When the first and the last new connection began that failed.
    failures: Option<(Duration, Duration)>,
}

impl Seen {
    fn report(&self, what: &str, figures: &mut Vec<Figure>) {
        let mut add = |name: &str, value: f64, unit| {
            figures.push(Figure::alone(format!("userspace-failures/{what}/{name}"), value, unit));
        };
        add("connections", self.connections as f64, "");
        add("connections-lost", self.lost as f64, "");
        add("new-connections", (self.opened.len() + self.failed) as f64, "");
        add("new-connections-failed", self.failed as f64, "");
        let failing = self.failures.map_or(Duration::ZERO, |(first, last)| last - first + OPENER_PAUSE);
        add("new-connections-failed-for", failing.as_secs_f64() * 1e3, "ms");
        let longest = self.opened.iter().map(|(_, took)| *took).max().unwrap_or_default();
        add("longest-new-connection", longest.as_secs_f64() * 1e3, "ms");
    }
}

/// Opens connections, carries bytes on them, and opens new connections while `failure` runs.
fn observe(bench: &Bench, failure: impl FnOnce(&Clients) -> Result<()>) -> Result<Seen> {
    let clients = Clients::new(bench.target);
    let shared = &clients;
    thread::scope(|scope| {
        let mut threads: Vec<_> = (0..CARRIERS).map(|_| start(scope, &bench.namespace, || shared.carry())).collect();
        let observed = || {
            let began_waiting = Instant::now();
            while clients.ready.load(Relaxed) < CONNECTIONS && threads.iter().all(|thread| !thread.is_finished()) {
                ensure!(
                    began_waiting.elapsed() < LONGEST_WAIT * 3,
                    "the clients did not open their connections in time"
                );
                thread::sleep(Duration::from_millis(20));
            }
            // The kernel completes connections before the agent accepts them.
            loop {
                let carried = bench.agent_counter("headgate_userspace_connections_open")?;
                if carried >= CONNECTIONS as f64 {
                    break;
                }
                let is_late = began_waiting.elapsed() > LONGEST_WAIT * 3;
                ensure!(!is_late, "the agent carries only {carried} of {CONNECTIONS} connections");
                thread::sleep(Duration::from_millis(20));
            }
            let began = Instant::now();
            threads.push(start(scope, &bench.namespace, move || shared.open_new(began)));
            failure(&clients)
        };
        let result = observed();
        clients.is_over.store(true, Relaxed);
        for thread in threads {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        result
    })?;
    let outcomes = clients.outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    let failed: Vec<Duration> = outcomes.iter().filter(|(_, took)| took.is_none()).map(|(began, _)| *began).collect();
    Ok(Seen {
        connections: CONNECTIONS,
        lost: clients.lost.into_inner(),
        opened: outcomes.iter().filter_map(|(began, took)| Some((*began, (*took)?))).collect(),
        failed: failed.len(),
        failures: failed.iter().min().copied().zip(failed.iter().max().copied()),
    })
}

/// Runs a client in a thread in the namespace, on the processor that the proxy does not use.
fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    namespace: &'scope Namespace,
    work: impl FnOnce() -> Result<()> + Send + 'scope,
) -> ScopedJoinHandle<'scope, Result<()>> {
    scope.spawn(move || namespace.run(move || load::use_the_other_processor().and_then(|()| work())))
}

/// When a connection began, as the time since the failure, and how long its answer took. `None` if
/// it failed.
type Opened = (Duration, Option<Duration>);

/// What the clients share.
struct Clients {
    target: SocketAddr,
    /// Number of open connections that carry bytes.
    ready: AtomicUsize,
    /// Number of connections on which a byte did not return.
    lost: AtomicUsize,
    outcomes: Mutex<Vec<Opened>>,
    /// True when the clients close their connections.
    close: AtomicBool,
    /// True when the clients end.
    is_over: AtomicBool,
}

impl Clients {
    fn new(target: SocketAddr) -> Self {
        Self {
            target,
            ready: AtomicUsize::default(),
            lost: AtomicUsize::default(),
            outcomes: Mutex::default(),
            close: AtomicBool::default(),
            is_over: AtomicBool::default(),
        }
    }

    /// Opens the share of one thread of the connections, and sends a byte on each again and again.
    fn carry(&self) -> Result<()> {
        let mut connections = Vec::new();
        for _ in 0..CONNECTIONS / CARRIERS {
            let connection = load::open(self.target, ECHO)?;
            connection.set_read_timeout(Some(LONGEST_WAIT))?;
            connections.push(connection);
            self.ready.fetch_add(1, Relaxed);
        }
        while !self.is_over.load(Relaxed) && !self.close.load(Relaxed) {
            connections.retain_mut(|connection| {
                let is_alive = connection.write_all(&[7]).and_then(|()| connection.read_exact(&mut [0])).is_ok();
                if !is_alive {
                    self.lost.fetch_add(1, Relaxed);
                }
                is_alive
            });
            thread::sleep(CARRIER_PAUSE);
        }
        Ok(())
    }

    /// Opens new connections, each in a thread of its own.
    fn open_new(&self, failure: Instant) -> Result<()> {
        thread::scope(|scope| {
            while !self.is_over.load(Relaxed) {
                let opener = move || {
                    let began = Instant::now();
                    let took = ask(self.target).ok().map(|()| began.elapsed());
                    self.outcomes.lock().unwrap_or_else(PoisonError::into_inner).push((began - failure, took));
                };
                thread::Builder::new().spawn_scoped(scope, opener).context("starting a client")?;
                thread::sleep(OPENER_PAUSE);
            }
            Ok(())
        })
    }
}

/// Opens a connection, and waits for the answer to one byte.
fn ask(target: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&target, LONGEST_OPENING)?;
    stream.set_read_timeout(Some(LONGEST_OPENING))?;
    stream.write_all(&[ONCE])?;
    stream.read_exact(&mut [0])
}
