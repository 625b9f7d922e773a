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

/// The requests of all streams.
#[derive(Debug, Default)]
pub(crate) struct Barriers {
    state: Mutex<Requests>,
}

#[derive(Debug, Default)]
struct Requests {
    last_id: u64,
    waiting: BTreeMap<u64, Waiting>,
    /// The last stream, which may have ended.
    stream: Option<mpsc::Sender<v1::BarrierRequest>>,
}

impl Requests {
    /// Sends a request. Without a stream, the next stream repeats it.
    fn send(&self, request: v1::BarrierRequest) {
        if let Some(stream) = &self.stream {
            let _ = stream.try_send(request);
        }
    }
}

#[derive(Debug)]
struct Waiting {
    request: v1::BarrierRequest,
    deadline: Instant,
    answer: oneshot::Sender<v1::BarrierAnswer>,
}

impl Waiting {
    /// The request, with the time that is left.
    fn request(&self) -> v1::BarrierRequest {
        let left = self.deadline.saturating_duration_since(Instant::now());
        v1::BarrierRequest { timeout_ms: left.as_millis() as u64, ..self.request.clone() }
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
    /// Asks the control plane about the pod that `request` names, and waits for the answer, at most
    /// until `deadline` and a second more. Sets the id and the timeout of the request.
    pub(crate) async fn ask(&self, mut request: v1::BarrierRequest, deadline: Instant) -> v1::BarrierAnswer {
        let (answer, receiver) = oneshot::channel();
        let asked = {
            let mut state = self.state();
            if state.waiting.len() >= MAX_WAITING {
                let reason = format!("{MAX_WAITING} pods of this node already wait; ask again later");
                return v1::BarrierAnswer { reason, ..v1::BarrierAnswer::default() };
            }
            state.last_id += 1;
            let id = state.last_id;
            request.id = id;
            let waiting = Waiting { request, deadline, answer };
            state.send(waiting.request());
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
        let address = address_to_wire(address);
        self.state().waiting.values().filter(|waiting| waiting.request.address == address).count()
    }

    /// Begins a stream. Returns its requests: first all that are not answered.
    pub(super) fn begin_stream(&self) -> mpsc::Receiver<v1::BarrierRequest> {
        let (sender, requests) = mpsc::channel(MAX_UNSENT);
        let mut state = self.state();
        state.stream = Some(sender);
        state.waiting.values().for_each(|waiting| state.send(waiting.request()));
        requests
    }

    /// Passes an answer of the replica to the client.
    pub(super) fn answered(&self, answer: v1::BarrierAnswer) {
        if let Some(waiting) = self.state().waiting.remove(&answer.id) {
            // The client may have gone.
            let _ = waiting.answer.send(answer);
        }
    }

    fn state(&self) -> MutexGuard<'_, Requests> {
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

    fn at_address() -> v1::BarrierRequest {
        v1::BarrierRequest { address: vec![10, 0, 0, 1].into(), pod_uid: "uid-1".into(), ..Default::default() }
    }

    #[tokio::test]
    async fn a_request_is_repeated_on_each_stream_until_it_is_answered() {
        let barriers = Arc::new(Barriers::default());
        let asker = Arc::clone(&barriers);
        let asked = tokio::spawn(async move { asker.ask(at_address(), later()).await });
        while barriers.state().waiting.is_empty() {
            tokio::task::yield_now().await;
        }
        for _ in 0..2 {
            let sent = barriers.begin_stream().recv().await.unwrap();
            assert_eq!((sent.id, &sent.address[..], &*sent.pod_uid), (1, &[10, 0, 0, 1][..], "uid-1"));
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
        let gone = barriers.ask(at_address(), later());
        assert!(tokio::time::timeout(Duration::from_millis(10), gone).await.is_err());
        assert_eq!(requests.recv().await.unwrap().address, at_address().address);
        assert!(requests.recv().await.unwrap().is_cancelled);
    }

    #[tokio::test]
    async fn without_a_stream_the_answer_is_incomplete_at_the_deadline() {
        let barriers = Barriers::default();
        let answer = barriers.ask(at_address(), Instant::now()).await;
        assert_eq!(answer.result(), Outcome::Incomplete);
    }
}
