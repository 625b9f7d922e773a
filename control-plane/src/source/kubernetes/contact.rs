//! Decides whether the source is cut off (discovery.proto, section 14). One decision covers all
//! kinds of objects.
//!
//! A quiet cluster has only about one bookmark a minute, so bookmarks alone detect an outage too
//! late. The watches therefore report the outcome of each request. After some seconds without any
//! answer, a probe asks the server for one object. The probe detects a server or a network that
//! accepts requests and never answers.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http_body_util::{BodyExt as _, Limited};
use kube::Client;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use super::wire::path;
use crate::{objects::ObjectKind, transaction::Sink};

/// Time between two checks of the source.
const TICK: Duration = Duration::from_secs(1);

/// A probe is sent when the server has sent nothing for this time.
const PROBE_AFTER: Duration = Duration::from_secs(5);

/// How long the answer to a probe may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// Upper bound of the answer to a probe. One object has at most about 1.5 MB.
const ANSWER_LIMIT_BYTES: usize = 4 << 20;

/// After this many failed probes in a row, the source is cut off. From then on, a probe is sent
/// every [`PROBE_AFTER`].
const FAILED_PROBES: u32 = 2;

/// The source is cut off after the requests for one kind have failed for this time.
const FAILING_LIMIT: Duration = Duration::from_secs(10);

/// A watch has a limit for its silence. The source is cut off when the API server has not confirmed
/// a kind of objects for this limit plus the margin here.
const STALE_MARGIN: Duration = Duration::from_secs(30);

/// Collects the outcomes of requests, and reports a verdict and a doubt to the sink. The verdict
/// says whether the source is cut off. The doubt says whether the last request for a kind has
/// failed, or whether a probe has failed or is late.
pub(super) struct Contact {
    sink: Arc<dyn Sink>,
    silence_limit: Duration,
    inner: Mutex<Inner>,
    /// Wakes the watches that wait for a retry when the server answers again.
    returned: Notify,
}

struct Inner {
    /// When the server last sent anything.
    answered: Instant,
    failed_probes: u32,
    probe_problem: String,
    /// Kinds whose requests fail: the time of the first failure, and the last message.
    failing: BTreeMap<ObjectKind, (Instant, String)>,
    /// When a complete list, a change or a bookmark of each kind last arrived. A kind is added with
    /// its first list.
    current: BTreeMap<ObjectKind, Instant>,
    /// Becomes true when a probe takes longer than [`TICK`], and false when the server sends
    /// something.
    is_probe_late: bool,
    /// The last verdict that the sink has received.
    is_cut_off: bool,
    /// The last doubt that the sink has received.
    is_doubted: bool,
}

impl Contact {
    /// Creates the record of a source that is not cut off. `silence_limit` is the time after which
    /// a silent watch is opened again.
    pub(super) fn new(sink: Arc<dyn Sink>, silence_limit: Duration) -> Arc<Self> {
        let inner = Inner {
            answered: Instant::now(),
            failed_probes: 0,
            probe_problem: String::new(),
            failing: BTreeMap::new(),
            current: BTreeMap::new(),
            is_probe_late: false,
            is_cut_off: false,
            is_doubted: false,
        };
        Arc::new(Self { sink, silence_limit, inner: Mutex::new(inner), returned: Notify::new() })
    }

    /// Notes that the server has sent something.
    pub(super) fn touched(&self) {
        self.answer(|_, _| {});
    }

    /// Notes that a watch of the kind was opened, or that a part of its list arrived.
    pub(super) fn answered(&self, kind: ObjectKind) {
        self.answer(|inner, _| {
            inner.failing.remove(&kind);
        });
    }

    /// Notes a complete list, a change or a bookmark of the kind.
    pub(super) fn confirmed(&self, kind: ObjectKind) {
        self.answer(|inner, now| {
            inner.failing.remove(&kind);
            if kind.is_essential() {
                inner.current.insert(kind, now);
            }
        });
    }

    /// Notes an answer of the server. An answer can end the cut-off or the doubt, but does not
    /// begin either of them. So the verdict and the doubt are checked only if the source is cut off
    /// or in doubt.
    fn answer(&self, note: impl FnOnce(&mut Inner, Instant)) {
        let (mut inner, now) = (self.lock(), Instant::now());
        inner.answered = now;
        inner.failed_probes = 0;
        inner.is_probe_late = false;
        note(&mut inner, now);
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
        let (_, last) = inner.failing.entry(kind).or_insert_with(|| (Instant::now(), String::new()));
        message.clone_into(last);
        self.judge(inner);
    }

    /// Waits before a retry. The wait ends early when a probe succeeds after a failed probe,
    /// because the pauses are long after a long outage.
    pub(super) async fn pause(&self, pause: Duration) {
        tokio::select! {
            () = sleep(pause) => {}
            () = self.returned.notified() => {}
        }
    }

    /// Checks the source every [`TICK`], and probes the server while the server is silent. Never
    /// returns.
    pub(super) async fn run(self: Arc<Self>, client: Client) {
        let mut next_probe = Instant::now();
        loop {
            sleep(TICK).await;
            let silent_for = self.lock().answered.elapsed();
            if silent_for >= PROBE_AFTER && next_probe <= Instant::now() {
                let asked = Instant::now();
                match self.await_probe(probe(&client)).await {
                    Ok(()) => self.probe_answered(),
                    Err(problem) => {
                        tracing::debug!("the API server does not answer a small request: {problem}");
                        if self.probe_failed(asked, problem) >= FAILED_PROBES {
                            next_probe = Instant::now() + PROBE_AFTER;
                        }
                    }
                }
            }
            self.judge(self.lock());
        }
    }

    /// Waits for a probe. A probe that takes longer than [`TICK`] raises doubt before it fails.
    async fn await_probe<T>(&self, probe: impl Future<Output = T>) -> T {
        let mut probe = pin!(probe);
        tokio::select! {
            outcome = &mut probe => return outcome,
            () = sleep(TICK) => {}
        }
        self.probe_is_late();
        probe.await
    }

    fn probe_is_late(&self) {
        let mut inner = self.lock();
        // A watch may have received something since the probe was sent.
        if inner.answered.elapsed() >= PROBE_AFTER {
            inner.is_probe_late = true;
            self.judge(inner);
        }
    }

    fn probe_answered(&self) {
        let had_failed = self.lock().failed_probes > 0;
        self.touched();
        if had_failed {
            self.returned.notify_waiters();
        }
    }

    /// Notes that a probe that was sent at `asked` has failed. Returns how many probes have failed
    /// in a row. A failed probe does not count if the server has sent something else since `asked`.
    fn probe_failed(&self, asked: Instant, problem: String) -> u32 {
        let mut inner = self.lock();
        if inner.answered < asked {
            inner.failed_probes = inner.failed_probes.saturating_add(1);
            inner.probe_problem = problem;
        }
        inner.failed_probes
    }

    /// Reports a new verdict and a new doubt to the sink.
    fn judge(&self, mut inner: MutexGuard<'_, Inner>) {
        let problem = inner.problem(self.silence_limit + STALE_MARGIN);
        let is_doubted = inner.is_probe_late || inner.failed_probes > 0 || !inner.failing.is_empty();
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

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Why the source is cut off; `None` if it is not cut off.
    fn problem(&self, stale_after: Duration) -> Option<String> {
        let failing = self.failing.iter().find(|(_, (since, _))| since.elapsed() >= FAILING_LIMIT);
        if let Some((kind, (_, message))) = failing {
            return Some(format!("{} cannot be watched: {message}", kind.name()));
        }
        if self.failed_probes >= FAILED_PROBES {
            return Some(format!("the API server is silent, and {}", self.probe_problem));
        }
        let stale = self.current.iter().find(|(_, current)| current.elapsed() >= stale_after);
        stale.map(|(kind, _)| {
            let seconds = stale_after.as_secs();
            format!("no change and no bookmark of kind {} has arrived for {seconds} seconds", kind.name())
        })
    }
}

/// Asks for one object. Any answer except a server error shows that the server is reachable. A
/// refusal also counts as an answer, because the watches report refusals themselves.
async fn probe(client: &Client) -> Result<(), String> {
    let uri = format!("{}?limit=1", path(ObjectKind::Service));
    let request = http::Request::get(uri).body(kube::client::Body::empty()).map_err(|error| error.to_string())?;
    let ask = async {
        let response = client.send(request).await.map_err(|error| format!("a small request to it fails: {error}"))?;
        let status = response.status();
        // The answer is read to its end, so that the connection can be used again.
        let body = Limited::new(response.into_body(), ANSWER_LIMIT_BYTES).collect().await;
        body.map_err(|error| format!("its answer to a small request breaks off: {error}"))?;
        if status.is_server_error() { Err(format!("it answers {status} to a small request")) } else { Ok(()) }
    };
    let late = || Err(format!("it does not answer a small request in {} seconds", PROBE_TIMEOUT.as_secs()));
    timeout(PROBE_TIMEOUT, ask).await.unwrap_or_else(|_| late())
}

#[cfg(test)]
mod tests {
    use headgate_core::node_state::SourceState;

    use super::*;
    use crate::{
        metrics::Metrics,
        store::{Limits, Store},
    };

    #[test]
    fn a_probe_fails_only_when_the_server_sends_nothing_else_meanwhile() {
        let sink = Arc::new(Store::new(Limits::default(), Arc::new(Metrics::default())));
        let contact = Contact::new(sink, Duration::from_secs(60));
        let later = || Instant::now() + Duration::from_secs(1);
        let fails = |asked| contact.probe_failed(asked, "it is late".into());
        assert_eq!(fails(later()), 1);
        let asked = Instant::now();
        contact.confirmed(ObjectKind::Node);
        assert_eq!(fails(asked), 0, "a watch has received something after the probe was sent");
        assert!(contact.lock().problem(Duration::from_secs(90)).is_none());
        assert_eq!((fails(later()), fails(later())), (1, 2));
        assert!(contact.lock().problem(Duration::from_secs(90)).is_some());
        contact.probe_answered();
        assert!(contact.lock().problem(Duration::from_secs(90)).is_none());
    }

    #[tokio::test]
    async fn failed_requests_and_late_probes_raise_doubt_before_the_verdict() {
        let store = Arc::new(Store::new(Limits::default(), Arc::new(Metrics::default())));
        store.synced();
        let sink: Arc<dyn Sink> = Arc::<Store>::clone(&store);
        let contact = Contact::new(sink, Duration::from_secs(60));
        let states = || (store.source_state(), store.source_state_for_others());
        let (following, in_doubt) =
            ((SourceState::Following, SourceState::Following), (SourceState::Following, SourceState::CutOff));
        assert_eq!(states(), following);
        contact.failed(ObjectKind::Node, "refused");
        assert_eq!(states(), in_doubt);
        contact.answered(ObjectKind::Node);
        assert_eq!(states(), following);
        contact.lock().answered -= PROBE_AFTER;
        contact.await_probe(sleep(2 * TICK)).await;
        assert_eq!(states(), in_doubt);
        contact.probe_answered();
        assert_eq!(states(), following);
        contact.lock().answered -= PROBE_AFTER;
        contact.await_probe(sleep(TICK / 2)).await;
        assert_eq!(states(), following, "an answer in good time raises no doubt");
    }
}
