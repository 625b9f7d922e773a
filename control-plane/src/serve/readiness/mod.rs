//! Ready everywhere: sets the condition of the readiness gate `headgate.io/programmed` once all
//! nodes use the endpoints of a pod, or after a bound (discovery.proto, section 20).
//!
//! Every replica treats the endpoints of a waiting pod as ready. Only the holder of the Lease
//! writes, and it only ever writes the status "True".

mod lease;

use std::{collections::HashMap, sync::Arc, time::Duration};

use headgate_core::{errors::chain, node_state::SourceState};
use headgate_proto::v1::question::Wanted;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, watch},
    task::AbortHandle,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use self::lease::Elector;
use super::{
    context::{Context, ReadinessSettings},
    everywhere::{self, Everywhere},
};
use crate::{
    objects::{GATE, PodId},
    source::{BackOff, SourceError, kubernetes_client},
    store::{Store, Topic, WaitingPod},
    transaction::GatedPod,
};

/// The longest time for one request to the API server.
const API_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum number of pods that are asked about at the same time. Other pods wait for their
/// turn, but not beyond their bound.
const MAX_ASKED: usize = 1_024;

/// The maximum number of requests to the API server at the same time.
const MAX_WRITES: usize = 16;

/// The shortest time between two looks at the store for one pod, and the longest one for a pod
/// without endpoints.
const PACE: Duration = Duration::from_millis(50);
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The maximum number of nodes that a condition names.
const MAX_NAMED: usize = 5;

/// The name that appears in `metadata.managedFields`.
const FIELD_MANAGER: &str = "headgate-control-plane";

/// Why a pod becomes ready.
#[derive(Debug)]
enum Verdict {
    /// All nodes use its endpoints.
    Programmed,
    /// Some nodes have not confirmed this within the bound, or never acknowledge.
    Incomplete(everywhere::Verdict),
    /// No Service had an endpoint of the pod within the bound.
    NoEndpoints,
}

impl Verdict {
    /// The reason in the condition.
    fn reason(&self) -> &'static str {
        match self {
            Self::Programmed => "Programmed",
            Self::Incomplete(_) => "TimedOut",
            Self::NoEndpoints => "NoEndpoints",
        }
    }

    /// The label `reason` of the metric.
    fn label(&self) -> &'static str {
        match self {
            Self::Programmed => "programmed",
            Self::Incomplete(_) => "timed_out",
            Self::NoEndpoints => "no_endpoints",
        }
    }

    fn message(&self, bound: Duration) -> String {
        let seconds = bound.as_secs_f64();
        match self {
            Self::Programmed => "all nodes send connections to this pod".into(),
            Self::NoEndpoints => {
                format!("no EndpointSlice had an endpoint of this pod for a Service with an address within {seconds} s")
            }
            Self::Incomplete(verdict) if verdict.is_final() => {
                let named: Vec<&str> = verdict.missing().take(MAX_NAMED).collect();
                let named = named.join(", ");
                format!(
                    "these nodes acknowledge nothing, so the pod does not wait for them: {named}; `headgatectl agents` shows why"
                )
            }
            Self::Incomplete(verdict) => {
                let named: Vec<&str> = verdict.missing().take(MAX_NAMED).collect();
                let more = verdict.missing().count() - named.len();
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                format!(
                    "these nodes have not confirmed within {seconds} s that they send connections to this pod: {}{more}; \
                     `headgatectl agents` shows why{}",
                    named.join(", "),
                    verdict.problems_text()
                )
            }
        }
    }
}

/// Sets the conditions while this replica holds the Lease.
pub(super) struct Readiness {
    context: Arc<Context>,
    everywhere: Arc<Everywhere>,
    client: Client,
    bound: Duration,
    held_until: watch::Receiver<Option<Instant>>,
    asking: Semaphore,
    writing: Semaphore,
}

/// The work for one pod. Dropping it ends the work.
struct Work {
    since: std::time::Instant,
    task: AbortHandle,
}

impl Drop for Work {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts the task that takes the Lease and the task that sets conditions.
///
/// # Errors
/// [`SourceError`], if the configuration of the API client cannot be used. A retry does not help.
pub(super) async fn start(
    context: Arc<Context>,
    everywhere: Arc<Everywhere>,
    settings: ReadinessSettings,
    shutdown: CancellationToken,
) -> Result<(), SourceError> {
    let client = kubernetes_client(settings.kubeconfig.as_deref()).await?;
    let identity = format!("{}_{:016x}", context.settings.replica_name, context.store.epoch());
    let elector = Elector::new(client.clone(), settings.lease, identity, Arc::clone(&context.metrics));
    let readiness = Arc::new(Readiness {
        context,
        everywhere,
        client,
        bound: settings.bound,
        held_until: elector.held_until(),
        asking: Semaphore::new(MAX_ASKED),
        writing: Semaphore::new(MAX_WRITES),
    });
    // A replica that has not listed its source knows no pods, so it leaves the Lease to others.
    let (mut source, stopping) = (readiness.store().watch_source(), shutdown.clone());
    tokio::spawn(async move {
        let listed = async { source.wait_for(|state| *state != SourceState::Unlisted).await.is_ok() };
        if stopping.run_until_cancelled(listed).await == Some(true) {
            elector.run(stopping).await;
        }
    });
    tokio::spawn(shutdown.run_until_cancelled_owned(readiness.run()));
    Ok(())
}

impl Readiness {
    /// Gives each waiting pod a task while this replica holds the Lease. Never returns.
    async fn run(self: Arc<Self>) {
        let (mut gates, mut held) = (self.store().watch_gates(), self.held_until.clone());
        let mut running: HashMap<PodId, Work> = HashMap::new();
        loop {
            gates.borrow_and_update();
            let is_holder = held.borrow_and_update().is_some();
            let mut waiting: HashMap<PodId, WaitingPod> = HashMap::new();
            if is_holder {
                waiting.extend(self.store().waiting_pods());
            }
            // A pod that waits again after its condition was set has a new beginning.
            running.retain(|pod, work| waiting.get(pod).is_some_and(|waiting| waiting.since == work.since));
            for (pod, waiting) in waiting {
                running.entry(pod).or_insert_with(|| {
                    let since = waiting.since;
                    Work { since, task: tokio::spawn(Arc::clone(&self).settle(pod, waiting)).abort_handle() }
                });
            }
            sleep(PACE).await;
            tokio::select! {
                Ok(()) = gates.changed() => {}
                Ok(()) = held.changed() => {}
            }
        }
    }

    fn store(&self) -> &Store {
        &self.context.store
    }

    fn is_holder(&self) -> bool {
        is_ahead(&self.held_until.borrow())
    }

    /// Waits until this replica may write. A replica that cannot renew the Lease for a moment keeps
    /// its tasks, and goes on with them after the renewal.
    async fn until_holder(&self) {
        let mut held = self.held_until.clone();
        if held.wait_for(is_ahead).await.is_err() {
            // The replica stops.
            std::future::pending::<()>().await;
        }
    }

    async fn settle(self: Arc<Self>, pod: PodId, WaitingPod { names, since }: WaitingPod) {
        let verdict = self.verdict(pod, Instant::from_std(since) + self.bound).await;
        if let Verdict::Incomplete(_) | Verdict::NoEndpoints = verdict {
            let message = verdict.message(self.bound);
            tracing::warn!(pod = %names, "a pod becomes ready: {message}");
        }
        self.write(pod, &names, &verdict, since).await;
    }

    /// Waits until all nodes use the endpoints of the pod, or until `limit`.
    async fn verdict(&self, pod: PodId, limit: Instant) -> Verdict {
        loop {
            let interest = self.store().interest([Topic::Pod(pod)]);
            let endpoints = self.store().served_endpoints(pod);
            if endpoints.is_empty() {
                if Instant::now() >= limit {
                    return Verdict::NoEndpoints;
                }
                tokio::select! {
                    () = interest.changed() => {}
                    // The Service of an endpoint may be added later.
                    () = sleep(LOOK_AGAIN) => {}
                }
                sleep_until((Instant::now() + PACE).min(limit)).await;
                continue;
            }
            let turn = timeout_at(limit, self.asking.acquire()).await;
            let wanted = endpoints.iter().map(|(key, address)| (key.clone(), Some(*address))).collect();
            let verdict = self.everywhere.until(Wanted::Usable, wanted, limit, |_| false).await;
            drop(turn);
            // Another Service may have got an endpoint of the pod meanwhile.
            if self.store().served_endpoints(pod) == endpoints || Instant::now() >= limit {
                let holds = verdict.holds();
                return if holds { Verdict::Programmed } else { Verdict::Incomplete(verdict) };
            }
        }
    }

    /// Sets the condition. Tries again after each failure: the caller ends this task when the pod
    /// waits no longer, or when the replica loses the Lease.
    async fn write(self: &Arc<Self>, pod: PodId, names: &Arc<GatedPod>, verdict: &Verdict, since: std::time::Instant) {
        // With another UID, the API server refuses the patch: it belongs to an older pod.
        let patch = json!({
            "metadata": {"uid": names.uid},
            "status": {"conditions": [{
                "type": GATE,
                "status": "True",
                "reason": verdict.reason(),
                "message": verdict.message(self.bound),
                "lastTransitionTime": Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            }]},
        });
        let (patch, label) = (Arc::new(patch), verdict.label());
        let mut back_off = BackOff::default();
        loop {
            self.until_holder().await;
            let turn = self.writing.acquire().await;
            if !self.store().is_waiting(pod) {
                return;
            }
            if !self.is_holder() {
                continue;
            }
            // The pod may stop to wait before the answer arrives, which ends this task. The answer
            // counts all the same.
            let (readiness, pod, patch) = (Arc::clone(self), Arc::clone(names), Arc::clone(&patch));
            let request = tokio::spawn(async move {
                let patched = readiness.patch(&pod, &patch).await;
                match patched {
                    Ok(()) => readiness.context.metrics.count_gate_set(label, since.elapsed()),
                    Err(_) => readiness.context.metrics.count_gate_failure("condition"),
                }
                patched
            });
            let answer = request.await;
            drop(turn);
            let (problem, retry_after) = match answer {
                Ok(Ok(())) => return,
                Ok(Err(problem)) => problem,
                Err(defect) => (defect.to_string(), None),
            };
            let pause = back_off.pause(retry_after);
            tracing::warn!(
                pod = %names,
                "cannot set the condition {GATE}: {problem}; the next attempt follows in {} ms; allow the verb patch on pods/status",
                pause.as_millis()
            );
            sleep(pause).await;
        }
    }

    /// Sends one patch. The error has the pause that the server asks for.
    async fn patch(&self, names: &GatedPod, patch: &Value) -> Result<(), (String, Option<Duration>)> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &names.namespace);
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let patched = timeout(API_TIMEOUT, api.patch_status(&names.name, &parameters, &Patch::Strategic(patch))).await;
        match patched {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err((chain(&error), retry_after(&error))),
            Err(_) => Err((format!("no answer within {} seconds", API_TIMEOUT.as_secs()), None)),
        }
    }
}

fn is_ahead(until: &Option<Instant>) -> bool {
    until.is_some_and(|until| until > Instant::now())
}

fn retry_after(error: &kube::Error) -> Option<Duration> {
    let kube::Error::Api(status) = error else { return None };
    let seconds = status.details.as_ref()?.retry_after_seconds;
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}
