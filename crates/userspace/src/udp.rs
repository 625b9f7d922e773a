//! The UDP proxy: sessions of clients, each with a socket that is connected to an endpoint. A
//! listening socket gets the datagrams for one address of a Service, and sends the replies. If it
//! does not have that address, rules translate, without connection tracking.

mod socket;
#[cfg(test)]
mod tests;
mod unreachable;
mod worker;

use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use worker::UdpWorker;

use crate::{
    list::{ConnectionList, ListFilter},
    services::{Scope, Services},
    stats::{UdpCounters, UdpStats},
    threads::{ListenerId, Threads},
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

/// A running UDP proxy. Dropping the proxy ends its sessions.
#[derive(Debug)]
pub struct UdpProxy {
    threads: Threads<UdpWorker>,
    counters: Arc<UdpCounters>,
}

impl UdpProxy {
    /// Starts the threads. A process without the capability NET_RAW runs a proxy that passes no
    /// ICMP errors to clients. Errors: the kernel refused a descriptor or a thread.
    pub fn start(settings: &UdpSettings, services: &Arc<Services>) -> io::Result<Self> {
        let counters = Arc::<UdpCounters>::default();
        let threads = Threads::start("udp-proxy", settings.threads, |event_loop| {
            Ok(UdpWorker::new(event_loop, settings.clone(), Arc::clone(services), Arc::clone(&counters)))
        })?;
        Ok(Self { threads, counters })
    }

    /// Serves a bound UDP socket on one thread. Its datagrams are for `destination`, an address of
    /// `scope`. Errors: the kernel refused an option.
    pub fn listen(&self, socket: impl Into<OwnedFd>, scope: Scope, destination: SocketAddr) -> io::Result<ListenerId> {
        let socket = socket.into();
        rustix::io::ioctl_fionbio(&socket, true)?;
        let id = self.threads.next_listener();
        self.threads.send_to_owner(id, move |worker| worker.listen(id, socket, scope, destination));
        Ok(id)
    }

    /// Closes a listener. The caller first sends its datagrams elsewhere.
    pub fn stop_listening(&self, id: ListenerId) {
        self.threads.send_to_owner(id, move |worker| worker.stop_listening(id));
    }

    /// The longest time since a thread with listeners last began a turn of its loop. While no such
    /// thread hangs, this is little more than 100 ms.
    pub fn since_last_turn(&self) -> Duration {
        self.threads.since_last_turns().max().unwrap_or_default()
    }

    /// Waits until no session expects datagrams of its endpoint, or until the deadline has passed.
    /// The caller first sends the datagrams of clients elsewhere. Returns the number of sessions
    /// that were still in use. Sessions end when the proxy is dropped.
    #[must_use = "the number of sessions that were lost"]
    pub fn drain(&self, deadline: Duration) -> u64 {
        let until = Instant::now() + deadline;
        loop {
            let busy = self.threads.ask(|worker| worker.busy()).iter().sum();
            if busy == 0 || Instant::now() >= until {
                return busy;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Open sessions, the most bytes first. Each thread walks over its sessions, so this is for
    /// people and not for a loop.
    pub fn sessions(&self, filter: ListFilter) -> ConnectionList {
        self.threads.list(filter)
    }

    /// The counters that belong to no Service.
    pub fn stats(&self) -> UdpStats {
        self.counters.read()
    }
}
