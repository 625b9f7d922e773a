//! The drain barrier: says when no node sends new connections to a pod that stops
//! (discovery.proto, section 18).

use std::{net::IpAddr, sync::Arc, time::Duration};

use headgate_core::{ServiceKey, address_from_bytes, dns_name::check_subdomain};
use headgate_proto::v1::{self, barrier_answer::Result as Outcome, question::Wanted};
use prost::Message as _;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tonic::Status;

use super::{
    everywhere::{Everywhere, HURRY, Verdict, last_of},
    fleet::{Agent, End, Fleet, MAX_OPEN, clip},
};
use crate::{
    objects::PodId,
    store::{Last, NoPod, PACE, PodEndpoints, PodName, Topic},
};

/// The longest wait for an answer.
const MAX_TIMEOUT: Duration = Duration::from_secs(3_600);

/// The maximum size of a request (discovery.proto, section 18). It waits, so it takes memory.
const MAX_REQUEST_BYTES: usize = 1_024;

/// The maximum number of names in each list of an answer.
const MAX_NAMED: usize = 1_000;

const CHANGES: &str = "the endpoints of the pod have changed again and again";
const AMBIGUOUS: &str = "several pods have this address, as pods in the host network do: ask with ?pod=NAMESPACE/NAME";
const UNCONFIRMED: &str =
    "some nodes have not confirmed that they stopped to use the pod: `headgatectl drain` names them to operators";
const TOO_OFTEN: &str = "there are too many questions about this pod, or of its node: ask once a second at most";
const ONLY_REMOVED: &str = "only removed endpoints have this pod name, and they may belong to an older pod: give the UID of the pod, or its address";

/// An endpoint of a pod: the version of its last change, and where it stays in use. The error says
/// why it is in use everywhere.
type UseOfEndpoint = (Arc<ServiceKey>, IpAddr, u64, Result<Last, &'static str>);

/// Answers the requests of agents.
pub(crate) struct Barrier {
    fleet: Arc<Fleet>,
    everywhere: Arc<Everywhere>,
}

impl Barrier {
    /// Creates the barrier of a replica.
    pub(crate) fn new(fleet: Arc<Fleet>, everywhere: Arc<Everywhere>) -> Arc<Self> {
        Arc::new(Self { fleet, everywhere })
    }

    /// Starts to answer a request of an agent. The answer is sent on the agent's stream.
    ///
    /// # Errors
    ///
    /// The end of the stream, if the request is larger, or the stream has more requests, than an
    /// agent may have.
    pub(crate) fn begin(self: &Arc<Self>, agent: &Arc<Agent>, request: &v1::BarrierRequest) -> Result<(), End> {
        if request.encoded_len() > MAX_REQUEST_BYTES {
            let text = format!("a request of a pod may have {MAX_REQUEST_BYTES} bytes at most");
            return Err(End::refusal("message_too_large", Status::resource_exhausted(text)));
        }
        agent.barriers.cancel(request.id);
        if request.is_cancelled {
            return Ok(());
        }
        // Without a runtime there is no stream either.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return Ok(()) };
        let (barrier, asker, id) = (Arc::clone(self), Arc::clone(agent), request.id);
        // A decoded text may have room for more than it holds, and a copy has none.
        let request = request.clone();
        let work = async move {
            let answer = barrier.answer(Some(&asker.node), request).await;
            asker.barriers.finish(answer);
            asker.signal.wake();
        };
        if agent.barriers.begin(id, || runtime.spawn(work).abort_handle()) {
            return Ok(());
        }
        let text = format!(
            "an agent may have {MAX_OPEN} requests of pods that are not answered, and whose answers are not read"
        );
        Err(End::refusal("too_many_requests", Status::resource_exhausted(text)))
    }

    /// Answers a request. With `node`, a pod asks through the agent of this node: it must run
    /// there, and learns the numbers of nodes but no names.
    pub(crate) async fn answer(&self, node: Option<&Arc<str>>, request: v1::BarrierRequest) -> v1::BarrierAnswer {
        let metrics = &self.fleet.context.metrics;
        let waiting = metrics.barrier_waits();
        let outcome = self.wait(node, &request).await;
        drop(waiting);
        let mut answer = outcome.unwrap_or_else(|reason| v1::BarrierAnswer { reason, ..v1::BarrierAnswer::default() });
        if node.is_some() {
            (answer.unconfirmed, answer.not_covered, answer.standby) = Default::default();
            answer.reason = clip(&answer.reason).to_owned();
        }
        metrics.count_barrier(answer.result());
        v1::BarrierAnswer { id: request.id, ..answer }
    }

    /// The error is the reason why the request is refused.
    async fn wait(&self, node: Option<&Arc<str>>, request: &v1::BarrierRequest) -> Result<v1::BarrierAnswer, String> {
        if self.everywhere.replicas().is_none() {
            return Err("the drain barrier is off: start every control plane replica with --peers".into());
        }
        let name = pod_name(request)?;
        let deadline = Instant::now() + Duration::from_millis(request.timeout_ms).min(MAX_TIMEOUT);
        let silent = Duration::from_millis(request.silent_ms).min(MAX_TIMEOUT);
        if let Some(node) = node
            && !in_turn(deadline, |now| self.fleet.turns().questions.take(Arc::clone(node), now)).await
        {
            return Ok(too_often());
        }
        let mut source = self.fleet.context.store.watch_source();
        let listed = source.wait_for(|_| self.fleet.context.store.is_synced());
        if !matches!(tokio::time::timeout_at(deadline, listed).await, Ok(Ok(_))) {
            return Ok(self.incomplete("the replica has not listed its source".into()));
        }
        let found = match self.find(node.is_some(), &name, &request.pod_uid, silent, deadline).await {
            Ok(found) => found,
            Err(answer) => return answer,
        };
        let pod = found.pod;
        if let Some(node) = node {
            if found.node.as_ref() != Some(node) {
                return Err("the pod does not run on this node: ask the agent of its own node".to_owned());
            }
            if !in_turn(deadline, |now| self.fleet.turns().pods.take(pod, now)).await {
                return Ok(too_often());
            }
        }
        // The question follows once the source shows that the pod stops.
        self.fleet.context.store.hurry(HURRY);
        loop {
            let asked = match self.until_unused(pod, deadline).await {
                Ok(asked) => asked,
                Err(reason) => return Ok(self.incomplete(reason)),
            };
            // No node stops to use an endpoint that is the last one everywhere.
            let stopping = asked.iter().filter(|(.., last)| *last != Ok(Last::Everywhere));
            let stopping: Vec<_> = stopping.map(|(key, address, ..)| ((**key).clone(), Some(*address))).collect();
            let limit = (Instant::now() + silent).min(deadline);
            let verdict = match stopping.is_empty() {
                true => Verdict::default(),
                false => self.everywhere.until(Wanted::Unusable, stopping, limit, |_| false).await,
            };
            // The answer holds for the endpoints as they were. Meanwhile the pod may be in use
            // again, or may not be the last endpoint any more.
            let is_same = self.endpoints(pod) == asked;
            if is_same || !verdict.holds() || Instant::now() >= deadline {
                let lasts = asked.iter().filter_map(|(key, address, _, last)| last_of(key, *address, last.ok()?));
                let lasts = lasts.collect::<Vec<_>>().join("; ");
                return Ok(match is_same {
                    true => outcome(&verdict, &lasts, node.is_some()),
                    false => answer(&verdict, Outcome::Incomplete, CHANGES.into()),
                });
            }
            sleep(PACE).await;
        }
    }

    /// The endpoints of a pod as this replica sees them.
    fn endpoints(&self, pod: PodId) -> Vec<UseOfEndpoint> {
        let store = &self.fleet.context.store;
        let state = |(key, address): (Arc<ServiceKey>, IpAddr)| {
            let last = store.usage(&key, address).unused().map(|(_, last)| last);
            let changed = store.changed_at(&key, address);
            (key, address, changed, last)
        };
        store.endpoints_of(pod).endpoints.into_iter().map(state).collect()
    }

    /// Finds the pod of a request. The error is an answer, or the reason why the request is
    /// refused.
    async fn find(
        &self,
        is_pod: bool,
        name: &PodName,
        uid: &str,
        silent: Duration,
        deadline: Instant,
    ) -> Result<PodEndpoints, Result<v1::BarrierAnswer, String>> {
        let store = &self.fleet.context.store;
        let mut head = store.head();
        loop {
            match store.pod(name, uid) {
                Ok(found) => return Ok(found),
                Err(NoPod::Ambiguous) => return Err(Err(AMBIGUOUS.into())),
                Err(NoPod::Unknown) => {
                    // While replicas are young, the pod may have lost its endpoints before they
                    // listed their source.
                    if self.everywhere.problems().is_empty() {
                        return Err(Err(unknown(name)));
                    }
                    let limit = (Instant::now() + silent).min(deadline);
                    let verdict = self.everywhere.until(Wanted::Unusable, Vec::new(), limit, |_| false).await;
                    return Err(if verdict.holds() { Err(unknown(name)) } else { Ok(outcome(&verdict, "", is_pod)) });
                }
                Err(NoPod::OnlyRemoved) if Instant::now() >= deadline => {
                    return Err(Ok(self.incomplete(ONLY_REMOVED.into())));
                }
                Err(NoPod::OnlyRemoved) => {}
            }
            // An error means that the deadline has come.
            let _ = timeout_at(deadline, head.changed()).await;
            sleep(PACE).await;
        }
    }

    /// Waits until the store shows that no endpoint of the pod is in use, and returns the
    /// endpoints. The error is the reason why this does not happen in time.
    async fn until_unused(&self, pod: PodId, deadline: Instant) -> Result<Vec<UseOfEndpoint>, String> {
        loop {
            let mut interest = self.fleet.context.store.interest([Topic::Pod(pod)]);
            let endpoints = self.fleet.context.store.endpoints_of(pod).endpoints;
            let topics = |(key, address)| [Topic::Service(key), Topic::Endpoint(key, address)];
            interest.add(endpoints.iter().flat_map(|(key, address)| topics((&**key, *address))));
            // The look follows the interest, so that no change is missed.
            let states = self.endpoints(pod);
            if states.is_empty() {
                return Err("the replica has forgotten the endpoints of the pod".into());
            }
            let in_use = states.iter().find_map(|(key, address, _, last)| Some((key, address, last.err()?)));
            let Some((key, address, why)) = in_use else { return Ok(states) };
            if Instant::now() >= deadline {
                let text = "the source does not show that the pod stops";
                return Err(format!("{text}: endpoint {address} of Service {key} {why}"));
            }
            interest.changed_until(deadline).await;
        }
    }

    /// An answer before any replica was asked: no node is confirmed.
    fn incomplete(&self, reason: String) -> v1::BarrierAnswer {
        answer(&self.everywhere.look(), Outcome::Incomplete, reason)
    }
}

/// Waits until `take` succeeds. Returns false if this takes longer than until the deadline.
async fn in_turn(deadline: Instant, take: impl Fn(std::time::Instant) -> Result<(), std::time::Instant>) -> bool {
    while let Err(next) = take(std::time::Instant::now()) {
        if Instant::from_std(next) > deadline {
            return false;
        }
        sleep_until(next.into()).await;
    }
    true
}

/// The answer to a request that gets no turn. Nothing was looked up for it.
fn too_often() -> v1::BarrierAnswer {
    let result = Outcome::Incomplete.into();
    v1::BarrierAnswer { result, reason: TOO_OFTEN.into(), ..v1::BarrierAnswer::default() }
}

/// The answer of a verdict. `lasts` says where endpoints stay in use; empty if nowhere.
fn outcome(verdict: &Verdict, lasts: &str, is_pod: bool) -> v1::BarrierAnswer {
    let (result, reason) = match lasts {
        _ if !verdict.holds() && is_pod => (Outcome::Incomplete, UNCONFIRMED.to_owned()),
        _ if !verdict.holds() => (Outcome::Incomplete, verdict.why("that they stopped to use the pod", 0)),
        "" => (Outcome::Drained, String::new()),
        lasts => (Outcome::Last, format!("{lasts}, so it keeps receiving connections")),
    };
    answer(verdict, result, reason)
}

fn answer(verdict: &Verdict, result: Outcome, reason: String) -> v1::BarrierAnswer {
    v1::BarrierAnswer {
        id: 0,
        result: result.into(),
        reason,
        unconfirmed: verdict.missing().take(MAX_NAMED).map(str::to_owned).collect(),
        unconfirmed_count: verdict.missing().count() as u64,
        not_covered: verdict.uncovered().take(MAX_NAMED).map(str::to_owned).collect(),
        not_covered_count: verdict.uncovered().count() as u64,
        standby: verdict.standby.keys().take(MAX_NAMED).cloned().collect(),
        standby_count: verdict.standby.len() as u64,
        confirmed_count: verdict.confirmed() as u64,
    }
}

/// Reads the pod that a request names.
fn pod_name(request: &v1::BarrierRequest) -> Result<PodName, String> {
    let v1::BarrierRequest { address, pod_namespace, pod_name, .. } = request;
    if !pod_name.is_empty() {
        for (what, name) in [("namespace", pod_namespace), ("name", pod_name)] {
            check_subdomain(name).map_err(|problem| format!("the {what} of the pod: {problem}"))?;
        }
        return Ok(PodName::Named(pod_namespace.clone(), pod_name.clone()));
    }
    let address = address_from_bytes(address).ok_or("the request names no pod")?;
    if pod_namespace.is_empty() {
        return Err("the request names no namespace".to_owned());
    }
    Ok(PodName::Address(pod_namespace.clone(), address))
}

fn unknown(pod: &PodName) -> String {
    match pod {
        PodName::Address(namespace, address) => format!(
            "no endpoint with the address {address} belongs to a pod of namespace {namespace}: check the namespace; a pod without a Service need not wait; if the CNI masquerades, or the pod is in the \
             host network, ask with ?pod=NAMESPACE/NAME from the node's address"
        ),
        PodName::Named(namespace, name) => {
            format!(
                "no endpoint belongs to pod {namespace}/{name}: check the name; a pod without a Service need not wait"
            )
        }
    }
}
