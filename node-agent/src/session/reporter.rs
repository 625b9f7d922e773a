//! What the agent reports to the replica of one stream: status, ACKs, failures, rejections. No I/O.

use std::collections::BTreeMap;

use headgate_proto::v1;
use tokio::time::Instant;
use tracing::warn;

use super::{machine::Machine, outbox::Outbox};
use crate::progress::{Programmed, Progress};

/// See the module.
#[derive(Debug)]
pub(super) struct Reporter {
    pub(super) outbox: Outbox,
    /// As [`crate::state::AgentState::begin_stream`] counts.
    stream: u64,
    /// The epoch of the replica; `None` before `Welcome`.
    pub(super) epoch: Option<u64>,
    /// Version and node revision of the last ACK on this stream.
    acked: Option<(u64, u64)>,
    /// The replica was told of a failure, and no ACK has followed.
    has_failed: bool,
    /// Services that the kernel rejects, by name, as the replica was told.
    refused: BTreeMap<String, v1::Rejection>,
    /// The status that the replica was told.
    status: v1::AgentStatus,
}

impl Reporter {
    /// For the stream of this number; `Hello` tells the replica the status.
    pub(super) fn new(stream: u64, status: v1::AgentStatus) -> Self {
        Self {
            outbox: Outbox::default(),
            stream,
            epoch: None,
            acked: None,
            has_failed: false,
            refused: BTreeMap::new(),
            status,
        }
    }

    /// Queues resources of the stream that cannot be used, and those that can be used again.
    pub(super) fn reject(&mut self, mut nack: v1::Nack) {
        for v1::Rejection { resource, field, reason } in &nack.rejections {
            warn!(resource, field, reason, "a resource cannot be used; its last good value stays, if there was one");
        }
        // A value that can be used, and whose rules the kernel still rejects, stays rejected for
        // that reason.
        let still = nack.withdrawn.extract_if(.., |resource| self.refused.contains_key(resource));
        let still: Vec<_> = still.filter_map(|resource| self.refused.get(&resource).cloned()).collect();
        nack.rejections.extend(still);
        self.queue_nack(nack);
    }

    fn queue_nack(&mut self, nack: v1::Nack) {
        let dropped = self.outbox.nack(nack);
        if dropped > 0 {
            warn!(dropped, "more rejections than the replica takes; it is not told of these");
        }
    }

    /// Queues the services that the kernel began or ceased to reject.
    fn report_refused(&mut self, version: u64, refused: &[v1::Rejection], machine: &Machine) {
        if refused.is_empty() && self.refused.is_empty() {
            return;
        }
        let now: BTreeMap<String, v1::Rejection> =
            refused.iter().map(|rejection| (rejection.resource.clone(), rejection.clone())).collect();
        let is_new = |rejection: &&v1::Rejection| self.refused.get(&rejection.resource) != Some(*rejection);
        let rejections: Vec<_> = now.values().filter(is_new).cloned().collect();
        let is_over = |resource: &&String| !now.contains_key(*resource) && !machine.has_rejected(resource);
        let withdrawn: Vec<_> = self.refused.keys().filter(is_over).cloned().collect();
        self.refused = now;
        if !rejections.is_empty() || !withdrawn.is_empty() {
            self.queue_nack(v1::Nack { version, rejections, withdrawn });
        }
    }

    /// Queues the status if it changed, and the ACK or the failure if it is about a version of this
    /// replica.
    pub(super) fn report(&mut self, progress: &Progress, status: v1::AgentStatus, machine: &Machine) {
        if status != self.status {
            self.status = status;
            self.outbox.status(self.status.clone());
        }
        if let Some(failure) = &progress.failure
            && Some(failure.target.epoch) == self.epoch
        {
            self.has_failed = true;
            self.outbox.apply_failed(v1::ApplyFailed {
                version: failure.target.version,
                error: failure.error.clone(),
                attempts: failure.attempts,
            });
        }
        let Some(programmed) = &progress.programmed else { return };
        if Some(programmed.target.epoch) == self.epoch {
            self.report_refused(programmed.target.version, &progress.refused, machine);
            self.ack(programmed, progress.failure.is_some());
        }
    }

    fn ack(&mut self, programmed: &Programmed, is_failing: bool) {
        let target = programmed.target;
        let node_revision = if target.stream == self.stream { target.node_revision } else { 0 };
        let reached = (target.version, node_revision);
        // An acknowledged version may have failed when it was tried again: the replica waits for
        // another ACK.
        let has_recovered = self.has_failed && !is_failing;
        if self.acked == Some(reached) && !has_recovered {
            return;
        }
        self.has_failed &= !has_recovered;
        self.acked = Some(reached);
        let ack = v1::Ack {
            version: target.version,
            node_revision,
            apply_microseconds: u64::try_from(programmed.took.as_micros()).unwrap_or(u64::MAX),
            services_planned: programmed.services_planned,
            objects_written: programmed.objects_written,
            ..v1::Ack::default()
        };
        self.outbox.ack(ack, Instant::now());
    }
}
