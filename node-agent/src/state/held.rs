//! What the agent holds, and how a step of the stream changes it.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
};

use headgate_core::{
    Change, Dirty, Node, ServiceKey, State,
    digest::{self, BUCKETS},
};
use headgate_proto::{digests_to_wire, v1};

use crate::state::{backlog::Trigger, unsaved::Unsaved};

/// What brings the held state to another version, as a whole.
#[derive(Debug, Default)]
pub struct StateUpdate {
    /// Epoch of the replica that sent it.
    pub epoch: u64,
    /// The version that the state has afterwards.
    pub version: u64,
    /// Positions of the source. A snapshot's replace all others.
    pub positions: Vec<v1::SourcePosition>,
    /// Resources and removals.
    pub changes: Vec<Change>,
    /// What set the changes of endpoints off.
    pub triggers: Vec<Trigger>,
    /// Set when the changes are complete buckets: whatever else is held in these goes.
    pub snapshot: Option<Snapshot>,
    /// Afterwards a rejection of some resource stands: the state is not all of what the replica has
    /// at that version.
    pub has_rejections: bool,
}

/// The agent's own node, as the replica knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnNode {
    /// `OwnNode.revision` of the stream.
    pub revision: u64,
    /// `None` when the source knows no such node.
    pub node: Option<Node>,
    /// Where the source was when it became so; `None` from a replica that does not say.
    pub position: Option<v1::SourcePosition>,
}

/// A state from disk.
#[derive(Debug)]
pub struct Restored {
    /// The resources, with the version and positions that they have.
    pub held: Held,
    /// The agent's own node.
    pub node: Option<Node>,
}

/// What a snapshot replaces.
#[derive(Debug)]
pub struct Snapshot {
    /// The buckets that are replaced.
    pub buckets: Buckets,
    /// Names, as in [`v1::Rejection`], of resources that the snapshot carried and the agent could
    /// not use. What is held of them stays: their last good value forwards better than none.
    pub rejected: HashSet<String>,
}

/// A set of buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Buckets {
    /// Every bucket.
    All,
    /// These.
    Some(HashSet<u16>),
}

impl Buckets {
    /// True when the bucket is in the set.
    #[must_use]
    pub fn contains(&self, bucket: u16) -> bool {
        match self {
            Self::All => true,
            Self::Some(buckets) => buckets.contains(&bucket),
        }
    }

    /// Number of buckets.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::All => BUCKETS,
            Self::Some(buckets) => buckets.len(),
        }
    }

    /// True for none at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The shared state with the version it has.
///
/// A rejected resource is not counted as held: what stays of it is its last good value, whose hash
/// is not that of the value that the replica has, so the bucket's digest differs and the next
/// resume by digests brings it again. Nothing has to be marked for that.
#[derive(Debug, Default)]
pub struct Held {
    state: State,
    position: Option<(u64, u64)>,
    sources: BTreeMap<i32, u64>,
    /// The source's position at the last change of the agent's own Node.
    node_position: Option<v1::SourcePosition>,
    has_rejections: bool,
    unsaved: Unsaved,
}

/// The program that writes to disk.
const AGENT_VERSION: &str = env!("CARGO_PKG_VERSION");

impl Held {
    /// A state from disk, with the version and positions of `point`. All of it is on disk.
    #[must_use]
    pub fn restored(state: State, point: &v1::Resume) -> Self {
        let mut held = Self { state, ..Self::default() };
        held.move_to(point);
        held
    }

    /// Takes up what is on disk after that.
    pub(crate) fn replay(&mut self, changes: Vec<Change>, point: &v1::Resume) {
        for change in changes {
            self.state.apply(change, &mut Dirty::default());
        }
        self.move_to(point);
    }

    fn move_to(&mut self, point: &v1::Resume) {
        // Another program may have used less of what it was sent, which the log would not bring
        // again.
        let epoch = if point.agent_version == AGENT_VERSION { point.epoch } else { 0 };
        self.position = Some((epoch, point.version));
        self.sources = point.positions.iter().map(|source| (source.kind, source.position)).collect();
    }

    /// What has changed since it was last written to disk.
    pub(crate) fn unsaved_mut(&mut self) -> &mut Unsaved {
        &mut self.unsaved
    }

    /// The resources.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The resources alone.
    pub(crate) fn into_state(self) -> State {
        self.state
    }

    /// Epoch and version; `None` before the first complete snapshot.
    #[must_use]
    pub fn position(&self) -> Option<(u64, u64)> {
        self.position
    }

    /// What `Hello` says about it; `None` as long as nothing has come.
    #[must_use]
    pub fn resume(&self) -> Option<v1::Resume> {
        let mut sources = self.sources.clone();
        if let Some(v1::SourcePosition { kind, position }) = self.node_position {
            let known = sources.entry(kind).or_default();
            *known = position.max(*known);
        }
        let positions = positions_to_wire(&sources);
        match self.position {
            Some((epoch, version)) => {
                let digests = Some(digests_to_wire(self.state.digests()));
                Some(v1::Resume { epoch, version, positions, digests, ..v1::Resume::default() })
            }
            // The Node alone.
            None => (!positions.is_empty()).then(|| v1::Resume { positions, ..v1::Resume::default() }),
        }
    }

    /// What is written to disk about it, from which [`Self::restored`] goes on; `None` before the
    /// first complete snapshot. While a rejection stands the epoch is 0: the log does not bring the
    /// rejected resource again, and after a restart nobody here would know of it.
    #[must_use]
    pub fn point(&self, with_digests: bool) -> Option<v1::Resume> {
        let (epoch, version) = self.position?;
        Some(v1::Resume {
            epoch: if self.has_rejections { 0 } else { epoch },
            version,
            positions: positions_to_wire(&self.sources),
            digests: with_digests.then(|| digests_to_wire(self.state.digests())),
            agent_version: AGENT_VERSION.to_owned(),
        })
    }

    /// Stores the source's position at the last change of the agent's own Node. A replica whose
    /// Nodes are behind this position does not send an older Node.
    pub fn set_node_position(&mut self, position: Option<v1::SourcePosition>) {
        self.node_position = position;
    }

    /// As [`Self::set_node_position`] was told last.
    pub(crate) fn node_position(&self) -> Option<v1::SourcePosition> {
        self.node_position
    }

    /// Takes a step, and adds what it affects to `dirty`.
    pub fn apply(&mut self, step: StateUpdate, dirty: &mut Dirty) {
        // Removals go last: what is new comes before what it replaces goes.
        let removals = step.snapshot.as_ref().map(|snapshot| self.left_over(snapshot, &step.changes));
        for change in in_parts(step.changes).chain(removals.into_iter().flatten()) {
            self.unsaved.note(&change);
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

    /// Removals of what is held in the snapshot's buckets and the snapshot did not carry. A full
    /// pass over the keys.
    fn left_over(&self, snapshot: &Snapshot, changes: &[Change]) -> Vec<Change> {
        let mut removals = Vec::new();
        let holds_nothing = self.state.entries().next().is_none() && self.state.service_cidrs().next().is_none();
        if snapshot.buckets.is_empty() || holds_nothing {
            return removals;
        }
        let carried = Carried::of(changes);
        let rejected = &snapshot.rejected;
        let is_rejected = |name: &dyn Fn() -> String| !rejected.is_empty() && rejected.contains(&name());
        for (key, entry) in self.state.entries() {
            if !snapshot.buckets.contains(digest::service_bucket(key)) {
                continue;
            }
            let gone = entry.service().is_some() && !carried.services.contains(&**key);
            if gone && !is_rejected(&|| format!("Service {key}")) {
                removals.push(Change::RemoveService((**key).clone()));
            }
            let staged = carried.endpoints.get(&**key);
            let group = || format!("endpoints of service {}", key.name);
            for address in entry.endpoints().keys() {
                let gone = !staged.is_some_and(|addresses| addresses.contains(address));
                if gone && !is_rejected(&|| format!("Endpoint {key} {address}")) && !is_rejected(&group) {
                    removals.push(Change::RemoveEndpoint((**key).clone(), *address));
                }
            }
        }
        for held in self.state.service_cidrs() {
            let in_bucket = snapshot.buckets.contains(digest::service_cidr_bucket(&held.name));
            let gone = in_bucket && !carried.service_cidrs.contains(held.name.as_str());
            if gone && !is_rejected(&|| format!("ServiceCIDR {}", held.name)) {
                removals.push(Change::RemoveServiceCidr(held.name.clone()));
            }
        }
        removals
    }
}

fn positions_to_wire(sources: &BTreeMap<i32, u64>) -> Vec<v1::SourcePosition> {
    sources.iter().map(|(kind, position)| v1::SourcePosition { kind: *kind, position: *position }).collect()
}

/// Changes that are freed together as they are taken up.
const CHANGES_IN_A_PART: usize = 4096;

/// Hands out changes in order, and frees what held them on the way: a snapshot and the state that
/// becomes of it are never both there as a whole.
fn in_parts(mut changes: Vec<Change>) -> impl Iterator<Item = Change> {
    let mut parts = Vec::new();
    while changes.len() > CHANGES_IN_A_PART {
        let start = (changes.len() - 1) / CHANGES_IN_A_PART * CHANGES_IN_A_PART;
        parts.push(changes.split_off(start));
        changes.shrink_to_fit();
    }
    parts.push(changes);
    // The first one was cut last.
    std::iter::from_fn(move || parts.pop()).flatten()
}

/// Keys that a snapshot carried.
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
                // A snapshot carries no removals; the machine refuses one that does.
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
    fn parts_keep_the_order_and_leave_out_nothing() {
        for count in [0, 1, CHANGES_IN_A_PART, CHANGES_IN_A_PART + 1, 3 * CHANGES_IN_A_PART, 3 * CHANGES_IN_A_PART + 7]
        {
            let change = |number: usize| Change::RemoveServiceCidr(number.to_string().into());
            let changes: Vec<Change> = (0..count).map(change).collect();
            assert_eq!(in_parts(changes.clone()).collect::<Vec<_>>(), changes, "{count} changes");
        }
    }
}
