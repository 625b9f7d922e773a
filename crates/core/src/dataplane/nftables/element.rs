//! Elements of maps and sets, the values on which the rules depend, the groups of endpoints with
//! their slots, and what a service port needs of them.

use std::{
    collections::{BTreeSet, HashSet, VecDeque},
    net::IpAddr,
};

use ipnet::IpNet;
use sha2::{Digest as _, Sha256};

use crate::{
    behaviours::{
        view::Destination,
        view::{MasqueradeConfig, MasqueradeSources, Outcome, ServicePortView},
    },
    model::{Family, Protocol, TrafficPolicy, Weight, greatest_common_divisor},
    state::frontends::Frontend,
};

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
    /// Returns the identifier of the service port, unrelated to its TCP or UDP port. The groups for
    /// policies Cluster and Local differ from it only in the lowest bit.
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
    /// An endpoint that may run on this node: its connections to itself are masqueraded.
    Hairpin(IpAddr),
    /// A frontend, and the group to which connections are sent.
    Service(Frontend, Target),
    /// A frontend, and the group for local pods and the node itself, before [`Self::Service`].
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
    /// The same for a group with affinity, whose rules need a map of another form.
    AffinityEndpoint(u32, u32, IpAddr, u16),
    /// An endpoint with affinity: connections of its recorded clients are sent to it.
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

    /// Returns the map of an element, with frontend and target; `None` without a target.
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

/// A chain that selects a slot, for all groups with equal selection and affinity timeout in a map.
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
    /// The ranges of ClusterIPs, in which packets to an address of no Service are dropped.
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

// Groups of endpoints, and their slots.

/// Identifies a group of a Service. Ports with equal endpoints share the groups of the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GroupKey {
    pub(super) protocol: Protocol,
    pub(super) port: u16,
    /// True for the group for policy Local.
    pub(super) is_local: bool,
}

/// Returns the number of a service port's group.
pub(super) fn group_number(port: u32, is_local: bool) -> u32 {
    port | u32::from(is_local)
}

/// The endpoints of a service port for one policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndpointGroup {
    pub(super) key: GroupKey,
    pub(super) number: u32,
    pub(super) affinity_timeout_seconds: Option<u32>,
    /// The number of slots, if a hash of the client's address selects the slot.
    pub(super) hashed_slots: Option<u32>,
    /// True if only a proxy can carry connections to the endpoints. The group then has no slots.
    pub(super) is_proxy_only: bool,
    /// The endpoint of each slot.
    pub(super) slots: Vec<(IpAddr, u16)>,
}

impl EndpointGroup {
    /// Replaces the endpoints by the wanted endpoints, which are sorted, each with its weight. An
    /// endpoint gets slots in proportion to its weight. Moves as few of the remaining endpoints as
    /// possible to other slots. If the group is hashed, its slots depend only on the wanted
    /// endpoints. Otherwise weights give it at most `weighted_slots`, and a slot for each endpoint.
    pub(super) fn set_endpoints(&mut self, wanted: &[((IpAddr, u16), Weight)], weighted_slots: u32) {
        if self.is_proxy_only {
            self.slots = Vec::new();
            return;
        }
        if let Some(count) = self.hashed_slots {
            self.slots = slots(wanted, count);
            return;
        }
        let mut lacking = slots_of_endpoints(wanted, weighted_slots);
        // Most slots are in the order of the endpoints, so the next endpoint is tried first.
        let mut next = 0;
        let mut keep = |endpoint: &(IpAddr, u16)| {
            if wanted.get(next).is_none_or(|(expected, _)| expected != endpoint) {
                next = wanted.binary_search_by_key(endpoint, |(endpoint, _)| *endpoint).ok()?;
            }
            let number = &mut lacking[next];
            *number = number.checked_sub(1)?;
            next += usize::from(*number == 0);
            Some(*endpoint)
        };
        let mut slots: Vec<Option<(IpAddr, u16)>> = self.slots.iter().map(&mut keep).collect();
        let added = wanted.iter().zip(&lacking);
        let mut added = added.flat_map(|((endpoint, _), number)| (0..*number).map(|_| *endpoint));
        let mut slot = 0;
        while let Some(endpoint) = slots.get_mut(slot) {
            *endpoint = endpoint.or_else(|| added.next());
            if endpoint.is_none() {
                // The endpoint of the last slot moves here and is examined next.
                slots.swap_remove(slot);
            } else {
                slot += 1;
            }
        }
        self.slots = slots.into_iter().flatten().chain(added).collect();
        self.slots.shrink_to_fit();
    }

    /// Returns the target for frontends of the group.
    pub(super) fn target(&self) -> Target {
        let selection = match u32::try_from(self.slots.len()).unwrap_or(u32::MAX) {
            _ if self.is_proxy_only => Selection::ProxyOnly,
            slots if self.hashed_slots.is_some() => Selection::ByClient(slots),
            slots => Selection::Random(slots),
        };
        Target { group: self.number, selection, affinity_timeout_seconds: self.affinity_timeout_seconds }
    }

    /// Appends the elements that only one of this group and `before`, its former value, has.
    pub(super) fn difference(&self, before: Option<&Self>, removed: &mut Vec<Element>, added: &mut Vec<Element>) {
        let is_same_map =
            |before: &&Self| before.affinity_timeout_seconds.is_some() == self.affinity_timeout_seconds.is_some();
        let Some(old) = before.filter(is_same_map) else {
            removed.extend(before.into_iter().flat_map(Self::elements));
            return added.extend(self.elements());
        };
        if old.slots == self.slots {
            return;
        }
        for slot in 0..old.slots.len().max(self.slots.len()) {
            if old.slots.get(slot) != self.slots.get(slot) {
                removed.extend(old.endpoint(slot));
                added.extend(self.endpoint(slot));
            }
        }
        let (before, now) = (old.members(), self.members());
        let member = |number: u32| move |(address, port): &(IpAddr, u16)| Element::Member(number, *address, *port);
        removed.extend(before.difference(&now).map(member(self.number)));
        added.extend(now.difference(&before).map(member(self.number)));
    }

    /// Returns the element of a slot.
    fn endpoint(&self, slot: usize) -> Option<Element> {
        let endpoint =
            if self.affinity_timeout_seconds.is_some() { Element::AffinityEndpoint } else { Element::Endpoint };
        let (address, port) = self.slots.get(slot)?;
        Some(endpoint(self.number, u32::try_from(slot).ok()?, *address, *port))
    }

    /// Returns the endpoints to which connections of recorded clients are sent.
    fn members(&self) -> BTreeSet<(IpAddr, u16)> {
        let has_affinity = self.affinity_timeout_seconds.is_some();
        self.slots.iter().filter(|_| has_affinity).copied().collect()
    }

    /// Returns the elements of the group.
    pub(super) fn elements(&self) -> impl Iterator<Item = Element> + '_ {
        let endpoints = (0..self.slots.len()).filter_map(|slot| self.endpoint(slot));
        let members = self.members().into_iter();
        let members = members.map(|(address, port)| Element::Member(self.number, address, port));
        endpoints.chain(members)
    }
}

/// Returns the number of slots of each endpoint. Without weights, each endpoint has one slot.
fn slots_of_endpoints(wanted: &[((IpAddr, u16), Weight)], most: u32) -> Vec<u32> {
    let weights = || wanted.iter().map(|(_, weight)| *weight);
    let divisor = weights().fold(0, |divisor, weight| greatest_common_divisor(divisor, weight.get())).max(1);
    let total: u32 = weights().map(|weight| weight.get() / divisor).sum();
    let slots = |weight: Weight| match weight.get() / divisor {
        slots if total <= most => slots,
        slots => (slots * most / total).max(1),
    };
    weights().map(slots).collect()
}

/// The numbers of service ports, which are even. The group for policy Cluster has the number of its
/// port, and the group for policy Local has the next number. So the rules can compute the port from
/// the group, and they record clients by port: both groups of a port share the recorded clients. A
/// released number is used again as late as possible.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    /// The highest number in use or free, from 1: 0 stands for a port without groups.
    last: u32,
    free: VecDeque<u32>,
}

impl Numbers {
    /// The highest number that a full sync adopts from the kernel. Only another program can have
    /// written higher numbers, and adopting them would exhaust the numbers.
    pub(super) const MAX_ADOPTED: u32 = 1 << 24;

    /// The maximum number of free numbers that a full sync collects.
    const MAX_FREE: usize = 4096;

    /// Creates the numbers after a full sync has found `in_use` in the kernel.
    pub(super) fn besides(in_use: &HashSet<u32>) -> Self {
        let last = in_use.iter().copied().max().unwrap_or_default();
        let free = (1..last / 2).map(|half| half * 2).filter(|number| !in_use.contains(number));
        Self { last, free: free.take(Self::MAX_FREE).collect() }
    }

    pub(super) fn take(&mut self) -> u32 {
        // Packets and recorded clients may still use a number that was released a moment ago.
        const RESERVE: usize = 64;
        if self.free.len() > RESERVE
            && let Some(number) = self.free.pop_front()
        {
            return number;
        }
        self.last += 2;
        self.last
    }

    pub(super) fn release(&mut self, number: u32) {
        self.free.push_back(number);
    }

    /// Takes a number that [`Self::release`] has just made free.
    pub(super) fn take_back(&mut self, number: u32) {
        if let Some(at) = self.free.iter().rposition(|free| *free == number) {
            self.free.remove(at);
        }
    }
}

// The slots of groups in which the client's address selects the slot.
//
// Weighted rendezvous hashing fills the slots: each slot holds the endpoint with the highest score
// for this slot. The scores depend only on slot and endpoint, so all nodes compute the same slots.
// A removed endpoint changes only its own slots, and clients of other endpoints do not move.

/// The most scores for a slot that weights ask for. With this and the [limits of a
/// Service](crate::view), the slots of a Service take less than 100 ms of a processor.
const MAX_WEIGHTED_DRAWS: u32 = 1024;

/// Returns the endpoint of each of `count` slots, on average in proportion to the weights.
/// The endpoints are sorted.
pub(super) fn slots(endpoints: &[((IpAddr, u16), Weight)], count: u32) -> Vec<(IpAddr, u16)> {
    let draws = draws_of(endpoints);
    let candidates: Vec<_> = endpoints.iter().zip(draws).map(|((at, _), draws)| (*at, draws, seed(at))).collect();
    let best = |slot| candidates.iter().max_by_key(|(_, draws, seed)| score(*seed, slot, *draws));
    (0..count).filter_map(|slot| best(slot).map(|(endpoint, ..)| *endpoint)).collect()
}

/// Returns how many scores each endpoint draws for a slot: its weight. If the sum is above
/// [`MAX_WEIGHTED_DRAWS`], all weights are halved, and rounded up, until it is not or all are 1.
fn draws_of(endpoints: &[((IpAddr, u16), Weight)]) -> Vec<u32> {
    let mut draws: Vec<u32> = endpoints.iter().map(|(_, weight)| weight.get()).collect();
    while draws.iter().sum::<u32>() > MAX_WEIGHTED_DRAWS && draws.iter().any(|draws| *draws > 1) {
        draws.iter_mut().for_each(|draws| *draws = draws.div_ceil(2));
    }
    draws
}

/// Returns a number that differs between endpoints.
fn seed((address, port): &(IpAddr, u16)) -> u64 {
    let mut hash = Sha256::new();
    match address {
        IpAddr::V4(address) => hash.update(address.octets()),
        IpAddr::V6(address) => hash.update(address.octets()),
    }
    hash.update(port.to_be_bytes());
    let first = hash.finalize().first_chunk().copied().unwrap_or_default();
    u64::from_be_bytes(first)
}

/// Returns the score of an endpoint for a slot: the maximum of so many pseudo-random numbers. So
/// the endpoint has the highest score with a probability in proportion to its weight, and the score
/// needs no floating-point numbers, whose results differ between machines.
fn score(seed: u64, slot: u32, draws: u32) -> u64 {
    (0..draws).map(|draw| scramble(seed ^ (u64::from(slot) << 32 | u64::from(draw)))).max().unwrap_or_default()
}

/// Returns a number all of whose bits depend on all bits of `number`.
fn scramble(number: u64) -> u64 {
    /// An odd number with irregular bits: the golden ratio, scaled to 64 bits.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let fold = |number: u64| {
        let product = u128::from(number) * u128::from(FACTOR);
        let low = product & u128::from(u64::MAX);
        u64::try_from((product >> 64) ^ low).unwrap_or_default()
    };
    fold(fold(fold(number ^ FACTOR)) ^ number)
}

// The elements and the groups of one service port, as the configuration says.

/// True if connections to a frontend are sent to the endpoints for policy Local. False for policy
/// Cluster.
type IsLocal = bool;

/// The elements and the endpoints of one service port, before its groups have numbers.
#[derive(Debug, Default)]
pub(in super::super) struct PortPlan {
    /// Endpoints for policy Cluster, if a frontend uses them, sorted. Each endpoint occurs once.
    pub(in super::super) cluster: Vec<((IpAddr, u16), Weight)>,
    /// The same for policy Local.
    pub(in super::super) local: Vec<((IpAddr, u16), Weight)>,
    /// Frontends whose connections are sent to a group.
    pub(in super::super) services: Vec<(Frontend, IsLocal)>,
    /// Frontends for which connections of local pods and of the node itself are sent to the
    /// endpoints for policy Cluster.
    pub(in super::super) inside: Vec<Frontend>,
    /// True if only a proxy can carry connections to the endpoints.
    pub(in super::super) is_proxy_only: bool,
    /// The elements that contain no group.
    pub(in super::super) elements: Vec<Element>,
}

/// Computes the plan of a service port.
pub(in super::super) fn port_plan(config: &NftablesConfig, view: &ServicePortView) -> PortPlan {
    let is_proxy_only = config.has_proxy && view.proxy_protocol.is_some();
    let mut plan = PortPlan { is_proxy_only, ..PortPlan::default() };
    let at = |address: &IpAddr| Frontend::Address(*address, view.protocol, view.port);
    if let Some(address) = &view.cluster_ip {
        plan.elements.push(Element::ClusterIp(*address));
        let sources = config.masquerade.sources_to_cluster_ips(config.family);
        plan.add_frontend(config, view, at(address), view.internal_traffic_policy, sources);
    }
    // An address may be in several lists. Only its first occurrence counts.
    let mut external: Vec<Frontend> = Vec::new();
    for address in view.external_ips.iter().chain(&view.load_balancer_ips) {
        if view.cluster_ip != Some(*address) && !external.contains(&at(address)) {
            external.push(at(address));
        }
    }
    if view.node_port != 0 {
        external.push(Frontend::NodePort(view.family, view.protocol, view.node_port));
    }
    let masquerade = MasqueradeSources::to_external_destinations(view.external_traffic_policy);
    for frontend in external {
        plan.add_frontend(config, view, frontend, view.external_traffic_policy, masquerade);
        if view.external_policy(true) != view.external_traffic_policy && !refuses(config, view) {
            plan.inside.push(frontend);
        }
    }
    // Ranges come first, as in kube-proxy's mode nftables: also a Service without endpoints gives
    // other clients no answer.
    for address in view.load_balancer_ips.iter().filter(|_| !view.source_ranges.is_open()) {
        plan.elements.push(Element::Guarded(at(address)));
        let admitted = view.source_ranges.ranges.iter().copied();
        let admitted = admitted.chain(view.source_ranges.admits_node.then_some((*address).into()));
        plan.elements.extend(admitted.map(|range| Element::Admitted(at(address), range)));
    }
    if config.counts_services {
        plan.add_counters();
    }
    if view.bypasses_proxy && view.protocol == Protocol::Tcp {
        let frontends = plan.services.iter().map(|(frontend, _)| *frontend).chain(plan.inside.iter().copied());
        plan.elements.extend(frontends.map(Element::Straight));
    }
    plan.add_endpoints(view);
    plan
}

/// Whether the rules refuse all connections to a port: a proxy cannot carry SCTP.
fn refuses(config: &NftablesConfig, view: &ServicePortView) -> bool {
    config.has_proxy && view.protocol == Protocol::Sctp
}

impl PortPlan {
    fn add_frontend(
        &mut self,
        config: &NftablesConfig,
        view: &ServicePortView,
        frontend: Frontend,
        policy: TrafficPolicy,
        masquerade: MasqueradeSources,
    ) {
        match view.outcome(policy) {
            _ if refuses(config, view) => self.elements.push(Element::Unserved(frontend, Refusal::Reject)),
            Outcome::Rejected => self.elements.push(Element::Unserved(frontend, Refusal::Reject)),
            Outcome::Dropped => self.elements.push(Element::Unserved(frontend, Refusal::Drop)),
            Outcome::Forwarded(_) => {
                self.services.push((frontend, policy.is_local()));
                // The rules translate connections for the proxy, and refuse those that are left.
                self.elements.extend(self.is_proxy_only.then_some(Element::Unserved(frontend, Refusal::Reject)));
            }
        }
        self.elements.push(Element::Masquerade(frontend, masquerade));
    }

    /// Adds the counters of all frontends.
    fn add_counters(&mut self) {
        let frontends = self.elements.iter().filter_map(|element| match element {
            Element::Masquerade(frontend, _) => Some(*frontend),
            _ => None,
        });
        let counters = frontends.flat_map(|frontend| Counted::ALL.map(|counted| Element::Counter(frontend, counted)));
        let counters: Vec<Element> = counters.collect();
        self.elements.extend(counters);
    }

    fn add_endpoints(&mut self, view: &ServicePortView) {
        let uses_cluster = !self.inside.is_empty() || self.services.iter().any(|(_, is_local)| !is_local);
        let uses_local = self.services.iter().any(|(_, is_local)| *is_local);
        let mut use_endpoints = |endpoints: &[Destination], is_used: bool| {
            let used = endpoints.iter().filter(|_| is_used);
            let here = used.clone().filter(|endpoint| endpoint.may_be_local);
            self.elements.extend(here.map(|endpoint| Element::Hairpin(endpoint.address)));
            let weighted = used.map(|endpoint| ((endpoint.address, endpoint.port), endpoint.weight));
            let mut endpoints: Vec<_> = weighted.collect();
            endpoints.sort_by_key(|(endpoint, _)| *endpoint);
            endpoints.dedup_by_key(|(endpoint, _)| *endpoint);
            endpoints
        };
        self.cluster = use_endpoints(&view.cluster_endpoints, uses_cluster);
        self.local = use_endpoints(&view.local_endpoints, uses_local);
        self.elements.sort_unstable();
        self.elements.dedup();
    }
}

// The configuration of nftables mode.

/// The configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NftablesConfig {
    /// The family.
    pub family: Family,
    /// Masquerading. nftables mode uses no packet mark, so it ignores [`MasqueradeConfig::bit`].
    pub masquerade: MasqueradeConfig,
    /// True if rules can hash the client's address. Otherwise Services that select
    /// [`crate::model::LoadBalancing::ConsistentHash`] use random slots.
    pub can_hash: bool,
    /// True if the kernel counts the connections and the traffic of each frontend.
    pub counts_services: bool,
    /// True in mode userspace: a proxy carries TCP connections. Rules then send no connection
    /// straight to endpoints that expect the PROXY protocol, and refuse SCTP.
    pub has_proxy: bool,
}

impl NftablesConfig {
    /// Returns the defaults of a family: no detector of local pods, and rules that can hash.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self {
            family,
            masquerade: MasqueradeConfig::default(),
            can_hash: true,
            counts_services: false,
            has_proxy: false,
        }
    }
}

#[cfg(test)]
mod rendezvous_tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::behaviours::view::HASHED_SLOTS;

    type WeightedEndpoints = BTreeMap<(IpAddr, u16), Weight>;

    fn slots(endpoints: &WeightedEndpoints) -> Vec<(IpAddr, u16)> {
        let sorted: Vec<_> = endpoints.iter().map(|(at, weight)| (*at, *weight)).collect();
        super::slots(&sorted, HASHED_SLOTS)
    }

    fn endpoints(weights: &[(u16, u32)]) -> WeightedEndpoints {
        let one = |(number, weight): &(u16, u32)| {
            let [high, low] = number.to_be_bytes();
            ((IpAddr::from([10, 244, high, low]), 8080), Weight::new(*weight).unwrap())
        };
        weights.iter().map(one).collect()
    }

    fn share(slots: &[(IpAddr, u16)], endpoint: &(IpAddr, u16)) -> f64 {
        f64::from(u32::try_from(slots.iter().filter(|held| *held == endpoint).count()).unwrap())
            / f64::from(HASHED_SLOTS)
    }

    /// The slots are part of the contract between nodes: agents of different versions must compute
    /// the same slots.
    #[test]
    fn slots_never_change_between_versions() {
        let digest = |endpoints: &WeightedEndpoints| {
            let text: String = slots(endpoints).iter().map(|(address, port)| format!("{address} {port}\n")).collect();
            u64::from_be_bytes(*Sha256::digest(text).first_chunk().unwrap())
        };
        let mut both = endpoints(&[(1, 1), (2, 3), (700, 100)]);
        assert_eq!(digest(&both), 0xc48c_031d_68ea_2f51);
        both.insert(("fd00::1".parse().unwrap(), 443), Weight::default());
        assert_eq!(digest(&both), 0x305e_5b13_ba54_54c2);
        assert_eq!(slots(&WeightedEndpoints::new()), []);
    }

    #[test]
    fn shares_follow_the_weights() {
        for weights in [&[(1, 1), (2, 1)][..], &[(1, 1), (2, 2), (3, 5)], &[(1, 100), (2, 100), (3, 50)]] {
            let total: u32 = weights.iter().map(|(_, weight)| weight).sum();
            let endpoints = endpoints(weights);
            let slots = slots(&endpoints);
            for (endpoint, weight) in &endpoints {
                let wanted = f64::from(weight.get()) / f64::from(total);
                let deviation = (wanted * (1.0 - wanted) / f64::from(HASHED_SLOTS)).sqrt();
                let found = share(&slots, endpoint);
                assert!((found - wanted).abs() < 4.0 * deviation, "{endpoint:?} of {weights:?} has {found}");
            }
        }
    }

    /// However many endpoints a group has and whatever they weigh, its slots take a limited time.
    #[test]
    fn heavy_weights_of_many_endpoints_lose_their_last_bits() {
        let of = |count: u16, weight: u32| {
            let all: Vec<(u16, u32)> =
                (0..count).map(|number| (number, if number == 0 { 1 } else { weight })).collect();
            let sorted: Vec<_> = endpoints(&all).into_iter().collect();
            draws_of(&sorted)[..2].to_vec()
        };
        assert_eq!(of(11, 100), [1, 100]);
        assert_eq!(of(12, 100), [1, 50]);
        assert_eq!(of(5000, 100), [1, 1]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

        #[test]
        fn an_endpoint_that_leaves_or_loses_weight_changes_only_its_own_slots(
            weights in prop::collection::btree_map(0u16..500, 1u32..=20, 2..30),
            which in any::<prop::sample::Index>(),
            smaller in any::<bool>(),
        ) {
            let weights: Vec<(u16, u32)> = weights.into_iter().collect();
            let all = endpoints(&weights);
            let leaving = *which.get(&all.keys().copied().collect::<Vec<_>>());
            let mut fewer = all.clone();
            let weight = fewer.remove(&leaving).unwrap().get();
            if smaller && weight > 1 {
                fewer.insert(leaving, Weight::new(weight - 1).unwrap());
            }
            let (before, after) = (slots(&all), slots(&fewer));
            let moved: BTreeSet<_> =
                before.iter().zip(&after).filter(|(old, new)| old != new).map(|(old, _)| *old).collect();
            prop_assert!(moved.iter().all(|endpoint| *endpoint == leaving), "{:?} moved", moved);
        }
    }
}
