//! The drain barrier: says when no node sends new connections to a pod that stops
//! (discovery.proto, section 18).
//!
//! `here.rs` answers from the store and the agents of this replica. `peers.rs` asks the other
//! replicas. This file combines the answers. Each decision follows from one round of answers, so
//! that a node that moves between replicas is confirmed by nobody or by its present replica.

mod here;
mod peers;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{
    StreamExt as _,
    future::{BoxFuture, join_all},
    stream::FuturesUnordered,
};
use headgate_core::{ServiceKey, dns_name::check_subdomain};
use headgate_proto::v1::{self, barrier_answer::Result as Outcome, confirm_answer::State};
use tokio::time::{Instant, sleep, sleep_until};

pub(crate) use self::here::{Question, Wanted, confirm};
use self::{
    here::{HURRY, Seen, used},
    peers::{Known, Link, Peers},
};
use super::fleet::{Agent, Fleet};
use crate::store::{NoPod, PodEndpoints, PodName};

/// The longest wait for an answer.
const MAX_TIMEOUT: Duration = Duration::from_secs(3_600);

/// The other replicas are told of waiting pods at most once in this time, which is shorter than
/// [`HURRY`].
const HINT_INTERVAL: Duration = Duration::from_secs(30);

/// The shortest time between two looks at the store for one request.
const PACE: Duration = Duration::from_millis(50);

/// How long to wait before a silent replica is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// The maximum number of names in each list of an answer.
const MAX_NAMED: usize = 1_000;

/// The maximum number of unconfirmed nodes whose arrival at a replica is awaited.
const MAX_AWAITED: usize = 256;

/// Answers the requests of agents.
pub(crate) struct Barrier {
    fleet: Arc<Fleet>,
    /// `None` if the options do not name the other replicas.
    peers: Option<Peers>,
    /// How long all replicas must have run before a Node without a stream counts as not covered.
    uncovered_after: Duration,
    pub(crate) started: Instant,
    /// When the other replicas were told last that a pod waits.
    hinted: Mutex<Option<Instant>>,
}

impl Barrier {
    /// Creates the barrier of a replica.
    pub(crate) fn new(fleet: Arc<Fleet>) -> Arc<Self> {
        let settings = &fleet.context.settings;
        let peers = settings.peers.clone().map(|peers| Peers::new(peers, fleet.context.store.epoch()));
        let uncovered_after = settings.uncovered_after;
        Arc::new(Self { peers, uncovered_after, started: Instant::now(), hinted: Mutex::default(), fleet })
    }

    /// Starts to answer a request of an agent. The answer is sent on the agent's stream.
    pub(crate) fn begin(self: &Arc<Self>, agent: &Arc<Agent>, request: v1::BarrierRequest) {
        agent.barriers.cancel(request.id);
        if request.is_cancelled {
            return;
        }
        // Without a runtime there is no stream either.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (barrier, asker, id) = (Arc::clone(self), Arc::clone(agent), request.id);
        let work = async move {
            let answer = barrier.answer(Some(&asker.node), request).await;
            asker.barriers.finish(answer);
            asker.signal().wake();
        };
        if !agent.barriers.begin(id, || runtime.spawn(work).abort_handle()) {
            agent.signal().wake();
        }
    }

    /// Answers a request. With `node`, the pod must run on this node.
    pub(crate) async fn answer(&self, node: Option<&str>, request: v1::BarrierRequest) -> v1::BarrierAnswer {
        let metrics = &self.fleet.context.metrics;
        let waiting = metrics.barrier_waits();
        let outcome = match self.peers.as_ref() {
            None => Err("the drain barrier is off: start every control plane replica with --peers".to_owned()),
            Some(peers) => match pod_name(&request) {
                Ok(pod) => self.wait(peers, node, &pod, &request).await,
                Err(problem) => Err(problem),
            },
        };
        drop(waiting);
        let answer = outcome.unwrap_or_else(|reason| v1::BarrierAnswer { reason, ..v1::BarrierAnswer::default() });
        metrics.count_barrier(answer.result());
        v1::BarrierAnswer { id: request.id, ..answer }
    }

    async fn wait(
        &self,
        peers: &Peers,
        node: Option<&str>,
        pod: &PodName,
        request: &v1::BarrierRequest,
    ) -> Result<v1::BarrierAnswer, String> {
        let deadline = Instant::now() + Duration::from_millis(request.timeout_ms).min(MAX_TIMEOUT);
        self.hurry(peers, pod).await;
        loop {
            let endpoints = match self.until_unused(node, pod, deadline).await? {
                Ok(endpoints) => endpoints,
                Err(answer) => return Ok(answer),
            };
            let silent_at = Instant::now() + Duration::from_millis(request.silent_ms).min(MAX_TIMEOUT);
            let confirmed = self.until_confirmed(peers, &endpoints, silent_at.min(deadline)).await;
            // The pod may have become the last endpoint meanwhile.
            let is_unused = matches!(used(&self.fleet, refs(&endpoints)), Seen::Since(_));
            if is_unused || confirmed.result() != Outcome::Drained {
                return Ok(confirmed);
            }
        }
    }

    /// Makes all agents acknowledge new batches at once. The other replicas are told by a question
    /// whose answer does not matter, at most once in [`HINT_INTERVAL`].
    async fn hurry(&self, peers: &Peers, pod: &PodName) {
        let store = &self.fleet.context.store;
        store.hurry(HURRY);
        let now = Instant::now();
        let is_due = {
            let mut hinted = self.hinted.lock().unwrap_or_else(PoisonError::into_inner);
            let is_due = hinted.is_none_or(|at| now.duration_since(at) >= HINT_INTERVAL);
            *hinted = if is_due { Some(now) } else { *hinted };
            is_due
        };
        let Some(pod) = store.pod(pod).ok().filter(|_| is_due) else { return };
        let endpoints = pod.endpoints.iter().map(|(key, address)| ((**key).clone(), *address)).collect();
        let question = Question { endpoints, ..Question::default() };
        for link in peers.known().await.links {
            let question = question.clone();
            tokio::spawn(async move { link.confirm(&question, now).await });
        }
    }

    /// Waits until the store shows that no endpoint of the pod is in use. The inner error is the
    /// answer if this does not happen.
    async fn until_unused(
        &self,
        node: Option<&str>,
        pod: &PodName,
        deadline: Instant,
    ) -> Result<Result<PodEndpoints, v1::BarrierAnswer>, String> {
        let store = &self.fleet.context.store;
        let (mut head, mut moves) = (store.head(), store.moves());
        loop {
            head.borrow_and_update();
            moves.borrow_and_update();
            let now = Instant::now();
            let endpoints = store.pod(pod).map_err(|problem| no_pod(pod, problem))?;
            if let Some(node) = node.filter(|node| endpoints.node.as_deref() != Some(*node)) {
                let there = endpoints.node.as_deref().unwrap_or("no node");
                return Err(format!("the pod runs on {there} and not on node {node}: ask the agent of its own node"));
            }
            let reason = match used(&self.fleet, refs(&endpoints)) {
                Seen::Since(_) => return Ok(Ok(endpoints)),
                Seen::Last(reason) => {
                    let reason = format!("{reason}, so it keeps receiving connections");
                    return Ok(Err(v1::BarrierAnswer { result: Outcome::Last.into(), reason, ..Default::default() }));
                }
                Seen::NotYet(reason) => reason,
            };
            if now >= deadline {
                let reason = format!("the source does not show that the pod stops: {reason}");
                let nodes = store.node_names().iter().map(ToString::to_string).collect();
                return Ok(Err(incomplete(&nodes, reason, &BTreeSet::new())));
            }
            tokio::select! {
                Ok(()) = head.changed() => {}
                Ok(()) = moves.changed() => {}
                () = sleep_until(deadline) => {}
            }
            sleep_until((now + PACE).min(deadline)).await;
        }
    }

    /// Asks all replicas until they confirm every node, or until `limit`.
    async fn until_confirmed(&self, peers: &Peers, pod: &PodEndpoints, limit: Instant) -> v1::BarrierAnswer {
        let endpoints = pod.endpoints.iter().map(|(key, address)| ((**key).clone(), *address)).collect();
        let Confirmed { last, missing, uncovered, reason } =
            self.until_all_confirm(peers, Wanted::Unusable, endpoints, limit).await;
        if let Some(reason) = last {
            return v1::BarrierAnswer { result: Outcome::Last.into(), reason, ..Default::default() };
        }
        if missing.is_empty() {
            let answer = v1::BarrierAnswer { result: Outcome::Drained.into(), ..Default::default() };
            return with_uncovered(answer, &uncovered);
        }
        let reason = format!(
            "these nodes have not confirmed that they stopped to use the pod; `headgatectl agents` shows why{reason}"
        );
        incomplete(&missing, reason, &uncovered)
    }

    /// Asks all replicas until they confirm that every node uses the endpoints, or until `limit`.
    pub(crate) async fn until_usable(&self, endpoints: Vec<(ServiceKey, IpAddr)>, limit: Instant) -> Confirmed {
        match self.peers.as_ref() {
            Some(peers) => self.until_all_confirm(peers, Wanted::Usable, endpoints, limit).await,
            None => {
                sleep_until(limit).await;
                Confirmed { missing: self.nodes(), reason: "; --peers is missing".into(), ..Confirmed::default() }
            }
        }
    }

    fn nodes(&self) -> BTreeSet<String> {
        self.fleet.context.store.node_names().iter().map(ToString::to_string).collect()
    }

    async fn until_all_confirm(
        &self,
        peers: &Peers,
        wanted: Wanted,
        endpoints: Vec<(ServiceKey, IpAddr)>,
        limit: Instant,
    ) -> Confirmed {
        let positions = self.fleet.context.store.changed_positions();
        let positions = positions.into_iter().filter(|(kind, _)| kind.is_comparable()).collect();
        let mut question = Question { wanted, endpoints, positions, awaited: Vec::new() };
        loop {
            let Known { links, is_complete } = peers.known().await;
            question.awaited.clear();
            let asked = self.ask_all(&links, &question, limit);
            let answers = join_all(asked).await.into_iter();
            let answers = answers.map(|answer| answer.filter(|answer| wanted.is_answered_by(answer.state()))).collect();
            let round = Round::of(answers, is_complete);
            let (missing, uncovered) = round.missing(&self.nodes(), self.uncovered_after);
            if missing.is_empty() || round.last.is_some() || Instant::now() >= limit {
                let reason = round.reason();
                return Confirmed { last: round.last, missing, uncovered, reason };
            }
            question.awaited = missing.into_iter().take(MAX_AWAITED).collect();
            let first = async {
                let mut asked: FuturesUnordered<_> =
                    links.iter().map(|link| self.ask_again(link, &question, limit)).collect();
                asked.push(Box::pin(async { drop(confirm(&self.fleet, &question, limit, self.started).await) }));
                asked.next().await;
            };
            first.await;
        }
    }

    fn ask_all<'a>(
        &'a self,
        links: &'a [Arc<Link>],
        question: &'a Question,
        until: Instant,
    ) -> Vec<BoxFuture<'a, Option<v1::ConfirmAnswer>>> {
        let here = async move { Some(confirm(&self.fleet, question, until, self.started).await) };
        let mut asked: Vec<BoxFuture<'a, _>> = vec![Box::pin(here)];
        asked.extend(links.iter().map(|link| -> BoxFuture<'a, _> { Box::pin(link.confirm(question, until)) }));
        asked
    }

    /// Asks a replica until it answers, or until `limit`.
    fn ask_again<'a>(&'a self, link: &'a Link, question: &'a Question, limit: Instant) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            while link.confirm(question, limit).await.is_none() && Instant::now() < limit {
                sleep(RETRY).await;
            }
        })
    }
}

/// What all replicas together have confirmed.
#[derive(Debug, Default)]
pub(crate) struct Confirmed {
    /// Why the endpoints stay in use, if one of them is the last one.
    last: Option<String>,
    /// The unconfirmed nodes.
    pub(crate) missing: BTreeSet<String>,
    /// The nodes that are not covered.
    uncovered: BTreeSet<String>,
    /// The problems of replicas, each after a semicolon.
    pub(crate) reason: String,
}

/// The answers of all replicas to one question. [`Round::missing`] decides whether the barrier
/// opens.
#[derive(Debug, Default)]
pub struct Round {
    confirmed: BTreeSet<String>,
    unconfirmed: BTreeSet<String>,
    departed: BTreeSet<String>,
    /// The lowest uptime; 0 if a replica does not answer or has forgotten departed nodes.
    uptime: Duration,
    last: Option<String>,
    problems: BTreeMap<String, String>,
}

impl Round {
    /// Collects the answers of all known replicas; `None` stands for a replica that does not
    /// answer. `is_complete` is false if replicas may be missing.
    #[must_use]
    pub fn of(answers: Vec<Option<v1::ConfirmAnswer>>, is_complete: bool) -> Self {
        let mut round = Self { uptime: Duration::MAX, ..Self::default() };
        if !is_complete {
            round.uptime = Duration::ZERO;
            round.problems.insert("--peers".into(), "a name does not resolve".into());
        }
        for answer in answers {
            let Some(answer) = answer else {
                round.uptime = Duration::ZERO;
                round.problems.insert("a replica".into(), "it does not answer".into());
                continue;
            };
            if answer.state() == State::Last {
                round.last = Some(format!("{}, so it keeps receiving connections", answer.reason));
            } else if !answer.reason.is_empty() {
                round.problems.insert(format!("replica {}", answer.replica), answer.reason);
            }
            round.uptime = round.uptime.min(Duration::from_millis(answer.uptime_ms));
            round.confirmed.extend(answer.confirmed);
            round.unconfirmed.extend(answer.unconfirmed);
            round.departed.extend(answer.departed);
        }
        round
    }

    /// Returns the unconfirmed nodes, and the nodes that are not covered. A replica that does not
    /// confirm a node counts more than a replica that does, because the latter may not have noticed
    /// yet that the node's stream has ended.
    #[must_use]
    pub fn missing(&self, nodes: &BTreeSet<String>, uncovered_after: Duration) -> (BTreeSet<String>, BTreeSet<String>) {
        let mut missing = self.unconfirmed.clone();
        let mut uncovered = BTreeSet::new();
        for node in nodes.iter().filter(|node| !self.confirmed.contains(*node) && !self.unconfirmed.contains(*node)) {
            let is_known = self.departed.contains(node) || self.uptime < uncovered_after;
            if is_known { &mut missing } else { &mut uncovered }.insert(node.clone());
        }
        (missing, uncovered)
    }

    fn reason(&self) -> String {
        self.problems.iter().map(|(who, what)| format!("; {who}: {what}")).collect()
    }
}

fn refs(pod: &PodEndpoints) -> impl Iterator<Item = (&ServiceKey, IpAddr)> {
    pod.endpoints.iter().map(|(key, address)| (&**key, *address))
}

fn incomplete(missing: &BTreeSet<String>, reason: String, uncovered: &BTreeSet<String>) -> v1::BarrierAnswer {
    let answer = v1::BarrierAnswer {
        result: Outcome::Incomplete.into(),
        reason,
        unconfirmed: missing.iter().take(MAX_NAMED).cloned().collect(),
        unconfirmed_count: missing.len() as u64,
        ..v1::BarrierAnswer::default()
    };
    with_uncovered(answer, uncovered)
}

fn with_uncovered(answer: v1::BarrierAnswer, uncovered: &BTreeSet<String>) -> v1::BarrierAnswer {
    v1::BarrierAnswer {
        not_covered: uncovered.iter().take(MAX_NAMED).cloned().collect(),
        not_covered_count: uncovered.len() as u64,
        ..answer
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
    address_from_wire(address).map(PodName::Address).ok_or_else(|| "the request names no pod".to_owned())
}

/// Reads an address of 4 or 16 bytes.
pub(crate) fn address_from_wire(bytes: &[u8]) -> Option<IpAddr> {
    let ipv4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    ipv4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

fn no_pod(pod: &PodName, problem: NoPod) -> String {
    match (pod, problem) {
        (PodName::Address(address), NoPod::Unknown) => format!(
            "no endpoint with the address {address} belongs to a pod: a pod without a Service need not wait; if the CNI masquerades, or the pod is in the \
             host network, ask with ?pod=NAMESPACE/NAME from the node's address"
        ),
        (PodName::Named(namespace, name), NoPod::Unknown) => {
            format!(
                "no endpoint belongs to pod {namespace}/{name}: check the name; a pod without a Service need not wait"
            )
        }
        (_, NoPod::Ambiguous) => {
            "several pods have this address, as pods in the host network do: ask with ?pod=NAMESPACE/NAME".to_owned()
        }
    }
}
