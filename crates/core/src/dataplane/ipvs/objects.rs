//! The kernel objects of IPVS mode.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use super::{
    super::ipsets::{IpSetElement, Set},
    scheduler::Scheduler,
};
use crate::model::Protocol;

/// Identifies a virtual server.
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
    /// Returns the element of a set that matches the address and port of this server.
    #[must_use]
    pub fn element(&self) -> IpSetElement {
        IpSetElement::IpPort(self.address, self.protocol, self.port)
    }
}

impl fmt::Display for ServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.protocol, SocketAddr::new(self.address, self.port))
    }
}

/// The settings of a virtual server. As in kube-proxy, one-packet scheduling is never on, because
/// with this option the kernel sends packets of one UDP flow to different destinations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Scheduler.
    pub scheduler: Scheduler,
    /// The scheduler also hashes the source port (flag `mh-port`). Only `mh` uses this flag.
    pub hashes_source_port: bool,
    /// How long a client stays with its destination, in seconds (flag `persistent`, with the
    /// netmask of a single host). `None` for no session affinity.
    pub persistence_seconds: Option<u32>,
}

impl Settings {
    /// Creates settings without session affinity. As in kube-proxy, `mh` hashes the source port.
    #[must_use]
    pub fn new(scheduler: Scheduler) -> Self {
        Self { scheduler, hashes_source_port: scheduler == Scheduler::MaglevHashing, persistence_seconds: None }
    }
}

/// An object that operations create or change, in the order of their creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Object {
    /// An element of a set.
    Element(Set, IpSetElement),
    /// An address of Headgate's device.
    Address(IpAddr),
    /// A virtual server.
    Server(ServerKey),
    /// A destination of a virtual server.
    Destination(ServerKey, SocketAddr),
}
