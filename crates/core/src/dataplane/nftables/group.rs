//! Groups of endpoints, and their slots.

use std::{
    collections::{BTreeSet, HashSet, VecDeque},
    net::IpAddr,
};

use super::{
    element::{Element, Selection, Target},
    rendezvous,
};
use crate::model::{Protocol, Weight, greatest_common_divisor};

/// Identifies a group among the groups of a Service. Ports with equal endpoints share the groups of
/// the first of them.
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
        if let Some(slots) = self.hashed_slots {
            self.slots = rendezvous::slots(wanted, slots);
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
                // The endpoint of the last slot moves into this slot, and the loop examines it
                // next.
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

    /// Appends the elements that only one of this group and `before` has. `before` is the same
    /// group before a change.
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
    /// The highest number in use or free. 0 is not used, because it stands for a service port
    /// without groups.
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
