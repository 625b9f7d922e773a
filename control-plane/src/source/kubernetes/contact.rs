//! Decides whether the source is cut off (discovery.proto, section 14). One decision covers all
//! kinds of objects.
//!
//! The watches report the outcome of each request, and whether a watch is stuck (`super::plan`).
//! After some seconds without any answer, a probe asks the server for its release. The probe
//! detects a server or a network that accepts requests and never answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http_body_util::{BodyExt as _, Limited};
use kube::{Client, client::Body};
use tokio::{
    sync::Notify,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use crate::{objects::ObjectKind, transaction::Sink};

/// Time between two checks of the source. Silence is counted in ticks, so that a process that was
/// frozen does not count the time in which it could not receive anything.
const TICK: Duration = Duration::from_secs(1);

/// While the server sends nothing, a probe is sent each time this many ticks have passed.
const PROBE_TICKS: u32 = 5;

/// How long the answer to a probe may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// After so many silent ticks the source is cut off: two probes have failed.
const SILENT_TICKS: u32 = 14;

/// Upper bound of the answer to a probe.
const ANSWER_LIMIT_BYTES: usize = 64 << 10;

/// The source is cut off after the requests for one kind have failed for this time.
pub(super) const FAILING_LIMIT: Duration = Duration::from_secs(10);

/// Collects the outcomes of requests, and reports a verdict and a doubt to the sink. The verdict
/// says whether the source is cut off. The doubt says whether the last request for a kind has
/// failed, or whether a probe has failed or is late.
pub(super) struct Contact {
    sink: Arc<dyn Sink>,
    inner: Mutex<ContactState>,
    /// Wakes the watches that wait for a retry when the server answers again.
    returned: Notify,
}

#[derive(Default)]
struct ContactState {
    /// Ticks since the server last sent anything.
    silent_ticks: u32,
    probe_problem: String,
    /// Kinds whose requests fail: the time of the first failure, and the last message. Without a
    /// message, the kind is listed because its watch has not reached the version of the server.
    failing: BTreeMap<ObjectKind, (Instant, Option<String>)>,
    /// Kinds whose watch is stuck.
    stuck: BTreeSet<ObjectKind>,
    /// The last verdict that the sink has received.
    is_cut_off: bool,
    /// The last doubt that the sink has received.
    is_doubted: bool,
}

impl Contact {
    /// Creates the record of a source that is not cut off.
    pub(super) fn new(sink: Arc<dyn Sink>) -> Arc<Self> {
        Arc::new(Self { sink, inner: Mutex::default(), returned: Notify::new() })
    }

    /// Notes that the server has sent something.
    pub(super) fn touched(&self) {
        self.answer(|_| {});
    }

    /// Notes that a request for the kind has succeeded.
    pub(super) fn answered(&self, kind: ObjectKind) {
        self.answer(|inner| {
            inner.failing.remove(&kind);
        });
    }

    /// Notes that a watch of the kind has brought a change or a bookmark.
    pub(super) fn delivered(&self, kind: ObjectKind) {
        self.answer(|inner| {
            inner.failing.remove(&kind);
            inner.stuck.remove(&kind);
        });
    }

    /// Notes that a list shows a change that the watch of the kind has not brought.
    pub(super) fn stuck(&self, kind: ObjectKind) {
        let mut inner = self.lock();
        if kind.is_essential() && inner.stuck.insert(kind) {
            self.judge(inner);
        }
    }

    /// Notes an answer of the server. An answer can end the cut-off or the doubt, but does not
    /// begin either of them. So the verdict and the doubt are checked only if the source is cut off
    /// or in doubt.
    fn answer(&self, note: impl FnOnce(&mut ContactState)) {
        let mut inner = self.lock();
        if std::mem::take(&mut inner.silent_ticks) > PROBE_TICKS {
            self.returned.notify_waiters();
        }
        note(&mut inner);
        if inner.is_cut_off || inner.is_doubted {
            self.judge(inner);
        }
    }

    /// Notes that a list or a watch of the kind has failed.
    pub(super) fn failed(&self, kind: ObjectKind, message: &str) {
        if !kind.is_essential() {
            return;
        }
        let mut inner = self.lock();
        inner.failing.entry(kind).or_insert_with(|| (Instant::now(), None)).1 = Some(message.to_owned());
        self.judge(inner);
    }

    /// Notes that the kind is listed because its watch has not reached the version of the server.
    /// This raises no doubt, because some servers never show their versions in watches.
    pub(super) fn behind(&self, kind: ObjectKind) {
        if kind.is_essential() {
            self.lock().failing.entry(kind).or_insert_with(|| (Instant::now(), None));
        }
    }

    /// Waits before a retry. The wait ends early when a silent server answers again, because the
    /// pauses are long after a long outage.
    pub(super) async fn pause(&self, pause: Duration) {
        tokio::select! {
            () = sleep(pause) => {}
            () = self.returned.notified() => {}
        }
    }

    /// Checks the source every [`TICK`], and probes the server while the server is silent. Never
    /// returns.
    pub(super) async fn run(self: Arc<Self>, client: Client) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // A probe ends with this task.
        let mut _probe;
        loop {
            ticks.tick().await;
            if self.tick() {
                // The probe before has ended: PROBE_TIMEOUT is shorter than the time between two.
                _probe = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&self).probe(client.clone())));
            }
        }
    }

    /// Asks for the release of the server. Any answer except a server error shows that the server
    /// is reachable. A refusal also counts as an answer, because the watches report refusals
    /// themselves.
    async fn probe(self: Arc<Self>, client: Client) {
        let ask = async {
            let request = http::Request::get("/version").body(Body::empty()).map_err(|error| error.to_string())?;
            let response = client.send(request).await;
            let response = response.map_err(|error| format!("a small request to it fails: {error}"))?;
            let status = response.status();
            // The answer is read to its end, so that the connection can be used again.
            let body = Limited::new(response.into_body(), ANSWER_LIMIT_BYTES).collect().await;
            body.map_err(|error| format!("its answer to a small request breaks off: {error}"))?;
            if status.is_server_error() { Err(format!("it answers {status} to a small request")) } else { Ok(()) }
        };
        let late = || Err(format!("it does not answer a small request in {} seconds", PROBE_TIMEOUT.as_secs()));
        match timeout(PROBE_TIMEOUT, ask).await.unwrap_or_else(|_| late()) {
            Ok(()) => self.touched(),
            Err(problem) => self.lock().probe_problem = problem,
        }
    }

    /// Counts a tick. Returns whether a probe is due.
    fn tick(&self) -> bool {
        let mut inner = self.lock();
        inner.silent_ticks += 1;
        let is_due = inner.silent_ticks.is_multiple_of(PROBE_TICKS);
        self.judge(inner);
        is_due
    }

    /// Reports a new verdict and a new doubt to the sink.
    fn judge(&self, mut inner: MutexGuard<'_, ContactState>) {
        let problem = inner.problem();
        let is_doubted =
            inner.silent_ticks > PROBE_TICKS || inner.failing.values().any(|(_, message)| message.is_some());
        if is_doubted != inner.is_doubted {
            inner.is_doubted = is_doubted;
            self.sink.doubted(is_doubted);
        }
        if problem.is_some() == inner.is_cut_off {
            return;
        }
        inner.is_cut_off = problem.is_some();
        match &problem {
            Some(problem) => {
                tracing::warn!("cut off from the API server: {problem}; the last known state stays in service");
            }
            None => tracing::info!("the API server answers again"),
        }
        // The lock is held until the end of this function, so that verdicts arrive in order.
        self.sink.cut_off(problem);
    }

    fn lock(&self) -> MutexGuard<'_, ContactState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ContactState {
    /// Why the source is cut off; `None` if it is not cut off.
    fn problem(&self) -> Option<String> {
        let failing = self.failing.iter().find(|(_, (since, _))| since.elapsed() >= FAILING_LIMIT);
        if let Some((kind, (_, message))) = failing {
            let message = message.as_deref().unwrap_or("the watch has not reached the version of the server");
            return Some(format!("{} cannot be watched: {message}", kind.name()));
        }
        if self.silent_ticks >= SILENT_TICKS {
            return Some(format!("the API server is silent, and {}", self.probe_problem));
        }
        let kind = self.stuck.first()?.name();
        Some(format!("a list shows a change of kind {kind} that the watch has not brought"))
    }
}

#[cfg(test)]
mod tests {
    use headgate_core::node_state::SourceState;

    use super::*;
    use crate::{
        metrics::Metrics,
        store::{Limits, Store},
    };

    fn rig() -> (Arc<Store>, Arc<Contact>) {
        let store = Arc::new(Store::new(Limits::default(), Arc::new(Metrics::default())));
        store.synced();
        let sink: Arc<dyn Sink> = Arc::<Store>::clone(&store);
        (store, Contact::new(sink))
    }

    #[test]
    fn silence_and_failed_requests_raise_doubt_before_the_verdict() {
        let (store, contact) = rig();
        let states = || (store.source_state(), store.source_state_for_others());
        let (following, in_doubt, cut_off) = (
            (SourceState::Following, SourceState::Following),
            (SourceState::Following, SourceState::CutOff),
            (SourceState::CutOff, SourceState::CutOff),
        );
        assert_eq!(states(), following);
        contact.failed(ObjectKind::Node, "refused");
        assert_eq!(states(), in_doubt);
        contact.answered(ObjectKind::Node);
        contact.behind(ObjectKind::Node);
        assert_eq!(states(), following, "a list that is under way raises no doubt");
        contact.answered(ObjectKind::Node);
        let probes: Vec<u32> = (1..=SILENT_TICKS)
            .filter(|tick| {
                let wanted = if *tick <= PROBE_TICKS + 1 { following } else { in_doubt };
                assert_eq!(states(), wanted, "before tick {tick}");
                contact.tick()
            })
            .collect();
        assert_eq!((states(), probes), (cut_off, vec![5, 10]), "two probes have failed");
        contact.touched();
        assert_eq!(states(), following);
        for _ in 1..SILENT_TICKS {
            contact.tick();
        }
        contact.answered(ObjectKind::Node);
        contact.tick();
        assert_eq!(states(), following, "a watch has received something after the probes were sent");
    }

    #[test]
    fn a_stuck_watch_cuts_the_source_off_until_a_watch_brings_something() {
        let (store, contact) = rig();
        contact.stuck(ObjectKind::Pod);
        assert_eq!(store.source_state(), SourceState::Following, "the kind is optional");
        contact.stuck(ObjectKind::Service);
        assert_eq!(store.source_state(), SourceState::CutOff);
        contact.answered(ObjectKind::Service);
        contact.delivered(ObjectKind::Node);
        assert_eq!(store.source_state(), SourceState::CutOff, "the watch of Services has brought nothing");
        contact.delivered(ObjectKind::Service);
        assert_eq!(store.source_state(), SourceState::Following);
    }
}
