//! Verifies the node on request, and describes what the agent holds, so that the control plane can
//! compare it (`discovery.proto`, rule 19). The reconcile loop reads the kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use headgate_core::{Family, State, digest::service_bucket, explain::Mode};
use headgate_oracle::Comparison;
use headgate_proto::{NodeView, digests_to_wire, v1, v1::node_answer};
use prost::Message as _;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout_at},
};

use super::{blocking, explain::Explainer};
use crate::{
    session::outbox::{NodeAnswer, drift_to_wire},
    state::{
        AgentState,
        progress::{ChangeTimes, Progress, Shadow, Verification},
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
        blocking(move || self.describe(run, &verification, &buckets)).await
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
        let last = move |state: &AgentState| match run {
            0 => state.request_verification(),
            _ => state.verifications_requested(),
        };
        let last = self.explainer.state.blocking(last).await;
        if run > last {
            return Err(format!("the agent has restarted and does not know verification {run}; verify again"));
        }
        Ok(Some(if run == 0 { last } else { run }))
    }

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
            shadow: verification.shadow.as_ref().map(|shadow| shadow_to_wire(shadow, &verification.comparison)),
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

fn shadow_to_wire(shadow: &Shadow, comparison: &Comparison) -> v1::Shadow {
    let mode = comparison.of_kube_proxy.map_or("an unknown mode", Mode::as_str);
    v1::Shadow {
        proxy: format!("kube-proxy ({mode})"),
        by_design: comparison.by_design.iter().take(MAX_SENTENCES).map(drift_to_wire).collect(),
        by_design_count: comparison.by_design_total,
        waiting: shadow.waiting,
        waiting_ms: u64::try_from(shadow.oldest.as_millis()).unwrap_or(u64::MAX),
        late: shadow.late,
        headgate: Some(times_to_wire(&shadow.ready)),
        other: Some(times_to_wire(&shadow.agreed)),
        resolution: Some(times_to_wire(&shadow.resolution)),
    }
}

fn times_to_wire(times: &ChangeTimes) -> v1::ChangeTimes {
    let [median_us, p99_us, longest_us] =
        [500, 990, 1000].map(|of| u64::try_from(times.quantile(of).as_micros()).unwrap_or(u64::MAX));
    v1::ChangeTimes { count: times.count, median_us, p99_us, longest_us }
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
    use headgate_core::NodeFacts;

    use super::*;
    use crate::{
        node_inputs::NodeInputs,
        session::outbox::PART_BYTES,
        state::progress::{Failure, Programmed, Target},
        testing::{service, snapshot},
    };

    #[tokio::test]
    async fn requests_pause_and_what_hinders_a_verification_is_named() {
        let state = Arc::new(AgentState::new("node-a"));
        state.apply(snapshot(1, vec![service("web", 80)]));
        state.backlog().succeeded(&[Family::V4]);
        let target = Target { epoch: 1, version: 1, stream: 1, node_revision: 0 };
        let programmed = Programmed { target, generation: 1, took: WAIT, services_planned: 1, objects_written: 1 };
        let status = v1::AgentStatus { backend: "nftables".into(), ..v1::AgentStatus::default() };
        let (progress, receiver) =
            watch::channel(Progress { status, programmed: Some(programmed), ..Progress::default() });
        let (_inputs, inputs) = watch::channel(NodeInputs::default());
        let shared = Arc::clone(&state);
        let explainer = Explainer { state: shared, inputs, masquerade_all: false, localhost_node_ports: true };
        let verifier = Verifier::new(explainer, receiver);
        // Publishes a verification that answers all requests so far.
        let verified = || {
            let verification = Verification {
                at: std::time::Instant::now(),
                request: state.request_verification(),
                target,
                comparison: Arc::new(Comparison { total: 3, ..Comparison::default() }),
                found: Some(Arc::default()),
                facts: Arc::new(NodeFacts::named("node-a")),
                cpu_time: None,
                error: None,
                shadow: None,
            };
            progress.send_modify(|progress| progress.verification = Some(Arc::new(verification)));
        };
        let answer = async |run| {
            let mut parts = verifier.clone().answer(v1::VerifyQuery { run, buckets: Vec::new() }).await?;
            let node_answer::Kind::Verification(part) = parts.remove(0) else { panic!("{parts:?}") };
            Ok::<_, String>(part)
        };
        verified();
        let run = answer(0).await.unwrap().run;
        verified();
        assert_eq!(answer(run).await.unwrap().drift_count, 3);
        assert!(answer(9).await.unwrap_err().contains("does not know verification 9"));
        // A verification that took long makes the next request wait.
        *verifier.next.lock().unwrap() = Instant::now() + 100 * WAIT;
        let paused = answer(0).await.unwrap();
        assert!(paused.is_running && paused.run == 0);
        *verifier.next.lock().unwrap() = Instant::now();
        let failure = Some(Failure { target, is_lost: false, error: "no permission".into(), attempts: 1 });
        progress.send_modify(|progress| progress.failure = failure);
        assert!(answer(0).await.unwrap_err().contains("no permission"));
        progress.send_modify(|progress| progress.programmed = None);
        assert!(answer(0).await.unwrap_err().contains("has not programmed"));
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
