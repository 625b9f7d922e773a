//! Verifies the node on request, and describes what the agent holds, so that the control plane can
//! compare it (`discovery.proto`, rule 19). The reconcile loop reads the kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use headgate_core::{Family, State, digest::service_bucket};
use headgate_proto::{NodeView, digests_to_wire, v1, v1::node_answer};
use prost::Message as _;
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, sleep_until, timeout_at},
};

use super::explain::Explainer;
use crate::{
    session::outbox::{NodeAnswer, drift_to_wire},
    state::{
        AgentState,
        progress::{Progress, Verification},
    },
};

/// How long an answer waits for the end of a pause and of the verification.
const WAIT: Duration = Duration::from_secs(2);
/// Shortest pause between two requested verifications. The pause is at least as long as the
/// processor time of the verification, so that requests use at most half of a core.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of buckets that an answer describes.
const MAX_BUCKETS: usize = 64;
/// Maximum size of the description of Services.
const MAX_DESCRIPTION_BYTES: usize = 512 << 10;
/// Maximum number of differences, and of sentences about what is not verified.
const MAX_SENTENCES: usize = 100;

/// Answers queries that verify the node.
#[derive(Debug, Clone)]
pub(super) struct Verifier {
    explainer: Explainer,
    progress: watch::Receiver<Progress>,
    /// When the next verification may be requested.
    next: Arc<Mutex<Instant>>,
}

impl Verifier {
    pub(super) fn new(explainer: Explainer, progress: watch::Receiver<Progress>) -> Self {
        Self { explainer, progress, next: Arc::new(Mutex::new(Instant::now())) }
    }

    /// Answers a query.
    pub(super) async fn answer(self, query: v1::VerifyQuery) -> NodeAnswer {
        let state = &self.explainer.state;
        if state.is_unconfirmed() || self.progress.borrow().programmed.is_none() {
            return Err("the agent has not programmed a state of the control plane yet; ask again".to_owned());
        }
        let deadline = Instant::now() + WAIT;
        let Some(run) = self.begin(query.run, deadline).await? else { return Ok(running(0)) };
        let Some(verification) = self.ended(run, deadline).await? else { return Ok(running(run)) };
        let buckets: BTreeSet<u16> =
            query.buckets.iter().take(MAX_BUCKETS).filter_map(|bucket| u16::try_from(*bucket).ok()).collect();
        let describe = move || self.describe(run, &verification, &buckets);
        spawn_blocking(describe).await.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// Requests a verification, unless the query names one. Returns its number, or `None` while the
    /// pause after the last verification lasts.
    async fn begin(&self, run: u64, deadline: Instant) -> Result<Option<u64>, String> {
        if run == 0 {
            let next = *self.next.lock().unwrap_or_else(PoisonError::into_inner);
            if next > deadline {
                return Ok(None);
            }
            sleep_until(next).await;
        }
        let state = Arc::clone(&self.explainer.state);
        let last = move || if run == 0 { state.request_verification() } else { state.verifications_requested() };
        let last = spawn_blocking(last).await.map_err(|error| error.to_string())?;
        if run > last {
            return Err(format!("the agent has restarted and does not know verification {run}; verify again"));
        }
        Ok(Some(if run == 0 { last } else { run }))
    }

    /// Waits for the end of a verification. Returns `None` if it has not ended in time.
    async fn ended(&self, run: u64, deadline: Instant) -> Result<Option<Arc<Verification>>, String> {
        let mut progress = self.progress.clone();
        let is_answered = |progress: &Progress| progress.verification.as_ref().is_some_and(|last| last.request >= run);
        if let Ok(Ok(progress)) = timeout_at(deadline, progress.wait_for(is_answered)).await {
            return Ok(progress.verification.clone());
        }
        match &self.progress.borrow().failure {
            Some(failure) => Err(format!(
                "the last sync failed, so the kernel may hold older rules; read the log of the agent: {}",
                failure.error
            )),
            None => Ok(None),
        }
    }

    fn describe(&self, run: u64, verification: &Verification, buckets: &BTreeSet<u16>) -> NodeAnswer {
        let pause = verification.cpu_time.unwrap_or_default().max(MIN_PAUSE);
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + pause;
        let progress = self.progress.borrow().clone();
        let settings = self.explainer.settings(&progress.status.backend)?;
        let families = self.explainer.state.backlog().counts().synced_at;
        let families = Family::BOTH.into_iter().zip(families).filter_map(|(family, at)| at.map(|_| family)).collect();
        let view = NodeView { facts: (*verification.facts).clone(), settings, families };
        let state = &self.explainer.state;
        let ((epoch, version), resources) = state.renewed_digests();
        let held = held_parts(held(state, &view, buckets));
        let services = state.with_state(State::service_count);
        if [epoch, state.position().unwrap_or_default().0].iter().any(|epoch| *epoch != verification.target.epoch) {
            return Err("the agent has just moved to another replica; ask again".to_owned());
        }
        let (unverified, drift) = (unverified(verification, &progress), &verification.comparison.differences);
        let first = v1::Verification {
            run,
            epoch,
            version: verification.target.version,
            resources: Some(digests_to_wire(&resources)),
            resources_version: version,
            view: Some(v1::NodeView { own_node: Some(state.own_node()), ..view.to_wire() }),
            drift: drift.iter().take(MAX_SENTENCES).map(drift_to_wire).collect(),
            drift_count: verification.comparison.total,
            unverified,
            services: services as u64,
            frontends: verification.comparison.frontends,
            ..v1::Verification::default()
        };
        let mut parts = vec![first];
        parts.extend(
            verification
                .found
                .as_deref()
                .map(|found| v1::Verification { table: Some(digests_to_wire(found)), ..v1::Verification::default() }),
        );
        parts.extend(held);
        Ok(parts.into_iter().map(node_answer::Kind::Verification).collect())
    }
}

/// The Services of these buckets. Holds the lock for one Service at a time.
fn held(state: &AgentState, view: &NodeView, buckets: &BTreeSet<u16>) -> BTreeMap<u16, Vec<v1::HeldService>> {
    let mut held: BTreeMap<u16, Vec<v1::HeldService>> = buckets.iter().map(|bucket| (*bucket, Vec::new())).collect();
    for key in if buckets.is_empty() { Vec::new() } else { state.keys() } {
        let bucket = service_bucket(&key);
        if let Some(services) = held.get_mut(&bucket) {
            let digests = state.with_state(|state| state.entry(&key).map(|_| view.digests_of(state, &key, bucket)));
            services.extend(digests.map(|digests| digests.to_wire(&key)));
        }
    }
    held
}

fn running(run: u64) -> Vec<node_answer::Kind> {
    let running = v1::Verification { run, is_running: true, ..v1::Verification::default() };
    vec![node_answer::Kind::Verification(running)]
}

/// What the agent could not verify, as sentences.
fn unverified(verification: &Verification, progress: &Progress) -> Vec<String> {
    let error = verification.error.iter().map(|error| format!("the kernel cannot be read; verify again: {error}"));
    let not_understood = verification.comparison.not_understood.iter().cloned();
    let rejected = progress.rejections.iter().map(|v1::Rejection { resource, reason, .. }| {
        format!("{resource}: the kernel rejects its rules, so its last good rules are in force: {reason}")
    });
    error.chain(not_understood).chain(rejected).take(MAX_SENTENCES).collect()
}

/// The Services in parts, bucket by bucket, until the description is too large.
fn held_parts(held: BTreeMap<u16, Vec<v1::HeldService>>) -> Vec<v1::Verification> {
    let mut bytes = 0;
    let parts = held.into_iter().map(|(bucket, held)| v1::Verification {
        buckets: vec![bucket.into()],
        held,
        ..v1::Verification::default()
    });
    let fits = |part: &v1::Verification| {
        bytes += part.encoded_len();
        bytes <= MAX_DESCRIPTION_BYTES
    };
    parts.take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{NodeFacts, digest::Digests};
    use headgate_oracle::Comparison;
    use headgate_proto::{ServiceDigests, digests_from_wire};

    use super::*;
    use crate::{
        node_inputs::NodeInputs,
        session::outbox::PART_BYTES,
        state::progress::{Failure, Programmed, Target},
        testing::{endpoint, key, service, snapshot, update},
    };

    /// An agent whose kernel has version 1 of two Services, and what its reconcile loop publishes.
    struct Rig {
        verifier: Verifier,
        progress: watch::Sender<Progress>,
        state: Arc<AgentState>,
        _inputs: watch::Sender<NodeInputs>,
    }

    impl Rig {
        fn new() -> Self {
            let state = Arc::new(AgentState::new("node-a"));
            let changes = vec![service("web", 80), endpoint("web", 1, 8080), service("api", 80)];
            state.apply(snapshot(1, changes));
            state.backlog().succeeded(&[Family::V4]);
            let target = Target { epoch: 1, version: 1, stream: 1, node_revision: 0 };
            let programmed = Programmed { target, generation: 1, took: WAIT, services_planned: 2, objects_written: 2 };
            let status = v1::AgentStatus { backend: "nftables".into(), ..v1::AgentStatus::default() };
            let (progress, receiver) =
                watch::channel(Progress { status, programmed: Some(programmed), ..Progress::default() });
            let (inputs, inputs_receiver) = watch::channel(NodeInputs::default());
            let explainer = Explainer {
                state: Arc::clone(&state),
                inputs: inputs_receiver,
                masquerade_all: false,
                localhost_node_ports: true,
            };
            Self { verifier: Verifier::new(explainer, receiver), progress, state, _inputs: inputs }
        }

        /// Publishes a verification that answers all requests so far.
        fn verified(&self, total: u64) {
            let request = self.state.request_verification();
            let verification = Verification {
                at: std::time::Instant::now(),
                request,
                target: Target { epoch: 1, version: 1, stream: 1, node_revision: 0 },
                comparison: Arc::new(Comparison { frontends: 2, total, ..Comparison::default() }),
                found: Some(Arc::default()),
                facts: Arc::new(NodeFacts { zone: Some("at-the-dump".into()), ..NodeFacts::named("node-a") }),
                cpu_time: None,
                error: None,
            };
            self.progress.send_modify(|progress| progress.verification = Some(Arc::new(verification)));
        }

        async fn answer(&self, run: u64, buckets: Vec<u32>) -> Result<v1::Verification, String> {
            let parts = self.verifier.clone().answer(v1::VerifyQuery { run, buckets }).await?;
            let mut answer = v1::Verification::default();
            for part in parts {
                let node_answer::Kind::Verification(part) = part else { panic!("not a verification: {part:?}") };
                answer.merge(part.encode_to_vec().as_slice()).unwrap();
            }
            Ok(answer)
        }
    }

    #[tokio::test]
    async fn an_answer_describes_the_verification_and_what_the_agent_holds() {
        let rig = Rig::new();
        // The loop has not answered yet.
        let waiting = rig.answer(0, Vec::new()).await.unwrap();
        assert!(waiting.is_running && waiting.run == 1 && waiting.resources.is_none(), "{waiting:?}");
        rig.verified(0);
        // The agent holds a newer version than the one that was verified.
        rig.state.apply(update(2, vec![endpoint("web", 2, 8080)]));
        let bucket = service_bucket(&key("web"));
        let answer = rig.answer(waiting.run, vec![bucket.into()]).await.unwrap();
        assert_eq!((answer.run, answer.epoch, answer.version, answer.resources_version), (1, 1, 1, 2));
        assert_eq!((answer.services, answer.frontends, answer.drift_count), (2, 2, 0));
        let digests = rig.state.with_state(|state| state.digests().clone());
        assert_eq!(digests_from_wire(answer.resources.as_ref().unwrap()), Some(digests));
        assert_eq!(digests_from_wire(answer.table.as_ref().unwrap()), Some(Digests::default()));
        let view = NodeView::from_wire("node-a", answer.view.as_ref().unwrap()).unwrap();
        assert_eq!((view.families, view.facts.zone.as_deref()), ([Family::V4].into(), Some("at-the-dump")));
        let unknown = rig.answer(9, Vec::new()).await.unwrap_err();
        assert!(unknown.contains("does not know verification 9"), "{unknown}");
        assert_eq!(view.settings.mode.as_str(), "nftables");
        assert_eq!(answer.buckets, [u32::from(bucket)]);
        let held: Vec<_> = answer.held.iter().filter_map(ServiceDigests::from_wire).collect();
        let (_, digests) = held.iter().find(|(held, _)| *held == key("web")).unwrap();
        assert_eq!((digests.resources.count, digests.table.count), (3, 1));
    }

    #[tokio::test]
    async fn requests_pause_and_what_hinders_a_verification_is_named() {
        let rig = Rig::new();
        rig.verified(3);
        let run = rig.answer(0, Vec::new()).await.unwrap().run;
        rig.verified(3);
        assert_eq!(rig.answer(run, Vec::new()).await.unwrap().drift_count, 3);
        // A verification that took long makes the next request wait.
        *rig.verifier.next.lock().unwrap() = Instant::now() + 2 * WAIT;
        let paused = rig.answer(0, Vec::new()).await.unwrap();
        assert!(paused.is_running && paused.run == 0);
        *rig.verifier.next.lock().unwrap() = Instant::now();
        let target = Target { epoch: 1, version: 2, stream: 1, node_revision: 0 };
        let failure = Some(Failure { target, is_lost: false, error: "no permission".into(), attempts: 1 });
        rig.progress.send_modify(|progress| progress.failure = failure);
        assert!(rig.answer(0, Vec::new()).await.unwrap_err().contains("no permission"));
        rig.progress.send_modify(|progress| progress.programmed = None);
        assert!(rig.answer(0, Vec::new()).await.unwrap_err().contains("has not programmed"));
    }

    #[test]
    fn a_description_has_whole_buckets_in_parts_of_bounded_size() {
        let service = |number: usize| v1::HeldService {
            service: Some(v1::ServiceKey { namespace: "ns".into(), name: format!("service-{number}") }),
            sum: vec![1; 16].into(),
            table_sum: vec![1; 16].into(),
            ..v1::HeldService::default()
        };
        let described = |count: usize| {
            let of_bucket = |bucket: u16| (usize::from(bucket)..count).step_by(64).map(service).collect();
            let parts = held_parts((0..64).map(|bucket| (bucket, of_bucket(bucket))).collect());
            let names: BTreeSet<String> = parts
                .iter()
                .flat_map(|part| &part.held)
                .filter_map(|held| held.service.as_ref())
                .map(|key| key.name.clone())
                .collect();
            let bytes = parts.iter().map(v1::Verification::encoded_len).max().unwrap_or_default();
            (parts.iter().flat_map(|part| part.buckets.clone()).collect::<Vec<_>>(), names.len(), bytes)
        };
        let (described_buckets, names, bytes) = described(640);
        assert_eq!((described_buckets, names), ((0..64).collect(), 640));
        assert!(bytes < 2 * PART_BYTES, "{bytes}");
        // Too many Services: only the first buckets are described, and each of them in full.
        let (described_buckets, names, _) = described(64 * 1_000);
        assert!(!described_buckets.is_empty() && described_buckets.len() < 64);
        assert_eq!(names, described_buckets.len() * 1_000);
    }
}
