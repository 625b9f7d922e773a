//! The state that the agent holds, and how a step of the stream changes it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
};

use headgate_core::{
    Change, Dirty, Node, ServiceKey, State,
    digest::{self, BUCKETS},
    frontends::Frontend,
};
use headgate_proto::{digests_to_wire, v1};

use crate::state::backlog::Trigger;

/// One step: all changes that bring the held state to another version.
#[derive(Debug, Default)]
pub struct StateUpdate {
    /// The epoch of the replica that sent the step.
    pub epoch: u64,
    /// The version of the state after the step.
    pub version: u64,
    /// Positions of the source. The positions of a snapshot replace all earlier positions.
    pub positions: Vec<v1::SourcePosition>,
    /// Changed and removed resources.
    pub changes: Vec<Change>,
    /// The triggers of the changes of endpoints.
    pub triggers: Vec<Trigger>,
    /// `Some` when the changes contain complete buckets. All other resources that the agent holds
    /// in these buckets are removed.
    pub snapshot: Option<Snapshot>,
    /// True when the agent rejects a resource that the replica has at this version, so the state
    /// lacks the replica's value.
    pub has_rejections: bool,
}

/// The agent's own Node, as the replica sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnNode {
    /// `OwnNode.revision` of the stream.
    pub revision: u64,
    /// The Node; `None` when the source has no Node with the name of this agent's node.
    pub node: Option<Node>,
    /// The source's position at the last change of this Node; `None` if the replica did not send
    /// this position.
    pub position: Option<v1::SourcePosition>,
    /// What no Service gets.
    pub reserved: BTreeSet<Frontend>,
}

/// A state that was read from disk.
#[derive(Debug, Default)]
pub struct Restored {
    /// The resources, with their version and positions.
    pub held: Held,
    /// The agent's own Node.
    pub node: Option<Node>,
    /// True if the rules in the kernel may be newer than this state.
    pub may_be_behind: bool,
}

/// The buckets that a snapshot replaces, and the resources that the agent rejected.
#[derive(Debug)]
pub struct Snapshot {
    /// The buckets that are replaced.
    pub buckets: HashSet<u16>,
    /// Resources that the snapshot carried and that the agent rejected, named as in
    /// [`v1::Rejection`]. The agent keeps their last good values instead of removing them.
    pub rejected: HashSet<String>,
}

/// The numbers of all buckets.
pub(crate) fn all_buckets() -> HashSet<u16> {
    (0..=u16::MAX).take(BUCKETS).collect()
}

/// The shared state, with its version and positions.
///
/// A rejected resource keeps its last good value in this state. That value has another hash than
/// the replica's value, so the digests of the bucket differ, and the next resume by digests sends
/// the resource again. Therefore this state does not mark rejected resources.
#[derive(Debug, Default)]
pub struct Held {
    pub(crate) state: State,
    /// Epoch and version; `None` before the first complete snapshot.
    position: Option<(u64, u64)>,
    /// The position of the source for each kind of resource.
    sources: BTreeMap<i32, u64>,
    /// The source's position at the last change of the agent's own Node. A replica whose Nodes are
    /// behind this position does not send an older Node.
    pub node_position: Option<v1::SourcePosition>,
    /// What no Service gets, as the replica said last.
    pub reserved: BTreeSet<Frontend>,
    has_rejections: bool,
}

/// The version of the program, which is written to disk with the state.
const AGENT_VERSION: &str = env!("CARGO_PKG_VERSION");

impl Held {
    /// A state that was read from disk, with the version and positions of `point`.
    #[must_use]
    pub fn restored(state: State, point: &v1::Resume) -> Self {
        // Another version of the program may have ignored fields that this version uses. A resume
        // from the log would not send these fields again, so epoch 0 makes the replica compare
        // digests.
        let epoch = if point.agent_version == AGENT_VERSION { point.epoch } else { 0 };
        let sources = point.positions.iter().map(|source| (source.kind, source.position)).collect();
        Self { state, position: Some((epoch, point.version)), sources, ..Self::default() }
    }

    /// Makes sure that the positions are not lower than these positions, which the kernel's rules
    /// may have reached.
    pub fn raise_positions(&mut self, positions: &[v1::SourcePosition]) {
        for source in positions {
            let known = if source.kind == i32::from(v1::source_position::Kind::Nodes) {
                &mut self.node_position.get_or_insert(*source).position
            } else {
                self.sources.entry(source.kind).or_default()
            };
            *known = source.position.max(*known);
        }
    }

    /// The held resources.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Epoch and version; `None` before the first complete snapshot.
    #[must_use]
    pub fn position(&self) -> Option<(u64, u64)> {
        self.position
    }

    /// The positions of the source, with the position of the agent's own Node.
    #[must_use]
    pub fn positions(&self) -> Vec<v1::SourcePosition> {
        let mut sources = self.sources.clone();
        if let Some(v1::SourcePosition { kind, position }) = self.node_position {
            let known = sources.entry(kind).or_default();
            *known = position.max(*known);
        }
        positions_to_wire(&sources)
    }

    /// Returns the description of the held state for `Hello`. Returns `None` when the agent holds
    /// neither a state nor the position of its Node.
    #[must_use]
    pub fn resume(&self) -> Option<v1::Resume> {
        let positions = self.positions();
        match self.position {
            Some((epoch, version)) => {
                let digests = Some(digests_to_wire(self.state.digests()));
                Some(v1::Resume { epoch, version, positions, digests, ..v1::Resume::default() })
            }
            // Without a snapshot, at most the position of the Node is known.
            None => (!positions.is_empty()).then(|| v1::Resume { positions, ..v1::Resume::default() }),
        }
    }

    /// Returns the version and positions to write to disk, for [`Self::restored`]; `None` before
    /// the first complete snapshot.
    ///
    /// If a resource is rejected, the epoch is 0, so that the agent resumes by digests after its
    /// restart. The log would not send the rejected resource again, and the agent would no longer
    /// know that the resource was rejected.
    #[must_use]
    pub fn point(&self) -> Option<v1::Resume> {
        let (epoch, version) = self.position?;
        Some(v1::Resume {
            epoch: if self.has_rejections { 0 } else { epoch },
            version,
            positions: positions_to_wire(&self.sources),
            digests: None,
            agent_version: AGENT_VERSION.to_owned(),
        })
    }

    /// Applies a step, and adds the affected services to `dirty`.
    pub fn apply(&mut self, step: StateUpdate, dirty: &mut Dirty) {
        // Removals are applied last, so that a new resource exists before the resource that it
        // replaces is removed.
        let removals = step.snapshot.as_ref().map(|snapshot| self.removals(snapshot, &step.changes));
        for change in in_parts(step.changes).chain(removals.into_iter().flatten()) {
            self.state.apply(change, dirty);
        }
        if step.snapshot.is_some() {
            self.sources.clear();
        }
        let known = step.positions.iter().filter(|source| source.kind != 0);
        self.sources.extend(known.map(|source| (source.kind, source.position)));
        self.position = Some((step.epoch, step.version));
        self.has_rejections = step.has_rejections;
    }

    /// Returns removals of all resources that the agent holds in the snapshot's buckets and that
    /// the snapshot did not carry. The cost grows with the number of all held resources.
    fn removals(&self, snapshot: &Snapshot, changes: &[Change]) -> Vec<Change> {
        let mut removals = Vec::new();
        let holds_nothing = self.state.entries().next().is_none() && self.state.service_cidrs().next().is_none();
        if snapshot.buckets.is_empty() || holds_nothing {
            return removals;
        }
        let carried = Carried::of(changes);
        let rejected = &snapshot.rejected;
        let is_rejected = |name: &dyn Fn() -> String| !rejected.is_empty() && rejected.contains(&name());
        for (key, entry) in self.state.entries() {
            if !snapshot.buckets.contains(&digest::service_bucket(key)) {
                continue;
            }
            let is_gone = entry.service().is_some() && !carried.services.contains(&**key);
            if is_gone && !is_rejected(&|| format!("Service {key}")) {
                removals.push(Change::RemoveService((**key).clone()));
            }
            let carried_endpoints = carried.endpoints.get(&**key);
            let group = || format!("endpoints of service {}", key.name);
            for address in entry.endpoints().keys() {
                let is_gone = !carried_endpoints.is_some_and(|addresses| addresses.contains(address));
                if is_gone && !is_rejected(&|| format!("Endpoint {key} {address}")) && !is_rejected(&group) {
                    removals.push(Change::RemoveEndpoint((**key).clone(), *address));
                }
            }
        }
        for held in self.state.service_cidrs() {
            let in_bucket = snapshot.buckets.contains(&digest::service_cidr_bucket(&held.name));
            let is_gone = in_bucket && !carried.service_cidrs.contains(held.name.as_str());
            if is_gone && !is_rejected(&|| format!("ServiceCIDR {}", held.name)) {
                removals.push(Change::RemoveServiceCidr(held.name.clone()));
            }
        }
        removals
    }
}

fn positions_to_wire(sources: &BTreeMap<i32, u64>) -> Vec<v1::SourcePosition> {
    sources.iter().map(|(kind, position)| v1::SourcePosition { kind: *kind, position: *position }).collect()
}

/// The number of changes whose memory is freed together.
const CHANGES_IN_A_PART: usize = 4096;

/// Iterates over changes in order, and frees their memory part by part. Therefore memory never
/// holds both a whole snapshot and the whole state that is built from this snapshot.
fn in_parts(mut changes: Vec<Change>) -> impl Iterator<Item = Change> {
    let mut parts = Vec::new();
    while changes.len() > CHANGES_IN_A_PART {
        let start = (changes.len() - 1) / CHANGES_IN_A_PART * CHANGES_IN_A_PART;
        parts.push(changes.split_off(start));
        changes.shrink_to_fit();
    }
    parts.push(changes);
    // The first part was pushed last.
    std::iter::from_fn(move || parts.pop()).flatten()
}

/// The keys of the resources that a snapshot carried.
#[derive(Default)]
struct Carried<'a> {
    services: HashSet<&'a ServiceKey>,
    endpoints: HashMap<&'a ServiceKey, HashSet<IpAddr>>,
    service_cidrs: HashSet<&'a str>,
}

impl<'a> Carried<'a> {
    fn of(changes: &'a [Change]) -> Self {
        let mut carried = Self::default();
        for change in changes {
            match change {
                Change::Service(service) => {
                    carried.services.insert(&service.key);
                }
                Change::Endpoint(key, endpoint) => {
                    carried.endpoints.entry(key).or_default().insert(endpoint.address);
                }
                Change::ServiceCidr(service_cidr) => {
                    carried.service_cidrs.insert(&service_cidr.name);
                }
                // A snapshot carries no removals: the session machine rejects a snapshot with a
                // removal.
                Change::RemoveService(_) | Change::RemoveEndpoint(..) | Change::RemoveServiceCidr(_) => {}
            }
        }
        carried
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitting_into_parts_keeps_all_changes_in_order() {
        for count in [0, 1, CHANGES_IN_A_PART, CHANGES_IN_A_PART + 1, 3 * CHANGES_IN_A_PART, 3 * CHANGES_IN_A_PART + 7]
        {
            let change = |number: usize| Change::RemoveServiceCidr(number.to_string().into());
            let changes: Vec<Change> = (0..count).map(change).collect();
            assert_eq!(in_parts(changes.clone()).collect::<Vec<_>>(), changes, "{count} changes");
        }
    }
}
