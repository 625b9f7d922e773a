//! The TCP proxy: threads that accept connections, choose endpoints, and carry bytes. Each has an
//! epoll instance with edge-triggered events, a buffer, and a few pipes. A connection takes less
//! than 512 bytes. Small transfers use the buffer; when a read fills it, the direction uses
//! `splice(2)` through a borrowed pipe. If none is left, bytes wait in their source's socket, so
//! that slow clients cannot use up memory or descriptors.

mod connection;
mod lingering;
mod open;
mod pipes;
#[cfg(test)]
mod tests;
mod worker;

use std::{
    io,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::net::sockopt;
use worker::{StreamListener, TcpWorker};

use crate::{
    list::{ConnectionInfo, ConnectionList, HowEnded, ListFilter},
    services::{Scope, Services},
    stats::{TcpCounters, TcpStats},
    threads::{ListenerId, Threads},
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
}

/// A running TCP proxy. Dropping the proxy resets its connections.
#[derive(Debug)]
pub struct TcpProxy {
    threads: Threads<TcpWorker>,
    counters: Arc<TcpCounters>,
}

impl TcpProxy {
    /// Starts the threads. Errors: the kernel refused a descriptor or a thread.
    pub fn start(settings: &TcpSettings, services: &Arc<Services>) -> io::Result<Self> {
        let counters = Arc::<TcpCounters>::default();
        let threads = Threads::start("tcp-proxy", settings.threads, |event_loop| {
            TcpWorker::new(event_loop, settings.clone(), Arc::clone(services), Arc::clone(&counters))
        })?;
        Ok(Self { threads, counters })
    }

    /// Accepts the connections of a listening socket, on all threads. The destinations of the
    /// connections are addresses of `scope`. Errors: the kernel refused an option of the socket.
    pub fn listen(&self, socket: impl Into<OwnedFd>, scope: Scope, destination: Destination) -> io::Result<ListenerId> {
        let socket = Arc::new(socket.into());
        rustix::io::ioctl_fionbio(&socket, true)?;
        // Accepted sockets inherit this option.
        sockopt::set_tcp_nodelay(&socket, true)?;
        let listener = StreamListener { id: self.threads.next_listener(), socket, scope, destination };
        let id = listener.id;
        self.threads.ask(move |worker| worker.listen(listener));
        Ok(id)
    }

    /// Accepts the connections in the backlog of a listener, or of all listeners, and closes it.
    /// Returns when all threads have done so. The kernel resets connections that arrive between the
    /// last accept and the close: the caller first sends new connections elsewhere.
    pub fn stop_listening(&self, id: Option<ListenerId>) {
        self.threads.ask(move |worker| worker.stop_listening(id)).iter().for_each(drop);
    }

    /// The time since any thread last began a turn of its loop, because a connection does not wait
    /// for a thread that hangs. While the proxy listens, this is little more than 100 ms.
    pub fn since_last_turn(&self) -> Duration {
        self.threads.since_last_turns().min().unwrap_or_default()
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
    pub fn connections(&self, filter: ListFilter) -> ConnectionList {
        self.threads.list(filter)
    }

    /// The counters that belong to no Service.
    pub fn stats(&self) -> TcpStats {
        self.counters.read()
    }
}
