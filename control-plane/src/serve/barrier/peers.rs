//! Questions to the other replicas. One connection and one stream to each replica carry all
//! questions.

use std::{
    collections::HashMap,
    fs,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use headgate_proto::{
    address_to_wire,
    v1::{self, peers_client::PeersClient},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::here::{Question, Wanted};
use crate::{
    serve::context::{PeerSettings, PeerTls, milliseconds},
    store::positions_to_wire,
};

/// How long a connection attempt may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A replica that does not answer a keepalive in this time counts as silent.
const KEEPALIVE: Duration = Duration::from_secs(3);

/// After a failure, no new attempt to connect is made for this time.
const PAUSE: Duration = Duration::from_millis(500);

/// How long the answer may take after the end of its wait.
const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// How long the addresses of the replicas are used before the names are resolved again.
const RESOLVED_FOR: Duration = Duration::from_secs(1);

/// The number of questions that may wait inside the transport.
const OUTGOING: usize = 64;

/// The maximum size of an answer: three lists of names.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// The links to all replicas.
pub(super) struct Peers {
    settings: PeerSettings,
    own_epoch: u64,
    links: tokio::sync::Mutex<Links>,
}

#[derive(Default)]
struct Links {
    by_address: HashMap<SocketAddr, Arc<Link>>,
    resolved: Option<Instant>,
    is_complete: bool,
}

/// The links at one moment, and whether all names were resolved.
pub(super) struct Known {
    pub(super) links: Vec<Arc<Link>>,
    pub(super) is_complete: bool,
}

impl Peers {
    pub(super) fn new(settings: PeerSettings, own_epoch: u64) -> Self {
        Self { settings, own_epoch, links: tokio::sync::Mutex::default() }
    }

    /// Returns the links to all other replicas.
    pub(super) async fn known(&self) -> Known {
        let mut links = self.links.lock().await;
        if links.resolved.is_none_or(|at| at.elapsed() > RESOLVED_FOR) {
            self.resolve(&mut links).await;
        }
        let others = links.by_address.values().filter(|link| !link.is_self.load(Ordering::Relaxed)).cloned().collect();
        Known { links: others, is_complete: links.is_complete }
    }

    async fn resolve(&self, links: &mut Links) {
        let mut found = HashMap::new();
        links.is_complete = true;
        for (host, port) in &self.settings.names {
            match timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((host.as_str(), *port))).await {
                Ok(Ok(addresses)) => {
                    for address in addresses {
                        let old = links.by_address.get(&address).cloned();
                        let new = || Arc::new(Link::new(address, host, self.settings.tls.clone(), self.own_epoch));
                        found.insert(address, old.unwrap_or_else(new));
                    }
                }
                // The replicas that were known before are asked still.
                Ok(Err(_)) | Err(_) => {
                    links.is_complete = false;
                    found.extend(links.by_address.clone());
                }
            }
        }
        links.by_address = found;
        links.resolved = Some(Instant::now());
    }
}

/// The connection to one replica.
pub(super) struct Link {
    address: SocketAddr,
    host: String,
    tls: Option<PeerTls>,
    own_epoch: u64,
    /// True if this replica has answered its own question.
    is_self: AtomicBool,
    last_id: AtomicU64,
    open: tokio::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    stream: Option<Stream>,
    failed: Option<Instant>,
}

#[derive(Clone)]
struct Stream {
    questions: mpsc::Sender<v1::ConfirmRequest>,
    pending: Arc<Pending>,
}

#[derive(Default)]
struct Pending(Mutex<HashMap<u64, oneshot::Sender<v1::ConfirmAnswer>>>);

impl Pending {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<v1::ConfirmAnswer>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives up a question when it is dropped.
struct Asked {
    id: u64,
    stream: Stream,
}

impl Drop for Asked {
    fn drop(&mut self) {
        if self.stream.pending.lock().remove(&self.id).is_some() {
            // If there is no room, the replica answers in vain.
            let cancel = v1::ConfirmRequest { id: self.id, is_cancelled: true, ..v1::ConfirmRequest::default() };
            let _ = self.stream.questions.try_send(cancel);
        }
    }
}

impl Link {
    fn new(address: SocketAddr, host: &str, tls: Option<PeerTls>, own_epoch: u64) -> Self {
        Self {
            address,
            host: host.to_owned(),
            tls,
            own_epoch,
            is_self: AtomicBool::new(false),
            last_id: AtomicU64::new(0),
            open: tokio::sync::Mutex::default(),
        }
    }

    /// Asks the replica. Returns `None` if it does not answer.
    pub(super) async fn confirm(&self, question: &Question, until: Instant) -> Option<v1::ConfirmAnswer> {
        let stream = self.stream().await?;
        let id = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, receiver) = oneshot::channel();
        stream.pending.lock().insert(id, sender);
        let asked = Asked { id, stream };
        let endpoints = question.endpoints.iter().map(|(key, address)| v1::PodEndpoint {
            service: Some(v1::ServiceKey { namespace: key.namespace.to_string(), name: key.name.to_string() }),
            address: address_to_wire(*address),
        });
        let request = v1::ConfirmRequest {
            id,
            is_cancelled: false,
            endpoints: endpoints.collect(),
            positions: positions_to_wire(question.positions.iter().map(|(kind, position)| (*kind, *position))),
            wait_ms: milliseconds(until.saturating_duration_since(Instant::now())),
            awaited_nodes: question.awaited.clone(),
            wants_usable: question.wanted == Wanted::Usable,
        };
        asked.stream.questions.send(request).await.ok()?;
        let answer = timeout_at(until + ANSWER_GRACE, receiver).await.ok()?.ok();
        if answer.as_ref().is_some_and(|answer| answer.epoch == self.own_epoch) {
            self.is_self.store(true, Ordering::Relaxed);
        }
        answer
    }

    /// Returns the open stream, or opens one. Returns `None` if this fails.
    async fn stream(&self) -> Option<Stream> {
        let mut open = self.open.lock().await;
        if let Some(stream) = open.stream.as_ref().filter(|stream| !stream.questions.is_closed()) {
            return Some(stream.clone());
        }
        if open.failed.is_some_and(|at| at.elapsed() < PAUSE) {
            return None;
        }
        match timeout(CONNECT_TIMEOUT * 2, self.connect()).await.unwrap_or_else(|_| Err("it does not answer".into())) {
            Ok(stream) => {
                *open = State { stream: Some(stream.clone()), failed: None };
                Some(stream)
            }
            Err(error) => {
                tracing::warn!(replica = %self.address, %error, "cannot ask another replica about pods that stop: check --peers, and the role replica of the certificates");
                *open = State { stream: None, failed: Some(Instant::now()) };
                None
            }
        }
    }

    async fn connect(&self) -> Result<Stream, String> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{}", self.address))
            .map_err(|error| error.to_string())?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .keep_alive_while_idle(true);
        if let Some(tls) = self.tls.clone() {
            endpoint = endpoint.tls_config(self.tls_config(tls).await?).map_err(|error| chain(&error))?;
        }
        let channel = endpoint.connect().await.map_err(|error| chain(&error))?;
        let mut client = PeersClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
        let (questions, receiver) = mpsc::channel(OUTGOING);
        let answer = client.confirm(ReceiverStream::new(receiver)).await;
        let mut answers = answer.map_err(|status| status.message().to_owned())?.into_inner();
        let stream = Stream { questions, pending: Arc::default() };
        let reading = stream.clone();
        tokio::spawn(async move {
            while let Ok(Some(answer)) = answers.message().await {
                if let Some(asker) = reading.pending.lock().remove(&answer.id) {
                    // The asker may have gone.
                    let _ = asker.send(answer);
                }
            }
            // This ends the waits of all askers.
            reading.pending.lock().clear();
        });
        Ok(stream)
    }

    /// Reads the files for each connection, because they may have been renewed.
    async fn tls_config(&self, PeerTls { cert, key, ca }: PeerTls) -> Result<ClientTlsConfig, String> {
        let host = self.host.clone();
        let read = move || {
            let read = |path: &PathBuf| fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
            let identity = Identity::from_pem(read(&cert)?, read(&key)?);
            let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&ca)?)).identity(identity);
            Ok(config.domain_name(host))
        };
        tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())?
    }
}

fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    headgate_proto::errors::chain(error)
}
