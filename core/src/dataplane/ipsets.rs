//! ipsets, by which a constant number of iptables rules serves any number of services. Names and
//! types are kube-proxy's; those that it does not have say so.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;

use crate::model::{Family, Protocol};

/// A set. In this order elements are added, and in the opposite order removed: what lets through
/// comes before what keeps out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Set {
    /// ClusterIPs and ports.
    ClusterIp,
    /// externalIPs and ports, Cluster policy.
    ExternalIp,
    /// externalIPs and ports, Local policy.
    ExternalIpLocal,
    /// Load balancer IPs and ports.
    LoadBalancer,
    /// Those of them with Local policy.
    LoadBalancerLocal,
    /// Load balancer IPs and ports, and the ranges that may reach them.
    LoadBalancerSourceCidr,
    /// Load balancer IPs and ports that the node may reach, from those addresses themselves.
    LoadBalancerSourceIp,
    /// Load balancer IPs and ports that only some may reach.
    LoadBalancerFirewall,
    /// NodePorts, TCP.
    NodePortTcp,
    /// Those of them with Local policy.
    NodePortLocalTcp,
    /// NodePorts, UDP.
    NodePortUdp,
    /// Those of them with Local policy.
    NodePortLocalUdp,
    /// Node addresses and NodePorts, SCTP.
    NodePortSctp,
    /// Those of them with Local policy.
    NodePortLocalSctp,
    /// Node addresses and NodePorts that have virtual servers, whatever the protocol. Not
    /// kube-proxy's: it says whose those servers are.
    NodePortServers,
    /// Ports of health checks.
    HealthCheckNodePort,
    /// Endpoints that may be on this node, as destination and source.
    LoopBack,
    /// Addresses on our device.
    DeviceAddresses,
    /// Addresses and ports without an endpoint anywhere: packets are rejected. kube-proxy has no
    /// such set.
    NoEndpoints,
    /// Addresses and ports with Local policy that have endpoints, but none here: packets are
    /// dropped. kube-proxy has no such set.
    NoLocalEndpoints,
}

/// What kind of elements a set has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetKind {
    /// `bitmap:port`, 0 to 65,535.
    Port,
    /// `hash:ip`.
    Ip,
    /// `hash:ip,port`.
    IpPort,
    /// `hash:ip,port,ip`.
    IpPortIp,
    /// `hash:ip,port,net`.
    IpPortNet,
}

impl SetKind {
    /// Most elements of a hash. kube-proxy has 65,536, which a cluster with as many service ports
    /// exceeds; it costs nothing.
    pub const MAX_ELEMENTS: u32 = 1 << 20;

    /// Buckets that a hash has at first.
    pub const HASH_SIZE: u32 = 1024;

    /// The kernel's name for the type.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Port => "bitmap:port",
            Self::Ip => "hash:ip",
            Self::IpPort => "hash:ip,port",
            Self::IpPortIp => "hash:ip,port,ip",
            Self::IpPortNet => "hash:ip,port,net",
        }
    }
}

/// One element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// Of `bitmap:port`.
    Port(u16),
    /// Of `hash:ip`.
    Ip(IpAddr),
    /// Of `hash:ip,port`.
    IpPort(IpAddr, Protocol, u16),
    /// Of `hash:ip,port,ip`.
    IpPortIp(IpAddr, Protocol, u16, IpAddr),
    /// Of `hash:ip,port,net`.
    IpPortNet(IpAddr, Protocol, u16, IpNet),
}

impl Element {
    /// The kind of set that it fits.
    #[must_use]
    pub fn kind(&self) -> SetKind {
        match self {
            Self::Port(_) => SetKind::Port,
            Self::Ip(_) => SetKind::Ip,
            Self::IpPort(..) => SetKind::IpPort,
            Self::IpPortIp(..) => SetKind::IpPortIp,
            Self::IpPortNet(..) => SetKind::IpPortNet,
        }
    }
}

/// As `ipset` writes it.
impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => write!(f, "{port}"),
            Self::Ip(address) => write!(f, "{address}"),
            Self::IpPort(address, protocol, port) => write!(f, "{address},{}:{port}", protocol.as_lower_str()),
            Self::IpPortIp(address, protocol, port, second) => {
                write!(f, "{address},{}:{port},{second}", protocol.as_lower_str())
            }
            Self::IpPortNet(address, protocol, port, net) => {
                write!(f, "{address},{}:{port},", protocol.as_lower_str())?;
                write_net(f, net)
            }
        }
    }
}

/// A host's net is written as its address.
fn write_net(f: &mut fmt::Formatter<'_>, net: &IpNet) -> fmt::Result {
    if net.prefix_len() == net.max_prefix_len() { write!(f, "{}", net.addr()) } else { write!(f, "{net}") }
}

/// The kernel's limit is 32 bytes with the one that ends the name.
const NAME_LENGTH: usize = 31;

impl Set {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::ClusterIp,
        Self::ExternalIp,
        Self::ExternalIpLocal,
        Self::LoadBalancer,
        Self::LoadBalancerLocal,
        Self::LoadBalancerSourceCidr,
        Self::LoadBalancerSourceIp,
        Self::LoadBalancerFirewall,
        Self::NodePortTcp,
        Self::NodePortLocalTcp,
        Self::NodePortUdp,
        Self::NodePortLocalUdp,
        Self::NodePortSctp,
        Self::NodePortLocalSctp,
        Self::NodePortServers,
        Self::HealthCheckNodePort,
        Self::LoopBack,
        Self::DeviceAddresses,
        Self::NoEndpoints,
        Self::NoLocalEndpoints,
    ];

    /// Sets whose elements are addresses and ports of virtual servers of ours.
    pub const OF_SERVERS: [Self; 5] =
        [Self::ClusterIp, Self::ExternalIp, Self::ExternalIpLocal, Self::LoadBalancer, Self::NodePortServers];

    /// Its name for IPv4, behind `KUBE-`.
    fn suffix(self) -> &'static str {
        match self {
            Self::ClusterIp => "CLUSTER-IP",
            Self::ExternalIp => "EXTERNAL-IP",
            Self::ExternalIpLocal => "EXTERNAL-IP-LOCAL",
            Self::LoadBalancer => "LOAD-BALANCER",
            Self::LoadBalancerLocal => "LOAD-BALANCER-LOCAL",
            Self::LoadBalancerSourceCidr => "LOAD-BALANCER-SOURCE-CIDR",
            Self::LoadBalancerSourceIp => "LOAD-BALANCER-SOURCE-IP",
            Self::LoadBalancerFirewall => "LOAD-BALANCER-FW",
            Self::NodePortTcp => "NODE-PORT-TCP",
            Self::NodePortLocalTcp => "NODE-PORT-LOCAL-TCP",
            Self::NodePortUdp => "NODE-PORT-UDP",
            Self::NodePortLocalUdp => "NODE-PORT-LOCAL-UDP",
            Self::NodePortSctp => "NODE-PORT-SCTP-HASH",
            Self::NodePortLocalSctp => "NODE-PORT-LOCAL-SCTP-HASH",
            Self::NodePortServers => "NODE-PORT-SERVERS",
            Self::HealthCheckNodePort => "HEALTH-CHECK-NODE-PORT",
            Self::LoopBack => "LOOP-BACK",
            Self::DeviceAddresses => "IPVS-IPS",
            Self::NoEndpoints => "NO-ENDPOINTS",
            Self::NoLocalEndpoints => "NO-LOCAL-ENDPOINTS",
        }
    }

    /// Its name, as kube-proxy forms it: IPv6 sets have a `6` in it, and what is too long is cut.
    #[must_use]
    pub fn name(self, family: Family) -> String {
        let mut name = match family {
            Family::V4 => format!("KUBE-{}", self.suffix()),
            Family::V6 => format!("KUBE-6-{}", self.suffix()),
        };
        name.truncate(NAME_LENGTH);
        name
    }

    /// The set of a name, in that family.
    #[must_use]
    pub fn parse(name: &str, family: Family) -> Option<Self> {
        Self::ALL.into_iter().find(|set| set.name(family) == name)
    }

    /// Its kind.
    #[must_use]
    pub fn kind(self) -> SetKind {
        match self {
            Self::NodePortTcp
            | Self::NodePortLocalTcp
            | Self::NodePortUdp
            | Self::NodePortLocalUdp
            | Self::HealthCheckNodePort => SetKind::Port,
            Self::DeviceAddresses => SetKind::Ip,
            Self::LoopBack | Self::LoadBalancerSourceIp => SetKind::IpPortIp,
            Self::LoadBalancerSourceCidr => SetKind::IpPortNet,
            _ => SetKind::IpPort,
        }
    }

    /// NodePorts of a protocol.
    #[must_use]
    pub fn node_port(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::NodePortTcp,
            Protocol::Udp => Self::NodePortUdp,
            Protocol::Sctp => Self::NodePortSctp,
        }
    }

    /// NodePorts of a protocol with Local policy.
    #[must_use]
    pub fn node_port_local(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::NodePortLocalTcp,
            Protocol::Udp => Self::NodePortLocalUdp,
            Protocol::Sctp => Self::NodePortLocalSctp,
        }
    }
}
