//! Packets and what becomes of them.

use std::net::IpAddr;

use crate::{NatFlags, Reject};

/// The ends of a connection, as one direction of it has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuple {
    /// Where its packets come from.
    pub source: (IpAddr, u16),
    /// Where they go.
    pub destination: (IpAddr, u16),
}

impl Tuple {
    /// The other direction of a connection that nobody translates.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self { source: self.destination, destination: self.source }
    }
}

/// What connection tracking knows of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// Bits of `NF_CT_STATE_BIT`.
    pub state: u32,
    /// Bits of `IPS_…`. Translations set theirs.
    pub status: u32,
    /// The packet is one of the answers.
    pub is_reply: bool,
    /// As the first packet was sent.
    pub original: Tuple,
    /// As answers are sent.
    pub reply: Tuple,
    /// The connection's mark.
    pub mark: u32,
}

impl Connection {
    /// The state of a first packet.
    pub const NEW: u32 = 8;
    /// The state of packets after the first answer.
    pub const ESTABLISHED: u32 = 2;
    /// `IPS_SRC_NAT`
    pub const SOURCE_TRANSLATED: u32 = 0x10;
    /// `IPS_DST_NAT`
    pub const DESTINATION_TRANSLATED: u32 = 0x20;
}

/// A packet of IPv4 or IPv6.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// Where it comes from and goes, as its headers say.
    pub tuple: Tuple,
    /// Its transport protocol.
    pub protocol: u8,
    /// Index and name of the interface on which it arrived.
    pub input: Option<(u32, String)>,
    /// Index and name of the interface on which it leaves.
    pub output: Option<(u32, String)>,
    /// Its mark.
    pub mark: u32,
    /// Its length in bytes.
    pub length: u32,
    /// Its connection; none if it is not tracked.
    pub connection: Option<Connection>,
    /// Whether the socket that it belongs to is transparent; none if it belongs to none.
    pub socket: Option<bool>,
}

impl Packet {
    /// The first packet of a connection.
    #[must_use]
    pub fn new(protocol: u8, source: (IpAddr, u16), destination: (IpAddr, u16)) -> Self {
        let tuple = Tuple { source, destination };
        let (original, reply) = (tuple, tuple.reversed());
        let state = Connection::NEW;
        Self {
            tuple,
            protocol,
            input: None,
            output: None,
            mark: 0,
            length: 60,
            connection: Some(Connection { state, status: 0, is_reply: false, original, reply, mark: 0 }),
            socket: None,
        }
    }

    /// The network header.
    pub(super) fn network_header(&self) -> Vec<u8> {
        let mut bytes = vec![0; if self.tuple.source.0.is_ipv4() { 20 } else { 40 }];
        let length = u16::try_from(self.length).unwrap_or(u16::MAX).to_be_bytes();
        match (self.tuple.source.0, self.tuple.destination.0) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                bytes[0] = 0x45;
                bytes[2..4].copy_from_slice(&length);
                (bytes[8], bytes[9]) = (64, self.protocol);
                bytes[12..16].copy_from_slice(&source.octets());
                bytes[16..20].copy_from_slice(&destination.octets());
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                bytes[0] = 0x60;
                (bytes[6], bytes[7]) = (self.protocol, 64);
                bytes[8..24].copy_from_slice(&source.octets());
                bytes[24..40].copy_from_slice(&destination.octets());
            }
            _ => bytes.clear(),
        }
        bytes
    }

    /// The first bytes of the transport header: the ports.
    pub(super) fn transport_header(&self) -> Vec<u8> {
        let mut bytes = [self.tuple.source.1.to_be_bytes(), self.tuple.destination.1.to_be_bytes()].concat();
        bytes.resize(20, 0);
        bytes
    }
}

/// What became of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It passed the hook.
    Accepted,
    /// It was dropped.
    Dropped,
    /// It was dropped, and the sender told.
    Rejected(Reject),
}

/// What rules did on a packet's way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Its destination was translated to this one.
    DestinationTranslated(IpAddr, u16),
    /// Its source was translated to this one.
    SourceTranslated(IpAddr, u16),
    /// Its source was translated to the address of the outgoing interface, which the packet here
    /// does not learn.
    Masqueraded(NatFlags),
    /// Its destination was translated to this host, at a port.
    Redirected(u16),
    /// It was given to a transparent socket.
    Proxied(Option<IpAddr>, Option<u16>),
    /// It gets no connection.
    Untracked,
    /// A line with this beginning was logged.
    Logged(String),
}

/// The way of a packet through a hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walk {
    /// What became of it.
    pub fate: Fate,
    /// What rules did, in their order.
    pub actions: Vec<Action>,
    /// The chains that it came to, in their order.
    pub chains: Vec<String>,
}
