//! Virtual services and destinations as the kernel knows them (`linux/ip_vs.h`).

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// `AF_INET`.
    V4,
    /// `AF_INET6`.
    V6,
}

impl Family {
    /// An address' family.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// A transport protocol. The kernel's IPVS takes TCP, UDP and SCTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// `IPPROTO_TCP`.
    Tcp,
    /// `IPPROTO_UDP`.
    Udp,
    /// `IPPROTO_SCTP`.
    Sctp,
    /// Any other, by its number.
    Other(u16),
}

/// What names a virtual service. The protocol [`Protocol::Other`] never stands for one of the others when it comes from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServiceId {
    /// An address and a port of a protocol. Port 0 is every port that has no service of its own, for services with persistence.
    Address {
        /// The protocol.
        protocol: Protocol,
        /// The address and port that clients send to.
        address: SocketAddr,
    },
    /// All packets of a family with a firewall mark.
    FirewallMark {
        /// The family.
        family: Family,
        /// The mark, not 0.
        mark: u32,
    },
}

impl ServiceId {
    /// A service by its address and port.
    #[must_use]
    pub fn new(protocol: Protocol, address: SocketAddr) -> Self {
        Self::Address { protocol, address }
    }

    /// The family of its clients.
    #[must_use]
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
            Self::Address { protocol, address } => {
                let name = match protocol {
                    Protocol::Tcp => "TCP",
                    Protocol::Udp => "UDP",
                    Protocol::Sctp => "SCTP",
                    Protocol::Other(number) => return write!(f, "protocol {number} {address}"),
                };
                write!(f, "{name} {address}")
            }
            Self::FirewallMark { family: Family::V4, mark } => write!(f, "mark {mark} of IPv4"),
            Self::FirewallMark { family: Family::V6, mark } => write!(f, "mark {mark} of IPv6"),
        }
    }
}

/// Which clients persistence takes for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Netmask {
    /// A mask of IPv4 addresses.
    V4(Ipv4Addr),
    /// The length of a prefix of IPv6 addresses, 1 to 128.
    V6(u32),
}

impl Netmask {
    /// Each address is a client of its own.
    #[must_use]
    pub fn host(family: Family) -> Self {
        match family {
            Family::V4 => Self::V4(Ipv4Addr::BROADCAST),
            Family::V6 => Self::V6(128),
        }
    }
}

/// A client's connections go to the same destination as its last ones (`IP_VS_SVC_F_PERSISTENT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Persistence {
    /// For how long after the last of them has ended, in seconds.
    pub timeout_seconds: u32,
    /// Whom to take for the same client. Of the service's family.
    pub netmask: Netmask,
}

/// Flags whose meaning is the scheduler's (`IP_VS_SVC_F_SCHED1` to `3`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SchedulerFlags {
    /// sh, mh: another destination if the chosen one has weight 0 or is overloaded (`sh-fallback`, `mh-fallback`).
    pub fallback: bool,
    /// sh, mh: the client's port takes part in the choice (`sh-port`, `mh-port`).
    pub port: bool,
    /// The third, which no scheduler of the kernel uses.
    pub third: bool,
}

/// A virtual service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// What names it.
    pub id: ServiceId,
    /// The scheduler's name, such as `rr`, of at most 15 bytes; `none` stands for no scheduler.
    pub scheduler: String,
    /// Persistence, if any.
    pub persistence: Option<Persistence>,
    /// UDP: every packet is scheduled by itself (`IP_VS_SVC_F_ONEPACKET`).
    pub one_packet: bool,
    /// Flags for the scheduler.
    pub scheduler_flags: SchedulerFlags,
    /// What tells clients apart above addresses, such as `sip`.
    pub persistence_engine: Option<String>,
}

impl Service {
    /// A service without persistence and flags.
    #[must_use]
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

    /// The same service with persistence for single client addresses.
    #[must_use]
    pub fn persistent(mut self, timeout_seconds: u32) -> Self {
        self.persistence = Some(Persistence { timeout_seconds, netmask: Netmask::host(self.id.family()) });
        self
    }
}

/// How packets get to a destination (`IP_VS_CONN_F_FWD_MASK`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Forwarding {
    /// By address translation (`IP_VS_CONN_F_MASQ`).
    #[default]
    Masquerade,
    /// The destination is this node (`IP_VS_CONN_F_LOCALNODE`). The kernel sets this by itself.
    Local,
    /// In a tunnel (`IP_VS_CONN_F_TUNNEL`).
    Tunnel,
    /// Unchanged, to the destination's link address (`IP_VS_CONN_F_DROUTE`).
    Direct,
    /// Any other, by its number.
    Other(u32),
}

/// A tunnel's encapsulation (`IP_VS_CONN_F_TUNNEL_TYPE_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TunnelKind {
    /// IP in IP.
    #[default]
    Ipip,
    /// Generic UDP encapsulation.
    Gue,
    /// Generic routing encapsulation.
    Gre,
    /// Any other, by its number.
    Other(u8),
}

/// The tunnel to a destination; of no effect with another forwarding method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tunnel {
    /// The encapsulation.
    pub kind: TunnelKind,
    /// The destination's port for it ([`TunnelKind::Gue`]).
    pub port: u16,
    /// `IP_VS_TUNNEL_ENCAP_FLAG_…`: 1 with a checksum, 2 with remote checksum.
    pub flags: u16,
}

/// A destination (real server) of a virtual service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// Its address and port, which are its name within the service. Of another family than the service's only in tunnels.
    pub address: SocketAddr,
    /// How packets get there.
    pub forwarding: Forwarding,
    /// Its share of new connections, up to 2³¹ − 1; with 0 it gets none, and keeps those it has.
    pub weight: u32,
    /// It gets no new connections while it has this many or more; 0 is no limit.
    pub upper_threshold: u32,
    /// After that, it gets new ones when it has fewer than this many; 0 is three quarters of the upper threshold.
    pub lower_threshold: u32,
    /// The tunnel, with [`Forwarding::Tunnel`].
    pub tunnel: Tunnel,
}

impl Destination {
    /// A destination of weight 1 by address translation, without thresholds.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            forwarding: Forwarding::Masquerade,
            weight: 1,
            upper_threshold: 0,
            lower_threshold: 0,
            tunnel: Tunnel::default(),
        }
    }

    /// The same destination with another weight.
    #[must_use]
    pub fn weighing(mut self, weight: u32) -> Self {
        self.weight = weight;
        self
    }
}

/// Counters since the object was made or zeroed, and estimated rates of the last seconds. The kernel sums them up every two seconds
/// (`net/netfilter/ipvs/ip_vs_est.c`), unlike the numbers of connections of a [`DestinationEntry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Connections scheduled.
    pub connections: u64,
    /// Packets from clients.
    pub incoming_packets: u64,
    /// Packets to clients.
    pub outgoing_packets: u64,
    /// Bytes from clients.
    pub incoming_bytes: u64,
    /// Bytes to clients.
    pub outgoing_bytes: u64,
    /// Connections a second.
    pub connections_per_second: u64,
    /// Packets from clients a second.
    pub incoming_packets_per_second: u64,
    /// Packets to clients a second.
    pub outgoing_packets_per_second: u64,
    /// Bytes from clients a second.
    pub incoming_bytes_per_second: u64,
    /// Bytes to clients a second.
    pub outgoing_bytes_per_second: u64,
}

/// A virtual service in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceEntry {
    /// What was programmed.
    pub service: Service,
    /// The kernel has it in its table (`IP_VS_SVC_F_HASHED`), as every service is once it was made.
    pub hashed: bool,
    /// Flags that are none of the above, as they came.
    pub other_flags: u32,
    /// Its counters.
    pub statistics: Statistics,
}

/// A destination in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DestinationEntry {
    /// What was programmed.
    pub destination: Destination,
    /// Connections that are established.
    pub active_connections: u32,
    /// Connections in all other states: those that end, and all of UDP.
    pub inactive_connections: u32,
    /// Clients that persistence keeps here.
    pub persistent_connections: u32,
    /// Its counters.
    pub statistics: Statistics,
}

/// How long connections live without packets, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timeouts {
    /// TCP, established.
    pub tcp_seconds: u32,
    /// TCP, after a FIN.
    pub tcp_fin_seconds: u32,
    /// UDP.
    pub udp_seconds: u32,
}

/// About the kernel's IPVS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    /// The version: major, minor and patch from the third byte down.
    pub version: u32,
    /// Buckets of the connection table.
    pub connection_table_size: u32,
}
