//! Objects from a Kubernetes API server, with one watch for each kind.

mod watch;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::FutureExt as _;
use http_body_util::{BodyExt as _, Limited};
use kube::{
    Client, Config,
    client::Body,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::{SourceError, SourceSettings};
use crate::{
    model::{Event, Model},
    objects::ObjectKind,
    transaction::{Sink, SourceKind, Transaction},
};
use watch::{KindUpdate, Watch, WatchUpdate, source_kind};

pub(crate) use wire::BackOff;

/// Capacity of the channel from the watches to the model. A watch waits while the channel is full.
const WAITING_UPDATES: usize = 1_024;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Watches the API server of `client` until `shutdown`, and passes its changes to `sink`.
///
/// # Errors
/// A task has ended that should never end. An unreachable server or an invalid answer is not an
/// error: the watch is retried.
pub async fn follow(
    client: Client,
    settings: SourceSettings,
    sink: Arc<dyn Sink>,
    shutdown: CancellationToken,
) -> Result<(), SourceError> {
    let (sender, mut updates) = mpsc::channel(WAITING_UPDATES);
    let mut watches = JoinSet::new();
    let contact = Contact::new(Arc::clone(&sink));
    let kinds: BTreeSet<ObjectKind> =
        ObjectKind::ALL.into_iter().chain(settings.model.reads_pods.then_some(ObjectKind::Pod)).collect();
    for kind in kinds.iter().copied() {
        let (client, contact) = (client.clone(), Arc::clone(&contact));
        let watch = Watch::new(kind, client, settings.watch_silence, Arc::clone(&sink), contact, sender.clone());
        watches.spawn(watch.run(shutdown.clone()));
    }
    let judging = contact.run(client);
    watches.spawn(shutdown.clone().run_until_cancelled_owned(judging).map(drop));
    drop(sender);
    let mut state = Applier::new(sink, kinds, Model::new(settings.model));
    let mut gatherer = Gatherer::default();
    loop {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            Some(ended) = watches.join_next() => {
                if shutdown.is_cancelled() {
                    return Ok(());
                }
                let why = ended.err().map_or_else(|| "without an error".to_owned(), |error| error.to_string());
                return Err(SourceError::WatchEnded(why));
            }
            Some(first) = updates.recv() => {
                for update in gatherer.together(first, &mut updates).await {
                    state.take_in(update);
                }
                state.commit();
            }
        }
    }
}

/// Creates a client for the API server of the kubeconfig file, or of the pod's cluster.
pub(crate) async fn client(kubeconfig: Option<&Path>) -> Result<Client, SourceError> {
    // The installation fails only if a provider is already installed, which is harmless.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut config = config(kubeconfig).await?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Each watch has its own time limits.
    config.read_timeout = None;
    // Each watch also has its own back-off, which counts and logs failures.
    config.default_retry = false;
    Client::try_from(config).map_err(|error| SourceError::Client(error.to_string()))
}

async fn config(kubeconfig: Option<&Path>) -> Result<Config, SourceError> {
    let Some(path) = kubeconfig else {
        return Config::incluster().map_err(|error| SourceError::NotInCluster(error.to_string()));
    };
    let refused = |why: String| SourceError::Kubeconfig { path: path.to_owned(), why };
    let kubeconfig = Kubeconfig::read_from(path).map_err(|error| refused(error.to_string()))?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    config.map_err(|error| refused(error.to_string()))
}

/// The name and port of the API server of [`client`], if that can be created.
pub(crate) async fn api_server(kubeconfig: Option<&Path>) -> Option<(String, u16)> {
    let url = config(kubeconfig).await.ok()?.cluster_url;
    let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("http") { 80 } else { 443 });
    Some((url.host()?.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
}

/// Turns updates into transactions.
struct Applier {
    sink: Arc<dyn Sink>,
    model: Model,
    positions: BTreeMap<SourceKind, u64>,
    /// The last bookmark's position of each kind, until a later list or change.
    bookmarks: BTreeMap<SourceKind, u64>,
    /// When the oldest uncommitted list or change arrived; `None` if there is no such update.
    received: Option<std::time::Instant>,
    unlisted: BTreeSet<ObjectKind>,
    is_synced: bool,
    /// Kinds with a resourceVersion that is not a number. Each kind is logged once.
    non_numeric_versions: BTreeSet<ObjectKind>,
}

impl Applier {
    /// Creates the state of a source that has listed none of `kinds`.
    fn new(sink: Arc<dyn Sink>, kinds: BTreeSet<ObjectKind>, model: Model) -> Self {
        Self {
            sink,
            model,
            positions: BTreeMap::new(),
            bookmarks: BTreeMap::new(),
            received: None,
            unlisted: kinds,
            is_synced: false,
            non_numeric_versions: BTreeSet::new(),
        }
    }

    fn take_in(&mut self, KindUpdate { kind, update, version, received }: KindUpdate) {
        let update = match update {
            WatchUpdate::Changed(event) if self.model.ignores(&event) => WatchUpdate::Moved,
            update => update,
        };
        let is_bookmark = matches!(update, WatchUpdate::Moved);
        if !is_bookmark {
            self.received.get_or_insert(received);
        }
        let new_problems = match update {
            WatchUpdate::Listed(events) => {
                self.unlisted.remove(&kind);
                self.model.replace(kind, events)
            }
            WatchUpdate::Changed(event) => self.model.event(event, ""),
            WatchUpdate::Moved => 0,
        };
        for _ in 0..new_problems {
            self.sink.count_error(source_kind(kind), "malformed_object");
        }
        let Some(version) = version else { return };
        if let Ok(position) = version.parse::<u64>() {
            let kind = source_kind(kind);
            self.bookmarks.remove(&kind);
            let moved = if is_bookmark { &mut self.bookmarks } else { &mut self.positions };
            moved.insert(kind, position);
        } else if self.non_numeric_versions.insert(kind) {
            let kind = kind.name();
            tracing::warn!(kind, version, "a resourceVersion is not a number, so replicas cannot compare positions");
        }
    }

    /// Commits the changes, but only problems until every kind has been listed once.
    fn commit(&mut self) {
        super::show_problems(&*self.sink, &mut self.model);
        let received = self.received.take();
        if !self.unlisted.is_empty() {
            return;
        }
        let positions = std::mem::take(&mut self.positions).into_iter().collect();
        let bookmarks = std::mem::take(&mut self.bookmarks).into_iter().collect();
        let transaction = Transaction { positions, bookmarks, ..self.model.take() };
        if transaction != Transaction::default() {
            self.sink.commit(Transaction { received, ..transaction });
        }
        if !std::mem::replace(&mut self.is_synced, true) {
            self.sink.synced();
        }
    }
}

/// The events in the lines of a watch, up to the first line that cannot be decoded.
#[must_use]
pub fn watch_events(kind: ObjectKind, bytes: &[u8]) -> Vec<Event> {
    let lines = bytes.split(|byte| *byte == b'\n').map_while(|text| wire::line(kind, text).ok());
    let event = |line| match line {
        wire::Line::Object { event, .. } => event,
        wire::Line::Bookmark { .. } | wire::Line::Error(_) => None,
    };
    lines.filter_map(event).collect()
}

/// The objects on a page of a list; empty if the page cannot be decoded.
#[must_use]
pub fn list_events(kind: ObjectKind, bytes: &[u8]) -> Vec<Event> {
    wire::page(kind, bytes).map(|(page, _)| page.events).unwrap_or_default()
}

// Gathers updates that follow one another closely, so that they are committed together.

/// Upper bound of the updates in one commit.
const MAX_TOGETHER: usize = 4_096;

/// Updates so close to one another, as of a Service and its slices, are committed together.
const LINGER: Duration = Duration::from_millis(1);

/// The longest wait for further updates, and the pause after which there is none.
const LONGEST_LINGER: Duration = Duration::from_millis(5);

/// Gathers the updates of one channel.
#[derive(Debug, Default)]
struct Gatherer {
    /// When the last updates were returned.
    last: Option<Instant>,
}

impl Gatherer {
    /// Returns the first update, and the updates that follow it. After a pause, these are only the
    /// updates that have arrived already: an update in a quiet cluster reaches the nodes without a
    /// wait. During a burst, these are the updates that arrive within [`LINGER`] of one another.
    async fn together<T>(&mut self, first: T, updates: &mut mpsc::Receiver<T>) -> Vec<T> {
        let mut batch = vec![first];
        let now = Instant::now();
        let is_burst = self.last.is_some_and(|last| now - last < LONGEST_LINGER);
        let until = if is_burst { now + LONGEST_LINGER } else { now };
        while batch.len() < MAX_TOGETHER {
            match updates.try_recv() {
                Ok(update) => batch.push(update),
                Err(_) if Instant::now() >= until => break,
                Err(_) => match timeout(LINGER, updates.recv()).await {
                    Ok(Some(update)) => batch.push(update),
                    Ok(None) | Err(_) => break,
                },
            }
        }
        self.last = Some(Instant::now());
        batch
    }
}

// Decides whether the source is cut off (discovery.proto, section 14). One decision covers all
// kinds of objects.
//
// The watches report the outcome of each request, and whether a watch is stuck (`plan`).
// After some seconds without any answer, a probe asks the server for its release. The probe
// detects a server or a network that accepts requests and never answers.

/// Time between two checks of the source. Silence is counted in ticks, so that a process that was
/// frozen does not count the time in which it could not receive anything.
const TICK: Duration = Duration::from_secs(1);

/// While the server sends nothing, a probe is sent each time this many ticks have passed.
const PROBE_TICKS: u32 = 5;

const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// After so many silent ticks the source is cut off: two probes have failed.
const SILENT_TICKS: u32 = 14;

/// Upper bound of the answer to a probe.
const ANSWER_LIMIT_BYTES: usize = 64 << 10;

/// The source is cut off after the requests for one kind have failed for this time.
const FAILING_LIMIT: Duration = Duration::from_secs(10);

/// Collects the outcomes of requests, and reports a verdict and a doubt to the sink. The verdict
/// says whether the source is cut off. The doubt says whether the last request for a kind has
/// failed, or whether a probe has failed or is late.
struct Contact {
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
    /// Kinds whose requests fail: since when, and why; without a message, behind the server.
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
    fn new(sink: Arc<dyn Sink>) -> Arc<Self> {
        Arc::new(Self { sink, inner: Mutex::default(), returned: Notify::new() })
    }

    /// Notes that the server has sent something.
    fn touched(&self) {
        self.answer(|_| {});
    }

    /// Notes that a request for the kind has succeeded.
    fn answered(&self, kind: ObjectKind) {
        self.answer(|inner| {
            inner.failing.remove(&kind);
        });
    }

    /// Notes that a watch of the kind has brought a change or a bookmark.
    fn delivered(&self, kind: ObjectKind) {
        self.answer(|inner| {
            inner.failing.remove(&kind);
            inner.stuck.remove(&kind);
        });
    }

    /// Notes that a list shows a change that the watch of the kind has not brought.
    fn stuck(&self, kind: ObjectKind) {
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
    fn failed(&self, kind: ObjectKind, message: &str) {
        if !kind.is_essential() {
            return;
        }
        let mut inner = self.lock();
        inner.failing.entry(kind).or_insert_with(|| (Instant::now(), None)).1 = Some(message.to_owned());
        self.judge(inner);
    }

    /// Notes that the kind is listed because its watch has not reached the version of the server.
    /// This raises no doubt, because some servers never show their versions in watches.
    fn behind(&self, kind: ObjectKind) {
        if kind.is_essential() {
            self.lock().failing.entry(kind).or_insert_with(|| (Instant::now(), None));
        }
    }

    /// Waits before a retry. The wait ends early when a silent server answers again, because the
    /// pauses are long after a long outage.
    async fn pause(&self, pause: Duration) {
        tokio::select! {
            () = sleep(pause) => {}
            () = self.returned.notified() => {}
        }
    }

    /// Checks the source every [`TICK`], and probes a silent server, for ever.
    async fn run(self: Arc<Self>, client: Client) {
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
mod gather_tests {
    #![allow(clippy::unwrap_used)]
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn updates_of_a_burst_are_gathered_for_a_bounded_time() {
        let (sender, mut updates) = mpsc::channel(8);
        let recently = || Gatherer { last: Some(Instant::now()) };
        assert!(recently().together(1, &mut updates).now_or_never().is_none(), "an update in a burst waits");
        let later = async {
            tokio::task::yield_now().await;
            sender.try_send(2).unwrap();
        };
        let mut gatherer = recently();
        let (batch, ()) = tokio::join!(gatherer.together(1, &mut updates), later);
        assert_eq!(batch, [1, 2]);

        let ending = tokio::spawn(async move {
            while sender.send(0).await.is_ok() {
                tokio::task::yield_now().await;
            }
        });
        let start = Instant::now();
        let batch = recently().together(1, &mut updates).await;
        let took = start.elapsed();
        assert!(took >= LONGEST_LINGER || batch.len() == MAX_TOGETHER, "{} updates after {took:?}", batch.len());
        assert!(batch.len() > 1);
        drop(updates);
        ending.await.unwrap();
    }
}
