//! Decides what a message from a replica means: turns a [`v1::ServerMessage`] into [`Effect`]s. The
//! module does no I/O and uses no clock.
//!
//! The contract at the head of `proto/headgate/v1/discovery.proto` states the rules. Snapshots and
//! split batches are staged, and become one [`StateUpdate`] when they are complete. If a stream
//! breaks earlier, the machine drops the staged parts. After a [`Violation`], the caller must drop
//! the stream, and resume on a new stream with the state that the agent holds.

use std::{collections::HashSet, iter, mem, sync::Arc};

use headgate_core::{
    Change, Family, Node,
    digest::{self, BUCKETS},
    reference::Referable,
};
use headgate_proto::{
    Decoder, UnknownReference, node_from_wire, reserved_from_wire,
    v1::{self, server_message::Body, welcome::ResumeMode},
};

use super::rejections::Rejections;
use crate::state::{
    backlog::Trigger,
    held::{OwnNode, Snapshot, StateUpdate, all_buckets},
};

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
    /// A batch refers to something that the agent does not hold. The next stream has to resume by
    /// digests.
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
    /// Apply the update to [`crate::state::held::Held`], then program the kernel.
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
    /// Answer a query of the replica.
    Query(v1::Query),
    /// Pass the replica's answer on to the pod that asked.
    Barrier(v1::BarrierAnswer),
    /// Connect again within the time that the replica names, preferably to another replica. If the
    /// replica asks for balance, it continues to serve: move only to a replica that follows its
    /// source.
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
    #[must_use]
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
    #[must_use]
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
    #[must_use]
    pub fn is_following(&self) -> bool {
        matches!(self.phase, Phase::Following { .. })
    }

    /// True if the caller must apply all effects so far, and then call [`Machine::refer_to`],
    /// before it processes the next message.
    #[must_use]
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
    ///
    /// # Errors
    /// The message breaks the contract. The caller must drop the stream.
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

    /// Returns [`Effect::Resumed`], once, when `version` completes the resume.
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
        // An empty list normally means all buckets. After a comparison of digests that found no
        // difference, an empty list means no bucket (discovery.proto, section 4). In this case, the
        // agent must not remove all resources.
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

#[cfg(test)]
mod tests;
