//! Ready everywhere: sets the condition of the readiness gate `headgate.io/programmed` once all
//! nodes use the endpoints of a pod, or after a bound (discovery.proto, section 20).
//!
//! Every replica treats the endpoints of a waiting pod as ready. The replica with the lowest epoch
//! writes; the others follow after pauses, in case it cannot. A second write changes nothing,
//! because a replica only ever writes the status "True".

use std::{collections::HashMap, sync::Arc, time::Duration};

use headgate_core::errors::chain;
use headgate_proto::v1::question::Wanted;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::Semaphore,
    task::AbortHandle,
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use super::{
    context::{Context, ReadinessSettings},
    everywhere::{Everywhere, Verdict},
};
use crate::{
    model::GatedPod,
    objects::{GATE, PodId},
    source::{BackOff, SourceError, kubernetes_client},
    store::{PACE, Store, Topic, WaitingPod},
};

/// How much later than the replica before it a replica asks, and again how much later it writes.
const TURN: Duration = Duration::from_secs(2);

const API_TIMEOUT: Duration = Duration::from_secs(5);

/// The most pods that are asked about at a time. Others wait, within their bound.
const MAX_ASKED: usize = 1_024;

/// The maximum number of requests to the API server at the same time.
const MAX_WRITES: usize = 16;

/// The longest time between two looks at a pod without endpoints.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The maximum number of nodes that a condition names.
const MAX_NAMED: usize = 5;

/// The name that appears in `metadata.managedFields`.
const FIELD_MANAGER: &str = "headgate-control-plane";

/// Sets the conditions.
pub(super) struct Readiness {
    context: Arc<Context>,
    everywhere: Arc<Everywhere>,
    client: Client,
    bound: Duration,
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

/// Starts the task that sets conditions. A retry after [`SourceError`] does not help.
pub(super) async fn start(
    context: Arc<Context>,
    everywhere: Arc<Everywhere>,
    ReadinessSettings { bound, kubeconfig, client }: ReadinessSettings,
    shutdown: CancellationToken,
) -> Result<(), SourceError> {
    let client = match client {
        Some(client) => client,
        None => kubernetes_client(kubeconfig.as_deref()).await?,
    };
    let (asking, writing) = (Semaphore::new(MAX_ASKED), Semaphore::new(MAX_WRITES));
    let readiness = Arc::new(Readiness { context, everywhere, client, bound, asking, writing });
    tokio::spawn(shutdown.run_until_cancelled_owned(readiness.run()));
    Ok(())
}

impl Readiness {
    /// Gives each waiting pod a task. Returns when the store is gone.
    async fn run(self: Arc<Self>) {
        let mut gates = self.store().watch_gates();
        let mut running: HashMap<PodId, Work> = HashMap::new();
        loop {
            gates.borrow_and_update();
            let waiting: HashMap<PodId, WaitingPod> = self.store().waiting_pods().into_iter().collect();
            // A pod that waits again after its condition was set has a new beginning.
            running.retain(|pod, work| waiting.get(pod).is_some_and(|waiting| waiting.since == work.since));
            for (pod, waiting) in waiting {
                running.entry(pod).or_insert_with(|| {
                    let since = waiting.since;
                    Work { since, task: tokio::spawn(Arc::clone(&self).settle(pod, waiting)).abort_handle() }
                });
            }
            sleep(PACE).await;
            if gates.changed().await.is_err() {
                return;
            }
        }
    }

    fn store(&self) -> &Store {
        &self.context.store
    }

    /// Gives the replicas with lower epochs time to set the condition, which ends this task.
    async fn turn(&self) {
        sleep(TURN * self.everywhere.rank()).await;
    }

    async fn settle(self: Arc<Self>, pod: PodId, WaitingPod { names, since }: WaitingPod) {
        self.turn().await;
        // A question needs some time, also if the bound has passed during the turn.
        let limit = (Instant::from_std(since) + self.bound).max(Instant::now() + LOOK_AGAIN);
        let verdict = self.verdict(pod, limit).await;
        self.turn().await;
        let seconds = self.bound.as_secs_f64();
        let (reason, label, message) = match verdict {
            None => {
                let endpoint = "an endpoint of this pod for a Service with an address";
                ("NoEndpoints", "no_endpoints", format!("no EndpointSlice had {endpoint} within {seconds} s"))
            }
            Some(verdict) if verdict.holds() => {
                let message = match (verdict.confirmed(), verdict.standby.len()) {
                    (_, 0) => "all nodes send connections to this pod".to_owned(),
                    (nodes, standby) => {
                        format!("{nodes} nodes send connections to this pod; not known on {standby} in standby")
                    }
                };
                ("Programmed", "programmed", message)
            }
            Some(verdict) => {
                let why = verdict.why("that they send connections to this pod", MAX_NAMED);
                ("TimedOut", "timed_out", format!("within {seconds} s, {why}"))
            }
        };
        if reason != "Programmed" {
            tracing::warn!(pod = %names, "a pod becomes ready: {message}");
        }
        // With another UID, the API server refuses the patch: it belongs to an older pod.
        let patch = json!({
            "metadata": {"uid": names.uid},
            "status": {"conditions": [{
                "type": GATE,
                "status": "True",
                "reason": reason,
                "message": message,
                "lastTransitionTime": Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            }]},
        });
        self.write(pod, names, Arc::new(patch), label, since).await;
    }

    /// Waits until all nodes use the pod's endpoints, or until `limit`; `None` without endpoints.
    async fn verdict(&self, pod: PodId, limit: Instant) -> Option<Verdict> {
        loop {
            let interest = self.store().interest([Topic::Pod(pod)]);
            let endpoints = self.store().served_endpoints(pod);
            if endpoints.is_empty() {
                if Instant::now() >= limit {
                    return None;
                }
                // The Service of an endpoint may be added later.
                interest.changed_until(limit.min(Instant::now() + LOOK_AGAIN)).await;
                continue;
            }
            let turn = timeout_at(limit, self.asking.acquire()).await;
            let wanted = endpoints.iter().map(|(key, address)| (key.clone(), Some(*address))).collect();
            let verdict = self.everywhere.until(Wanted::Usable, wanted, limit, |_| false).await;
            drop(turn);
            // Another Service may have got an endpoint of the pod meanwhile.
            if self.store().served_endpoints(pod) == endpoints || Instant::now() >= limit {
                return Some(verdict);
            }
        }
    }

    /// Sets the condition, again after failures: the caller ends this task in time.
    async fn write(
        self: &Arc<Self>,
        pod: PodId,
        names: Arc<GatedPod>,
        patch: Arc<Value>,
        label: &'static str,
        since: std::time::Instant,
    ) {
        let mut back_off = BackOff::default();
        loop {
            let turn = self.writing.acquire().await;
            if !self.store().is_waiting(pod) {
                return;
            }
            // The answer counts even if the pod stops to wait, which ends this task.
            let (readiness, pod, patch) = (Arc::clone(self), Arc::clone(&names), Arc::clone(&patch));
            let request = tokio::spawn(async move {
                let patched = readiness.patch(&pod, &patch).await;
                match patched {
                    Ok(()) => readiness.context.metrics.count_gate_set(label, since.elapsed()),
                    Err(_) => {
                        readiness.context.metrics.gate_failures.inc();
                    }
                }
                patched
            });
            let answer = request.await.unwrap_or_else(|defect| Err((defect.to_string(), None)));
            drop(turn);
            let Err((problem, retry_after)) = answer else { return };
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

fn retry_after(error: &kube::Error) -> Option<Duration> {
    let kube::Error::Api(status) = error else { return None };
    let seconds = status.details.as_ref()?.retry_after_seconds;
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}
