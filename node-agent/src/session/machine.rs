//! Turns a [`v1::ServerMessage`] into [`Effect`]s, by the contract at the head of
//! `proto/headgate/v1/discovery.proto`, and remembers which resources the agent or its kernel
//! rejects. No I/O and no clock. Snapshots and split batches are staged, become one [`StateUpdate`]
//! when they are complete, and are dropped with their stream. After a [`Violation`], the caller
//! must drop the stream.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    iter, mem,
    net::SocketAddr,
    sync::Arc,
};

use headgate_core::{
    Change, Family, Node, ServiceKey,
    digest::{self, BUCKETS},
    reference::Referable,
};
use headgate_proto::{
    Decoder, MAX_AGENT_MESSAGE_BYTES, UnknownReference, node_from_wire, reserved_from_wire,
    v1::{self, server_message::Body, welcome::ResumeMode},
};
use prost::Message as _;

use crate::state::{OwnNode, Snapshot, StateUpdate, all_buckets, progress::Trigger};

/// A message that breaks the contract.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// At least one batch was lost.
    #[error("a batch follows version {previous}, but the agent is at version {held}")]
    VersionGap {
        /// `Batch.follows_version`.
        previous: u64,
        /// The version that the agent holds.
        held: u64,
    },
    /// A batch refers to something that the agent does not hold. The next resumes by digests.
    #[error("{0}; resuming by digests, which needs no references")]
    Reference(#[from] UnknownReference),
    /// What else breaks the contract, as a sentence.
    #[error("{0}")]
    Other(String),
}

const BEFORE_WELCOME: &str = "a message arrived before Welcome";
const BATCH_IN_SNAPSHOT: &str = "a batch arrived before the end of a snapshot";
const SNAPSHOT_IN_BATCH: &str = "a snapshot arrived in the middle of a split batch";

fn breach<T>(sentence: impl Into<String>) -> Result<T, Violation> {
    Err(Violation::Other(sentence.into()))
}

/// A version is lower than an earlier version of the same epoch.
fn backwards<T>(sent: u64, held: u64) -> Result<T, Violation> {
    breach(format!("version {sent} was sent after version {held} of the same epoch"))
}

/// An action that the caller has to take after a message.
#[derive(Debug)]
pub enum Effect {
    /// The replica has accepted the stream.
    Welcomed(v1::Welcome),
    /// Apply the update to [`crate::state::Held`], then program the kernel.
    Apply(StateUpdate),
    /// Store the agent's own Node.
    Node(OwnNode),
    /// The agent has everything that the replica had when the stream began. This effect occurs once
    /// on a stream, after the step that completes the state.
    Resumed,
    /// Received resources cannot be used. [`Machine::rejections`] reports them to the replica.
    Reject(Vec<v1::Rejection>),
    /// Record the contents of a heartbeat.
    Heartbeat(v1::Heartbeat),
    /// Keep the addresses of all replicas.
    Replicas(BTreeSet<SocketAddr>),
    /// Answer a query of the replica.
    Query(v1::Query),
    /// Pass the replica's answer on to the pod that asked.
    Barrier(v1::BarrierAnswer),
    /// Connect again within the time that the replica names, preferably to another replica; for
    /// balance, only to one that follows its source.
    Drain(v1::Drain),
}

/// The progress of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    AwaitingWelcome,
    /// The first snapshot of the stream is not complete.
    Resuming {
        epoch: u64,
        mode: ResumeMode,
    },
    Following {
        epoch: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Staging {
    #[default]
    Nothing,
    Snapshot,
    Batch,
}

/// Parts of a snapshot or of a split batch that is not complete.
#[derive(Debug, Default)]
struct Staged {
    what: Staging,
    changes: Vec<Change>,
    triggers: Vec<Trigger>,
    rejections: Vec<v1::Rejection>,
    positions: Vec<v1::SourcePosition>,
    resources: u64,
}

/// The state machine of the agent's streams. One machine serves all streams, one after the other.
#[derive(Debug)]
pub struct Machine {
    node_name: Arc<str>,
    decoder: Decoder,
    position: Option<(u64, u64)>,
    phase: Phase,
    /// The version at which the agent has everything that the replica had when the stream began.
    /// `None` before this version is known, and after the agent has reached it.
    resumed_at: Option<u64>,
    staged: Staged,
    pub(super) rejections: Rejections,
    needs_referable: bool,
}

impl Machine {
    /// Creates the machine for the agent of a node.
    pub fn new(node_name: Arc<str>) -> Self {
        Self {
            node_name,
            decoder: Decoder::default(),
            position: None,
            phase: Phase::AwaitingWelcome,
            resumed_at: None,
            staged: Staged::default(),
            rejections: Rejections::default(),
            needs_referable: false,
        }
    }

    /// True if more resources were rejected than the machine remembers. In this case, the next
    /// stream has to resume by digests, so that the replica sends all rejected resources again.
    pub fn has_forgotten_rejections(&self) -> bool {
        self.rejections.has_forgotten()
    }

    /// Starts a new stream. `Hello` states that the agent holds `position` (epoch and version).
    pub fn begin(&mut self, position: Option<(u64, u64)>) {
        self.position = position;
        self.phase = Phase::AwaitingWelcome;
        self.staged = Staged::default();
        self.rejections.end();
        self.needs_referable = false;
    }

    /// True once the agent holds a complete state on this stream, and only changes follow.
    pub fn is_following(&self) -> bool {
        matches!(self.phase, Phase::Following { .. })
    }

    /// True if the caller must apply all effects so far, and then call [`Machine::refer_to`],
    /// before it processes the next message.
    pub fn needs_referable(&self) -> bool {
        self.needs_referable
    }

    /// Adds the resources to which later batches may refer: the contents of the agent's state
    /// (discovery.proto, section 13).
    pub fn refer_to(&mut self, referable: Referable) {
        self.needs_referable = false;
        self.decoder.refer_to(referable);
    }

    /// Processes the next message and returns its effects, in order. Ignores messages of an unknown
    /// kind (discovery.proto, section 12).
    /// Errors: the message breaks the contract. The caller must drop the stream.
    pub fn on_message(&mut self, message: v1::ServerMessage) -> Result<Vec<Effect>, Violation> {
        let Some(body) = message.body else { return Ok(Vec::new()) };
        if self.phase == Phase::AwaitingWelcome && !matches!(body, Body::Welcome(_)) {
            return breach(BEFORE_WELCOME);
        }
        match body {
            Body::Welcome(welcome) => self.on_welcome(welcome),
            Body::Batch(batch) => self.on_batch(batch),
            Body::SnapshotChunk(chunk) => self.on_chunk(chunk),
            Body::SnapshotEnd(end) => self.on_end(end),
            Body::OwnNode(own_node) => Ok(vec![self.on_node(own_node)]),
            Body::Heartbeat(heartbeat) => Ok(vec![Effect::Heartbeat(heartbeat)]),
            Body::Query(query) => Ok(vec![Effect::Query(query)]),
            Body::Barrier(answer) => Ok(vec![Effect::Barrier(answer)]),
            // Only a stream of its own has this answer.
            Body::Standing(_) => Ok(Vec::new()),
            Body::Drain(drain) => Ok(vec![Effect::Drain(drain)]),
        }
    }

    fn on_welcome(&mut self, welcome: v1::Welcome) -> Result<Vec<Effect>, Violation> {
        if self.phase != Phase::AwaitingWelcome {
            return breach("a second Welcome arrived");
        }
        let fail = |problem: &str| breach(format!("Welcome does not match Hello: {problem}"));
        let epoch = welcome.epoch;
        if epoch == 0 {
            return fail("epoch 0 is not valid");
        }
        let mode = welcome.resume();
        self.phase = match (mode, self.position) {
            (ResumeMode::Log, Some((held, _))) if held == epoch => Phase::Following { epoch },
            (ResumeMode::Log, _) => return fail("resume LOG, but the agent holds nothing of this epoch"),
            (ResumeMode::Digests, None) => return fail("resume DIGESTS, but the agent sent no digests"),
            (ResumeMode::Digests | ResumeMode::Full, _) => Phase::Resuming { epoch, mode },
            (ResumeMode::Unspecified, _) => return fail("an unknown resume mode"),
        };
        self.needs_referable = mode == ResumeMode::Log;
        self.resumed_at = welcome.head_version.filter(|_| mode == ResumeMode::Log);
        if mode == ResumeMode::Log && self.resumed_at.is_none() {
            return fail("resume LOG without the version at the head of the log");
        }
        let version = self.position.map_or(0, |(_, version)| version);
        self.rejections.begin(mode, version);
        Ok(iter::once(Effect::Welcomed(welcome)).chain(self.resumed(version)).collect())
    }

    fn resumed(&mut self, version: u64) -> Option<Effect> {
        self.resumed_at.take_if(|head| version >= *head).map(|_| Effect::Resumed)
    }

    fn on_batch(&mut self, batch: v1::Batch) -> Result<Vec<Effect>, Violation> {
        let (Phase::Following { epoch }, Some((_, held))) = (self.phase, self.position) else {
            return breach(BATCH_IN_SNAPSHOT);
        };
        if self.staged.what == Staging::Snapshot {
            return breach(BATCH_IN_SNAPSHOT);
        }
        let previous = batch.follows().unwrap_or_default();
        if previous != held {
            return Err(Violation::VersionGap { previous, held });
        }
        if batch.version < held {
            return backwards(batch.version, held);
        }
        self.staged.positions.extend(batch.moved_positions());
        self.stage(Staging::Batch, batch.changes.unwrap_or_default())?;
        if batch.version == held {
            return Ok(Vec::new());
        }
        self.needs_referable = self.decoder.has_learned_much();
        let staged = mem::take(&mut self.staged);
        Ok(self.finish(epoch, batch.version, staged, None))
    }

    fn on_chunk(&mut self, chunk: v1::SnapshotChunk) -> Result<Vec<Effect>, Violation> {
        if self.staged.what == Staging::Batch {
            return breach(SNAPSHOT_IN_BATCH);
        }
        let changes = chunk.changes.unwrap_or_default();
        let removes = !changes.removed_services.is_empty()
            || !changes.removed_service_cidrs.is_empty()
            || changes.endpoints.iter().any(|group| !group.removed.is_empty());
        if removes {
            return breach("a snapshot contains removals");
        }
        self.stage(Staging::Snapshot, changes)?;
        Ok(Vec::new())
    }

    fn on_end(&mut self, end: v1::SnapshotEnd) -> Result<Vec<Effect>, Violation> {
        if self.staged.what == Staging::Batch {
            return breach(SNAPSHOT_IN_BATCH);
        }
        let (epoch, by_digests) = match self.phase {
            Phase::Resuming { epoch, mode } => (epoch, mode == ResumeMode::Digests),
            Phase::Following { epoch } => (epoch, false),
            Phase::AwaitingWelcome => return breach(BEFORE_WELCOME),
        };
        if end.resource_count != self.staged.resources {
            let (counted, staged) = (end.resource_count, self.staged.resources);
            return breach(format!("SnapshotEnd counts {counted} resources, but {staged} arrived"));
        }
        if let Some((held_epoch, held)) = self.position
            && held_epoch == epoch
            && end.version < held
        {
            return backwards(end.version, held);
        }
        // An empty list means all buckets, but no bucket after a comparison of digests that found
        // no difference (discovery.proto, section 4).
        let buckets = if end.buckets.is_empty() && !(by_digests && end.resource_count == 0) {
            all_buckets()
        } else {
            checked_buckets(&end.buckets)?
        };
        check_membership(&buckets, &self.staged.changes)?;
        let mut staged = mem::take(&mut self.staged);
        let rejected = staged.rejections.iter().map(|rejection| rejection.resource.clone()).collect();
        staged.positions = end.positions;
        if matches!(self.phase, Phase::Resuming { .. }) {
            self.rejections.resumed();
            self.resumed_at = Some(end.version);
        }
        self.phase = Phase::Following { epoch };
        self.needs_referable = true;
        Ok(self.finish(epoch, end.version, staged, Some(Snapshot { buckets, rejected })))
    }

    fn on_node(&mut self, own: v1::OwnNode) -> Effect {
        let v1::OwnNode { revision, node, position, reserved } = own;
        let node = node.map(|wire| self.checked(&wire)).transpose();
        let checked = node.and_then(|node| Ok((node, reserved_from_wire(&reserved)?)));
        self.rejections.node(checked.as_ref().err());
        match checked {
            Ok((node, reserved)) => Effect::Node(OwnNode { revision, node, position, reserved }),
            Err(rejection) => Effect::Reject(vec![rejection]),
        }
    }

    fn checked(&self, wire: &v1::Node) -> Result<Node, v1::Rejection> {
        let node = node_from_wire(wire)?;
        if node.name.eq_ignore_ascii_case(&self.node_name) {
            return Ok(node);
        }
        let (resource, field) = (format!("Node {}", node.name), "name".into());
        Err(v1::Rejection { resource, field, reason: format!("this is the agent of node {}", self.node_name) })
    }

    fn stage(&mut self, what: Staging, wire: v1::Changes) -> Result<(), Violation> {
        let endpoints: usize = wire.endpoints.iter().map(|group| group.changed.len()).sum();
        let resources = wire.services.len() + wire.service_cidrs.len() + endpoints;
        // The resources of a snapshot may have changed long ago, so their triggers are ignored.
        if what == Staging::Batch {
            self.staged
                .triggers
                .extend(wire.endpoints.iter().flat_map(|group| triggers(group, wire.trigger_unix_ms(group))));
        }
        let (changes, rejections) = self.decoder.changes(wire)?;
        self.staged.what = what;
        self.staged.resources = self.staged.resources.saturating_add(resources as u64);
        self.staged.changes.extend(changes);
        self.staged.rejections.extend(rejections);
        Ok(())
    }

    fn finish(&mut self, epoch: u64, version: u64, staged: Staged, snapshot: Option<Snapshot>) -> Vec<Effect> {
        self.position = Some((epoch, version));
        let Staged { changes, triggers, rejections, positions, .. } = staged;
        self.rejections.step(version, &rejections, &changes, snapshot.as_ref());
        let rejected = (!rejections.is_empty()).then_some(Effect::Reject(rejections));
        let has_rejections = self.rejections.has_resources();
        let step =
            Effect::Apply(StateUpdate { epoch, version, positions, changes, triggers, snapshot, has_rejections });
        rejected.into_iter().chain([step]).chain(self.resumed(version)).collect()
    }
}

/// The triggers of a service's endpoint changes: one for each family with changed endpoints. As in
/// kube-proxy, removals are ignored. A time of 0 means that the trigger is unknown.
fn triggers(group: &v1::ServiceEndpoints, unix_ms: u64) -> impl Iterator<Item = Trigger> + use<> {
    let has = |bytes: usize| group.changed.iter().any(|endpoint| endpoint.address.len() == bytes);
    let families = [(Family::V4, 4), (Family::V6, 16)].map(|(family, bytes)| has(bytes).then_some(family));
    let known = families.into_iter().flatten().filter(move |_| unix_ms != 0);
    known.map(move |family| Trigger { family, unix_ms })
}

fn checked_buckets(wire: &[u32]) -> Result<HashSet<u16>, Violation> {
    let ascends = wire.windows(2).find(|pair| pair[0] >= pair[1]).map(|pair| pair[1]);
    let in_range =
        wire.iter().copied().find(|bucket| usize::try_from(*bucket).map_or(true, |bucket| bucket >= BUCKETS));
    match ascends.or(in_range) {
        Some(bucket) => breach(format!("SnapshotEnd names bucket {bucket}, which is out of order or out of range")),
        None => Ok(wire.iter().filter_map(|bucket| u16::try_from(*bucket).ok()).collect()),
    }
}

/// Checks that all resources of a snapshot are in the named buckets. Otherwise the agent could hold
/// a resource that no later message of the stream removes.
fn check_membership(buckets: &HashSet<u16>, changes: &[Change]) -> Result<(), Violation> {
    if buckets.len() == BUCKETS {
        return Ok(());
    }
    for change in changes {
        let (resource, bucket) = match change {
            Change::Service(service) => (format!("Service {}", service.key), digest::service_bucket(&service.key)),
            Change::Endpoint(key, _) => (format!("an endpoint of {key}"), digest::service_bucket(key)),
            Change::ServiceCidr(service_cidr) => {
                (format!("ServiceCIDR {}", service_cidr.name), digest::service_cidr_bucket(&service_cidr.name))
            }
            // `on_chunk` has rejected chunks with removals.
            Change::RemoveService(_) | Change::RemoveEndpoint(..) | Change::RemoveServiceCidr(_) => continue,
        };
        if !buckets.contains(&bucket) {
            return breach(format!(
                "the snapshot contains {resource} of bucket {bucket}, which SnapshotEnd does not name"
            ));
        }
    }
    Ok(())
}

// The resources that the agent or its kernel rejects, and what the replica has to hear of them
// (`discovery.proto`, rule 7).

/// Maximum number of received resources whose rejections the agent remembers: more than the
/// endpoints of the largest Services. Further ones only count in `Nack.in_force`, until the stream
/// ends.
const MAX_KEPT: usize = 16_384;
/// Maximum number of names that wait to be sent. Further ones only count in `Nack.in_force`.
const MAX_CHANGED: usize = 2 * MAX_KEPT;
/// Maximum length of a text in a message. Longer texts are cut.
pub(super) const MAX_TEXT_BYTES: usize = 1024;
/// Maximum size of the items of one NACK: half of the maximum message size, for the other fields.
const NACK_BYTES: usize = MAX_AGENT_MESSAGE_BYTES / 2;

/// The rejections in force, by the resource's name as in [`v1::Rejection`].
#[derive(Debug, Default)]
pub(super) struct Rejections {
    /// Received resources that the agent cannot use.
    received: BTreeMap<String, v1::Rejection>,
    /// The number of rejections that `received` could not hold, or more: a resource that is
    /// rejected again counts again.
    forgotten: u64,
    /// The number of ended rejections whose names `changed` could not hold. The replica still
    /// remembers them, so they count until the stream ends.
    lost_withdrawals: u64,
    /// Services whose rules the kernel rejects, or that lack a reserved address and port.
    by_node: BTreeMap<String, v1::Rejection>,
    /// Resources whose rejections began, changed or ended since the replica heard of them.
    changed: BTreeSet<String>,
    /// True if the replica has to hear of `changed`, or of another number of rejections.
    is_due: bool,
    /// The version at the last change.
    version: u64,
    /// True until the first snapshot of a stream is complete. No rejection of an earlier stream is
    /// in force meanwhile.
    is_resuming: bool,
}

impl Rejections {
    /// Begins a stream at a version. After a resume by log, the replica does not send the rejected
    /// resources again, so the agent repeats the rejections.
    pub(super) fn begin(&mut self, mode: ResumeMode, version: u64) {
        let is_resuming = mode != ResumeMode::Log;
        let changed = if is_resuming { BTreeSet::new() } else { self.received.keys().cloned().collect() };
        let (received, forgotten, is_due) = (mem::take(&mut self.received), self.forgotten, !changed.is_empty());
        *self = Self { received, forgotten, changed, is_due, version, is_resuming, ..Self::default() };
    }

    /// Forgets what waits for the replica of the stream that has ended: another replica has not
    /// heard of these rejections. [`Self::begin`] repeats those that count on the new stream.
    pub(super) fn end(&mut self) {
        self.changed.clear();
        self.is_due = false;
    }

    /// Drops all rejections of received resources, except those of the Node: the first snapshot of
    /// a stream is complete, and contains every rejected resource that still differs. Not earlier,
    /// because the next stream may resume by log.
    pub(super) fn resumed(&mut self) {
        self.received.retain(|resource, _| is_node(resource));
        self.is_due |= !self.received.is_empty();
        (self.forgotten, self.is_resuming) = (0, false);
    }

    /// True if a received resource is rejected.
    #[cfg(test)]
    pub(super) fn contains(&self, resource: &str) -> bool {
        self.received.contains_key(resource)
    }

    /// True if rejections that are not remembered may be in force.
    pub(super) fn has_forgotten(&self) -> bool {
        self.forgotten > 0
    }

    /// True if a rejection is in force for a resource that a resume by log does not send again.
    /// Rejections of the agent's own Node are ignored, because every stream sends the Node.
    pub(super) fn has_resources(&self) -> bool {
        self.has_forgotten() || self.received.keys().any(|resource| !is_node(resource))
    }

    /// Records a step that leads to `version`. Rejections end if the step contains a usable value,
    /// or removes the resource. The cost is negligible while no rejection is in force.
    pub(super) fn step(
        &mut self,
        version: u64,
        rejections: &[v1::Rejection],
        changes: &[Change],
        snapshot: Option<&Snapshot>,
    ) {
        self.version = version;
        let ended = if self.received.is_empty() { BTreeSet::new() } else { self.ended(changes, snapshot) };
        self.replace(ended, rejections);
    }

    /// Records whether the agent can use its own Node.
    pub(super) fn node(&mut self, rejection: Option<&v1::Rejection>) {
        let earlier = self.received.keys().filter(|resource| is_node(resource)).cloned().collect();
        self.replace(earlier, rejection.map(std::slice::from_ref).unwrap_or_default());
    }

    fn replace(&mut self, ended: BTreeSet<String>, rejections: &[v1::Rejection]) {
        for resource in ended {
            self.received.remove(&resource);
            self.change(resource);
        }
        for rejection in rejections {
            self.is_due = true;
            if self.received.len() < MAX_KEPT || self.received.contains_key(&rejection.resource) {
                self.received.insert(rejection.resource.clone(), rejection.clone());
                self.change(rejection.resource.clone());
            } else {
                self.forgotten += 1;
            }
        }
    }

    fn ended(&self, changes: &[Change], snapshot: Option<&Snapshot>) -> BTreeSet<String> {
        let named = changes.iter().flat_map(names).filter(|resource| self.received.contains_key(resource));
        let mut ended: BTreeSet<String> = named.collect();
        if let Some(Snapshot { buckets, .. }) = snapshot {
            // A snapshot contains everything in its buckets. Other resources are gone.
            let is_replaced = |resource: &&String| match bucket(resource) {
                Some(bucket) => buckets.contains(&bucket),
                None => buckets.len() == digest::BUCKETS,
            };
            ended.extend(self.received.keys().filter(is_replaced).cloned());
        }
        ended
    }

    /// Records the Services that this node does not program as a whole at this version. If a
    /// Service has several rejections, the last one counts.
    pub(super) fn set_by_node(&mut self, version: u64, rejections: &[v1::Rejection]) {
        if rejections.is_empty() && self.by_node.is_empty() {
            return;
        }
        let now = rejections.iter().map(|rejection| (rejection.resource.clone(), rejection.clone())).collect();
        let before = mem::replace(&mut self.by_node, now);
        let is_other = |(resource, rejection): &(&String, &v1::Rejection)| before.get(*resource) != Some(*rejection);
        let is_over = |resource: &&String| !self.by_node.contains_key(*resource);
        let new = self.by_node.iter().filter(is_other).map(|(resource, _)| resource);
        let changed: Vec<String> = new.chain(before.keys().filter(is_over)).cloned().collect();
        for resource in changed {
            self.version = version;
            self.change(resource);
        }
    }

    fn change(&mut self, resource: String) {
        self.is_due = true;
        if self.changed.len() < MAX_CHANGED {
            self.changed.insert(resource);
        } else if !self.changed.contains(&resource)
            && !self.received.contains_key(&resource)
            && !self.by_node.contains_key(&resource)
        {
            self.lost_withdrawals += 1;
        }
    }

    /// The number of rejections in force on this stream. If it is not exact, it is too high.
    fn in_force(&self) -> u64 {
        if self.is_resuming {
            return 0;
        }
        let only_by_node = self.by_node.keys().filter(|resource| !self.received.contains_key(*resource));
        self.forgotten + self.lost_withdrawals + self.received.len() as u64 + only_by_node.count() as u64
    }

    pub(super) fn is_due(&self) -> bool {
        self.is_due
    }

    pub(super) fn pop(&mut self) -> Option<v1::Nack> {
        if !self.is_due {
            return None;
        }
        let mut nack = v1::Nack { version: self.version, in_force: self.in_force(), ..v1::Nack::default() };
        let mut room = NACK_BYTES;
        while let Some(mut resource) = self.changed.pop_first() {
            let rejection = self.received.get(&resource).or_else(|| self.by_node.get(&resource));
            let rejection = rejection.cloned().map(|mut rejection| {
                let v1::Rejection { resource, field, reason } = &mut rejection;
                [resource, field, reason].into_iter().for_each(|text| shorten(text, MAX_TEXT_BYTES));
                rejection
            });
            let bytes = rejection.as_ref().map_or(resource.len().min(MAX_TEXT_BYTES), v1::Rejection::encoded_len) + 8;
            let Some(left) = room.checked_sub(bytes) else {
                self.changed.insert(resource);
                break;
            };
            room = left;
            match rejection {
                Some(rejection) => nack.rejections.push(rejection),
                None => {
                    shorten(&mut resource, MAX_TEXT_BYTES);
                    nack.withdrawn.push(resource);
                }
            }
        }
        self.is_due = !self.changed.is_empty();
        Some(nack)
    }
}

/// Cuts a text that is too long, at a character boundary.
pub(super) fn shorten(text: &mut String, max_bytes: usize) {
    if text.len() > max_bytes {
        text.truncate(text.floor_char_boundary(max_bytes));
        text.push('…');
    }
}

fn is_node(resource: &str) -> bool {
    resource.starts_with("Node ")
}

/// The names under which the resource of a change may have been rejected.
fn names(change: &Change) -> Vec<String> {
    let of_endpoint = |key: &ServiceKey, address: &dyn std::fmt::Display| {
        vec![
            format!("Endpoint {key} {address}"),
            format!("Endpoint {key}"),
            format!("endpoints of service {}", key.name),
        ]
    };
    match change {
        Change::Service(service) => vec![format!("Service {}", service.key)],
        Change::RemoveService(key) => vec![format!("Service {key}")],
        Change::Endpoint(key, endpoint) => of_endpoint(key, &endpoint.address),
        Change::RemoveEndpoint(key, address) => of_endpoint(key, address),
        Change::ServiceCidr(service_cidr) => vec![format!("ServiceCIDR {}", service_cidr.name)],
        Change::RemoveServiceCidr(name) => vec![format!("ServiceCIDR {name}")],
    }
}

/// The bucket of a rejected resource; `None` if its name does not determine it.
fn bucket(resource: &str) -> Option<u16> {
    let (kind, rest) = resource.split_once(' ')?;
    if kind == "ServiceCIDR" {
        return Some(digest::service_cidr_bucket(rest));
    }
    if kind != "Service" && kind != "Endpoint" {
        return None;
    }
    let (namespace, name) = rest.split(' ').next()?.split_once('/')?;
    Some(digest::service_bucket(&ServiceKey::new(namespace, name)))
}

#[cfg(test)]
mod rejections_tests {
    #![allow(clippy::unwrap_used)]
    use std::{collections::HashSet, slice};

    use super::*;
    use crate::{
        state::all_buckets,
        testing::{endpoint, key, no_endpoint, service, service_cidr},
    };

    fn rejection(resource: &str) -> v1::Rejection {
        v1::Rejection { resource: resource.into(), field: "ports".into(), reason: "port 0".into() }
    }

    fn named(number: usize) -> v1::Rejection {
        rejection(&format!("Service ns/s{number}"))
    }

    /// Rejections of which the replica has heard.
    fn rejected(resources: &[&str]) -> Rejections {
        let mut rejected = Rejections::default();
        let rejections: Vec<_> = resources.iter().map(|resource| rejection(resource)).collect();
        rejected.step(1, &rejections, &[], None);
        assert_eq!(rejected.pop().unwrap().rejections.len(), resources.len());
        rejected
    }

    /// The withdrawals after a step without rejections.
    fn withdrawn(rejected: &mut Rejections, changes: &[Change], snapshot: Option<&Snapshot>) -> Vec<String> {
        rejected.step(2, &[], changes, snapshot);
        rejected.pop().map(|nack| nack.withdrawn).unwrap_or_default()
    }

    #[test]
    fn a_rejection_ends_with_a_usable_value_or_a_removal_of_its_resource() {
        let web = format!("Service {}", key("web"));
        let db = format!("Service {}", key("db"));
        let address = format!("Endpoint {} 10.1.0.1", key("web"));
        for (resource, change) in [
            (web.as_str(), service("web", 80)),
            (&web, Change::RemoveService(key("web"))),
            ("ServiceCIDR kubernetes", service_cidr("kubernetes", 0)),
            ("ServiceCIDR kubernetes", Change::RemoveServiceCidr("kubernetes".into())),
        ] {
            let mut rejected = rejected(&[&web, &db, &address, "ServiceCIDR kubernetes"]);
            assert_eq!(withdrawn(&mut rejected, slice::from_ref(&change), None), [resource]);
            assert!(!rejected.contains(resource) && rejected.contains(&db));
            assert!(withdrawn(&mut rejected, &[change], None).is_empty(), "the rejection is withdrawn only once");
        }
        let Change::Endpoint(_, held) = endpoint("web", 1, 80) else { unreachable!() };
        let named = format!("Endpoint {} {}", key("web"), held.address);
        for change in [endpoint("web", 1, 80), no_endpoint("web", 1)] {
            assert_eq!(withdrawn(&mut rejected(&[&named, &web]), &[change], None), [named.as_str()]);
        }
    }

    #[test]
    fn a_resource_that_is_rejected_again_stays_rejected_with_the_newer_reason() {
        let web = format!("Service {}", key("web"));
        let mut rejected = rejected(&[&web]);
        let newer = v1::Rejection { reason: "port 70000".into(), ..rejection(&web) };
        rejected.step(2, slice::from_ref(&newer), &[Change::RemoveService(key("web"))], None);
        let nack = rejected.pop().unwrap();
        assert_eq!((nack.version, &nack.rejections[..], nack.withdrawn.len()), (2, slice::from_ref(&newer), 0));
        rejected.begin(ResumeMode::Log, 2);
        let repeated = rejected.pop().unwrap();
        assert_eq!((repeated.rejections, repeated.in_force), (vec![newer], 1), "the log does not send it again");
        rejected.begin(ResumeMode::Digests, 2);
        assert_eq!(rejected.pop(), None, "a resume by digests sends the resource again");
        assert!(rejected.contains(&web), "the stream may break before the snapshot is complete");
        rejected.resumed();
        assert!(!rejected.contains(&web) && rejected.pop().is_none());
    }

    #[test]
    fn a_snapshot_ends_the_rejections_in_the_buckets_that_it_replaces() {
        let (web, db) = (format!("Service {}", key("web")), format!("Endpoint {} 10.1.0.1", key("db")));
        let snapshot = |buckets| Snapshot { buckets, rejected: HashSet::new() };
        let only_web = snapshot([digest::service_bucket(&key("web"))].into());
        let mut rejected = rejected(&[&web, &db, "removed Service"]);
        assert_eq!(withdrawn(&mut rejected, &[], Some(&only_web)), [web.as_str()]);
        let left = withdrawn(&mut rejected, &[], Some(&snapshot(all_buckets())));
        assert_eq!(left, [db.as_str(), "removed Service"]);
    }

    #[test]
    fn the_number_of_remembered_rejections_is_bounded() {
        let rejections: Vec<_> = (0..MAX_KEPT + 100).map(named).collect();
        let mut rejected = Rejections::default();
        rejected.step(1, &rejections, &[], None);
        let all = std::iter::from_fn(|| rejected.pop()).map(|nack| (nack.rejections.len(), nack.in_force));
        let (named, in_force): (Vec<usize>, Vec<u64>) = all.unzip();
        assert_eq!(named.iter().sum::<usize>(), MAX_KEPT);
        assert!(in_force.iter().all(|count| *count == rejections.len() as u64));
        // All remembered rejections end. The rejections that are not remembered are still in force.
        let changes: Vec<_> =
            (0..MAX_KEPT + 50).map(|i| Change::RemoveService(ServiceKey::new("ns", &format!("s{i}")))).collect();
        rejected.step(2, &[], &changes, None);
        let last = std::iter::from_fn(|| rejected.pop()).last().unwrap();
        assert!(rejected.has_forgotten() && rejected.has_resources() && last.in_force == 100);
        rejected.resumed();
        assert!(!rejected.has_forgotten() && !rejected.has_resources() && rejected.in_force() == 0);
    }

    #[test]
    fn a_lost_withdrawal_counts_until_the_stream_ends() {
        let mut rejected = Rejections::default();
        let all: Vec<_> = (0..MAX_KEPT).map(named).collect();
        rejected.step(1, &all, &[], None);
        while rejected.pop().is_some() {}
        // The kernel rejects as many others, so that no name of an ended rejection fits.
        let others: Vec<_> = (0..MAX_CHANGED).map(|number| rejection(&format!("Service other/s{number}"))).collect();
        rejected.set_by_node(2, &others);
        rejected.step(3, &[], &[Change::RemoveService(ServiceKey::new("ns", "s1"))], None);
        let in_force = (MAX_KEPT + MAX_CHANGED) as u64;
        assert_eq!(rejected.pop().unwrap().in_force, in_force, "the replica still remembers ns/s1");
        rejected.begin(ResumeMode::Log, 3);
        assert_eq!(rejected.pop().unwrap().in_force, MAX_KEPT as u64 - 1);
    }

    #[test]
    fn a_new_stream_hears_only_what_begin_repeats() {
        let mut rejected = Rejections::default();
        rejected.step(1, &[named(1)], &[], None);
        rejected.end();
        assert!(rejected.pop().is_none(), "nothing is sent before Welcome");
        rejected.begin(ResumeMode::Log, 1);
        assert_eq!(rejected.pop().unwrap().rejections, [named(1)]);
    }

    #[test]
    fn messages_have_a_limited_size() {
        let long = "é".repeat(1_000);
        let rejections: Vec<_> = (0..900)
            .map(|number| v1::Rejection { field: long.clone(), reason: long.clone(), ..named(number) })
            .collect();
        let mut rejected = Rejections::default();
        rejected.step(7, &rejections, &[], None);
        let mut sent = 0;
        while let Some(nack) = rejected.pop() {
            assert!(nack.encoded_len() <= MAX_AGENT_MESSAGE_BYTES);
            assert_eq!((nack.version, nack.in_force), (7, 900));
            sent += nack.rejections.len();
        }
        assert_eq!(sent, 900);
    }

    #[test]
    fn a_resource_that_agent_and_kernel_reject_counts_once() {
        let [api, db, web] = ["api", "db", "web"].map(|name| rejection(&format!("Service {}", key(name))));
        let mut rejected = Rejections::default();
        let nack = |rejected: &mut Rejections| {
            rejected.pop().map(|nack| (nack.rejections.len(), nack.withdrawn.len(), nack.in_force))
        };
        rejected.set_by_node(5, &[api.clone(), web.clone()]);
        assert_eq!(nack(&mut rejected), Some((2, 0, 2)));
        rejected.step(6, &[web, db], &[], None);
        assert_eq!(nack(&mut rejected), Some((2, 0, 3)), "api, db, web");
        // The kernel accepts both. The agent still rejects one of them.
        rejected.set_by_node(6, &[]);
        assert_eq!(nack(&mut rejected), Some((1, 1, 2)));
        rejected.step(7, &[], &[service("web", 80), service("db", 80)], None);
        assert_eq!(nack(&mut rejected), Some((0, 2, 0)));
        // The agent can use the Service again, and its kernel still rejects it.
        rejected.step(8, slice::from_ref(&api), &[], None);
        rejected.set_by_node(8, slice::from_ref(&api));
        rejected.step(9, &[], &[service("api", 80)], None);
        assert_eq!(nack(&mut rejected), Some((1, 0, 1)));
    }
}
