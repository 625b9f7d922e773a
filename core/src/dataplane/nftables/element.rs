//! Elements of maps and sets, and what the rules depend on.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use crate::state::frontends::Frontend;

/// The answer to a packet for a frontend that has no endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The client gets an ICMP error, because no endpoint exists anywhere.
    Reject,
    /// The packet is dropped. Endpoints exist, but the policy is Local and none is on this node.
    Drop,
}

/// Which clients of a frontend are masqueraded: the address of the node replaces their source
/// address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MasqueradeSources {
    /// No client.
    Nobody,
    /// Clients that the detector does not recognise as local pods.
    Outside,
    /// The node itself.
    Node,
    /// All clients.
    Everyone,
}

/// The number of the service port that a group belongs to.
pub(super) fn port_number(group: u32) -> u32 {
    group & !1
}

/// The group that a frontend leads to, with what the rules need to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// The number of the group.
    pub group: u32,
    /// The number of its endpoints, at least 1.
    pub count: u32,
    /// The timeout of ClientIP affinity.
    pub affinity_timeout_seconds: Option<u32>,
}

impl Target {
    /// An identifier of the service port, which is not its TCP or UDP port number. The groups for
    /// policies Cluster and Local of a port differ in the lowest bit alone.
    #[must_use]
    pub fn port_number(&self) -> u32 {
        port_number(self.group)
    }

    /// The chain that selects a slot of the group at random. Each slot holds one endpoint.
    #[must_use]
    pub fn pick(&self, lookup: Lookup) -> Pick {
        Pick { lookup, affinity_timeout_seconds: self.affinity_timeout_seconds, count: self.count }
    }
}

/// An element of a map or of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// A ClusterIP. Packets to it are rejected on ports that no Service has.
    ClusterIp(IpAddr),
    /// An endpoint that may run on this node. Its connections to itself are masqueraded.
    Hairpin(IpAddr),
    /// Connections to a frontend go to a group.
    Service(Frontend, Target),
    /// Connections of local pods and of the node itself to a frontend go to this group, and not to
    /// the group of [`Self::Service`].
    Inside(Frontend, Target),
    /// A frontend without endpoints.
    Unserved(Frontend, Refusal),
    /// Whose connections to a frontend are masqueraded.
    Masquerade(Frontend, MasqueradeSources),
    /// Only [`Self::Admitted`] clients reach this frontend.
    Guarded(Frontend),
    /// Clients that may use a guarded frontend.
    Admitted(Frontend, IpNet),
    /// The endpoint in a slot of a group: group, slot, address, port.
    Endpoint(u32, u32, IpAddr, u16),
    /// An endpoint of a group with affinity. Recorded clients stay with it while this element
    /// exists.
    Member(u32, IpAddr, u16),
}

/// What identifies an element in its map or set. The kernel cannot change the value of an existing
/// key, so a changed element is deleted and added again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ElementKey {
    /// The whole element.
    Whole(Element),
    /// [`Element::Service`].
    Service(Frontend),
    /// [`Element::Inside`].
    Inside(Frontend),
    /// [`Element::Endpoint`].
    Endpoint(u32, u32),
}

impl Element {
    /// The key.
    #[must_use]
    pub fn key(&self) -> ElementKey {
        match *self {
            Self::Service(frontend, _) => ElementKey::Service(frontend),
            Self::Inside(frontend, _) => ElementKey::Inside(frontend),
            Self::Endpoint(group, slot, ..) => ElementKey::Endpoint(group, slot),
            whole => ElementKey::Whole(whole),
        }
    }
}

/// The map that a chain looks a packet up in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lookup {
    /// [`Element::Service`] by destination address, protocol and port.
    Service,
    /// [`Element::Inside`] by destination address, protocol and port.
    Inside,
    /// [`Element::Service`] of NodePorts, by protocol and port.
    NodePort,
    /// [`Element::Inside`] of NodePorts, by protocol and port.
    InsideNodePort,
}

impl Lookup {
    /// All maps.
    pub const ALL: [Self; 4] = [Self::Service, Self::Inside, Self::NodePort, Self::InsideNodePort];

    /// The map of an element that leads to a group, with the frontend and the group.
    #[must_use]
    pub fn of(element: &Element) -> Option<(Self, Frontend, Target)> {
        match *element {
            Element::Service(frontend @ Frontend::Address(..), target) => Some((Self::Service, frontend, target)),
            Element::Service(frontend @ Frontend::NodePort(..), target) => Some((Self::NodePort, frontend, target)),
            Element::Inside(frontend @ Frontend::Address(..), target) => Some((Self::Inside, frontend, target)),
            Element::Inside(frontend @ Frontend::NodePort(..), target) => {
                Some((Self::InsideNodePort, frontend, target))
            }
            _ => None,
        }
    }
}

/// A chain that draws a slot. All groups of one size and one affinity timeout share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pick {
    /// The map that leads to the group.
    pub lookup: Lookup,
    /// The timeout of ClientIP affinity in seconds.
    pub affinity_timeout_seconds: Option<u32>,
    /// The number of endpoints, at least 1.
    pub count: u32,
}

/// What the rules depend on besides the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shape {
    /// The chains that draw a slot.
    pub picks: BTreeSet<Pick>,
    /// The prefix lengths of source ranges.
    pub prefix_lengths: BTreeSet<u8>,
    /// The ranges of ClusterIPs. A packet to an address in a range is dropped if no Service has the
    /// address.
    pub service_cidrs: BTreeSet<IpNet>,
}

impl Shape {
    /// The timeouts of ClientIP affinity in seconds.
    #[must_use]
    pub fn affinity_timeouts_seconds(&self) -> BTreeSet<u32> {
        self.picks.iter().filter_map(|pick| pick.affinity_timeout_seconds).collect()
    }
}
