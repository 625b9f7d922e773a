//! The names and addresses of a testbed's machines. Names and addresses are constant, so that the
//! output of a failing case can be understood without access to the machine.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// IPv4 or IPv6. Every case runs for both families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The loopback address.
    pub fn loopback(self) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::LOCALHOST.into(),
            Self::V6 => Ipv6Addr::LOCALHOST.into(),
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// One address of each family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// IPv4.
    pub v4: Ipv4Addr,
    /// IPv6.
    pub v6: Ipv6Addr,
}

impl Addresses {
    /// The address of `family`.
    pub fn of(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.v4.into(),
            Family::V6 => self.v6.into(),
        }
    }

    /// Both addresses, IPv4 first.
    pub fn both(&self) -> [IpAddr; 2] {
        Family::BOTH.map(|family| self.of(family))
    }
}

/// A node and its pods.
#[derive(Debug)]
pub struct NodePlan {
    /// The Kubernetes node name.
    pub name: &'static str,
    /// The value of the label `topology.kubernetes.io/zone`.
    pub zone: &'static str,
    /// The pods of the node, in the order of their addresses.
    pub pods: &'static [&'static str],
}

/// The nodes. The pods a3, b3 and c2 are clients: no service of the packet table has them as
/// endpoints.
pub const NODES: [NodePlan; 3] = [
    NodePlan { name: "node-a", zone: "zone-1", pods: &["a1", "a2", "a3"] },
    NodePlan { name: "node-b", zone: "zone-1", pods: &["b1", "b2", "b3"] },
    NodePlan { name: "node-c", zone: "zone-2", pods: &["c1", "c2"] },
];

/// Clients outside the cluster: the name, and the node to which the client sends packets for
/// service addresses.
pub const OUTSIDE: [(&str, &str); 2] = [("outside-1", "node-a"), ("outside-2", "node-b")];

/// The machine of the control plane.
pub const CONTROL: &str = "control";

/// The port of the control plane.
pub const CONTROL_PORT: u16 = 7443;

/// The port at which the control plane serves Inspect.
pub const INSPECT_PORT: u16 = CONTROL_PORT + 1;

/// The value of the agents' `--cluster-cidr`.
pub const CLUSTER_CIDR: &str = "10.244.0.0/16,fd00:10:244::/48";

/// The prefixes of cluster, external and load balancer addresses, in both families.
pub const SERVICE_PREFIXES: [&str; 6] =
    ["10.96.0.0/16", "198.51.100.0/24", "203.0.113.0/24", "fd00:10:96::/112", "2001:db8:100::/64", "2001:db8:200::/64"];

/// The port of the TCP line servers, UDP servers and SCTP servers on every pod and node.
pub const LINE_PORT: u16 = 8080;
/// The second port of the TCP line servers, UDP servers and SCTP servers.
pub const SECOND_LINE_PORT: u16 = 9090;
/// The port of the HTTP server on every pod and node.
pub const HTTP_PORT: u16 = 8081;

/// The addresses of a node, a pod, an outside client or the control plane's machine; `None` for
/// other names.
pub fn address(name: &str) -> Option<Addresses> {
    if let Some((node, pod)) = pod_position(name) {
        let (node, pod) = (node + 1, pod + 10);
        return Some(Addresses {
            v4: Ipv4Addr::new(10, 244, node, pod),
            v6: Ipv6Addr::new(0xfd00, 0x10, 0x244, u16::from(node), 0, 0, 0, u16::from(pod)),
        });
    }
    let underlay = |last: u8| Addresses {
        v4: Ipv4Addr::new(192, 0, 2, last),
        v6: Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 0, 0, 0, u16::from(last)),
    };
    if name == CONTROL {
        return Some(underlay(1));
    }
    if let Some(index) = NODES.iter().position(|node| node.name == name) {
        return Some(underlay(11 + u8::try_from(index).ok()?));
    }
    let index = OUTSIDE.iter().position(|(outside, _)| *outside == name)?;
    Some(underlay(100 + u8::try_from(index).ok()?))
}

/// The addresses of the underlay's gateway, which drops all packets.
pub fn gateway() -> Addresses {
    Addresses { v4: Ipv4Addr::new(192, 0, 2, 254), v6: Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 0, 0, 0, 254) }
}

/// The pod networks of a node, IPv4 and IPv6, as CIDRs.
pub fn pod_networks(node: &str) -> Option<[String; 2]> {
    let number = NODES.iter().position(|plan| plan.name == node)? + 1;
    Some([format!("10.244.{number}.0/24"), format!("fd00:10:244:{number}::/64")])
}

/// The node of the pod `name`, or the node called `name`.
pub fn node_of(name: &str) -> Option<&'static NodePlan> {
    NODES.iter().find(|node| node.name == name || node.pods.contains(&name))
}

/// The node that gets the requests of a client to addresses of Services, except NodePorts.
pub fn entry_of(client: &str) -> Option<&'static str> {
    let outside = OUTSIDE.iter().find(|(outside, _)| *outside == client).map(|(_, node)| *node);
    outside.or_else(|| node_of(client).map(|node| node.name))
}

fn pod_position(name: &str) -> Option<(u8, u8)> {
    NODES.iter().zip(0_u8..).find_map(|(node, index)| {
        let pod = node.pods.iter().position(|pod| *pod == name)?;
        Some((index, u8::try_from(pod).ok()?))
    })
}
