//! The UDP proxy: sessions of clients, each with a socket that is connected to an endpoint.
//!
//! A listening socket receives the datagrams for one address of a Service, or for one port of all
//! addresses of the node. Replies leave from the same socket. If the socket does not have the
//! address that the client used, rules translate both directions. This needs no connection
//! tracking.

mod socket;
#[cfg(test)]
mod tests;
mod unreachable;
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

use worker::{Command, Worker};

use crate::{
    list::{ConnectionList, ListFilter},
    services::{Scope, Services},
    stats::Counter,
    threads::{Threads, milliseconds},
};

/// The settings of the UDP proxy.
#[derive(Debug, Clone)]
pub struct UdpSettings {
    /// The number of threads, at least 1. Each listener belongs to one thread.
    pub threads: usize,
    /// A session ends after this time without a datagram.
    pub idle_timeout: Duration,
    /// The most sessions of all threads. Each session needs one descriptor.
    pub max_sessions: u64,
    /// The most sessions of one client address on one thread. A client address also has at most as
    /// many sessions on a thread as [`Self::max_sessions`] leaves free. So it cannot take all of
    /// them: with one thread, it gets at most half.
    pub max_sessions_per_client: u32,
}

impl Default for UdpSettings {
    fn default() -> Self {
        Self {
            threads: 1,
            idle_timeout: Duration::from_secs(60),
            max_sessions: 100_000,
            max_sessions_per_client: 5_000,
        }
    }
}

/// A listener of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UdpListenerId(u64);

/// The last time at which each thread began a turn of its loop. A thread without listeners does not
/// turn, and has the time [`u64::MAX`].
#[derive(Debug)]
struct Heartbeats {
    began: Instant,
    last_ms: Vec<AtomicU64>,
}

impl Heartbeats {
    fn now_ms(&self) -> u64 {
        milliseconds(self.began.elapsed())
    }
}

/// The counters of all threads.
#[derive(Debug, Default)]
struct Counters {
    open: Counter,
    unknown_destination: Counter,
    exhausted: Counter,
}

/// Counters of the proxy that belong to no Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UdpStats {
    /// Open sessions.
    pub open: u64,
    /// Datagrams that were dropped, because their destination is the address of no Service, or of
    /// a Service that was removed.
    pub unknown_destination: u64,
    /// How often the kernel had no descriptor or no memory for a session or for a listener.
    pub exhausted: u64,
}

/// A running UDP proxy. Dropping the proxy ends its sessions.
#[derive(Debug)]
pub struct UdpProxy {
    threads: Threads<Command>,
    counters: Arc<Counters>,
    heartbeats: Arc<Heartbeats>,
    next_listener: AtomicU64,
}

impl UdpProxy {
    /// Starts the threads. A process without the capability NET_RAW runs a proxy that passes no
    /// ICMP errors to clients.
    ///
    /// # Errors
    ///
    /// The kernel refused a descriptor or a thread.
    pub fn start(settings: &UdpSettings, services: &Arc<Services>) -> io::Result<Self> {
        let counters = Arc::new(Counters::default());
        let last_ms = (0..settings.threads.max(1)).map(|_| AtomicU64::new(u64::MAX)).collect();
        let heartbeats = Arc::new(Heartbeats { began: Instant::now(), last_ms });
        let mut number = 0..;
        let threads = Threads::start("udp-proxy", settings.threads, |inbox, seed| {
            let heartbeat = (Arc::clone(&heartbeats), number.next().unwrap_or_default());
            let (services, counters) = (Arc::clone(services), Arc::clone(&counters));
            let worker = Worker::new(settings.clone(), services, counters, inbox, heartbeat, seed)?;
            Ok(|| worker.run())
        })?;
        Ok(Self { threads, counters, heartbeats, next_listener: AtomicU64::new(0) })
    }

    /// Serves a bound UDP socket on one thread. Its datagrams are for `destination`, an address of
    /// `scope`. If the IP address of `destination` is unspecified, each datagram is for the address
    /// to which it was sent, and for the port of `destination`.
    ///
    /// # Errors
    ///
    /// The kernel refused an option.
    pub fn listen(
        &self,
        socket: impl Into<OwnedFd>,
        scope: Scope,
        destination: SocketAddr,
    ) -> io::Result<UdpListenerId> {
        let socket = socket.into();
        rustix::io::ioctl_fionbio(&socket, true)?;
        let id = self.next_listener.fetch_add(1, Ordering::Relaxed);
        self.send(id, Command::Listen { id, socket, scope, destination });
        Ok(UdpListenerId(id))
    }

    /// Closes a listener. The caller first sends its datagrams elsewhere.
    pub fn stop_listening(&self, id: UdpListenerId) {
        self.send(id.0, Command::StopListening(id.0));
    }

    /// Sends a command to the thread of a listener.
    fn send(&self, listener: u64, command: Command) {
        let thread = listener % self.heartbeats.last_ms.len() as u64;
        self.threads.send_to_one(usize::try_from(thread).unwrap_or_default(), command);
    }

    /// The longest time since a thread with listeners last began a turn of its loop. While no such
    /// thread hangs, this is little more than 100 ms.
    #[must_use]
    pub fn since_last_turn(&self) -> Duration {
        let last_ms = self.heartbeats.last_ms.iter().map(|last| last.load(Ordering::Relaxed)).min();
        Duration::from_millis(self.heartbeats.now_ms().saturating_sub(last_ms.unwrap_or(u64::MAX)))
    }

    /// Waits until no session expects datagrams of its endpoint, or until the deadline has passed.
    /// The caller first sends the datagrams of clients elsewhere. Returns the number of sessions
    /// that were still in use. Sessions end when the proxy is dropped.
    #[must_use = "the number of sessions that were lost"]
    pub fn drain(&self, deadline: Duration) -> u64 {
        let until = Instant::now() + deadline;
        loop {
            let busy = self.threads.ask(Command::CountBusy).iter().sum();
            if busy == 0 || Instant::now() >= until {
                return busy;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Open sessions, the most bytes first. Each thread walks over its sessions, so this is for
    /// people and not for a loop.
    #[must_use]
    pub fn sessions(&self, filter: ListFilter) -> ConnectionList {
        let filter = Arc::new(filter);
        let lists = self.threads.ask(|answer| Command::List(Arc::clone(&filter), answer));
        ConnectionList::join(lists.iter(), filter.limit)
    }

    /// The counters that belong to no Service.
    #[must_use]
    pub fn stats(&self) -> UdpStats {
        let Counters { open, unknown_destination, exhausted } = &*self.counters;
        UdpStats { open: open.get(), unknown_destination: unknown_destination.get(), exhausted: exhausted.get() }
    }
}
