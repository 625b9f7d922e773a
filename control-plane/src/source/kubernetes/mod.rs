//! Objects from a Kubernetes API server, with one watch for each kind.

mod watch;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    error::Error,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::FutureExt as _;
use headgate_core::errors::chain;
use http::StatusCode;
use http_body_util::{BodyExt as _, Limited};
use kube::{
    Client, Config,
    client::Body,
    config::{KubeConfigOptions, Kubeconfig},
    core::Status,
};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::{SourceError, SourceSettings};
use crate::{
    model::{Event, Model, Sink, Transaction},
    objects::{ManifestHeader, Object, ObjectKey, ObjectKind, SourceKind},
};
use watch::{KindUpdate, Watch, WatchUpdate, source_kind};

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
        self.model.show_problems(&*self.sink);
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
    let lines = bytes.split(|byte| *byte == b'\n').map_while(|text| decode_line(kind, text).ok());
    let event = |line| match line {
        Line::Object { event, .. } => event,
        Line::Bookmark { .. } | Line::Error(_) => None,
    };
    lines.filter_map(event).collect()
}

/// The objects on a page of a list; empty if the page cannot be decoded.
#[must_use]
pub fn list_events(kind: ObjectKind, bytes: &[u8]) -> Vec<Event> {
    decode_page(kind, bytes).map(|(page, _)| page.events).unwrap_or_default()
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

// Decodes what the API server sends: lists, and watches with one JSON document per line.
//
// `kube::runtime::watcher` is not used, for two reasons. First, the watcher does not pass on
// bookmarks. While no object of a kind changes, only bookmarks report the position of the kind.
// Second, the watcher hides the loss of an event in a line that cannot be decoded. Here,
// an invalid object is still an event if the name of the object can be read. So one invalid object
// does not stop a list.

/// Maximum size of a line. No object is this large, because etcd accepts only 1.5 MiB by default.
const LINE_LIMIT_BYTES: usize = 16 * 1024 * 1024;

/// One line of a watch.
#[derive(Debug)]
enum Line {
    /// An object has changed, or is part of the initial state.
    Object {
        /// The change; `None` for a pod without the readiness gate of Headgate.
        event: Option<Event>,
        /// The object's resourceVersion.
        version: String,
    },
    /// All changes up to this version have been sent.
    Bookmark {
        /// The resourceVersion.
        version: String,
        /// The initial state of a streaming list is complete.
        ends_initial_state: bool,
    },
    /// The server ends the watch with an error.
    Error(Box<kube::core::Status>),
}

#[derive(Deserialize)]
struct RawLine<'a> {
    #[serde(rename = "type", borrow)]
    event: Cow<'a, str>,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: ListMetadata,
}

/// The metadata of a bookmark, or of a page of a list.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    continue_token: Option<String>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// Decodes one line of a watch.
///
/// # Errors
/// A description, if the line is not an event of this kind.
fn decode_line(kind: ObjectKind, text: &[u8]) -> Result<Line, String> {
    let raw: RawLine<'_> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    match raw.event.as_ref() {
        "ADDED" | "MODIFIED" => {
            let (event, version) = object(kind, raw.object)?;
            Ok(Line::Object { event: Some(event).filter(has_effect), version })
        }
        "DELETED" => {
            let (key, version) = names(kind, raw.object)?;
            Ok(Line::Object { event: Some(Event::Delete(key)), version })
        }
        "BOOKMARK" => {
            let metadata =
                serde_json::from_str::<Bookmark>(raw.object.get()).map_err(|error| error.to_string())?.metadata;
            if metadata.resource_version.is_empty() {
                return Err("a bookmark without a resourceVersion".to_owned());
            }
            let annotations = metadata.annotations.unwrap_or_default();
            let ends_initial_state = annotations.get("k8s.io/initial-events-end").is_some_and(|value| value == "true");
            Ok(Line::Bookmark { version: metadata.resource_version, ends_initial_state })
        }
        "ERROR" => serde_json::from_str(raw.object.get()).map(Line::Error).map_err(|error| error.to_string()),
        other => Err(format!("an event of unknown type {other:?}")),
    }
}

/// All objects of a kind, or those of one page, and the version of the list.
#[derive(Debug)]
struct Listed {
    events: Vec<Event>,
    version: String,
}

impl Listed {
    /// The newest version of an object.
    fn newest(&self) -> Option<u64> {
        let version = |event: &Event| match event {
            Event::Apply(object) => object.names().1[2].parse().ok(),
            Event::Delete(_) | Event::Undecodable { .. } => None,
        };
        self.events.iter().filter_map(version).max()
    }
}

#[derive(Deserialize)]
struct RawPage<'a> {
    metadata: ListMetadata,
    #[serde(borrow, deserialize_with = "required_items")]
    items: Vec<&'a RawValue>,
}

/// Reads `items`, where `null` means an empty list. The field must be present: an answer without it
/// is not a list, and must not count as an empty list.
fn required_items<'de: 'a, 'a, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<&'a RawValue>, D::Error> {
    Ok(Option::<Vec<&'a RawValue>>::deserialize(deserializer)?.unwrap_or_default())
}

/// Decodes one page of a list. Returns also the token for the next page.
///
/// # Errors
/// A description, if the text is not a list, or an item has no name, namespace or resourceVersion.
fn decode_page(kind: ObjectKind, text: &[u8]) -> Result<(Listed, Option<String>), String> {
    let raw: RawPage<'_> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if raw.metadata.resource_version.is_empty() {
        return Err("a list without a resourceVersion".to_owned());
    }
    let events = raw
        .items
        .into_iter()
        .map(|item| object(kind, item).map(|(event, _)| event))
        .filter(|event| event.as_ref().map_or(true, has_effect))
        .collect::<Result<_, _>>()?;
    let continue_token = raw.metadata.continue_token.filter(|token| !token.is_empty());
    Ok((Listed { events, version: raw.metadata.resource_version }, continue_token))
}

/// False for a pod without the readiness gate of Headgate. The gates of a pod never change, so such
/// a pod never gets an effect.
fn has_effect(event: &Event) -> bool {
    !matches!(event, Event::Apply(object) if matches!(&**object, Object::Pod(pod) if !pod.has_gate()))
}

fn object(kind: ObjectKind, raw: &RawValue) -> Result<(Event, String), String> {
    let decoded = Object::deserialize(kind, &mut serde_json::Deserializer::from_str(raw.get()));
    match decoded {
        Ok(object) => {
            let (_, [namespace, name, version]) = object.names();
            check_names(kind, name, namespace, version)?;
            let version = version.to_owned();
            Ok((Event::Apply(Box::new(object)), version))
        }
        Err(_) => {
            let (key, version) = names(kind, raw)?;
            let mut deserializer = serde_json::Deserializer::from_str(raw.get());
            let mut track = serde_path_to_error::Track::new();
            let tracked = serde_path_to_error::Deserializer::new(&mut deserializer, &mut track);
            let Err(error) = Object::deserialize(kind, tracked) else {
                return Err("an object that was decoded only at the second attempt".to_owned());
            };
            let field = track.path().to_string();
            let message = format!("{error}: correct the field, or the program that writes it");
            Ok((Event::Undecodable { key, field, message }, version))
        }
    }
}

fn names(kind: ObjectKind, raw: &RawValue) -> Result<(ObjectKey, String), String> {
    let header: ManifestHeader = serde_json::from_str(raw.get()).map_err(|error| error.to_string())?;
    let names = header.metadata;
    check_names(kind, &names.name, &names.namespace, &names.resource_version)?;
    Ok((ObjectKey::new(kind, &names.namespace, &names.name), names.resource_version))
}

fn check_names(kind: ObjectKind, name: &str, namespace: &str, version: &str) -> Result<(), String> {
    let missing = match () {
        () if name.is_empty() => "name",
        () if kind.is_namespaced() && namespace.is_empty() => "namespace",
        () if version.is_empty() => "resourceVersion",
        () => return Ok(()),
    };
    Err(format!("a {} without metadata.{missing}", kind.name()))
}

/// The lines of a response body.
#[derive(Debug)]
struct Lines {
    body: Body,
    buffer: BytesMut,
    /// Number of bytes at the start of the buffer that contain no line end.
    searched_bytes: usize,
}

impl Lines {
    fn new(body: Body) -> Self {
        Self { body, buffer: BytesMut::new(), searched_bytes: 0 }
    }

    /// The next line without its line end; `None` when the body has ended after a complete line.
    ///
    /// # Errors
    /// The connection broke, the body ended in the middle of a line, or a line is too long. The
    /// watch can be resumed.
    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let found = self.buffer[self.searched_bytes..].iter().position(|byte| *byte == b'\n');
            if let Some(place) = found {
                let mut line = self.buffer.split_to(self.searched_bytes + place + 1);
                self.searched_bytes = 0;
                line.truncate(line.len() - 1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return Ok(Some(line.freeze()));
            }
            self.searched_bytes = self.buffer.len();
            if self.buffer.len() > LINE_LIMIT_BYTES {
                return Err(Failure::malformed(format!("a line of more than {LINE_LIMIT_BYTES} bytes")));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Err(Failure::dropped(&error)),
                None if self.buffer.trim_ascii().is_empty() => return Ok(None),
                None => return Err(Failure::cut()),
            }
        }
    }
}

// Failures of lists and watches, their remedies, and the pauses before retries.

/// Upper bound of the first pause, which is random.
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// Upper bound of the random pause, and of the pause that a server asks for.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Why a request failed, or a watch ended early. Every failure is retried.
#[derive(Debug)]
struct Failure {
    /// The value of the metric label `reason`.
    reason: &'static str,
    /// What happened and what to do about it.
    message: String,
    /// True if the watch cannot continue from its position, so the kind must be listed again.
    needs_list: bool,
    /// The HTTP status code, if the server has answered.
    code: Option<StatusCode>,
    /// The pause that the server asks for.
    retry_after: Option<Duration>,
}

impl Failure {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), needs_list: false, code: None, retry_after: None }
    }

    /// The server sent an answer that violates the protocol. An event may be lost, so the watch is
    /// opened again after the last event that was decoded. If it breaks there again, the kind is
    /// listed.
    fn malformed(message: impl std::fmt::Display) -> Self {
        Self::new("malformed_answer", format!("the server sent an invalid answer: {message}"))
    }

    /// The connection broke.
    fn dropped(error: &(dyn Error + 'static)) -> Self {
        Self::new("connection_lost", format!("the connection broke: {}", chain(error)))
    }

    /// The answer ended in the middle of an object.
    fn cut() -> Self {
        Self::new("connection_lost", "the answer ended in the middle of an object")
    }

    /// Nothing arrived for `time`. `what` is the first part of the message, such as "nothing
    /// arrived in a watch".
    fn silent(what: &str, time: Duration) -> Self {
        Self::new("timeout", format!("{what} for {} seconds", time.as_secs()))
    }

    /// A streaming list ended before it was complete.
    fn incomplete_list() -> Self {
        Self::new("list_incomplete", "the server ended a streaming list before it was complete")
    }

    /// The newest version at the server is older than a version that the server sent before.
    fn went_back(ours: u64, theirs: u64) -> Self {
        let message = format!(
            "the server is at version {theirs}, but has sent version {ours} before, as after the restore of a backup: \
             everything is listed again"
        );
        Self { needs_list: true, ..Self::new("source_went_back", message) }
    }

    /// The server did not answer the request.
    fn request(error: &kube::Error) -> Self {
        let message =
            format!("a request to the API server failed: {}: check the address and the network", chain(error));
        match error {
            kube::Error::Auth(_) => Self::new("unauthorized", message),
            _ => Self::new("connection_failed", message),
        }
    }

    /// An answer with an error code to a request that needs the right `verb`.
    fn answer(kind: ObjectKind, verb: &str, code: StatusCode, status: Option<&Status>) -> Self {
        let said = status.map_or_else(|| code.to_string(), |status| format!("{} ({})", status.message, code.as_u16()));
        let resource = kind.rbac_resource();
        let (reason, message) = match code {
            StatusCode::UNAUTHORIZED => {
                ("unauthorized", format!("{said}: the credentials are not accepted; check the token or the kubeconfig"))
            }
            StatusCode::FORBIDDEN => {
                let message =
                    format!("{said}: allow the verb {verb:?} on {resource} in the ClusterRole of this account");
                ("forbidden", message)
            }
            StatusCode::NOT_FOUND => ("not_found", format!("{said}: the server does not serve {resource}")),
            StatusCode::GONE => ("watch_expired", format!("{said}: everything is listed again")),
            StatusCode::TOO_MANY_REQUESTS => ("throttled", said),
            _ if code.is_server_error() => ("server_error", said),
            _ => ("refused", said),
        };
        let retry_after = status.and_then(|status| status.details.as_ref()).map(|details| details.retry_after_seconds);
        let retry_after = retry_after.filter(|seconds| *seconds > 0).map(|seconds| Duration::from_secs(seconds.into()));
        let needs_list = code == StatusCode::GONE;
        Self { needs_list, code: Some(code), retry_after, ..Self::new(reason, message) }
    }

    /// An ERROR event inside a watch.
    fn event(kind: ObjectKind, status: &Status) -> Self {
        let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let expired = matches!(status.reason.as_str(), "Expired" | "Gone");
        let code = if expired { StatusCode::GONE } else { code };
        Self::answer(kind, "watch", code, Some(status))
    }

    /// Whether the server sent an error of its own, or a line that cannot be decoded. The same may
    /// happen at each attempt to continue at this version.
    fn is_fault_of_server(&self) -> bool {
        matches!(self.reason, "malformed_answer" | "server_error" | "refused")
    }

    /// Whether the answer means that the server has no streaming lists. API servers with the
    /// feature disabled answer 422. Proxies in front of API servers answer with one of the other
    /// codes below.
    fn refuses_streaming(&self) -> bool {
        self.code.is_some_and(|code| matches!(code.as_u16(), 400 | 405 | 406 | 415 | 422 | 501))
    }
}

/// Pauses between retries: random times between 0 and a bound that doubles with each failure. The
/// pauses are random so that replicas do not retry together.
#[derive(Debug, Default)]
pub(crate) struct BackOff {
    failures: u32,
    rng: fastrand::Rng,
}

impl BackOff {
    /// A back-off before the first failure, which draws its pauses from `rng`.
    fn new(rng: fastrand::Rng) -> Self {
        Self { failures: 0, rng }
    }

    /// Returns to the first bound.
    fn reset(&mut self) {
        self.failures = 0;
    }

    /// The time to wait before the next retry. `retry_after` is the pause that the server asks for.
    /// A random pause is added to `retry_after`.
    pub(crate) fn pause(&mut self, retry_after: Option<Duration>) -> Duration {
        let bound = FIRST_PAUSE.saturating_mul(1 << self.failures.min(16)).min(LONGEST_PAUSE);
        self.failures = self.failures.saturating_add(1);
        let drawn = bound.mul_f64(self.rng.f64());
        retry_after.map_or(drawn, |asked| asked.min(LONGEST_PAUSE) + drawn)
    }
}

#[cfg(test)]
mod gather_tests {
    #![allow(clippy::unwrap_used)]
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
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

        let pause = Arc::new(Mutex::new(LINGER / 2));
        let pauses = Arc::clone(&pause);
        let ending = tokio::spawn(async move {
            while sender.send(0).await.is_ok() {
                let pause = *pauses.lock().unwrap();
                tokio::time::advance(pause).await;
            }
        });
        let start = Instant::now();
        let batch = recently().together(1, &mut updates).await;
        let took = start.elapsed();
        assert!(batch.len() > 2, "{batch:?}");
        assert!((LONGEST_LINGER..=LONGEST_LINGER + LINGER).contains(&took), "{took:?}");
        *pause.lock().unwrap() = Duration::ZERO;
        assert_eq!(recently().together(1, &mut updates).await.len(), MAX_TOGETHER);
        drop(updates);
        ending.await.unwrap();
    }
}

#[cfg(test)]
mod contact_tests {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_object_that_cannot_be_decoded_is_an_event() {
        let text = br#"{"kind":"ServiceList","metadata":{"resourceVersion":"7"},"items":[
            {"metadata":{"name":"a","namespace":"x","resourceVersion":"1"},"spec":{"ports":[{"port":"eighty"}]}},
            {"metadata":{"name":"b","namespace":"x","resourceVersion":"2","labels":null},"spec":{"ports":null}}]}"#;
        let (page, _) = decode_page(ObjectKind::Service, text).unwrap();
        assert_eq!(page.version, "7");
        assert!(
            matches!(&page.events[0], Event::Undecodable { key, field, .. }
            if key.to_string() == "Service x/a" && field == "spec.ports[0].port"),
            "{:?}",
            page.events[0]
        );
        assert!(matches!(&page.events[1], Event::Apply(_)));
    }

    #[test]
    fn an_answer_that_is_not_a_list_is_an_error() {
        for text in ["{}", "[]", r#"{"metadata":{}}"#, r#"{"metadata":{"resourceVersion":"1"}}"#, "<html>"] {
            assert!(decode_page(ObjectKind::Node, text.as_bytes()).is_err(), "{text}");
        }
        let empty = r#"{"metadata":{"resourceVersion":"1"},"items":null}"#;
        assert!(decode_page(ObjectKind::Node, empty.as_bytes()).unwrap().0.events.is_empty());
    }

    #[test]
    fn each_type_of_line_is_decoded() {
        let read = |text: &str| decode_line(ObjectKind::Node, text.as_bytes());
        let node = r#"{"object":{"metadata":{"name":"n","resourceVersion":"5"}},"type":"ADDED"}"#;
        assert!(
            matches!(read(node).unwrap(), Line::Object { event: Some(Event::Apply(_)), version } if version == "5")
        );
        let end = r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9",
            "annotations":{"k8s.io/initial-events-end":"true"}}}}"#;
        assert!(matches!(read(end).unwrap(), Line::Bookmark { ends_initial_state: true, .. }));
        let gone = r#"{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}"#;
        assert!(matches!(read(gone).unwrap(), Line::Error(status) if status.code == 410));
        for text in ["}", "{}", r#"{"type":"ADDED","object":{"metadata":{"name":"n"}}}"#, r#"{"type":"X","object":{}}"#]
        {
            assert!(read(text).is_err(), "{text}");
        }
    }
}

#[cfg(test)]
mod failure_tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_start_over() {
        let mut back_off = BackOff::default();
        assert!(back_off.pause(None) <= FIRST_PAUSE);
        for _ in 0..100 {
            assert!(back_off.pause(None) <= LONGEST_PAUSE);
        }
        assert!(back_off.pause(Some(Duration::from_secs(3))) >= Duration::from_secs(3));
        back_off.reset();
        assert!(back_off.pause(None) <= FIRST_PAUSE);
    }

    #[test]
    fn a_missing_permission_is_named() {
        let failure = Failure::answer(ObjectKind::EndpointSlice, "watch", StatusCode::FORBIDDEN, None);
        assert_eq!(failure.reason, "forbidden");
        assert!(failure.message.contains("\"watch\"") && failure.message.contains("endpointslices.discovery.k8s.io"));
        assert!(Failure::answer(ObjectKind::Node, "watch", StatusCode::GONE, None).needs_list);
    }
}
