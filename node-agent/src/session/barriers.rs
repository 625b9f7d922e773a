//! Requests of pods that stop: when does no node send new connections to the pod any more
//! (`discovery.proto`, rule 18)? Unanswered ones are repeated on the next stream.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, RandomState},
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use headgate_core::turns::Turns;
use headgate_proto::{
    address_to_wire,
    v1::{self, barrier_answer::Result as Outcome},
};
use prometheus_client::metrics::{counter::Counter, family::Family};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until, timeout_at},
};

use crate::metric_registry::{AGENT, Labels, metrics};

/// Maximum number of unanswered requests (`discovery.proto`, rule 18).
const MAX_WAITING: usize = 1_024;
/// Maximum number of waiting requests about one pod. A pod in the host network, or behind a CNI
/// that masquerades, is known by its name, and any other by its address.
const MAX_OF_POD: usize = 4;
/// Maximum number of waiting requests that name their pod. Any pod whose connections are
/// masqueraded can send such requests, so the other places are kept for pods with an address.
const MAX_NAMED: usize = MAX_WAITING / 2;
/// How many requests that name their pod reach the control plane at once, and when one more does.
const NAMED_AT_ONCE: u32 = 256;
const NAMED_INTERVAL: Duration = Duration::from_millis(100);
/// The shortest time between two questions about one pod that reach the control plane. Further ones
/// wait, because each container of a pod may have a hook.
const POD_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of requests that wait to be sent. Further ones wait for the next stream.
const MAX_UNSENT: usize = 2 * MAX_WAITING;
/// How long the replica's answer may take after the end of the wait.
const ANSWER_GRACE: Duration = Duration::from_secs(1);

metrics! {
    /// Metrics of the requests.
    pub struct DrainMetrics {}
    AGENT {
        requests: Family<Labels<1>, Counter> = "drain_requests" ["result (drained, incomplete, last, refused)"],
            "Requests of pods that stop and wait until no node sends new connections to them";
    }
}

impl DrainMetrics {
    /// Counts a request. `result` is from a small fixed set.
    pub(crate) fn count(&self, result: &'static str) {
        self.requests.get_or_create(&[("result", result)]).inc();
    }
}

/// The requests of all streams.
#[derive(Debug, Default)]
pub struct Barriers {
    state: Mutex<Requests>,
    /// Pods are known by hashes, because a client may give any name.
    hasher: RandomState,
}

#[derive(Debug)]
struct Requests {
    turns: Turns<u64>,
    named: Turns<()>,
    last_id: u64,
    waiting: BTreeMap<u64, Waiting>,
    /// The last stream, which may have ended.
    stream: Option<mpsc::Sender<v1::BarrierRequest>>,
}

impl Default for Requests {
    fn default() -> Self {
        let (turns, named) = (Turns::new(POD_INTERVAL, 1), Turns::new(NAMED_INTERVAL, NAMED_AT_ONCE));
        Self { turns, named, last_id: 0, waiting: BTreeMap::new(), stream: None }
    }
}

impl Requests {
    /// The number of requests that wait for a pod.
    fn count(&self, pod: u64) -> usize {
        self.waiting.values().filter(|waiting| waiting.pod == pod).count()
    }

    /// Sends a request. Without a stream, the next stream repeats it.
    fn send(&self, request: v1::BarrierRequest) {
        if let Some(stream) = &self.stream {
            let _ = stream.try_send(request);
        }
    }
}

#[derive(Debug)]
struct Waiting {
    pod: u64,
    request: v1::BarrierRequest,
    /// True once the turn of the pod has come.
    is_due: bool,
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
    /// Errors: too many requests wait already: about this pod, that name their pod, or in all.
    pub async fn ask(&self, mut request: v1::BarrierRequest, deadline: Instant) -> Result<v1::BarrierAnswer, String> {
        let (answer, receiver) = oneshot::channel();
        let is_named = request.address.is_empty();
        let pod = match is_named {
            true => self.hasher.hash_one((&request.pod_namespace, &request.pod_name)),
            false => self.hasher.hash_one(&request.address),
        };
        let asked = {
            let mut state = self.state();
            let named = state.waiting.values().filter(|waiting| waiting.request.address.is_empty()).count();
            for (count, most, of) in [
                (state.count(pod), MAX_OF_POD, "about this pod already wait: one for each pod is enough"),
                (if is_named { named } else { 0 }, MAX_NAMED, "with ?pod= already wait: ask again later"),
                (state.waiting.len(), MAX_WAITING, "of pods of this node already wait: ask again later"),
            ] {
                if count >= most {
                    return Err(format!("{most} requests {of}"));
                }
            }
            state.last_id += 1;
            let id = state.last_id;
            request.id = id;
            state.waiting.insert(id, Waiting { pod, request, is_due: false, deadline, answer });
            Asked { barriers: self, id }
        };
        let answered = async {
            while let Err(next) = self.send_in_turn(asked.id, pod, is_named) {
                sleep_until(next.into()).await;
            }
            receiver.await.ok()
        };
        let answered = timeout_at(deadline + ANSWER_GRACE, answered).await;
        drop(asked);
        Ok(answered.ok().flatten().unwrap_or_else(|| v1::BarrierAnswer {
            result: Outcome::Incomplete.into(),
            reason: "no control plane has answered; `/status` of the agent shows whether the agent has a stream"
                .to_owned(),
            ..v1::BarrierAnswer::default()
        }))
    }

    /// Sends a request if the turn of its pod has come. The error is the time to try again.
    fn send_in_turn(&self, id: u64, pod: u64, is_named: bool) -> Result<(), std::time::Instant> {
        let (mut state, now) = (self.state(), std::time::Instant::now());
        state.turns.check(&pod, now)?;
        if is_named {
            state.named.take((), now)?;
        }
        state.turns.take(pod, now)?;
        let Some(waiting) = state.waiting.get_mut(&id) else { return Ok(()) };
        waiting.is_due = true;
        let request = waiting.request();
        state.send(request);
        Ok(())
    }

    /// True if no further request may wait for the pod with this address.
    pub(crate) fn is_crowded(&self, address: IpAddr) -> bool {
        self.state().count(self.hasher.hash_one(address_to_wire(address))) >= MAX_OF_POD
    }

    pub(super) fn begin_stream(&self) -> mpsc::Receiver<v1::BarrierRequest> {
        let (sender, requests) = mpsc::channel(MAX_UNSENT);
        let mut state = self.state();
        state.stream = Some(sender);
        state.waiting.values().filter(|waiting| waiting.is_due).for_each(|waiting| state.send(waiting.request()));
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
        assert_eq!(asked.await.unwrap(), Ok(answer));
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
        let answer = barriers.ask(at_address(), Instant::now()).await.unwrap();
        assert_eq!(answer.result(), Outcome::Incomplete);
    }

    fn named(name: usize) -> v1::BarrierRequest {
        let (pod_namespace, pod_name) = ("prod".to_owned(), format!("pod-{name}"));
        v1::BarrierRequest { pod_namespace, pod_name, ..v1::BarrierRequest::default() }
    }

    #[tokio::test]
    async fn one_question_for_a_pod_and_second_is_sent_and_further_ones_wait() {
        let barriers = Barriers::default();
        // No further turn comes during the test, however slow the machine is.
        barriers.state().turns = Turns::new(Duration::from_secs(3_600), 1);
        let mut requests = barriers.begin_stream();
        let ask = |request: v1::BarrierRequest| Box::pin(barriers.ask(request, later()));
        let mut asking: Vec<_> = (0..MAX_OF_POD).map(|_| ask(at_address())).collect();
        let context = &mut std::task::Context::from_waker(std::task::Waker::noop());
        assert!(asking.iter_mut().all(|asking| asking.as_mut().poll(context).is_pending()));
        assert!(requests.try_recv().is_ok() && requests.try_recv().is_err(), "the others wait for their turn");
        assert!(barriers.is_crowded([10, 0, 0, 1].into()) && !barriers.is_crowded([10, 0, 0, 2].into()));
        assert!(ask(at_address()).await.unwrap_err().contains("4 requests about this pod"));
        // A new stream repeats only what was sent.
        let mut requests = barriers.begin_stream();
        assert!(requests.try_recv().is_ok() && requests.try_recv().is_err());
        // Another pod has its own turn.
        asking.push(ask(named(1)));
        assert!(asking.last_mut().unwrap().as_mut().poll(context).is_pending());
        assert_eq!(requests.try_recv().unwrap().pod_name, "pod-1");
    }

    #[tokio::test]
    async fn requests_that_name_their_pod_leave_places_for_pods_with_an_address() {
        let barriers = Barriers::default();
        let mut requests = barriers.begin_stream();
        let ask = |request: v1::BarrierRequest| Box::pin(barriers.ask(request, later()));
        let mut asking: Vec<_> = (0..MAX_NAMED).map(|name| ask(named(name))).collect();
        let context = &mut std::task::Context::from_waker(std::task::Waker::noop());
        assert!(asking.iter_mut().all(|asking| asking.as_mut().poll(context).is_pending()));
        assert!(ask(named(MAX_NAMED)).await.unwrap_err().contains("512 requests with ?pod="));
        let sent = std::iter::from_fn(|| requests.try_recv().ok()).count();
        assert!((NAMED_AT_ONCE as usize..MAX_NAMED).contains(&sent), "{sent}");
        asking.push(ask(at_address()));
        assert!(asking.last_mut().unwrap().as_mut().poll(context).is_pending());
        assert_eq!(requests.try_recv().unwrap().address, at_address().address);
    }
}
