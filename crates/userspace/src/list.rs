//! Lists of open connections and UDP sessions, and what is known of a connection at its end.

use std::{cmp::Reverse, net::SocketAddr, sync::Arc};

use slab::Slab;

use crate::{carried::Carried, relay::Side, services::Protocol};

/// Which connections a list has.
#[derive(Debug, Clone)]
pub struct ListFilter {
    /// Only connections of Services with this account.
    pub account: Option<Arc<str>>,
    /// The most connections in the list.
    pub limit: usize,
}

/// Open connections and UDP sessions, the most bytes first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConnectionList {
    /// The connections.
    pub connections: Vec<ConnectionInfo>,
    /// The number of connections that the limit left out.
    pub left_out: u64,
}

/// The state of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionState {
    /// No endpoint has accepted yet.
    Connecting,
    /// Both sides may send.
    Open,
    /// The client has sent its last byte (FIN).
    ClientDone,
    /// The endpoint has sent its last byte (FIN).
    EndpointDone,
    /// Both sides have sent their last byte, and some bytes have not arrived.
    Closing,
    /// The last datagram of a UDP session came from the client.
    AwaitsReply,
    /// The last datagram of a UDP session came from the endpoint.
    Answered,
}

impl ConnectionState {
    /// The state for lists.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Open => "open",
            Self::ClientDone => "client done",
            Self::EndpointDone => "endpoint done",
            Self::Closing => "closing",
            Self::AwaitsReply => "awaits reply",
            Self::Answered => "answered",
        }
    }
}

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HowEnded {
    /// Both sides sent a FIN.
    Closed,
    /// A side failed or sent a RST.
    Reset,
    /// The connection was idle for too long.
    Idle,
    /// No endpoint that was tried accepted the connection.
    Failed,
    /// The proxy stopped.
    Stopped,
}

impl HowEnded {
    /// The end for logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::Idle => "idle",
            Self::Failed => "no endpoint accepted",
            Self::Stopped => "the proxy stopped",
        }
    }
}

/// A TCP connection or a UDP session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The protocol.
    pub protocol: Protocol,
    /// The name of the Service.
    pub service: Arc<str>,
    /// The client's address.
    pub client: SocketAddr,
    /// The address of the Service that the client used.
    pub destination: SocketAddr,
    /// The endpoint, or the one that was tried last.
    pub endpoint: SocketAddr,
    /// The state.
    pub state: ConnectionState,
    /// Bytes from the client to the endpoint.
    pub bytes_to_endpoint: u64,
    /// Bytes from the endpoint to the client.
    pub bytes_to_client: u64,
    /// Datagrams from the client to the endpoint; 0 for a TCP connection.
    pub datagrams_to_endpoint: u64,
    /// Datagrams from the endpoint to the client; 0 for a TCP connection.
    pub datagrams_to_client: u64,
    /// The time since the connection was accepted, or since the first datagram.
    pub age_ms: u64,
    /// The time since the last byte or datagram.
    pub idle_ms: u64,
}

impl ConnectionInfo {
    fn bytes(&self) -> u64 {
        self.bytes_to_endpoint + self.bytes_to_client
    }
}

/// What a thread carries and lists.
pub(crate) trait Listed {
    const PROTOCOL: Protocol;

    fn carried(&self) -> &Carried;

    fn state(&self) -> ConnectionState;

    /// What lists and logs show.
    fn info(&self, now_ms: u64) -> ConnectionInfo {
        let carried = self.carried();
        ConnectionInfo {
            protocol: Self::PROTOCOL,
            service: Arc::clone(&carried.service.state().settings.name),
            client: carried.client,
            destination: carried.destination,
            endpoint: carried.picked.address,
            state: self.state(),
            bytes_to_endpoint: carried.bytes[0],
            bytes_to_client: carried.bytes[1],
            datagrams_to_endpoint: carried.datagrams[0],
            datagrams_to_client: carried.datagrams[1],
            age_ms: now_ms.saturating_sub(carried.opened_ms),
            idle_ms: now_ms.saturating_sub(carried.active_ms),
        }
    }
}

/// The epoll token of a socket of a connection.
pub(crate) fn token(slot: usize, generation: u32, side: Side) -> u64 {
    (u64::from(generation) << 32) | ((slot as u64) << 1) | side as u64
}

/// The slot of the connection of a token, if it has not ended, and the side of the socket.
pub(crate) fn find<L: Listed>(connections: &Slab<L>, token: u64) -> Option<(usize, Side)> {
    let slot = ((token & u64::from(u32::MAX)) >> 1) as usize;
    let is_same = u64::from(connections.get(slot)?.carried().generation) == token >> 32;
    is_same.then_some((slot, if token & 1 == 0 { Side::Client } else { Side::Endpoint }))
}

impl ConnectionList {
    /// The list of one thread. Apart from the result, it needs 16 bytes for each connection.
    pub(crate) fn of<'a, L: Listed + 'a>(connections: &'a Slab<L>, filter: &ListFilter, now_ms: u64) -> Self {
        let is_wanted = |of: &Carried| filter.account.as_ref().is_none_or(|name| of.service.account.name == *name);
        let wanted = connections.iter().map(|(_, listed)| listed).filter(|listed| is_wanted(listed.carried()));
        let mut wanted: Vec<(u64, &L)> = wanted.map(|listed| (listed.carried().bytes.iter().sum(), listed)).collect();
        let left_out = wanted.len().saturating_sub(filter.limit);
        if left_out > 0 {
            wanted.select_nth_unstable_by_key(filter.limit, |(bytes, _)| Reverse(*bytes));
            wanted.truncate(filter.limit);
        }
        let connections = wanted.into_iter().map(|(_, listed)| listed.info(now_ms)).collect();
        Self { connections, left_out: left_out as u64 }
    }

    /// Joins lists of several threads or proxies.
    #[must_use]
    pub fn join(lists: impl IntoIterator<Item = Self>, limit: usize) -> Self {
        let mut joined = lists.into_iter().fold(Self::default(), |mut joined, list| {
            joined.connections.extend(list.connections);
            joined.left_out += list.left_out;
            joined
        });
        joined.connections.sort_by_key(|connection| (Reverse(connection.bytes()), Reverse(connection.age_ms)));
        joined.left_out += joined.connections.len().saturating_sub(limit) as u64;
        joined.connections.truncate(limit);
        joined
    }
}
