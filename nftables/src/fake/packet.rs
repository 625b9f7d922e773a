//! Packets and the results of walks.

use std::net::IpAddr;

use crate::{NatFlags, PayloadBase, Reject};

/// The addresses and ports of one direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuple {
    /// The source address and port.
    pub source: (IpAddr, u16),
    /// The destination address and port.
    pub destination: (IpAddr, u16),
}

impl Tuple {
    /// The reverse direction of a connection without address translation.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self { source: self.destination, destination: self.source }
    }
}

/// The connection tracking state of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// Bits of `NF_CT_STATE_BIT`.
    pub state: u32,
    /// Bits of `IPS_…`. Address translation sets its own bits.
    pub status: u32,
    /// Whether the packet is a reply.
    pub is_reply: bool,
    /// The tuple of the original direction.
    pub original: Tuple,
    /// The tuple of the reply direction.
    pub reply: Tuple,
    /// The connection's mark.
    pub mark: u32,
}

impl Connection {
    /// The state of the first packet of a connection.
    pub const NEW: u32 = 8;
    /// The state of packets after the first reply.
    pub const ESTABLISHED: u32 = 2;
    /// `IPS_SRC_NAT`
    pub const SOURCE_TRANSLATED: u32 = 0x10;
    /// `IPS_DST_NAT`
    pub const DESTINATION_TRANSLATED: u32 = 0x20;
}

/// An IPv4 or IPv6 packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// The addresses and ports in the headers.
    pub tuple: Tuple,
    /// The transport protocol.
    pub protocol: u8,
    /// The index and name of the incoming interface.
    pub input: Option<(u32, String)>,
    /// The index and name of the outgoing interface.
    pub output: Option<(u32, String)>,
    /// The packet mark.
    pub mark: u32,
    /// The length in bytes.
    pub length: u32,
    /// The tracked connection. None if the packet is untracked.
    pub connection: Option<Connection>,
    /// Whether the packet's socket is transparent. None if the packet belongs to no socket.
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

    /// Writes an address or a port of the headers. Returns whether the bytes are one: the fake does
    /// not model other fields.
    pub(super) fn write(&mut self, base: PayloadBase, offset: u32, bytes: &[u8]) -> bool {
        let Tuple { source, destination } = &mut self.tuple;
        let end = match (base, offset, bytes.len()) {
            (PayloadBase::Network, 12, 4) | (PayloadBase::Network, 8, 16) | (PayloadBase::Transport, 0, 2) => source,
            (PayloadBase::Network, 16, 4) | (PayloadBase::Network, 24, 16) | (PayloadBase::Transport, 2, 2) => {
                destination
            }
            _ => return false,
        };
        if let Ok(port) = <[u8; 2]>::try_from(bytes) {
            end.1 = u16::from_be_bytes(port);
        } else if let Ok(address) = <[u8; 4]>::try_from(bytes) {
            end.0 = address.into();
        } else if let Ok(address) = <[u8; 16]>::try_from(bytes) {
            end.0 = address.into();
        }
        true
    }

    /// The first bytes of the transport header: the ports.
    pub(super) fn transport_header(&self) -> Vec<u8> {
        let mut bytes = [self.tuple.source.1.to_be_bytes(), self.tuple.destination.1.to_be_bytes()].concat();
        bytes.resize(20, 0);
        bytes
    }
}

/// The final verdict on a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The packet passed the hook.
    Accepted,
    /// The packet was dropped.
    Dropped,
    /// The packet was dropped, and an error was sent to its sender.
    Rejected(Reject),
}

/// An action of rules on a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// The destination was translated to this address and port.
    DestinationTranslated(IpAddr, u16),
    /// The source was translated to this address and port.
    SourceTranslated(IpAddr, u16),
    /// The source was translated to the address of the outgoing interface. The fake does not model
    /// this address.
    Masqueraded(NatFlags),
    /// The destination was translated to this port of the local host.
    Redirected(u16),
    /// The packet was delivered to a transparent socket.
    Proxied(Option<IpAddr>, Option<u16>),
    /// The packet was exempted from connection tracking.
    Untracked,
    /// A line with this prefix was logged.
    Logged(String),
}

/// The result of a packet's walk through a hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walk {
    /// The final verdict.
    pub fate: Fate,
    /// The actions of rules, in order.
    pub actions: Vec<Action>,
    /// The visited chains, in order.
    pub chains: Vec<String>,
}
