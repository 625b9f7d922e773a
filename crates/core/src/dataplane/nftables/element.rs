//! Elements of maps and sets, and the values on which the rules depend.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use crate::{behaviours::masquerade::MasqueradeSources, state::frontends::Frontend};

/// The answer to a packet for a frontend that has no endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The client gets an ICMP error, because no endpoint exists anywhere.
    Reject,
    /// The packet is dropped: the policy is Local, and all endpoints are on other nodes.
    Drop,
}

/// What a [`Element::Counter`] counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Counted {
    /// New connections that are sent to an endpoint.
    Connections,
    /// Packets and bytes of these connections, in both directions.
    Traffic,
}

impl Counted {
    /// Both values.
    pub const ALL: [Self; 2] = [Self::Connections, Self::Traffic];
}

/// Returns the number of the service port to which a group belongs.
pub(super) fn port_number(group: u32) -> u32 {
    group & !1
}

/// How a rule selects a slot of a group. Each slot holds one endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Selection {
    /// A random slot below this number, which is at least 1.
    Random(u32),
    /// The slot below this number that a hash of the client's address selects.
    ByClient(u32),
    /// No slot: only a proxy can carry the connection. While the proxy does not accept connections,
    /// they are refused.
    ProxyOnly,
}

impl Selection {
    /// Returns the number of slots.
    #[must_use]
    pub fn slots(self) -> u32 {
        match self {
            Self::Random(slots) | Self::ByClient(slots) => slots,
            Self::ProxyOnly => 0,
        }
    }
}

/// The group to which connections to a frontend are sent, with the properties that the rules use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// The number of the group.
    pub group: u32,
    /// How a slot of the group is selected.
    pub selection: Selection,
    /// The timeout of ClientIP affinity. `None` for no affinity.
    pub affinity_timeout_seconds: Option<u32>,
}

impl Target {
    /// Returns the identifier of the service port, which is unrelated to its TCP or UDP port
    /// number. A port has one group for policy Cluster and one for policy Local. The numbers of
    /// these groups differ only in the lowest bit.
    #[must_use]
    pub fn port_number(&self) -> u32 {
        port_number(self.group)
    }

    /// Returns the chain that selects a slot of the group.
    #[must_use]
    pub fn pick(&self, lookup: Lookup) -> Pick {
        Pick { lookup, affinity_timeout_seconds: self.affinity_timeout_seconds, selection: self.selection }
    }
}

/// An element of a map or of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// A ClusterIP. Packets to ports of this address that no Service has are rejected.
    ClusterIp(IpAddr),
    /// An endpoint that may run on this node. Connections of the endpoint to itself are
    /// masqueraded.
    Hairpin(IpAddr),
    /// A frontend, and the group to which connections are sent.
    Service(Frontend, Target),
    /// A frontend, and the group to which connections of local pods and of the node itself are
    /// sent. This group takes precedence over the group of [`Self::Service`].
    Inside(Frontend, Target),
    /// A frontend without endpoints.
    Unserved(Frontend, Refusal),
    /// A frontend whose TCP connections do not go to the proxy of mode userspace.
    Straight(Frontend),
    /// A frontend, and the clients whose connections are masqueraded.
    Masquerade(Frontend, MasqueradeSources),
    /// A frontend, and what its counter in the kernel counts. Only packets change the counter: the
    /// element stays while the frontend exists.
    Counter(Frontend, Counted),
    /// A frontend that only [`Self::Admitted`] clients may reach.
    Guarded(Frontend),
    /// A range of clients that may reach a [`Self::Guarded`] frontend.
    Admitted(Frontend, IpNet),
    /// The endpoint in a slot of a group: group, slot, address, port.
    Endpoint(u32, u32, IpAddr, u16),
    /// The same for a group with affinity. The rules that record clients need a map of another
    /// form.
    AffinityEndpoint(u32, u32, IpAddr, u16),
    /// An endpoint of a group with affinity. While this element exists, connections of a recorded
    /// client are sent to the endpoint.
    Member(u32, IpAddr, u16),
}

/// The key of an element in its map or set. The kernel cannot change the value of an existing key,
/// so a changed element is deleted and added again.
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
    /// [`Element::AffinityEndpoint`].
    AffinityEndpoint(u32, u32),
}

impl Element {
    /// The key.
    #[must_use]
    pub fn key(&self) -> ElementKey {
        match *self {
            Self::Service(frontend, _) => ElementKey::Service(frontend),
            Self::Inside(frontend, _) => ElementKey::Inside(frontend),
            Self::Endpoint(group, slot, ..) => ElementKey::Endpoint(group, slot),
            Self::AffinityEndpoint(group, slot, ..) => ElementKey::AffinityEndpoint(group, slot),
            whole => ElementKey::Whole(whole),
        }
    }

    /// The frontend to which the element belongs.
    pub(super) fn frontend(&self) -> Option<Frontend> {
        match *self {
            Self::Service(frontend, _)
            | Self::Inside(frontend, _)
            | Self::Unserved(frontend, _)
            | Self::Masquerade(frontend, _)
            | Self::Counter(frontend, _)
            | Self::Guarded(frontend)
            | Self::Admitted(frontend, _) => Some(frontend),
            _ => None,
        }
    }
}

/// The map in which a chain looks up a packet.
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

    /// Returns the map that contains an element, with the frontend and the target. Returns `None`
    /// if the element has no target.
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

/// A chain that selects a slot. Groups with the same selection and the same affinity timeout in the
/// same map share one chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pick {
    /// The map that contains the target.
    pub lookup: Lookup,
    /// The timeout of ClientIP affinity in seconds.
    pub affinity_timeout_seconds: Option<u32>,
    /// How the chain selects a slot.
    pub selection: Selection,
}

/// The values on which the rules depend, besides the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shape {
    /// The chains that select a slot.
    pub picks: BTreeSet<Pick>,
    /// The prefix lengths of source ranges.
    pub prefix_lengths: BTreeSet<u8>,
    /// The ranges of ClusterIPs. Packets to an address in a range are dropped if no Service has the
    /// address.
    pub service_cidrs: BTreeSet<IpNet>,
}

impl Shape {
    /// The largest number of endpoints that has [`Self::spare_picks`]. The kernel checks each new
    /// endpoint against each rule that looks up endpoints (`nft_add_set_elem` walks the bindings of
    /// the map). With 100 counts these checks took half of the time of a first sync.
    const SPARE_COUNTS: u32 = 16;

    /// Returns chains for small numbers of endpoints. An agent adds them to a table that has no
    /// elements, even if no service needs them. When the kernel binds a map to a new chain, it
    /// walks all elements of the map (`nf_tables_bind_set`), so a chain that is added later costs a
    /// time that grows with the number of endpoints in the cluster.
    pub fn spare_picks() -> impl Iterator<Item = Pick> {
        let of = |lookup| {
            (1..=Self::SPARE_COUNTS).map(move |count| Pick {
                lookup,
                affinity_timeout_seconds: None,
                selection: Selection::Random(count),
            })
        };
        [Lookup::Service, Lookup::NodePort].into_iter().flat_map(of)
    }
}
