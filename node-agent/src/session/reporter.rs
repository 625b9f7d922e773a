//! Decides what the agent reports on one stream: status, ACKs, failures and rejections. The module
//! does no I/O.

use std::collections::BTreeMap;

use headgate_proto::v1;
use tokio::time::Instant;
use tracing::warn;

use super::{machine::Machine, outbox::Outbox, verified::Reported};
use crate::progress::{Programmed, Progress};

/// The reports of one stream.
#[derive(Debug)]
pub(super) struct Reporter {
    pub(super) outbox: Outbox,
    /// The number of the stream, from [`crate::state::AgentState::begin_stream`].
    stream: u64,
    /// The epoch of the replica; `None` before `Welcome`.
    pub(super) epoch: Option<u64>,
    /// Version and node revision of the last ACK on this stream.
    acked: Option<(u64, u64)>,
    /// True if a failure was reported and no ACK has followed.
    has_failed: bool,
    /// The services that were reported as rejected by the kernel, by name.
    rejected_by_kernel: BTreeMap<String, v1::Rejection>,
    /// The status that was reported last.
    status: v1::AgentStatus,
    verified: Reported,
}

impl Reporter {
    /// Creates the reporter of the stream with this number. `Hello` has reported `status`.
    pub(super) fn new(stream: u64, status: v1::AgentStatus) -> Self {
        Self {
            outbox: Outbox::default(),
            stream,
            epoch: None,
            acked: None,
            has_failed: false,
            rejected_by_kernel: BTreeMap::new(),
            verified: Reported::in_hello(&status),
            status,
        }
    }

    /// Queues the names of received resources that the agent cannot use, and of resources that the
    /// agent can use again.
    pub(super) fn reject(&mut self, mut nack: v1::Nack) {
        for v1::Rejection { resource, field, reason } in &nack.rejections {
            warn!(resource, field, reason, "a resource cannot be used; its last good value stays, if there is one");
        }
        // A resource that the agent can use again may still be rejected by the kernel. In this
        // case, the agent reports the resource with the reason of the kernel.
        let rejected = &self.rejected_by_kernel;
        let still = nack.withdrawn.extract_if(.., |resource| rejected.contains_key(resource));
        let still: Vec<_> = still.filter_map(|resource| rejected.get(&resource).cloned()).collect();
        nack.rejections.extend(still);
        self.queue_nack(nack);
    }

    fn queue_nack(&mut self, nack: v1::Nack) {
        let dropped = self.outbox.nack(nack);
        if dropped > 0 {
            warn!(
                dropped,
                "too many rejections are waiting to be sent; the dropped rejections are not reported to the replica"
            );
        }
    }

    /// Queues the services that the kernel began or ceased to reject.
    fn report_rejected_by_kernel(&mut self, version: u64, rejected: &[v1::Rejection], machine: &Machine) {
        if rejected.is_empty() && self.rejected_by_kernel.is_empty() {
            return;
        }
        let now: BTreeMap<String, v1::Rejection> =
            rejected.iter().map(|rejection| (rejection.resource.clone(), rejection.clone())).collect();
        let before = &self.rejected_by_kernel;
        let is_new = |rejection: &&v1::Rejection| before.get(&rejection.resource) != Some(*rejection);
        let rejections: Vec<_> = now.values().filter(is_new).cloned().collect();
        let is_over = |resource: &&String| !now.contains_key(*resource) && !machine.has_rejected(resource);
        let withdrawn: Vec<_> = before.keys().filter(is_over).cloned().collect();
        self.rejected_by_kernel = now;
        if !rejections.is_empty() || !withdrawn.is_empty() {
            self.queue_nack(v1::Nack { version, rejections, withdrawn });
        }
    }

    /// Queues the status if it changed. Queues the ACK or the failure if it concerns a version of
    /// this replica.
    pub(super) fn report(&mut self, progress: &Progress, status: v1::AgentStatus, machine: &Machine) {
        let verification = progress.verification.as_ref().zip(status.verified.as_ref());
        let is_news = verification.is_some_and(|(verification, wire)| self.verified.is_news(verification.at, wire));
        let has_changed = (&status.backend, &status.degraded) != (&self.status.backend, &self.status.degraded);
        if has_changed || is_news {
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
            self.report_rejected_by_kernel(programmed.target.version, &progress.rejections, machine);
            self.ack(programmed, progress.failure.is_some());
        }
    }

    fn ack(&mut self, programmed: &Programmed, is_failing: bool) {
        let target = programmed.target;
        let node_revision = if target.stream == self.stream { target.node_revision } else { 0 };
        let reached = (target.version, node_revision);
        // A failure revokes the ACK of an acknowledged version. After the recovery, the replica
        // waits for another ACK of that version (`discovery.proto`, rule 7).
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
