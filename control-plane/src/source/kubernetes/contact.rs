//! Whether the API server can be heard: one verdict over all kinds (contract, 14).
//!
//! The age of what is known says little in a short time, since a quiet cluster has only about one
//! bookmark a minute. So the watches tell what becomes of their requests, and when nothing at all
//! has come for some seconds the server is asked for one object. That finds a server, or a network,
//! that accepts everything and says nothing.

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

/// Time between two looks.
const TICK: Duration = Duration::from_secs(1);

/// Silence after which the server is asked for one object.
const PROBE_AFTER: Duration = Duration::from_secs(5);

/// How long the answer may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// Answers are read up to here. One object is at most some 1.5 MB.
const ANSWER_LIMIT_BYTES: usize = 4 << 20;

/// Unanswered probes in a row that make the verdict. Further ones follow in pauses of
/// [`PROBE_AFTER`].
const FAILED_PROBES: u32 = 2;

/// How long requests for one kind may fail.
const FAILING_LIMIT: Duration = Duration::from_secs(10);

/// How much longer than a silent watch is kept open a kind may show nothing.
const STALE_MARGIN: Duration = Duration::from_secs(30);

/// See the module.
pub(super) struct Contact {
    sink: Arc<dyn Sink>,
    silence_limit: Duration,
    inner: Mutex<Inner>,
    /// Wakes those that wait for another try, when the server answers again.
    returned: Notify,
}

struct Inner {
    /// When the server last sent anything.
    answered: Instant,
    failed_probes: u32,
    probe_problem: String,
    /// Kinds whose requests fail: since when, and why at last.
    failing: BTreeMap<ObjectKind, (Instant, String)>,
    /// When a kind last showed that what is known of it is current; from its first list on.
    current: BTreeMap<ObjectKind, Instant>,
    /// A probe has been out for longer than [`TICK`].
    is_probe_late: bool,
    is_cut_off: bool,
    is_doubted: bool,
}

impl Contact {
    /// The source counts as heard until something speaks against it. `silence_limit`: how long a
    /// silent watch is kept open.
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

    /// The server sent something.
    pub(super) fn touched(&self) {
        self.answer(|_, _| {});
    }

    /// A watch of the kind was opened, or a part of its list came.
    pub(super) fn answered(&self, kind: ObjectKind) {
        self.answer(|inner, _| {
            inner.failing.remove(&kind);
        });
    }

    /// The kind showed that what is known of it is current.
    pub(super) fn is_current(&self, kind: ObjectKind) {
        self.answer(|inner, now| {
            inner.failing.remove(&kind);
            inner.current.insert(kind, now);
        });
    }

    /// An answer may end a verdict or a doubt, and cannot begin one.
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

    /// A list or a watch of the kind failed.
    pub(super) fn failed(&self, kind: ObjectKind, message: &str) {
        let mut inner = self.lock();
        let (_, last) = inner.failing.entry(kind).or_insert_with(|| (Instant::now(), String::new()));
        message.clone_into(last);
        self.judge(inner);
    }

    /// Waits before another try. The wait is over at once when the server answers a probe after it
    /// has not: after a long outage the pauses are long.
    pub(super) async fn pause(&self, pause: Duration) {
        tokio::select! {
            () = sleep(pause) => {}
            () = self.returned.notified() => {}
        }
    }

    /// Judges, and asks the server when it is silent, for ever.
    pub(super) async fn run(self: Arc<Self>, client: Client) {
        let mut next_probe = Instant::now();
        loop {
            sleep(TICK).await;
            let silent_for = self.lock().answered.elapsed();
            if silent_for >= PROBE_AFTER && next_probe <= Instant::now() {
                let asked = Instant::now();
                match self.watched(probe(&client)).await {
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

    /// Waits for a probe. One that takes longer than [`TICK`] raises doubt before it fails.
    async fn watched<T>(&self, probe: impl Future<Output = T>) -> T {
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
        // A watch may have brought something meanwhile.
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

    /// A probe that was sent at `asked` failed. Returns how many have failed in a row. One during
    /// which the server sent something else does not count: the server is not silent.
    fn probe_failed(&self, asked: Instant, problem: String) -> u32 {
        let mut inner = self.lock();
        if inner.answered < asked {
            inner.failed_probes = inner.failed_probes.saturating_add(1);
            inner.probe_problem = problem;
        }
        inner.failed_probes
    }

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
            Some(problem) => tracing::warn!("cut off from the API server: {problem}; what is known stays in service"),
            None => tracing::info!("the API server is heard again"),
        }
        // Under the lock, so that verdicts arrive in order.
        self.sink.cut_off(problem);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Why the source counts as cut off, if it does.
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
            format!("{} have shown neither a change nor a bookmark for {seconds} seconds", kind.name())
        })
    }
}

/// Asks for one object. Any answer but a server error shows that the server is there; whether it
/// lets us watch is for the watches to tell.
async fn probe(client: &Client) -> Result<(), String> {
    let uri = format!("{}?limit=1", path(ObjectKind::Service));
    let request = http::Request::get(uri).body(kube::client::Body::empty()).map_err(|error| error.to_string())?;
    let ask = async {
        let response = client.send(request).await.map_err(|error| format!("it cannot be asked: {error}"))?;
        let status = response.status();
        // Read to its end, so that the connection can be used again.
        let body = Limited::new(response.into_body(), ANSWER_LIMIT_BYTES).collect().await;
        body.map_err(|error| format!("its answer to a small request breaks: {error}"))?;
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
        contact.is_current(ObjectKind::Node);
        assert_eq!(fails(asked), 0, "a watch brought something after the probe was sent");
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
        contact.watched(sleep(2 * TICK)).await;
        assert_eq!(states(), in_doubt);
        contact.probe_answered();
        assert_eq!(states(), following);
        contact.lock().answered -= PROBE_AFTER;
        contact.watched(sleep(TICK / 2)).await;
        assert_eq!(states(), following, "an answer in good time raises no doubt");
    }
}
