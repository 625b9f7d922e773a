//! Virtual servers and their destinations, as they are programmed.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    super::ipsets::{Element, Set},
    objects::{ServerKey, Settings},
    plan::Op,
};
use crate::model::Protocol;

/// A virtual server as a service wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Settings.
    pub settings: Settings,
    /// Destinations in order, and their weights. Shared by all virtual servers of a port and
    /// policy.
    pub destinations: Arc<[(SocketAddr, u32)]>,
    /// The element that marks it as ours.
    pub mark: (Set, Element),
    /// Its address is to be on our device.
    pub is_on_device: bool,
}

/// What became of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Destination {
    /// It takes connections, with this weight. With 0 it takes none, since it fails health checks,
    /// and stays.
    Active(u32),
    /// It keeps those that it has, since this time.
    Draining(u64),
}

/// One virtual server of the kernel's.
#[derive(Debug)]
pub(super) struct Server {
    key: ServerKey,
    pub(super) settings: Settings,
    destinations: BTreeMap<SocketAddr, Destination>,
    /// As in [`Wanted`], of the service that wants it or the last one that did.
    pub(super) mark: (Set, Element),
    pub(super) is_on_device: bool,
}

impl Server {
    /// A new one, without destinations.
    pub(super) fn new(key: ServerKey, settings: Settings, mark: (Set, Element), is_on_device: bool) -> Self {
        Self { key, settings, destinations: BTreeMap::new(), mark, is_on_device }
    }

    /// One that the kernel has, with its destinations and their weights. What has no weight drains;
    /// `since` says since when.
    pub(super) fn found(
        key: ServerKey,
        settings: Settings,
        mark: (Set, Element),
        is_on_device: bool,
        destinations: &BTreeMap<SocketAddr, u32>,
        since: impl Fn(&SocketAddr) -> u64,
    ) -> Self {
        let state = |(address, weight): (&SocketAddr, &u32)| match *weight {
            0 => (*address, Destination::Draining(since(address))),
            weight => (*address, Destination::Active(weight)),
        };
        let destinations = destinations.iter().map(state).collect();
        Self { key, settings, destinations, mark, is_on_device }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.destinations.is_empty()
    }

    pub(super) fn is_draining(&self) -> bool {
        self.destinations.values().any(|destination| matches!(destination, Destination::Draining(_)))
    }

    /// Since when a destination has been draining.
    pub(super) fn draining_since(&self, address: &SocketAddr) -> Option<u64> {
        match self.destinations.get(address)? {
            Destination::Draining(since_ms) => Some(*since_ms),
            Destination::Active(_) => None,
        }
    }

    /// Its address.
    pub(super) fn address(&self) -> IpAddr {
        self.key.address
    }

    /// The weight of a destination that takes connections.
    pub(super) fn active_weight(&self, address: &SocketAddr) -> Option<u32> {
        match self.destinations.get(address)? {
            Destination::Active(weight) => Some(*weight),
            Destination::Draining(_) => None,
        }
    }

    /// Whether the kernel has these destinations and weights. Draining destinations may be gone,
    /// and deferred ones may differ.
    pub(super) fn matches(&self, found: &BTreeMap<SocketAddr, u32>, is_deferred: impl Fn(&SocketAddr) -> bool) -> bool {
        let is_found = |(address, destination): (&SocketAddr, &Destination)| match destination {
            Destination::Active(weight) => found.get(address) == Some(weight) || is_deferred(address),
            Destination::Draining(_) => found.get(address).is_none_or(|weight| *weight == 0),
        };
        self.destinations.iter().all(is_found) && found.keys().all(|address| self.destinations.contains_key(address))
    }

    /// Brings destinations to what is wanted: additions and restored weights into `before`,
    /// removals into `after`.
    pub(super) fn program(
        &mut self,
        wanted: &[(SocketAddr, u32)],
        now_ms: u64,
        before: &mut Vec<Op>,
        after: &mut Vec<Op>,
    ) {
        let key = self.key;
        // A server that nobody wants any more may drain whatever its scheduler.
        let can_drain =
            key.protocol == Protocol::Tcp && (wanted.is_empty() || self.settings.scheduler.passes_over_weight_zero());
        for (address, weight) in wanted {
            match self.destinations.insert(*address, Destination::Active(*weight)) {
                None => before.push(Op::AddDestination(key, *address, *weight)),
                Some(Destination::Active(old)) if old == *weight => {}
                Some(Destination::Draining(_)) if *weight == 0 => {}
                Some(_) => before.push(Op::EditDestination(key, *address, *weight)),
            }
        }
        self.destinations.retain(|address, destination| {
            if wanted.binary_search_by(|(candidate, _)| candidate.cmp(address)).is_ok() {
                return true;
            }
            match destination {
                Destination::Draining(_) if can_drain => true,
                Destination::Active(weight) if can_drain => {
                    if *weight != 0 {
                        after.push(Op::EditDestination(key, *address, 0));
                    }
                    *destination = Destination::Draining(now_ms);
                    true
                }
                Destination::Draining(_) | Destination::Active(_) => {
                    after.push(Op::DeleteDestination(key, *address));
                    false
                }
            }
        });
    }

    /// Takes note of how many connections (active and inactive) the kernel counts, and removes
    /// draining destinations that have none, or have drained for `limit_ms`. One that the kernel
    /// does not list is gone.
    pub(super) fn drain(
        &mut self,
        connections: &BTreeMap<SocketAddr, u64>,
        limit_ms: Option<u64>,
        now_ms: u64,
        after: &mut Vec<Op>,
    ) {
        let key = self.key;
        self.destinations.retain(|address, destination| {
            let Destination::Draining(since_ms) = *destination else { return true };
            let Some(count) = connections.get(address) else { return false };
            let is_over = limit_ms.is_some_and(|limit| now_ms.saturating_sub(since_ms) >= limit);
            if *count == 0 || is_over {
                after.push(Op::DeleteDestination(key, *address));
            }
            *count != 0 && !is_over
        });
    }
}
