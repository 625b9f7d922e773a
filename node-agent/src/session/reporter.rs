//! Decides what the agent reports on one stream: status, ACKs, failures and rejections. The module
//! does no I/O.

use std::collections::BTreeMap;

use headgate_proto::v1;
use tokio::time::Instant;
use tracing::warn;

use super::{machine::Machine, outbox::Outbox, verified::Reported};
use crate::progress::{Programmed, Progress};

/// The reports of one stream.
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
    pub(super) fn new(stream: u64, status: v1::AgentStatus, outbox: Outbox) -> Self {
        Self {
            outbox,
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
    pub(super) fn reject(&mut self, mut nack: v1::Nack, machine: &Machine) {
        for v1::Rejection { resource, field, reason } in &nack.rejections {
            warn!(resource, field, reason, "a resource cannot be used; its last good value stays, if there is one");
        }
        // A resource that the agent can use again may still be rejected by the kernel. In this
        // case, the agent reports the resource with the reason of the kernel.
        let rejected = &self.rejected_by_kernel;
        let still = nack.withdrawn.extract_if(.., |resource| rejected.contains_key(resource));
        let still: Vec<_> = still.filter_map(|resource| rejected.get(&resource).cloned()).collect();
        nack.rejections.extend(still);
        self.queue_nack(nack, machine);
    }

    fn queue_nack(&mut self, nack: v1::Nack, machine: &Machine) {
        let only_kernel = self.rejected_by_kernel.keys().filter(|resource| !machine.has_rejected(resource));
        self.outbox.set_in_force(machine.rejections_in_force() + only_kernel.count() as u64);
        let dropped = self.outbox.nack(nack);
        if dropped > 0 {
            warn!(
                dropped,
                "too many rejections are waiting to be sent; the replica learns only the number of the dropped rejections"
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
            self.queue_nack(v1::Nack { version, rejections, withdrawn, ..v1::Nack::default() }, machine);
        }
    }

    /// Queues the status if it changed, the last failure, and, once the agent follows the stream,
    /// the ACK.
    pub(super) fn report(&mut self, progress: &Progress, status: v1::AgentStatus, machine: &Machine) {
        let verification = progress.verification.as_ref().zip(status.verified.as_ref());
        let is_news = verification.is_some_and(|(verification, wire)| self.verified.is_news(verification.at, wire));
        let has_changed = (&status.backend, &status.degraded) != (&self.status.backend, &self.status.degraded);
        if has_changed || is_news {
            self.status = status;
            self.outbox.status(self.status.clone());
        }
        let Some(epoch) = self.epoch else { return };
        let programmed = progress.programmed.as_ref().filter(|programmed| programmed.target.epoch == epoch);
        let failed = progress.failure.as_ref().map(|failure| {
            // A replica revokes ACKs of this version and of later ones. A failure to program the
            // state of another replica revokes all, because the kernel may hold a part of it.
            let version = if failure.target.epoch == epoch { failure.target.version } else { 0 };
            let programmed = programmed.filter(|_| failure.is_lost).map(|programmed| programmed.target.version);
            let version = programmed.map_or(version, |programmed| version.min(programmed));
            v1::ApplyFailed { version, error: failure.error.clone(), attempts: failure.attempts }
        });
        if let Some(failed) = &failed {
            self.has_failed = true;
            self.outbox.apply_failed(failed.clone());
        }
        if let Some(programmed) = programmed.filter(|_| machine.is_following()) {
            self.report_rejected_by_kernel(programmed.target.version, &progress.rejections, machine);
            if failed.as_ref().is_none_or(|failed| programmed.target.version < failed.version) {
                self.ack(programmed, failed.is_some());
            }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{sync::Arc, time::Duration};

    use headgate_proto::v1::{agent_message::Body, server_message, welcome::ResumeMode};

    use super::*;
    use crate::{
        progress::{Failure, Target},
        session::{answers::Answers, machine::Effect},
        testing::{Replica, batch, key, service},
    };

    /// An agent that follows a replica of epoch 7 from version 5.
    fn following() -> (Reporter, Machine) {
        let mut machine = Machine::new("node-1".into());
        machine.begin(Some((7, 5)));
        machine.on_message(Replica::new(7, 2).welcome(ResumeMode::Log)).unwrap();
        let outbox = Outbox::new(Arc::default(), Answers::new(None));
        let mut reporter = Reporter::new(1, v1::AgentStatus::default(), outbox);
        reporter.epoch = Some(7);
        (reporter, machine)
    }

    fn target(epoch: u64, version: u64) -> Target {
        Target { epoch, version, stream: 1, node_revision: 1 }
    }

    fn programmed(version: u64) -> Progress {
        let (took, target) = (Duration::ZERO, target(7, version));
        let programmed = Programmed { target, generation: 1, took, services_planned: 1, objects_written: 1 };
        Progress { programmed: Some(programmed), ..Progress::default() }
    }

    impl Reporter {
        /// The messages after a report of this progress.
        fn messages(&mut self, progress: &Progress, machine: &Machine) -> Vec<Body> {
            self.report(progress, v1::AgentStatus::default(), machine);
            std::iter::from_fn(|| self.outbox.pop_at_last()).filter_map(|message| message.body).collect()
        }
    }

    #[test]
    fn while_the_kernel_may_lack_the_acknowledged_version_there_is_no_ack() {
        // The epoch and the version of the failed attempt, whether the kernel lost rules, and what
        // a new stream hears.
        let cases = [
            ((7, 6), false, [Some(6), None], [None, Some(5)]),
            ((7, 6), true, [Some(5), None], [None, None]),
            ((7, 5), true, [Some(5), None], [None, None]),
            ((8, 9), false, [Some(0), None], [None, None]),
        ];
        for ((epoch, version), is_lost, failed, acked) in cases {
            let (mut reporter, machine) = following();
            let failure = Failure { target: target(epoch, version), is_lost, error: "locked".into(), attempts: 1 };
            let failing = Progress { failure: Some(failure), ..programmed(5) };
            let messages = reporter.messages(&failing, &machine);
            for index in 0..2 {
                match messages.get(index) {
                    Some(Body::ApplyFailed(message)) => assert_eq!(Some(message.version), failed[index]),
                    Some(Body::Ack(message)) => assert_eq!(Some(message.version), acked[index]),
                    None => assert_eq!((failed[index], acked[index]), (None, None), "{epoch} {version} {is_lost}"),
                    other => panic!("{other:?}"),
                }
            }
            let messages = reporter.messages(&programmed(5), &machine);
            assert!(matches!(&messages[..], [Body::Ack(message)] if message.version == 5), "{messages:?}");
        }
    }

    #[test]
    fn a_resource_that_agent_and_kernel_reject_counts_once() {
        let (mut reporter, mut machine) = following();
        let name = |name: &str| format!("Service {}", key(name));
        let rejection = |resource: String| v1::Rejection { resource, ..v1::Rejection::default() };
        let rejections = [rejection(name("api")), rejection(name("web"))];
        let rejecting = |rejections: &[v1::Rejection]| Progress { rejections: rejections.into(), ..programmed(5) };
        let nacks = |reporter: &mut Reporter, progress: &Progress, machine: &Machine| {
            let nack = |body| match body {
                Body::Nack(nack) => Some((nack.rejections.len(), nack.withdrawn.len(), nack.in_force)),
                _ => None,
            };
            reporter.messages(progress, machine).into_iter().find_map(nack)
        };
        assert_eq!(nacks(&mut reporter, &rejecting(&rejections), &machine), Some((2, 0, 2)));
        let mut unusable = batch(5, 6, &[service("web", 80), service("db", 80)]);
        let Some(server_message::Body::Batch(wire)) = &mut unusable.body else { unreachable!() };
        wire.changes.as_mut().unwrap().services.iter_mut().for_each(|service| service.ports.clear());
        let apply = |reporter: &mut Reporter, machine: &mut Machine, message| {
            for effect in machine.on_message(message).unwrap() {
                if let Effect::Reject(nack) = effect {
                    reporter.reject(nack, machine);
                }
            }
        };
        apply(&mut reporter, &mut machine, unusable);
        assert_eq!(nacks(&mut reporter, &rejecting(&rejections), &machine), Some((2, 0, 3)), "api, db, web");
        // The kernel accepts both. The agent still rejects one of them.
        assert_eq!(nacks(&mut reporter, &rejecting(&[]), &machine), Some((0, 1, 2)));
        apply(&mut reporter, &mut machine, batch(6, 7, &[service("web", 80), service("db", 80)]));
        assert_eq!(nacks(&mut reporter, &rejecting(&[]), &machine), Some((0, 2, 0)));
    }
}
