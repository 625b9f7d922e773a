//! Counters of a Service.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One counter or gauge that several threads change.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, number: u64) -> u64 {
        self.0.fetch_add(number, Relaxed)
    }

    pub(crate) fn subtract(&self, number: u64) {
        self.0.fetch_sub(number, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Debug, Default)]
        pub(crate) struct Stats {
            $(pub(crate) $name: Counter,)*
        }

        /// The counters of a Service at one time. Connections include UDP sessions.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct ServiceStats {
            $($(#[$doc])* pub $name: u64,)*
            /// Endpoints that rest after failures.
            pub resting_endpoints: u64,
            /// Clients with ClientIP affinity.
            pub affinity_clients: u64,
        }

        impl ServiceStats {
            /// Adds the counters of another Service, and the counts of its endpoints and clients.
            pub(crate) fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
                self.resting_endpoints += other.resting_endpoints;
                self.affinity_clients += other.affinity_clients;
            }
        }

        impl Stats {
            pub(crate) fn read(&self) -> ServiceStats {
                ServiceStats { $($name: self.$name.get(),)* ..ServiceStats::default() }
            }
        }
    };
}

stats! {
    /// Accepted connections, including those that got no endpoint.
    accepted,
    /// Open connections.
    open,
    /// Connections that were reset because the Service had as many as its limit.
    over_limit,
    /// Connections that were reset because the Service had too large a part of all connections.
    over_share,
    /// Connections that were reset because the Service had no endpoint.
    without_endpoint,
    /// Connections that were reset because no endpoint that was tried accepted.
    failed,
    /// Attempts to connect to another endpoint, after an endpoint failed.
    retries,
    /// Endpoints that were not tried, because their address is the address of a Service.
    loops,
    /// Connections to endpoints.
    connected,
    /// The sum of the times that these connections took, in microseconds.
    connect_microseconds,
    /// Connections that ended with a RST, because a side failed or because of the idle timeout.
    reset,
    /// Connections that ended because they were idle for too long.
    idle,
    /// Bytes from clients to endpoints.
    bytes_to_endpoints,
    /// Bytes from endpoints to clients.
    bytes_to_clients,
    /// Datagrams that were dropped, because a limit was reached or the kernel refused to send them.
    dropped_datagrams,
    /// Clients whose affinity was forgotten early, because the table was full.
    affinity_evicted,
}
