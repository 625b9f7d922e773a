//! Requests of pods that stop: when does no node send new connections to the pod any more
//! (`discovery.proto`, rule 18). The requests survive streams: the agent repeats unanswered
//! requests on its next stream.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use headgate_proto::{
    address_to_wire,
    v1::{self, barrier_answer::Result as Outcome},
};
use prometheus_client::metrics::{counter::Counter, family::Family};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout_at},
};

use crate::metric_registry::{AGENT, Labels, MetricRegistry};

/// Maximum number of unanswered requests (`discovery.proto`, rule 18).
const MAX_WAITING: usize = 1_024;
/// Maximum number of requests that wait to be sent. Further ones wait for the next stream.
const MAX_UNSENT: usize = 2 * MAX_WAITING;
/// How long the replica's answer may take after the end of the wait.
const ANSWER_GRACE: Duration = Duration::from_secs(1);

/// Metrics of the requests.
#[derive(Debug, Clone, Default)]
pub struct DrainMetrics {
    requests: Family<Labels<1>, Counter>,
}

impl DrainMetrics {
    /// Counts a request. `result` is from a small fixed set.
    pub(crate) fn count(&self, result: &'static str) {
        self.requests.get_or_create(&[("result", result)]).inc();
    }

    /// Registers the metrics.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let help = "Requests of pods that stop and wait until no node sends new connections to them";
        let results = "result (drained, incomplete, last, refused)";
        registry.adder(AGENT).counter("drain_requests", results, help, self.requests.clone());
    }
}

/// The pod that a request concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pod {
    /// The pod with this address.
    At(IpAddr),
    /// A pod by namespace and name.
    Named(String, String),
}

/// The requests of all streams.
#[derive(Debug, Default)]
pub(crate) struct Barriers {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last_id: u64,
    waiting: BTreeMap<u64, Waiting>,
    /// The last stream, which may have ended.
    stream: Option<mpsc::Sender<v1::BarrierRequest>>,
}

impl State {
    /// Sends a request. Without a stream, the next stream repeats it.
    fn send(&self, request: v1::BarrierRequest) {
        if let Some(stream) = &self.stream {
            let _ = stream.try_send(request);
        }
    }
}

#[derive(Debug)]
struct Waiting {
    pod: Pod,
    uid: String,
    deadline: Instant,
    silent: Duration,
    answer: oneshot::Sender<v1::BarrierAnswer>,
}

impl Waiting {
    fn request(&self, id: u64) -> v1::BarrierRequest {
        let milliseconds = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let request = v1::BarrierRequest {
            id,
            pod_uid: self.uid.clone(),
            timeout_ms: milliseconds(self.deadline.saturating_duration_since(Instant::now())),
            silent_ms: milliseconds(self.silent),
            ..v1::BarrierRequest::default()
        };
        match &self.pod {
            Pod::At(address) => v1::BarrierRequest { address: address_to_wire(*address), ..request },
            Pod::Named(namespace, name) => {
                v1::BarrierRequest { pod_namespace: namespace.clone(), pod_name: name.clone(), ..request }
            }
        }
    }
}

/// Gives a request up when it is dropped.
struct Asked<'a> {
    barriers: &'a Barriers,
    id: u64,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let mut state = self.barriers.state();
        if state.waiting.remove(&self.id).is_some() {
            state.send(v1::BarrierRequest { id: self.id, is_cancelled: true, ..v1::BarrierRequest::default() });
        }
    }
}

impl Barriers {
    /// Asks the control plane about a pod, and waits for the answer, at most until `deadline` and a
    /// second more. `uid` is the UID of the pod, or empty. `silent` is how long nodes are waited
    /// for that confirm nothing.
    pub(crate) async fn ask(&self, pod: Pod, uid: String, deadline: Instant, silent: Duration) -> v1::BarrierAnswer {
        let (answer, receiver) = oneshot::channel();
        let asked = {
            let mut state = self.state();
            if state.waiting.len() >= MAX_WAITING {
                let reason = format!("{MAX_WAITING} pods of this node already wait; ask again later");
                return v1::BarrierAnswer { reason, ..v1::BarrierAnswer::default() };
            }
            state.last_id += 1;
            let (id, waiting) = (state.last_id, Waiting { pod, uid, deadline, silent, answer });
            state.send(waiting.request(id));
            state.waiting.insert(id, waiting);
            Asked { barriers: self, id }
        };
        let answered = timeout_at(deadline + ANSWER_GRACE, receiver).await;
        drop(asked);
        answered.ok().and_then(Result::ok).unwrap_or_else(|| v1::BarrierAnswer {
            result: Outcome::Incomplete.into(),
            reason: "no control plane has answered; `/status` of the agent shows whether the agent has a stream"
                .to_owned(),
            ..v1::BarrierAnswer::default()
        })
    }

    /// The number of requests that wait for the pod with this address.
    pub(crate) fn waiting_of(&self, address: IpAddr) -> usize {
        self.state().waiting.values().filter(|waiting| waiting.pod == Pod::At(address)).count()
    }

    /// Begins a stream. Returns its requests: first all that are not answered.
    pub(super) fn begin_stream(&self) -> mpsc::Receiver<v1::BarrierRequest> {
        let (sender, requests) = mpsc::channel(MAX_UNSENT);
        let mut state = self.state();
        state.stream = Some(sender);
        state.waiting.iter().for_each(|(id, waiting)| state.send(waiting.request(*id)));
        requests
    }

    /// Passes an answer of the replica to the client.
    pub(super) fn answered(&self, answer: v1::BarrierAnswer) {
        if let Some(waiting) = self.state().waiting.remove(&answer.id) {
            // The client may have gone.
            let _ = waiting.answer.send(answer);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use super::*;

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[tokio::test]
    async fn a_request_is_repeated_on_each_stream_until_it_is_answered() {
        let barriers = Arc::new(Barriers::default());
        let asker = Arc::clone(&barriers);
        let pod = Pod::At([10, 0, 0, 1].into());
        let asked = tokio::spawn(async move { asker.ask(pod, "uid-1".into(), later(), Duration::from_secs(20)).await });
        while barriers.state().waiting.is_empty() {
            tokio::task::yield_now().await;
        }
        for _ in 0..2 {
            let sent = barriers.begin_stream().recv().await.unwrap();
            assert_eq!((sent.id, &sent.address[..], sent.silent_ms), (1, &[10, 0, 0, 1][..], 20_000));
            assert_eq!(sent.pod_uid, "uid-1");
            assert!(sent.timeout_ms <= 30_000);
        }
        let answer = v1::BarrierAnswer { id: 1, result: Outcome::Drained.into(), ..v1::BarrierAnswer::default() };
        barriers.answered(answer.clone());
        assert_eq!(asked.await.unwrap(), answer);
    }

    #[tokio::test]
    async fn a_client_that_goes_cancels_its_request() {
        let barriers = Barriers::default();
        let mut requests = barriers.begin_stream();
        let gone = barriers.ask(Pod::Named("prod".into(), "web-1".into()), String::new(), later(), Duration::ZERO);
        assert!(tokio::time::timeout(Duration::from_millis(10), gone).await.is_err());
        assert_eq!(requests.recv().await.unwrap().pod_name, "web-1");
        assert!(requests.recv().await.unwrap().is_cancelled);
    }

    #[tokio::test]
    async fn without_a_stream_the_answer_is_incomplete_at_the_deadline() {
        let barriers = Barriers::default();
        let pod = Pod::At([10, 0, 0, 1].into());
        let answer = barriers.ask(pod, String::new(), Instant::now(), Duration::ZERO).await;
        assert_eq!(answer.result(), Outcome::Incomplete);
    }
}
