//! What a message from a replica means: from [`v1::ServerMessage`] to [`Effect`]s. No input, no
//! output, no clock.
//!
//! The rules are those of the contract at the head of `proto/headgate/v1/discovery.proto`.
//! Snapshots and split batches are staged here and become one [`StateUpdate`] when they are
//! complete; a stream that breaks before leaves no trace. A [`Violation`] means that the stream
//! cannot be trusted any further: the caller drops it and comes back with what it holds.

use std::{collections::HashSet, iter, mem, sync::Arc, time::Duration};

use headgate_core::{
    Change, Family,
    digest::{self, BUCKETS},
    node_state::SourceState,
    reference::{Referable, Referrer},
};
use headgate_proto::{
    Decoder, UnknownReference, node_from_wire,
    v1::{self, server_message::Body, welcome::ResumeMode},
};

use super::rejected::Rejected;
use crate::state::{
    backlog::Trigger,
    held::{Buckets, OwnNode, Snapshot, StateUpdate},
};

/// Used when a replica names no interval.
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(10);

/// A message that breaks the contract.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The first message must be `Welcome`.
    #[error("a message came before Welcome")]
    BeforeWelcome,
    /// A second `Welcome`.
    #[error("a second Welcome")]
    SecondWelcome,
    /// `Welcome.resume` or `Welcome.epoch` makes no sense after our `Hello`.
    #[error("Welcome cannot be: {0}")]
    Welcome(String),
    /// Something between was lost.
    #[error("a batch follows version {previous}, and the agent is at {held}")]
    VersionGap {
        /// `Batch.follows_version`.
        previous: u64,
        /// The version that the agent is at.
        held: u64,
    },
    /// Versions only grow within an epoch.
    #[error("version {sent} came after version {held} of the same epoch")]
    Backwards {
        /// The version that was sent.
        sent: u64,
        /// The version that the agent is at.
        held: u64,
    },
    /// What a batch refers to is not held here, as when it was rejected. The next stream has to
    /// resume by digests.
    #[error("{0}; resuming by digests, which spells everything out")]
    Reference(#[from] UnknownReference),
    /// A batch before the end of the snapshot that the stream begins with, or in the middle of one.
    #[error("a batch came before the snapshot's end")]
    BatchInSnapshot,
    /// A snapshot in the middle of a split batch.
    #[error("a snapshot came in the middle of a split batch")]
    SnapshotInBatch,
    /// Snapshots carry complete resources only.
    #[error("a snapshot carries removals")]
    RemovalInSnapshot,
    /// Part of the snapshot was lost.
    #[error("the snapshot's end counts {counted} resources, and {staged} came")]
    ResourceCount {
        /// `SnapshotEnd.resource_count`.
        counted: u64,
        /// Resources in the chunks.
        staged: u64,
    },
    /// The list of buckets is not ascending, or names one that does not exist.
    #[error("the snapshot's end names bucket {0}, out of order or out of range")]
    Bucket(u32),
    /// A chunk carried what its end does not name.
    #[error("the snapshot carries {resource} of bucket {bucket}, which its end does not name")]
    ForeignBucket {
        /// What was carried.
        resource: String,
        /// Its bucket.
        bucket: u16,
    },
}

/// What the caller is to do.
#[derive(Debug)]
pub enum Effect {
    /// The stream begins.
    Welcomed(Welcomed),
    /// Apply to [`crate::state::held::Held`], then program the kernel.
    Apply(StateUpdate),
    /// The agent's own node has changed.
    Node(OwnNode),
    /// The agent has everything that the replica had when the stream began. Comes once on a stream,
    /// after the step that brought the last of it.
    Resumed,
    /// Tell the replica which resources could not be used, and of which that is over.
    Reject(v1::Nack),
    /// The replica lives; its source was heard so long ago.
    Heartbeat {
        /// The newest version that the replica has.
        head_version: u64,
        /// Time since the source was last heard, at the moment of sending.
        source_age: Duration,
        /// What the source is doing; `None` from a replica that does not say.
        source: Option<SourceState>,
        /// Snapshots that the replica has completed, for any agent.
        snapshots_sent: u64,
    },
    /// Connect anew within this time, preferably elsewhere.
    Drain {
        /// The latest moment, from now.
        within: Duration,
        /// For the log.
        reason: String,
        /// The replica goes on serving: only a better one is worth the move.
        for_balance: bool,
    },
}

/// How a stream begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcomed {
    /// The replica's name.
    pub replica: String,
    /// Its epoch.
    pub epoch: u64,
    /// How it brings the agent up to date.
    pub mode: ResumeMode,
    /// Longest time between two messages.
    pub heartbeat_interval: Duration,
    /// What the source is doing; `None` from a replica that does not say.
    pub source: Option<SourceState>,
}

/// Where the stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    AwaitingWelcome,
    /// The snapshot that the stream begins with is on its way.
    Resuming {
        epoch: u64,
        mode: ResumeMode,
    },
    Following {
        epoch: u64,
    },
}

/// When the agent has everything that the replica had at the stream's begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Resumed {
    /// With the end of the snapshot that the stream begins with.
    AtSnapshotEnd,
    /// At a version that the next `Heartbeat` tells.
    AtNextHead,
    /// At this version.
    At(u64),
    /// It has.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Staging {
    #[default]
    Nothing,
    Snapshot,
    Batch,
}

/// What waits for its end.
#[derive(Debug, Default)]
struct Staged {
    what: Staging,
    changes: Vec<Change>,
    triggers: Vec<Trigger>,
    rejections: Vec<v1::Rejection>,
    positions: Vec<v1::SourcePosition>,
    resources: u64,
}

/// The state machine of one stream after the other.
#[derive(Debug)]
pub struct Machine {
    node_name: Arc<str>,
    decoder: Decoder,
    position: Option<(u64, u64)>,
    phase: Phase,
    resumed: Resumed,
    staged: Staged,
    rejected: Rejected,
    needs_referable: bool,
}

impl Machine {
    /// A machine for the agent of a node.
    #[must_use]
    pub fn new(node_name: Arc<str>) -> Self {
        Self {
            node_name,
            decoder: Decoder::default(),
            position: None,
            phase: Phase::AwaitingWelcome,
            resumed: Resumed::AtSnapshotEnd,
            staged: Staged::default(),
            rejected: Rejected::default(),
            needs_referable: false,
        }
    }

    /// True while this stream's rejection of a resource stands.
    #[must_use]
    pub fn has_rejected(&self, resource: &str) -> bool {
        self.rejected.contains(resource)
    }

    /// True when more was rejected than is remembered: only a resume by digests brings all of it
    /// again.
    #[must_use]
    pub fn has_forgotten_rejections(&self) -> bool {
        self.rejected.has_forgotten()
    }

    /// A new stream begins, with a `Hello` that says that the agent holds `position` (epoch and
    /// version).
    pub fn begin(&mut self, position: Option<(u64, u64)>) {
        self.position = position;
        self.phase = Phase::AwaitingWelcome;
        self.staged = Staged::default();
        self.needs_referable = false;
        self.decoder.forget_references();
    }

    /// True once the stream has brought the replica's state as a whole, so that only what changes
    /// follows.
    #[must_use]
    pub fn is_following(&self) -> bool {
        matches!(self.phase, Phase::Following { .. })
    }

    /// True when [`Machine::refer_to`] has to be called before the next message, once every effect
    /// so far has been applied.
    #[must_use]
    pub fn needs_referable(&self) -> bool {
        self.needs_referable
    }

    /// Takes what batches may refer to from now on: what the agent holds (contract, 13).
    pub fn refer_to(&mut self, referable: Referable) {
        if let Phase::Following { epoch } = self.phase {
            self.needs_referable = false;
            self.decoder.refer_to(Referrer::new(epoch), referable);
        }
    }

    /// Takes the next message.
    ///
    /// A kind of message that this program does not know means nothing (contract, 12).
    ///
    /// # Errors
    /// The stream breaks the contract; it must be dropped.
    pub fn on_message(&mut self, message: v1::ServerMessage) -> Result<Vec<Effect>, Violation> {
        let Some(body) = message.body else { return Ok(Vec::new()) };
        if self.phase == Phase::AwaitingWelcome && !matches!(body, Body::Welcome(_)) {
            return Err(Violation::BeforeWelcome);
        }
        match body {
            Body::Welcome(welcome) => self.on_welcome(welcome),
            Body::Batch(batch) => self.on_batch(batch),
            Body::SnapshotChunk(chunk) => self.on_chunk(chunk),
            Body::SnapshotEnd(end) => self.on_end(end),
            Body::OwnNode(own_node) => Ok(self.on_node(own_node)),
            Body::Heartbeat(heartbeat) => Ok(self.on_heartbeat(heartbeat)),
            Body::Drain(drain) => Ok(vec![Effect::Drain {
                within: Duration::from_millis(drain.reconnect_within_ms.into()),
                reason: drain.reason,
                for_balance: drain.for_balance,
            }]),
        }
    }

    fn on_welcome(&mut self, welcome: v1::Welcome) -> Result<Vec<Effect>, Violation> {
        if self.phase != Phase::AwaitingWelcome {
            return Err(Violation::SecondWelcome);
        }
        let fail = |problem: &str| Err(Violation::Welcome(problem.to_owned()));
        let epoch = welcome.epoch;
        if epoch == 0 {
            return fail("epoch 0 stands for none");
        }
        let mode = welcome.resume();
        self.phase = match (mode, self.position) {
            (ResumeMode::Log, Some((held, _))) if held == epoch => Phase::Following { epoch },
            (ResumeMode::Log, _) => return fail("resume LOG, but the agent holds nothing of this epoch"),
            (ResumeMode::Digests, None) => return fail("resume DIGESTS, but the agent sent none"),
            (ResumeMode::Digests | ResumeMode::Full, _) => Phase::Resuming { epoch, mode },
            (ResumeMode::Unspecified, _) => return fail("an unknown way to resume"),
        };
        self.needs_referable = mode == ResumeMode::Log;
        self.resumed = match mode {
            ResumeMode::Log => welcome.head_version.map_or(Resumed::AtNextHead, Resumed::At),
            _ => Resumed::AtSnapshotEnd,
        };
        let heartbeat_interval = match welcome.heartbeat_interval_ms {
            0 => DEFAULT_HEARTBEAT,
            interval_ms => Duration::from_millis(interval_ms.into()),
        };
        let source = welcome.source_state().known();
        let mut effects =
            vec![Effect::Welcomed(Welcomed { replica: welcome.replica, epoch, mode, heartbeat_interval, source })];
        let version = self.position.map_or(0, |(_, version)| version);
        let rejections = self.rejected.begin(mode);
        effects.extend(reject(v1::Nack { version, rejections, withdrawn: Vec::new() }));
        effects.extend(self.resumed_at(version));
        Ok(effects)
    }

    fn on_heartbeat(&mut self, heartbeat: v1::Heartbeat) -> Vec<Effect> {
        let (source, head_version) = (heartbeat.source_state().known(), heartbeat.head_version);
        let v1::Heartbeat { source_age_ms, snapshots_sent, .. } = heartbeat;
        if self.resumed == Resumed::AtNextHead {
            self.resumed = Resumed::At(head_version);
        }
        let version = self.position.map_or(0, |(_, version)| version);
        let source_age = Duration::from_millis(source_age_ms);
        let heard = Effect::Heartbeat { head_version, source_age, source, snapshots_sent };
        iter::once(heard).chain(self.resumed_at(version)).collect()
    }

    /// Tells, once, that the agent has everything that the replica had at the stream's begin.
    fn resumed_at(&mut self, version: u64) -> Option<Effect> {
        matches!(self.resumed, Resumed::At(head) if version >= head).then(|| {
            self.resumed = Resumed::Done;
            Effect::Resumed
        })
    }

    fn on_batch(&mut self, batch: v1::Batch) -> Result<Vec<Effect>, Violation> {
        let (Phase::Following { epoch }, Some((_, held))) = (self.phase, self.position) else {
            return Err(Violation::BatchInSnapshot);
        };
        if self.staged.what == Staging::Snapshot {
            return Err(Violation::BatchInSnapshot);
        }
        let previous = batch.follows().unwrap_or_default();
        if previous != held {
            return Err(Violation::VersionGap { previous, held });
        }
        if batch.version < held {
            return Err(Violation::Backwards { sent: batch.version, held });
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
            return Err(Violation::SnapshotInBatch);
        }
        let changes = chunk.changes.unwrap_or_default();
        let removes = !changes.removed_services.is_empty()
            || !changes.removed_service_cidrs.is_empty()
            || changes.endpoints.iter().any(|group| !group.removed.is_empty());
        if removes {
            return Err(Violation::RemovalInSnapshot);
        }
        self.stage(Staging::Snapshot, changes)?;
        Ok(Vec::new())
    }

    fn on_end(&mut self, end: v1::SnapshotEnd) -> Result<Vec<Effect>, Violation> {
        if self.staged.what == Staging::Batch {
            return Err(Violation::SnapshotInBatch);
        }
        let (epoch, by_digests) = match self.phase {
            Phase::Resuming { epoch, mode } => (epoch, mode == ResumeMode::Digests),
            Phase::Following { epoch } => (epoch, false),
            Phase::AwaitingWelcome => return Err(Violation::BeforeWelcome),
        };
        if end.resource_count != self.staged.resources {
            return Err(Violation::ResourceCount { counted: end.resource_count, staged: self.staged.resources });
        }
        if let Some((held_epoch, held)) = self.position
            && held_epoch == epoch
            && end.version < held
        {
            return Err(Violation::Backwards { sent: end.version, held });
        }
        // An empty list means all buckets. After a comparison of digests that found no difference
        // it has to mean none: the list of what differs is empty, and removing everything is the
        // one mistake that cannot be made good.
        let buckets = if end.buckets.is_empty() && !(by_digests && end.resource_count == 0) {
            Buckets::All
        } else {
            Buckets::Some(checked_buckets(&end.buckets)?)
        };
        check_membership(&buckets, &self.staged.changes)?;
        let mut staged = mem::take(&mut self.staged);
        let rejected = staged.rejections.iter().map(|rejection| rejection.resource.clone()).collect();
        staged.positions = end.positions;
        if matches!(self.phase, Phase::Resuming { .. }) {
            self.rejected.resumed();
        }
        self.phase = Phase::Following { epoch };
        self.needs_referable = true;
        if self.resumed == Resumed::AtSnapshotEnd {
            self.resumed = Resumed::At(end.version);
        }
        Ok(self.finish(epoch, end.version, staged, Some(Snapshot { buckets, rejected })))
    }

    fn on_node(&mut self, own_node: v1::OwnNode) -> Vec<Effect> {
        let version = self.position.map_or(0, |(_, version)| version);
        let v1::OwnNode { revision, node, position } = own_node;
        let Some(wire) = node else {
            let withdrawn = self.rejected.node_is_usable();
            let end = reject(v1::Nack { version, withdrawn, ..v1::Nack::default() });
            let unknown = Effect::Node(OwnNode { revision, node: None, position });
            return end.into_iter().chain([unknown]).collect();
        };
        let checked = node_from_wire(&wire).and_then(|node| {
            let is_ours = node.name.eq_ignore_ascii_case(&self.node_name);
            let rejection = || v1::Rejection {
                resource: format!("Node {}", node.name),
                field: "name".into(),
                reason: format!("this is the agent of node {}", self.node_name),
            };
            if is_ours { Ok(node) } else { Err(rejection()) }
        });
        let mut withdrawn = self.rejected.node_is_usable();
        let (rejections, node) = match checked {
            Ok(node) => (Vec::new(), Some(Effect::Node(OwnNode { revision, node: Some(node), position }))),
            Err(rejection) => (vec![rejection], None),
        };
        self.rejected.step(&rejections, &[], None);
        withdrawn.retain(|resource| !self.rejected.contains(resource));
        reject(v1::Nack { version, rejections, withdrawn }).into_iter().chain(node).collect()
    }

    fn stage(&mut self, what: Staging, wire: v1::Changes) -> Result<(), Violation> {
        let endpoints: usize = wire.endpoints.iter().map(|group| group.changed.len()).sum();
        let resources = wire.services.len() + wire.service_cidrs.len() + endpoints;
        // Whatever a snapshot carries was set off long ago.
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
        let withdrawn = self.rejected.step(&rejections, &changes, snapshot.as_ref());
        let nack = reject(v1::Nack { version, rejections, withdrawn });
        let has_rejections = self.rejected.has_resources();
        let step =
            Effect::Apply(StateUpdate { epoch, version, positions, changes, triggers, snapshot, has_rejections });
        nack.into_iter().chain([step]).chain(self.resumed_at(version)).collect()
    }
}

/// Tells of a `Nack` that says anything.
fn reject(nack: v1::Nack) -> Option<Effect> {
    (!nack.rejections.is_empty() || !nack.withdrawn.is_empty()).then_some(Effect::Reject(nack))
}

/// What set a service's endpoints off: once for each family that has changed ones. Removals do not
/// count, as with kube-proxy.
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
        Some(bucket) => Err(Violation::Bucket(bucket)),
        None => Ok(wire.iter().filter_map(|bucket| u16::try_from(*bucket).ok()).collect()),
    }
}

/// A resource outside the named buckets would stay for ever on one side only.
fn check_membership(buckets: &Buckets, changes: &[Change]) -> Result<(), Violation> {
    if *buckets == Buckets::All {
        return Ok(());
    }
    for change in changes {
        let (resource, bucket) = match change {
            Change::Service(service) => (format!("Service {}", service.key), digest::service_bucket(&service.key)),
            Change::Endpoint(key, _) => (format!("an endpoint of {key}"), digest::service_bucket(key)),
            Change::ServiceCidr(service_cidr) => {
                (format!("ServiceCIDR {}", service_cidr.name), digest::service_cidr_bucket(&service_cidr.name))
            }
            // Chunks with removals were refused.
            Change::RemoveService(_) | Change::RemoveEndpoint(..) | Change::RemoveServiceCidr(_) => continue,
        };
        if !buckets.contains(bucket) {
            return Err(Violation::ForeignBucket { resource, bucket });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
