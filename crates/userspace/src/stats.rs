//! Counters of Services and of the proxies.

use std::{
    ops::AddAssign,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

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

/// Defines counters, and their values at one time.
macro_rules! counters {
    ($(#[$about:meta])* $counters:ident, $values:ident { $($(#[$doc:meta])* $name:ident,)* }) => {
        #[derive(Debug, Default)]
        pub(crate) struct $counters {
            $(pub(crate) $name: Counter,)*
        }

        impl $counters {
            pub(crate) fn read(&self) -> $values {
                $values { $($name: self.$name.get(),)* }
            }
        }

        $(#[$about])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $values {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl AddAssign for $values {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// The counters of a Service at one time. Connections include UDP sessions.
    Stats, ServiceStats {
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
        /// Endpoints that were not tried: their address is a Service's or the node's.
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
        /// Open UDP sessions.
        udp_sessions,
        /// Datagrams from clients that were sent to endpoints.
        datagrams_to_endpoints,
        /// Datagrams from endpoints that were sent to clients.
        datagrams_to_clients,
        /// The bytes of the datagrams that were sent to endpoints.
        datagram_bytes_to_endpoints,
        /// The bytes of the datagrams that were sent to clients.
        datagram_bytes_to_clients,
        /// Datagrams that were dropped because a limit of sessions was reached.
        dropped_by_limit,
        /// Datagrams that were dropped because the Service had no endpoint.
        dropped_without_endpoint,
        /// Datagrams that were dropped: the endpoint's address is a Service's or the node's.
        dropped_by_loop,
        /// Datagrams that were dropped because a session lacked a descriptor or kernel memory.
        dropped_by_exhaustion,
        /// Datagrams that were dropped because nobody listened at the endpoint, or without a route.
        dropped_unreachable,
        /// Datagrams that were dropped because the buffer of the socket was full.
        dropped_by_full_buffer,
        /// Datagrams that were dropped because the kernel refused to send them for another reason.
        dropped_by_refusal,
        /// Datagrams of endpoints that were dropped because the session had ended.
        dropped_after_end,
        /// Clients whose affinity was forgotten early, because the table was full.
        affinity_evicted,
        /// Endpoints that rest after failures. [`crate::Services`] counts them when it is asked.
        resting_endpoints,
        /// Clients with ClientIP affinity, which are counted likewise.
        affinity_clients,
    }
}

counters! {
    /// Counters of the TCP proxy that belong to no Service.
    TcpCounters, TcpStats {
        /// Open connections.
        open,
        /// Connections that were reset, because their destination is the address of no Service. A
        /// client that connects to a listener directly is one of them.
        unknown_destination,
        /// How often the kernel had no descriptor or no memory for a connection.
        exhausted,
        /// How often accepting paused, because of exhaustion or because of `max_connections`.
        accept_pauses,
        /// Pipes, each with two descriptors.
        pipes,
        /// How often no pipe was left for a transfer, which then used a buffer.
        pipes_refused,
    }
}

counters! {
    /// Counters of the UDP proxy that belong to no Service.
    UdpCounters, UdpStats {
        /// Open sessions.
        open,
        /// Datagrams that were dropped, because their destination is the address of no Service, or
        /// of a Service that was removed.
        unknown_destination,
        /// How often the kernel had no descriptor or no memory for a session or for a listener.
        exhausted,
    }
}

impl ServiceStats {
    /// The datagrams that the proxy dropped, for every reason.
    pub fn dropped_datagrams(&self) -> u64 {
        self.dropped_by_limit
            + self.dropped_without_endpoint
            + self.dropped_by_loop
            + self.dropped_by_exhaustion
            + self.dropped_unreachable
            + self.dropped_by_full_buffer
            + self.dropped_by_refusal
            + self.dropped_after_end
    }
}
