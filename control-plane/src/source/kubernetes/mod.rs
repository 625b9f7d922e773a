//! Objects from a Kubernetes API server, with one watch for each kind.

mod contact;
mod failure;
mod gather;
mod plan;
mod watch;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt as _;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_util::sync::CancellationToken;

pub(crate) use self::failure::BackOff;
use self::{
    contact::Contact,
    gather::Gatherer,
    watch::{KindUpdate, Watch, WatchUpdate, source_kind},
};
use super::{SourceError, SourceSettings};
use crate::{
    model::{Event, Model},
    objects::ObjectKind,
    transaction::{Problem, Sink, SourceKind, Transaction},
};

/// Capacity of the channel from the watches to the model. A watch waits while the channel is full.
const WAITING_UPDATES: usize = 1_024;

/// Maximum time to connect to the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Watches the API server until `shutdown`, and passes its changes to `sink`.
///
/// # Errors
/// The configuration cannot be used, or a task has ended that should never end. An unreachable
/// server or an invalid answer is not an error: the watch is retried.
pub(super) async fn run(
    settings: SourceSettings,
    sink: Arc<dyn Sink>,
    shutdown: CancellationToken,
) -> Result<(), SourceError> {
    let client = client(settings.kubeconfig.as_deref()).await?;
    let (sender, mut updates) = mpsc::channel(WAITING_UPDATES);
    let mut watches = JoinSet::new();
    let contact = Contact::new(Arc::clone(&sink));
    let kinds: BTreeSet<ObjectKind> =
        ObjectKind::ALL.into_iter().chain(settings.reads_pods.then_some(ObjectKind::Pod)).collect();
    for kind in kinds.iter().copied() {
        let (client, contact) = (client.clone(), Arc::clone(&contact));
        let watch = Watch::new(kind, client, settings.watch_silence, Arc::clone(&sink), contact, sender.clone());
        watches.spawn(watch.run(shutdown.clone()));
    }
    let judging = contact.run(client);
    watches.spawn(shutdown.clone().run_until_cancelled_owned(judging).map(drop));
    drop(sender);
    let mut state = Applier::new(sink, kinds, settings);
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

/// Creates a client for the API server that the kubeconfig file names. Without a file, the client
/// uses the API server of the cluster in which the pod of this program runs.
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

/// The name and port of the API server of [`client`]; `None` if no client can be created, as
/// [`client`] reports.
pub(crate) async fn api_server(kubeconfig: Option<&Path>) -> Option<(String, u16)> {
    let url = config(kubeconfig).await.ok()?.cluster_url;
    let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("http") { 80 } else { 443 });
    Some((url.host()?.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
}

/// Turns updates into transactions.
struct Applier {
    sink: Arc<dyn Sink>,
    model: Model,
    shown_problems: Vec<Problem>,
    positions: BTreeMap<SourceKind, u64>,
    /// The position of the last bookmark of each kind. A list or a change that arrives later
    /// removes the position.
    bookmarks: BTreeMap<SourceKind, u64>,
    /// When the oldest uncommitted list or change arrived; `None` if there is no such update.
    received: Option<Instant>,
    unlisted: BTreeSet<ObjectKind>,
    is_synced: bool,
    /// Kinds with a resourceVersion that is not a number. Each kind is logged once.
    non_numeric_versions: BTreeSet<ObjectKind>,
}

impl Applier {
    /// Creates the state of a source that has listed none of `kinds`.
    fn new(sink: Arc<dyn Sink>, kinds: BTreeSet<ObjectKind>, settings: SourceSettings) -> Self {
        let reads_pods = kinds.contains(&ObjectKind::Pod);
        let model = if reads_pods { Model::with_gates() } else { Model::default() };
        Self {
            sink,
            model: model.with_agent_nodes(settings.agent_nodes).with_external_ips(settings.external_ips),
            shown_problems: Vec::new(),
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

    /// Commits the changes. Until every kind has been listed once, only problems are passed on: a
    /// part of the cluster's state must not be served.
    fn commit(&mut self) {
        if let Some(problems) = self.model.take_problems() {
            super::show_problems(&*self.sink, &mut self.shown_problems, problems);
        }
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
