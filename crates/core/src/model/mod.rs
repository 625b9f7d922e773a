//! The resources that the control plane sends to agents. The control plane has already selected IP
//! families, applied the defaults of the API, and replaced policies that have no effect. So all
//! agents use the same values.

mod change;
mod endpoint;
mod load_balancing;
mod node;
pub mod pool;
mod proxy_protocol;
mod service;

pub use change::Change;
pub(crate) use endpoint::greatest_common_divisor;
pub use endpoint::{Conditions, Endpoint, EndpointPort, Hints, Placement, PortState, Weight};
pub use load_balancing::LoadBalancing;
pub use node::{Node, ServiceCidr};
pub use proxy_protocol::ProxyProtocol;
pub use service::{ClientIpAffinity, Service, ServiceKey, ServicePort, TrafficPolicy};

use std::{fmt, net::IpAddr};

/// An IP family. The two families of a Service are programmed independently of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// Returns the family of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The length of a host prefix: 32 or 128.
    #[must_use]
    pub fn host_prefix_length(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }
}

/// Reads an address in network order: 4 bytes of IPv4, or 16 bytes of IPv6.
#[must_use]
pub fn address_from_bytes(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// A transport protocol that Services can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// All protocols.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The name in lower case, as in iptables rules and in the hashes of kube-proxy.
    #[must_use]
    pub fn as_lower_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

/// The name in upper case, as in the Kubernetes API.
impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        })
    }
}
