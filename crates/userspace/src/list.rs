//! Lists of open connections and UDP sessions, and what is known of a connection at its end.

use std::{cmp::Reverse, net::SocketAddr, sync::Arc};

use crate::services::Protocol;

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

impl ConnectionList {
    /// Joins lists of several threads or proxies.
    pub fn join(lists: impl IntoIterator<Item = Self>, limit: usize) -> Self {
        let mut joined = lists.into_iter().fold(Self::default(), |mut joined, list| {
            joined.connections.extend(list.connections);
            joined.left_out += list.left_out;
            joined
        });
        joined.connections.sort_by_key(|of| (Reverse(of.bytes_to_endpoint + of.bytes_to_client), Reverse(of.age_ms)));
        joined.left_out += joined.connections.len().saturating_sub(limit) as u64;
        joined.connections.truncate(limit);
        joined
    }
}
