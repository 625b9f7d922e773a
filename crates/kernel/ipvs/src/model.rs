//! Virtual services and destinations as IPVS represents them (`linux/ip_vs.h`).

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
};

use headgate_netlink::{Family, Protocol};

/// The key of a virtual service. [`Protocol::Other`] is never TCP, UDP or SCTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServiceId {
    /// A protocol, an address and a port. With persistence, port 0 matches every port of the
    /// address for which no other service exists.
    Address {
        /// The protocol.
        protocol: Protocol,
        /// The address and port that clients send to.
        address: SocketAddr,
    },
    /// All packets of a family that carry a firewall mark.
    FirewallMark {
        /// The family.
        family: Family,
        /// The mark, not 0.
        mark: u32,
    },
}

impl ServiceId {
    /// The key of a service with an address and a port.
    pub fn new(protocol: Protocol, address: SocketAddr) -> Self {
        Self::Address { protocol, address }
    }

    /// The address family of the clients.
    pub fn family(&self) -> Family {
        match self {
            Self::Address { address, .. } => Family::of(address.ip()),
            Self::FirewallMark { family, .. } => *family,
        }
    }
}

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { protocol: Protocol::Other(number), address } => write!(f, "protocol {number} {address}"),
            Self::Address { protocol, address } => write!(f, "{} {address}", protocol.to_string().to_uppercase()),
            Self::FirewallMark { family: Family::V4, mark } => write!(f, "mark {mark} of IPv4"),
            Self::FirewallMark { family: Family::V6, mark } => write!(f, "mark {mark} of IPv6"),
        }
    }
}

/// The set of client addresses that persistence treats as one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Netmask {
    /// An IPv4 netmask.
    V4(Ipv4Addr),
    /// An IPv6 prefix length, 1 to 128.
    V6(u32),
}

impl Netmask {
    /// The mask that treats each address as a separate client.
    pub fn host(family: Family) -> Self {
        match family {
            Family::V4 => Self::V4(Ipv4Addr::BROADCAST),
            Family::V6 => Self::V6(128),
        }
    }
}

/// Persistence: new connections of a client use the same destination as its earlier connections
/// (`IP_VS_SVC_F_PERSISTENT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Persistence {
    /// How long persistence lasts after the client's last connection has ended, in seconds.
    pub timeout_seconds: u32,
    /// The mask that groups client addresses into one client. It has the service's family.
    pub netmask: Netmask,
}

/// Flags whose meaning depends on the scheduler (`IP_VS_SVC_F_SCHED1` and `2`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SchedulerFlags {
    /// sh, mh: use another destination if the selected destination has weight 0 or is overloaded
    /// (`sh-fallback`, `mh-fallback`).
    pub fallback: bool,
    /// sh, mh: include the client's port in the hash (`sh-port`, `mh-port`).
    pub port: bool,
}

/// A virtual service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// The key of the service.
    pub id: ServiceId,
    /// The name of the scheduler, such as `rr`, at most 15 bytes. `none` selects no scheduler.
    pub scheduler: String,
    /// Persistence, if any.
    pub persistence: Option<Persistence>,
    /// UDP: schedule every packet independently (`IP_VS_SVC_F_ONEPACKET`).
    pub one_packet: bool,
    /// Flags of the scheduler.
    pub scheduler_flags: SchedulerFlags,
    /// The persistence engine that identifies clients by application data, such as `sip`.
    pub persistence_engine: Option<String>,
}

impl Service {
    /// A service without persistence and flags.
    pub fn new(id: ServiceId, scheduler: impl Into<String>) -> Self {
        Self {
            id,
            scheduler: scheduler.into(),
            persistence: None,
            one_packet: false,
            scheduler_flags: SchedulerFlags::default(),
            persistence_engine: None,
        }
    }

    /// Adds persistence that treats each client address as a separate client.
    pub fn persistent(mut self, timeout_seconds: u32) -> Self {
        self.persistence = Some(Persistence { timeout_seconds, netmask: Netmask::host(self.id.family()) });
        self
    }
}

/// How IPVS forwards packets to a destination (`IP_VS_CONN_F_FWD_MASK`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Forwarding {
    /// By address translation (`IP_VS_CONN_F_MASQ`).
    #[default]
    Masquerade,
    /// The destination is this node (`IP_VS_CONN_F_LOCALNODE`). Only the kernel selects it.
    Local,
    /// Through a tunnel (`IP_VS_CONN_F_TUNNEL`).
    Tunnel,
    /// Without changes, to the destination's link-layer address (`IP_VS_CONN_F_DROUTE`).
    Direct,
    /// Another method, by its number.
    Other(u32),
}

/// A destination (real server) of a virtual service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// Address and port, which are the key within the service. The family differs from the family
    /// of the service only with tunnels.
    pub address: SocketAddr,
    /// The forwarding method.
    pub forwarding: Forwarding,
    /// The relative share of new connections, at most 2³¹ − 1. A destination of weight 0 gets no
    /// new connections and keeps its existing connections.
    pub weight: u32,
    /// The number of connections at which the destination gets no new ones. 0 means no limit.
    pub upper_threshold: u32,
    /// After the upper threshold was reached, the destination gets new connections again when it
    /// has fewer connections than this number. 0 means three quarters of the upper threshold.
    pub lower_threshold: u32,
}

impl Destination {
    /// A destination of weight 1 with masquerading and without thresholds.
    pub fn new(address: SocketAddr) -> Self {
        Self { address, forwarding: Forwarding::Masquerade, weight: 1, upper_threshold: 0, lower_threshold: 0 }
    }

    /// Sets the weight.
    pub fn weighing(mut self, weight: u32) -> Self {
        self.weight = weight;
        self
    }
}

/// A virtual service as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceEntry {
    /// The configuration.
    pub service: Service,
    /// Flags that [`Service`] does not represent.
    pub other_flags: u32,
}

/// A destination as the kernel lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DestinationEntry {
    /// The configuration.
    pub destination: Destination,
    /// Established connections.
    pub active_connections: u32,
    /// Connections in all other states: closing TCP connections and all UDP connections.
    pub inactive_connections: u32,
}

/// Idle timeouts of connections, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timeouts {
    /// Timeout of established TCP connections.
    pub tcp_seconds: u32,
    /// Timeout of TCP connections after a FIN.
    pub tcp_fin_seconds: u32,
    /// Timeout of UDP connections.
    pub udp_seconds: u32,
}
