//! Serving: gRPC to agents and people, HTTP to probes and Prometheus.

mod admission;
mod agents;
mod balance;
mod body;
mod budget;
mod closer;
mod connections;
mod discovery;
mod first_request;
mod fleet;
pub(crate) mod fuzz;
mod handshakes;
mod hello;
mod http_api;
mod http_listener;
mod inbound;
mod inspect;
mod lateness;
mod listener;
mod session;
mod signal;
mod standing;
mod streams;
mod sync_connection;
pub mod tls;
mod untaken;
mod wait;
mod warnings;

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, atomic::AtomicUsize},
    time::{Duration, Instant, SystemTime},
};

use headgate_core::{ServiceKey, node_state::SourceState};
use headgate_proto::{FILE_DESCRIPTOR_SET, v1::inspect_server::InspectServer};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tokio_stream::wrappers::ReceiverStream;
pub use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{
    Request, Status,
    service::{Routes, interceptor::InterceptedService},
    transport::Server,
};
use tonic_health::ServingStatus;
use tower::layer::layer_fn;

use crate::{
    identity::Peer,
    metrics::Metrics,
    store::{NodeObserver, Store},
};
use admission::Admission;
use agents::{Agents, End};
use discovery::Discovery;
use fleet::Fleet;
use handshakes::Handshakes;
use streams::Streams;
use untaken::Untaken;
use warnings::{Warning, Warnings};

/// Both sides probe a connection on which nothing is heard, and give it up after the same time again.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// What a stopping replica's connections get after their streams have ended, to write what is left.
const LINGER: Duration = Duration::from_secs(1);

/// Longest message of a request to Inspect, health or reflection, which hold names. Room is made for a message as soon as its length is known.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// Requests at the same time on a connection of the general server.
const MAX_REQUESTS: u32 = 64;

/// What a client may send on such a connection before it is read: requests are small.
const REQUEST_WINDOW_BYTES: u32 = 65_535;

/// How connections are secured.
#[derive(Clone)]
pub enum Security {
    /// Not at all: `--insecure-loopback`, whose rule for addresses is [`crate::options::Options::security`]'s.
    Plaintext,
    /// TLS with client certificates.
    Tls(Arc<tls::ServerTls>),
}

/// What serving needs to know.
#[derive(Clone)]
pub struct Settings {
    /// Name of this replica, shown to agents and people.
    pub replica_name: String,
    /// What the source is called: `files:DIR` or `kubernetes`.
    pub source_name: String,
    /// How often an agent hears something at least.
    pub heartbeat_interval: Duration,
    /// How long an agent that has seen newer state waits for this replica to catch up.
    pub behind_wait: Duration,
    /// How long a stream may take to say `Hello`.
    pub hello_timeout: Duration,
    /// How long an answer of the general server may wait for its client to take some of it.
    pub untaken_timeout: Duration,
    /// How long agents have to go elsewhere when the replica stops.
    pub drain_grace: Duration,
    /// Whether nodes may use Inspect and reflection, as readers may.
    pub nodes_may_inspect: bool,
    /// The Service whose ready endpoints are the replicas, between which agents are balanced; without it they are not.
    pub balance_service: Option<ServiceKey>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            replica_name: "headgate".into(),
            source_name: String::new(),
            heartbeat_interval: Duration::from_secs(10),
            behind_wait: Duration::from_secs(30),
            hello_timeout: Duration::from_secs(10),
            untaken_timeout: Duration::from_secs(300),
            drain_grace: Duration::from_secs(2),
            nodes_may_inspect: false,
            balance_service: None,
        }
    }
}

fn to_ms(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

impl Settings {
    fn heartbeat_interval_ms(&self) -> u32 {
        to_ms(self.heartbeat_interval)
    }

    fn behind_wait_ms(&self) -> u32 {
        to_ms(self.behind_wait)
    }
}

/// Where a replica is between start and stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lifecycle {
    Serving,
    /// Agents have been asked to go elsewhere.
    Draining,
    /// Streams end.
    Ended,
}

/// What every stream shares.
struct Shared {
    store: Arc<Store>,
    agents: Arc<Agents>,
    streams: Arc<Streams>,
    handshakes: Arc<Handshakes>,
    admission: Admission,
    /// Streams that wait for the source to reach a position, or to be listed.
    waiting_for_position: AtomicUsize,
    metrics: Arc<Metrics>,
    warnings: Warnings,
    settings: Settings,
    lifecycle: watch::Sender<Lifecycle>,
}

impl Shared {
    fn new(store: Arc<Store>, metrics: Arc<Metrics>, settings: Settings) -> Arc<Self> {
        let fleet = Fleet::new(Arc::clone(&store), Arc::clone(&metrics));
        let agents = Arc::new(Agents::new(Arc::new(fleet)));
        let observer: Arc<dyn NodeObserver> = Arc::<Agents>::clone(&agents);
        store.observe_nodes(Arc::downgrade(&observer));
        let times =
            [settings.heartbeat_interval, settings.behind_wait, settings.hello_timeout, settings.untaken_timeout];
        Arc::new(Self {
            agents,
            streams: Arc::new(Streams::new(times)),
            handshakes: Handshakes::new(Arc::clone(&metrics)),
            admission: Admission::new(Arc::clone(&metrics)),
            waiting_for_position: AtomicUsize::new(0),
            metrics,
            warnings: Warnings::default(),
            settings,
            lifecycle: watch::Sender::new(Lifecycle::Serving),
            store,
        })
    }

    /// Why this replica is not ready, if it is not: one answer for every probe (contract, 14).
    fn unready_reason(&self) -> Option<String> {
        if *self.lifecycle.borrow() != Lifecycle::Serving {
            return Some("draining".into());
        }
        let reason = match self.store.source_state() {
            SourceState::Following => return None,
            SourceState::Unlisted => "the source has not been listed yet",
            SourceState::CutOff => "cut off from the source",
        };
        let problem = self.store.source_problem();
        Some(problem.map_or_else(|| reason.to_owned(), |problem| format!("{reason}: {problem}")))
    }

    fn count_end(&self, end: &End, address: SocketAddr, node: &str) {
        let (reason, status) = (end.reason, end.status.message());
        if end.is_refusal {
            self.metrics.count_rejected(reason);
            if self.warnings.admit(Warning::StreamRefused, tokio::time::Instant::now()) {
                tracing::warn!(%address, node, reason, status, "stream refused");
            }
        } else {
            self.metrics.count_ended(reason);
            tracing::info!(%address, node, reason, "stream ended");
        }
    }
}

/// Why serving could not begin.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("{option}: cannot listen on {address}: {error}; {}", remedy(.error))]
    Listen {
        /// The option that gave it.
        option: &'static str,
        /// The address.
        address: SocketAddr,
        /// What the system said.
        error: io::Error,
    },
    /// The descriptor set that was compiled in cannot be served.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => "this machine has no such address: choose one of its own, or [::] for all",
        io::ErrorKind::PermissionDenied => "choose a port above 1023",
        _ => "choose another address or stop what uses it",
    }
}

/// A replica that serves.
pub struct Running {
    /// Where gRPC is served.
    pub local_addr: SocketAddr,
    /// Where metrics and probes are served, if they are.
    pub metrics_addr: Option<SocketAddr>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    /// Asks agents to go, ends their streams after the grace period, and returns once everything has stopped. Takes under 5 seconds with the default
    /// grace.
    pub async fn stop(self) {
        self.shutdown.cancel();
        self.join().await;
    }

    /// Waits until serving has stopped, because its token was cancelled.
    pub async fn join(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "serving ended by a defect");
        }
    }
}

/// Serves `store` until `shutdown` is cancelled. Port 0 takes any free port.
///
/// # Errors
///
/// [`ServeError`]; trying again helps if the address becomes free.
pub async fn start(
    listen: SocketAddr,
    metrics_listen: Option<SocketAddr>,
    security: Security,
    settings: Settings,
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> Result<Running, ServeError> {
    let (listener, local_addr) = bind("--listen", listen).await?;
    let metrics_listener = match metrics_listen {
        Some(address) => Some(bind("--metrics-listen", address).await?),
        None => None,
    };
    let metrics_addr = metrics_listener.as_ref().map(|(_, address)| *address);
    let shared = Shared::new(store, Arc::clone(&metrics), settings);
    let routes = routes(&shared).await?;
    // A child, so that dropping `Running` after `stop` does not touch the caller's token.
    let shutdown = shutdown.child_token();
    let stopped = CancellationToken::new();
    streams::start(&shared, &stopped);
    if let Some((listener, _)) = metrics_listener {
        tokio::spawn(http_api::serve(listener, Arc::clone(&shared), stopped.clone()));
    }
    if let Security::Tls(tls) = &security {
        tokio::spawn(Arc::clone(tls).follow(metrics, shutdown.clone()));
    }
    if let Some(service) = shared.settings.balance_service.clone() {
        tokio::spawn(stopped.clone().run_until_cancelled_owned(balance::run(Arc::clone(&shared), service)));
    }
    let task = tokio::spawn(serve(listener, security, routes, shared, shutdown.clone(), stopped));
    Ok(Running { local_addr, metrics_addr, shutdown, task })
}

async fn bind(option: &'static str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), ServeError> {
    let fail = |error| ServeError::Listen { option, address, error };
    let listener = match TcpListener::bind(address).await {
        // A host without IPv6 has no [::], which stands for every address.
        Err(error) if address.ip() == Ipv6Addr::UNSPECIFIED && error.kind() != io::ErrorKind::AddrInUse => {
            let ipv4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
            TcpListener::bind(ipv4).await.map_err(|_| error)
        }
        bound => bound,
    }
    .map_err(fail)?;
    let local = listener.local_addr().map_err(fail)?;
    Ok((listener, local))
}

async fn routes(shared: &Arc<Shared>) -> Result<Routes, ServeError> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let names = ["", "headgate.v1.Discovery"];
    for name in names {
        reporter.set_service_status(name, ServingStatus::NotServing).await;
    }
    let (mut source, mut lifecycle) = (shared.store.watch_source(), shared.lifecycle.subscribe());
    let following = Arc::clone(shared);
    tokio::spawn(async move {
        loop {
            source.mark_unchanged();
            lifecycle.mark_unchanged();
            let is_ready = following.unready_reason().is_none();
            let status = if is_ready { ServingStatus::Serving } else { ServingStatus::NotServing };
            for name in names {
                reporter.set_service_status(name, status).await;
            }
            let changed = tokio::select! {
                changed = source.changed() => changed,
                changed = lifecycle.changed() => changed,
            };
            if changed.is_err() || *lifecycle.borrow() == Lifecycle::Ended {
                return;
            }
        }
    });
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let inspect = InspectServer::new(inspect::Inspector(Arc::clone(shared)));
    let inspect = inspect.max_decoding_message_size(MAX_REQUEST_BYTES);
    let reflection_v1 = reflection().build_v1()?.max_decoding_message_size(MAX_REQUEST_BYTES);
    let reflection_v1alpha = reflection().build_v1alpha()?.max_decoding_message_size(MAX_REQUEST_BYTES);
    Ok(Routes::new(Discovery(Arc::clone(shared)))
        .add_service(InterceptedService::new(inspect, readers_only(shared)))
        .add_service(health.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(InterceptedService::new(reflection_v1, readers_only(shared)))
        .add_service(InterceptedService::new(reflection_v1alpha, readers_only(shared))))
}

/// Lets requests through that may look; health is for everybody whose certificate is believed.
fn readers_only(shared: &Arc<Shared>) -> impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
    let shared = Arc::clone(shared);
    move |request| {
        let peer = request.extensions().get::<Peer>();
        let peer = peer.ok_or_else(|| Status::internal("the connection has no peer"))?;
        let allowed = peer.may_inspect(shared.settings.nodes_may_inspect, SystemTime::now());
        allowed.map_err(|denied| {
            shared.metrics.count_request_denied(denied.reason());
            if shared.warnings.admit(Warning::RequestRefused, tokio::time::Instant::now()) {
                tracing::warn!(address = %peer.address, reason = denied.reason(), %denied, "request refused");
            }
            Status::from(denied)
        })?;
        Ok(request)
    }
}

async fn serve(
    listener: TcpListener,
    security: Security,
    routes: Routes,
    shared: Arc<Shared>,
    shutdown: CancellationToken,
    stopped: CancellationToken,
) {
    let (accepted, accept) = listener::accept(listener, security, Arc::clone(&shared), shutdown.clone());
    let tasks = TaskTracker::new();
    let (general, dispatch) = connections::dispatch(accepted, Arc::clone(&shared), tasks.clone(), shutdown.clone());
    let answering = Arc::clone(&shared);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_concurrent_streams(Some(MAX_REQUESTS))
        .initial_stream_window_size(Some(REQUEST_WINDOW_BYTES))
        .initial_connection_window_size(Some(REQUEST_WINDOW_BYTES))
        .layer(layer_fn(move |routes| Untaken::new(routes, Arc::clone(&answering))))
        .add_routes(routes)
        .serve_with_incoming_shutdown(ReceiverStream::new(general), shutdown.clone().cancelled_owned());
    let mut server = tokio::spawn(server);
    shutdown.cancelled().await;
    drain(&shared).await;
    tasks.close();
    let ended = async { tokio::join!(&mut server, tasks.wait()).0 };
    match tokio::time::timeout(LINGER, ended).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::error!(%error, "gRPC server failed"),
        Ok(Err(error)) => tracing::error!(%error, "gRPC server ended by a defect"),
        // A connection that takes nothing, not even the end of its stream.
        Err(_) => {
            server.abort();
            shared.streams.abort();
        }
    }
    accept.abort();
    dispatch.abort();
    stopped.cancel();
}

/// Asks agents to go, and ends the streams of those that have not gone after the grace period.
async fn drain(shared: &Shared) {
    let agents = shared.agents.len();
    tracing::info!(agents, "stopping: agents are asked to go elsewhere");
    shared.lifecycle.send_replace(Lifecycle::Draining);
    let deadline = Instant::now() + shared.settings.drain_grace;
    while shared.agents.len() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    shared.lifecycle.send_replace(Lifecycle::Ended);
}
