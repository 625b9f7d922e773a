//! The UDP proxy: sessions of clients, each with a socket that is connected to an endpoint.
//!
//! A listening socket receives the datagrams for one address of a Service, or for one port of all
//! addresses of the node. Replies leave from the same socket, and therefore from the address that
//! the client used. This needs no connection tracking.

mod socket;
#[cfg(test)]
mod tests;
mod worker;

use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use worker::{Command, Worker};

use crate::{
    services::{ServiceId, Services},
    stats::Counter,
    threads::Threads,
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
    /// The most sessions of one client address on one thread.
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

/// An open session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdpSessionInfo {
    /// The Service.
    pub service: ServiceId,
    /// The client's address.
    pub client: SocketAddr,
    /// The address of the Service that the client used.
    pub destination: SocketAddr,
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// Bytes from the client to the endpoint.
    pub bytes_to_endpoint: u64,
    /// Bytes from the endpoint to the client.
    pub bytes_to_client: u64,
    /// The time since the first datagram.
    pub age_ms: u64,
    /// The time since the last datagram.
    pub idle_ms: u64,
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
    /// Datagrams that were dropped, because their destination is the address of no Service.
    pub unknown_destination: u64,
    /// How often the kernel had no descriptor or no memory for a session or for a listener.
    pub exhausted: u64,
}

/// A running UDP proxy. Dropping the proxy ends its sessions.
#[derive(Debug)]
pub struct UdpProxy {
    threads: Threads<Command>,
    counters: Arc<Counters>,
    next_thread: AtomicUsize,
}

impl UdpProxy {
    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// The kernel refused a descriptor or a thread.
    pub fn start(settings: &UdpSettings, services: &Arc<Services>) -> io::Result<Self> {
        let counters = Arc::new(Counters::default());
        let threads = Threads::start("udp-proxy", settings.threads, |inbox, seed| {
            let worker = Worker::new(settings.clone(), Arc::clone(services), Arc::clone(&counters), inbox, seed)?;
            Ok(|| worker.run())
        })?;
        Ok(Self { threads, counters, next_thread: AtomicUsize::new(0) })
    }

    /// Serves a bound UDP socket. The socket is bound to an address of a Service, with
    /// IP_TRANSPARENT if no interface has that address, or to a port of all addresses.
    ///
    /// # Errors
    ///
    /// The socket is not bound, or the kernel refused an option.
    pub fn listen(&self, socket: impl Into<OwnedFd>) -> io::Result<()> {
        let socket = socket.into();
        rustix::io::ioctl_fionbio(&socket, true)?;
        let address = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
        self.threads.send_to_one(self.next_thread.fetch_add(1, Ordering::Relaxed), Command::Listen(socket, address));
        Ok(())
    }

    /// Waits until no session had a datagram for `quiet`, or until the deadline has passed, and
    /// ends all sessions. Datagrams are served meanwhile: the caller first sends new ones
    /// elsewhere. Returns the number of sessions that were still in use.
    #[must_use = "the number of sessions that were lost"]
    pub fn drain(self, quiet: Duration, deadline: Duration) -> u64 {
        let until = Instant::now() + deadline;
        loop {
            let sessions = self.sessions();
            let busy = sessions.iter().filter(|session| u128::from(session.idle_ms) < quiet.as_millis()).count();
            if busy == 0 || Instant::now() >= until {
                return busy as u64;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// All open sessions. Each thread copies its list, so this is for people and for a drain.
    #[must_use]
    pub fn sessions(&self) -> Vec<UdpSessionInfo> {
        self.threads.ask(Command::List).iter().flatten().collect()
    }

    /// The counters that belong to no Service.
    #[must_use]
    pub fn stats(&self) -> UdpStats {
        let Counters { open, unknown_destination, exhausted } = &*self.counters;
        UdpStats { open: open.get(), unknown_destination: unknown_destination.get(), exhausted: exhausted.get() }
    }
}
