//! The ipsets of the IPVS dataplane. iptables rules match these sets, so the number of rules does
//! not depend on the number of services. Names and types are the same as in kube-proxy, except
//! where the comment of a set names a difference.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;

use crate::model::{Family, Protocol};

named! {
    /// A set. Elements are added to the sets in the order of this list and removed in the opposite
    /// order. Sets that let packets pass come before sets that reject or drop packets, so an update
    /// never blocks an address that both the old and the new state admit. Displayed as for IPv4 and
    /// without the prefix `KUBE-`: [`Set::name`] has the name in the kernel.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Set {
        /// ClusterIPs and ports.
        ClusterIp = "CLUSTER-IP",
        /// externalIPs and ports, Cluster policy.
        ExternalIp = "EXTERNAL-IP",
        /// externalIPs and ports, Local policy.
        ExternalIpLocal = "EXTERNAL-IP-LOCAL",
        /// Load balancer IPs and ports.
        LoadBalancer = "LOAD-BALANCER",
        /// Load balancer IPs and ports, Local policy.
        LoadBalancerLocal = "LOAD-BALANCER-LOCAL",
        /// Load balancer IPs and ports, each with a source range whose clients may reach it.
        LoadBalancerSourceCidr = "LOAD-BALANCER-SOURCE-CIDR",
        /// Load balancer IPs and ports that the node may reach, each with the same address as
        /// source.
        LoadBalancerSourceIp = "LOAD-BALANCER-SOURCE-IP",
        /// Load balancer IPs and ports that have source ranges.
        LoadBalancerFirewall = "LOAD-BALANCER-FW",
        /// NodePorts, TCP.
        NodePortTcp = "NODE-PORT-TCP",
        /// NodePorts, TCP, Local policy.
        NodePortLocalTcp = "NODE-PORT-LOCAL-TCP",
        /// NodePorts, UDP.
        NodePortUdp = "NODE-PORT-UDP",
        /// NodePorts, UDP, Local policy.
        NodePortLocalUdp = "NODE-PORT-LOCAL-UDP",
        /// Node addresses and NodePorts, SCTP.
        NodePortSctp = "NODE-PORT-SCTP-HASH",
        /// Node addresses and NodePorts, SCTP, Local policy.
        NodePortLocalSctp = "NODE-PORT-LOCAL-SCTP-HASH",
        /// Node addresses and NodePorts that have virtual servers, of all protocols. This set marks
        /// these servers as programmed by Headgate. kube-proxy has no such set.
        NodePortServers = "NODE-PORT-SERVERS",
        /// Health-check node ports.
        HealthCheckNodePort = "HEALTH-CHECK-NODE-PORT",
        /// Endpoints that may be on this node, each as destination and as source.
        LoopBack = "LOOP-BACK",
        /// Addresses of Headgate's device.
        DeviceAddresses = "IPVS-IPS",
        /// Addresses and ports without any endpoint: packets are rejected. kube-proxy has no such
        /// set.
        NoEndpoints = "NO-ENDPOINTS",
        /// Addresses and ports with Local policy whose endpoints are all on other nodes: packets
        /// are dropped. kube-proxy has no such set.
        NoLocalEndpoints = "NO-LOCAL-ENDPOINTS",
    }
}

named! {
    /// The type of a set. Named as in the kernel.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum SetKind {
        /// `bitmap:port`, 0 to 65,535.
        Port = "bitmap:port",
        /// `hash:ip`.
        Ip = "hash:ip",
        /// `hash:ip,port`.
        IpPort = "hash:ip,port",
        /// `hash:ip,port,ip`.
        IpPortIp = "hash:ip,port,ip",
        /// `hash:ip,port,net`.
        IpPortNet = "hash:ip,port,net",
    }
}

impl SetKind {
    /// The maximum number of elements with which kube-proxy creates a hash. kube-proxy cannot use a
    /// set of its own names with another maximum. So the hashes of Headgate have this maximum while
    /// they have no more elements, and a node can go back to kube-proxy.
    pub const KUBE_PROXYS_MAX_ELEMENTS: u32 = 1 << 16;

    /// The maximum number of elements of a hash that needs more than kube-proxy's maximum.
    pub const MAX_ELEMENTS: u32 = 1 << 20;

    /// Initial number of buckets of a hash.
    pub const HASH_SIZE: u32 = 1024;

    /// Returns the maximum number of elements with which a hash of `count` elements is created.
    #[must_use]
    pub fn max_elements(count: usize) -> u32 {
        let is_enough = u32::try_from(count).is_ok_and(|count| count <= Self::KUBE_PROXYS_MAX_ELEMENTS);
        if is_enough { Self::KUBE_PROXYS_MAX_ELEMENTS } else { Self::MAX_ELEMENTS }
    }
}

/// One element of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IpSetElement {
    /// Element of `bitmap:port`.
    Port(u16),
    /// Element of `hash:ip`.
    Ip(IpAddr),
    /// Element of `hash:ip,port`.
    IpPort(IpAddr, Protocol, u16),
    /// Element of `hash:ip,port,ip`.
    IpPortIp(IpAddr, Protocol, u16, IpAddr),
    /// Element of `hash:ip,port,net`.
    IpPortNet(IpAddr, Protocol, u16, IpNet),
}

impl IpSetElement {
    /// Returns the type of set that holds such elements.
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

/// The element as `ipset` prints it.
impl fmt::Display for IpSetElement {
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

/// Writes a network. A network that contains a single address is written as that address.
fn write_net(f: &mut fmt::Formatter<'_>, net: &IpNet) -> fmt::Result {
    if net.prefix_len() == net.max_prefix_len() { write!(f, "{}", net.addr()) } else { write!(f, "{net}") }
}

/// Maximum length of a name: `IPSET_MAXNAMELEN` is 32, including the terminating NUL byte.
const NAME_LENGTH: usize = 31;

impl Set {
    /// Sets whose elements are addresses and ports of Headgate's virtual servers.
    pub const OF_SERVERS: [Self; 5] =
        [Self::ClusterIp, Self::ExternalIp, Self::ExternalIpLocal, Self::LoadBalancer, Self::NodePortServers];

    /// Sets that kube-proxy does not have.
    pub const NOT_OF_KUBE_PROXY: [Self; 3] = [Self::NodePortServers, Self::NoEndpoints, Self::NoLocalEndpoints];

    /// Returns the name as kube-proxy forms it: names of IPv6 sets contain a `6`, and names that
    /// are too long are truncated.
    #[must_use]
    pub fn name(self, family: Family) -> String {
        let mut name = match family {
            Family::V4 => format!("KUBE-{}", self.as_str()),
            Family::V6 => format!("KUBE-6-{}", self.as_str()),
        };
        name.truncate(NAME_LENGTH);
        name
    }

    /// Returns the type of the set.
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

    /// Returns the set of NodePorts for a protocol.
    #[must_use]
    pub fn node_port(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::NodePortTcp,
            Protocol::Udp => Self::NodePortUdp,
            Protocol::Sctp => Self::NodePortSctp,
        }
    }

    /// Returns the set of NodePorts with Local policy for a protocol.
    #[must_use]
    pub fn node_port_local(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::NodePortLocalTcp,
            Protocol::Udp => Self::NodePortLocalUdp,
            Protocol::Sctp => Self::NodePortLocalSctp,
        }
    }
}
