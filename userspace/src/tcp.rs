//! The TCP proxy: threads that accept connections, choose endpoints, and carry bytes.
//!
//! Each thread has one epoll instance with edge-triggered events, one buffer, and a few pipes. A
//! connection is one entry of less than 512 bytes. Small transfers are a read and a write with the
//! buffer of the thread. When a read fills the buffer, the direction uses `splice(2)` through a
//! pipe that it borrows while bytes are in it. If no pipe is left, bytes wait in the socket of
//! their source, so that slow clients cannot use up memory or descriptors.

mod connection;
mod lingering;
mod open;
mod pipes;
#[cfg(test)]
mod tests;
mod worker;

use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::net::sockopt;
use worker::{Command, Worker};

use crate::{
    list::{ConnectionInfo, ConnectionList, HowEnded, ListFilter},
    services::{Scope, Services},
    stats::Counter,
    threads::{Threads, milliseconds},
};

/// The settings of the TCP proxy.
#[derive(Debug, Clone)]
pub struct TcpSettings {
    /// The number of threads, at least 1.
    pub threads: usize,
    /// After this time without an answer, the next endpoint is tried. The default of 2.5 s has room
    /// for one repeated SYN.
    pub connect_timeout: Duration,
    /// A connection without bytes for this time is reset.
    pub idle_timeout: Duration,
    /// The idle time before TCP keepalive probes.
    pub keepalive: Duration,
    /// The most open connections of all threads. Further connections wait in the backlog. Each
    /// connection needs two descriptors.
    pub max_connections: u64,
    /// The most pipes of a thread, each with two descriptors.
    pub pipes_per_thread: usize,
    /// Called at the end of each connection that had an endpoint, for an access log. The call
    /// delays the other connections of its thread.
    pub on_end: Option<fn(&ConnectionInfo, HowEnded)>,
}

impl Default for TcpSettings {
    fn default() -> Self {
        Self {
            threads: 1,
            connect_timeout: Duration::from_millis(2500),
            idle_timeout: Duration::from_secs(2 * 3600),
            keepalive: Duration::from_secs(60),
            max_connections: 100_000,
            pipes_per_thread: 256,
            on_end: None,
        }
    }
}

/// How a listener finds the address that its client used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// Rules changed the destination (DNAT, REDIRECT): ask connection tracking (SO_ORIGINAL_DST).
    Original,
    /// The socket has the address, as with TPROXY and with a listener on the address itself.
    Local,
    /// All connections are for this address.
    Fixed(SocketAddr),
}

/// A listener of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ListenerId(u64);

/// The counters of all threads.
#[derive(Debug, Default)]
struct Counters {
    open: Counter,
    unknown_destination: Counter,
    exhausted: Counter,
    accept_pauses: Counter,
    pipes: Counter,
    pipes_refused: Counter,
}

/// The last time at which any thread began a turn of its loop.
#[derive(Debug)]
struct Heartbeat {
    began: Instant,
    last_ms: AtomicU64,
}

impl Heartbeat {
    fn now_ms(&self) -> u64 {
        milliseconds(self.began.elapsed())
    }

    /// Records a turn. Returns the time of the turn.
    fn beat(&self) -> u64 {
        let now_ms = self.now_ms();
        self.last_ms.store(now_ms, Ordering::Relaxed);
        now_ms
    }
}

/// Counters of the proxy that belong to no Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TcpStats {
    /// Open connections.
    pub open: u64,
    /// Connections that were reset, because their destination is the address of no Service. A
    /// client that connects to a listener directly is one of them.
    pub unknown_destination: u64,
    /// How often the kernel had no descriptor or no memory for a connection.
    pub exhausted: u64,
    /// How often accepting paused, because of exhaustion or because of `max_connections`.
    pub accept_pauses: u64,
    /// Pipes, each with two descriptors.
    pub pipes: u64,
    /// How often no pipe was left for a transfer, which then used a buffer.
    pub pipes_refused: u64,
}

/// A running TCP proxy. Dropping the proxy resets its connections.
#[derive(Debug)]
pub struct TcpProxy {
    threads: Threads<Command>,
    counters: Arc<Counters>,
    heartbeat: Arc<Heartbeat>,
    next_listener: AtomicU64,
}

impl TcpProxy {
    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// The kernel refused a descriptor or a thread.
    pub fn start(settings: &TcpSettings, services: &Arc<Services>) -> io::Result<Self> {
        let counters = Arc::new(Counters::default());
        let heartbeat = Arc::new(Heartbeat { began: Instant::now(), last_ms: AtomicU64::new(0) });
        let threads = Threads::start("tcp-proxy", settings.threads, |inbox, seed| {
            let (services, counters) = (Arc::clone(services), Arc::clone(&counters));
            let worker = Worker::new(settings.clone(), services, counters, inbox, Arc::clone(&heartbeat), seed)?;
            Ok(|| worker.run())
        })?;
        Ok(Self { threads, counters, heartbeat, next_listener: AtomicU64::new(0) })
    }

    /// Accepts the connections of a listening socket, on all threads. The destinations of the
    /// connections are addresses of `scope`.
    ///
    /// # Errors
    ///
    /// The kernel refused an option of the socket.
    pub fn listen(&self, socket: impl Into<OwnedFd>, scope: Scope, destination: Destination) -> io::Result<ListenerId> {
        let socket = Arc::new(socket.into());
        rustix::io::ioctl_fionbio(&socket, true)?;
        // Accepted sockets inherit this option.
        sockopt::set_tcp_nodelay(&socket, true)?;
        let id = ListenerId(self.next_listener.fetch_add(1, Ordering::Relaxed));
        self.threads.send_to_all(|| Command::Listen { id, socket: Arc::clone(&socket), scope, destination });
        Ok(id)
    }

    /// Accepts the connections in the backlog of a listener, or of all listeners, and closes it.
    /// Returns when all threads have done so. The kernel resets connections that arrive between the
    /// last accept and the close: the caller first sends new connections elsewhere.
    pub fn stop_listening(&self, id: Option<ListenerId>) {
        let all_done = self.threads.ask(|done| Command::StopListening { id, done });
        all_done.iter().for_each(drop);
    }

    /// The time since a thread last began a turn of its loop. While the proxy listens and no thread
    /// hangs, this is little more than 100 ms.
    #[must_use]
    pub fn since_last_turn(&self) -> Duration {
        let last_ms = self.heartbeat.last_ms.load(Ordering::Relaxed);
        Duration::from_millis(self.heartbeat.now_ms().saturating_sub(last_ms))
    }

    /// Stops listening, and waits until all connections have ended or the deadline has passed.
    /// Returns the number of remaining connections, which end when the proxy is dropped.
    #[must_use = "the number of connections that were lost"]
    pub fn drain(&self, deadline: Duration) -> u64 {
        let until = Instant::now() + deadline;
        self.stop_listening(None);
        while self.counters.open.get() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.counters.open.get()
    }

    /// Open connections, the most bytes first. Each thread walks over its connections, so this is
    /// for people and not for a loop.
    #[must_use]
    pub fn connections(&self, filter: ListFilter) -> ConnectionList {
        let filter = Arc::new(filter);
        let lists = self.threads.ask(|answer| Command::List(Arc::clone(&filter), answer));
        ConnectionList::join(lists.iter(), filter.limit)
    }

    /// The counters that belong to no Service.
    #[must_use]
    pub fn stats(&self) -> TcpStats {
        let counters = &*self.counters;
        TcpStats {
            open: counters.open.get(),
            unknown_destination: counters.unknown_destination.get(),
            exhausted: counters.exhausted.get(),
            accept_pauses: counters.accept_pauses.get(),
            pipes: counters.pipes.get(),
            pipes_refused: counters.pipes_refused.get(),
        }
    }
}
