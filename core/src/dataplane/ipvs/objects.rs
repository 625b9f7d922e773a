//! What IPVS mode has in a kernel.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use super::{
    super::ipsets::{Element, Set},
    scheduler::Scheduler,
};
use crate::model::Protocol;

/// Identity of a virtual server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerKey {
    /// Address.
    pub address: IpAddr,
    /// Protocol.
    pub protocol: Protocol,
    /// Port.
    pub port: u16,
}

impl ServerKey {
    /// As an element of a set.
    #[must_use]
    pub fn element(&self) -> Element {
        Element::IpPort(self.address, self.protocol, self.port)
    }
}

impl fmt::Display for ServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.protocol, SocketAddr::new(self.address, self.port))
    }
}

/// What a virtual server does. One-packet scheduling is never on, as with kube-proxy: it would
/// break UDP flows of several packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Scheduler.
    pub scheduler: Scheduler,
    /// A client is kept at its destination for so long (flag `persistent`, with a host's netmask).
    pub persistence_seconds: Option<u32>,
}

/// Something that steps make or change. They make it in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Object {
    /// An element of a set.
    Element(Set, Element),
    /// An address of our device.
    Address(IpAddr),
    /// A virtual server.
    Server(ServerKey),
    /// A destination of a virtual server.
    Destination(ServerKey, SocketAddr),
}
