//! The programmed virtual servers and their destinations.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    super::ipsets::{IpSetElement, Set},
    objects::{ServerKey, Settings},
    plan::Op,
};
use crate::model::Protocol;

/// A virtual server that a service wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Settings.
    pub settings: Settings,
    /// Destinations with their weights, in order of address. All virtual servers of a port and
    /// policy share these destinations.
    pub destinations: Arc<[(SocketAddr, u32)]>,
    /// The element that marks the server as Headgate's.
    pub mark: (Set, IpSetElement),
    /// True if Headgate's device must have the address of the server.
    pub is_on_device: bool,
}

/// The state of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DestinationState {
    /// The destination is wanted and has this weight. The weight is 0 if the destination fails
    /// health checks.
    Active(u32),
    /// The destination is no longer wanted and gets no new connections. Draining started at this
    /// time in milliseconds.
    Draining(u64),
}

/// A virtual server in the kernel.
#[derive(Debug)]
pub(super) struct Server {
    key: ServerKey,
    pub(super) settings: Settings,
    destinations: BTreeMap<SocketAddr, DestinationState>,
    /// `mark` and `is_on_device` are the fields of [`Wanted`]. Their values come from the service
    /// that wants the server or, if no service wants it, from the last service that wanted it.
    pub(super) mark: (Set, IpSetElement),
    pub(super) is_on_device: bool,
}

impl Server {
    /// Creates a server without destinations.
    pub(super) fn new(key: ServerKey, settings: Settings, mark: (Set, IpSetElement), is_on_device: bool) -> Self {
        Self { key, settings, destinations: BTreeMap::new(), mark, is_on_device }
    }

    /// Creates the record of a server that was found in the kernel. Its destinations with weight 0
    /// are draining. `since` returns the time at which a destination started to drain.
    pub(super) fn found(
        key: ServerKey,
        settings: Settings,
        mark: (Set, IpSetElement),
        is_on_device: bool,
        destinations: &BTreeMap<SocketAddr, u32>,
        since: impl Fn(&SocketAddr) -> u64,
    ) -> Self {
        let state = |(address, weight): (&SocketAddr, &u32)| match *weight {
            0 => (*address, DestinationState::Draining(since(address))),
            weight => (*address, DestinationState::Active(weight)),
        };
        let destinations = destinations.iter().map(state).collect();
        Self { key, settings, destinations, mark, is_on_device }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.destinations.is_empty()
    }

    pub(super) fn is_draining(&self) -> bool {
        self.destinations.values().any(|destination| matches!(destination, DestinationState::Draining(_)))
    }

    /// Returns the time at which a destination started to drain, or `None` if it is not draining.
    pub(super) fn draining_since(&self, address: &SocketAddr) -> Option<u64> {
        match self.destinations.get(address)? {
            DestinationState::Draining(since_ms) => Some(*since_ms),
            DestinationState::Active(_) => None,
        }
    }

    /// The address of the server.
    pub(super) fn address(&self) -> IpAddr {
        self.key.address
    }

    /// Returns the weight of a destination that is wanted.
    pub(super) fn active_weight(&self, address: &SocketAddr) -> Option<u32> {
        match self.destinations.get(address)? {
            DestinationState::Active(weight) => Some(*weight),
            DestinationState::Draining(_) => None,
        }
    }

    /// Changes the destinations to the wanted destinations. Additions and changed weights of wanted
    /// destinations are appended to `before`, removals and weights of 0 for draining to `after`.
    pub(super) fn program(
        &mut self,
        wanted: &[(SocketAddr, u32)],
        now_ms: u64,
        before: &mut Vec<Op>,
        after: &mut Vec<Op>,
    ) {
        let key = self.key;
        // If no destination is wanted, the remaining destinations may drain with any scheduler.
        let can_drain =
            key.protocol == Protocol::Tcp && (wanted.is_empty() || self.settings.scheduler.skips_weight_zero());
        for (address, weight) in wanted {
            match self.destinations.insert(*address, DestinationState::Active(*weight)) {
                None => before.push(Op::AddDestination(key, *address, *weight)),
                Some(DestinationState::Active(old)) if old == *weight => {}
                Some(DestinationState::Draining(_)) if *weight == 0 => {}
                Some(_) => before.push(Op::EditDestination(key, *address, *weight)),
            }
        }
        self.destinations.retain(|address, destination| {
            if wanted.binary_search_by(|(candidate, _)| candidate.cmp(address)).is_ok() {
                return true;
            }
            match destination {
                DestinationState::Draining(_) if can_drain => true,
                DestinationState::Active(weight) if can_drain => {
                    if *weight != 0 {
                        after.push(Op::EditDestination(key, *address, 0));
                    }
                    *destination = DestinationState::Draining(now_ms);
                    true
                }
                DestinationState::Draining(_) | DestinationState::Active(_) => {
                    after.push(Op::DeleteDestination(key, *address));
                    false
                }
            }
        });
    }

    /// Removes draining destinations that have no connections or that have drained for `limit_ms`.
    /// `connections` contains the number of active and inactive connections of each destination in
    /// the kernel. A draining destination that `connections` does not contain no longer exists in
    /// the kernel.
    pub(super) fn drain(
        &mut self,
        connections: &BTreeMap<SocketAddr, u64>,
        limit_ms: Option<u64>,
        now_ms: u64,
        after: &mut Vec<Op>,
    ) {
        let key = self.key;
        self.destinations.retain(|address, destination| {
            let DestinationState::Draining(since_ms) = *destination else { return true };
            let Some(count) = connections.get(address) else { return false };
            let is_over = limit_ms.is_some_and(|limit| now_ms.saturating_sub(since_ms) >= limit);
            if *count == 0 || is_over {
                after.push(Op::DeleteDestination(key, *address));
            }
            *count != 0 && !is_over
        });
    }
}
