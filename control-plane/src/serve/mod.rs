//! The servers of a replica: gRPC for agents, gRPC for people and replicas, HTTP for probes.

mod api;
mod barrier;
mod context;
#[doc(hidden)]
pub mod crowd;
mod enrolment;
mod everywhere;
mod fleet;
#[doc(hidden)]
pub mod fuzz;
mod overview;
mod readiness;
mod stream;
pub mod tls;
mod transport;
mod verification;

use std::{
    fs, io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::{
        fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use headgate_listener::{Carrier, Families, listen};
use tokio::{
    net::{TcpListener, UnixListener},
    task::JoinHandle,
};
pub use tokio_util::sync::CancellationToken;

pub use self::{
    context::{EnrolmentSettings, PeerSettings, Ports, ReadinessSettings, Settings},
    enrolment::EnrolmentError,
    everywhere::{Absence, Round, Verdict},
    fleet::Departed,
    tls::Security,
};
use self::{enrolment::Enrolment, fleet::balance, stream::Streams, transport::Listener};
use crate::{metrics::Metrics, source::SourceError, store::Store};

/// Why a replica cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("{option}: cannot listen on {address}: {error}; {}", remedy(.error))]
    Listen {
        /// The command line option that holds the address.
        option: &'static str,
        /// The address.
        address: SocketAddr,
        /// The error of the operating system.
        error: io::Error,
    },
    /// The sockets for this machine cannot be made.
    #[error("cannot listen on {path}: {error}")]
    Socket {
        /// The file of the socket.
        path: PathBuf,
        /// The error of the operating system, with the remedy.
        error: io::Error,
    },
    /// The built-in descriptor set is invalid.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// Agents cannot get certificates.
    #[error(transparent)]
    Enrolment(#[from] EnrolmentError),
    /// No API client can be created to set the conditions of readiness gates.
    #[error("--ready-everywhere: {0}")]
    Readiness(#[source] SourceError),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => {
            "this machine does not have this address: choose an address of this machine, or [::] for all addresses"
        }
        io::ErrorKind::PermissionDenied => "choose a port above 1023",
        _ => "choose another address, or stop the program that uses this address",
    }
}

/// The addresses that a replica listens on. Port 0 means any free port.
#[derive(Debug, Clone)]
pub struct Listen {
    /// The address for agents (`--listen`).
    pub agents: SocketAddr,
    /// The address for Inspect, Peers, health and reflection (`--inspect-listen`).
    pub inspect: SocketAddr,
    /// The address for metrics and probes (`--metrics-listen`).
    pub metrics: Option<SocketAddr>,
    /// A folder for [`AGENTS_SOCKET`] and [`INSPECT_SOCKET`], which take the place of the two gRPC
    /// ports. Only the user of this process can open them.
    pub sockets: Option<PathBuf>,
}

/// The name of the socket for agents.
pub const AGENTS_SOCKET: &str = "agents.sock";

/// The name of the socket for Inspect, health and reflection.
pub const INSPECT_SOCKET: &str = "inspect.sock";

impl Listen {
    /// Returns the addresses of a replica without metrics and probes whose address for agents is
    /// `agents`: the other gRPC port is the next one.
    #[must_use]
    pub fn at(agents: SocketAddr) -> Self {
        let port = match agents.port() {
            // The system chooses both ports, or no port follows the highest one.
            0 | u16::MAX => 0,
            port => port + 1,
        };
        Self { agents, inspect: SocketAddr::new(agents.ip(), port), metrics: None, sockets: None }
    }
}

/// A replica whose servers run.
pub struct Running {
    /// The address for agents.
    pub local_addr: SocketAddr,
    /// The address for Inspect, Peers, health and reflection.
    pub inspect_addr: SocketAddr,
    /// The address of the server for metrics and probes, if there is one.
    pub metrics_addr: Option<SocketAddr>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    /// Asks agents to move to another replica, ends their streams after the grace period, and
    /// returns once everything has stopped. With the default grace period, stopping takes less than
    /// 5 seconds.
    pub async fn stop(self) {
        self.shutdown.cancel();
        self.join().await;
    }

    /// Waits until the servers have stopped, after the `shutdown` of [`start`].
    pub async fn join(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the servers stopped because of a defect");
        }
    }
}

/// Starts the servers of a replica that serves `store`, until `shutdown` is cancelled. A retry
/// after [`ServeError`] helps only if the address becomes free.
pub async fn start(
    listen: Listen,
    security: Security,
    mut settings: Settings,
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> Result<Running, ServeError> {
    let ([agents, inspect], [local_addr, inspect_addr]) = match &listen.sockets {
        Some(folder) => {
            let sockets = [bind_socket(folder, AGENTS_SOCKET)?, bind_socket(folder, INSPECT_SOCKET)?];
            (sockets.map(|socket| Listener::Other(Box::new(socket))), [listen.agents, listen.inspect])
        }
        None => {
            let carrier = settings.carrier.as_deref();
            let (agents, local_addr) = bind_over(carrier, &security, "--listen", listen.agents)?;
            let (inspect, inspect_addr) = bind_over(carrier, &security, "--inspect-listen", listen.inspect)?;
            ([agents, inspect], [local_addr, inspect_addr])
        }
    };
    let metrics_listener = listen.metrics.map(|address| bind("--metrics-listen", address)).transpose()?;
    let metrics_addr = metrics_listener.as_ref().map(|(_, address)| *address);
    if let (Security::Tls(tls), Some(peers)) = (&security, &mut settings.peers) {
        peers.tls = Some(Arc::clone(tls));
    }
    settings.ports = Ports { agents: local_addr, inspect: inspect_addr, pages: metrics_addr };
    let streams = Streams::new(store, Arc::clone(&metrics), settings);
    let context = &streams.context;
    let routes = api::routes(&streams).await?;
    // `Running::stop` cancels this child token, but not the caller's token.
    let shutdown = shutdown.child_token();
    let stopped = CancellationToken::new();
    context::start_visits(context, &stopped);
    if let Some((listener, _)) = metrics_listener {
        tokio::spawn(api::serve_pages(listener, Arc::clone(&streams), stopped.clone()));
    }
    if let Security::Tls(tls) = &security {
        if let Some(settings) = context.settings.enrolment.clone() {
            let (listener, address) = bind("--enrolment-listen", settings.listen)?;
            let enrolment = Enrolment::new(Arc::clone(context), settings, Arc::clone(tls)).await?;
            tracing::info!(%address, "agents can enrol");
            tokio::spawn(stopped.clone().run_until_cancelled_owned(enrolment.run(listener)));
        }
        tokio::spawn(Arc::clone(tls).follow(metrics, shutdown.clone()));
    }
    if let Some(settings) = context.settings.readiness.clone() {
        let everywhere = Arc::clone(&streams.everywhere);
        let started = readiness::start(Arc::clone(context), everywhere, settings, shutdown.clone()).await;
        started.map_err(ServeError::Readiness)?;
    }
    if let Some(service) = context.settings.balance_service.clone() {
        let balance = balance::run(Arc::clone(&streams.fleet), service);
        tokio::spawn(stopped.clone().run_until_cancelled_owned(balance));
    }
    tokio::spawn(stopped.clone().run_until_cancelled_owned(Arc::clone(&streams.overview).run()));
    let everywhere = Arc::clone(&streams.everywhere);
    let serve = transport::serve([agents, inspect], security, routes, streams, shutdown.clone(), stopped.clone());
    let task = tokio::spawn(serve);
    everywhere.start(stopped).await;
    Ok(Running { local_addr, inspect_addr, metrics_addr, shutdown, task })
}

fn bind(option: &'static str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), ServeError> {
    let fail = |error| ServeError::Listen { option, address, error };
    let listener = match listen(address, Families::Both) {
        // On a host without IPv6, `0.0.0.0` takes the place of `[::]`, every address.
        Err(error) if address.ip() == Ipv6Addr::UNSPECIFIED && error.kind() != io::ErrorKind::AddrInUse => {
            let ipv4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
            listen(ipv4, Families::Both).map_err(|_| error)
        }
        bound => bound,
    }
    .map_err(fail)?;
    let local = listener.local_addr().map_err(fail)?;
    Ok((listener, local))
}

/// Listens on a gRPC port, over `carrier` in place of TCP if there is one.
fn bind_over(
    carrier: Option<&dyn Carrier>,
    security: &Security,
    option: &'static str,
    address: SocketAddr,
) -> Result<(Listener, SocketAddr), ServeError> {
    let bound = match (carrier, security) {
        (None, _) => return bind(option, address).map(|(listener, local)| (Listener::Tcp(listener), local)),
        (Some(carrier), Security::Plaintext) => carrier.listen(address),
        (Some(_), Security::Tls(_)) => Err(io::Error::other("only TCP has TLS")),
    };
    let (listener, local) = bound.map_err(|error| ServeError::Listen { option, address, error })?;
    Ok((Listener::Other(listener), local))
}

/// Listens on a socket in a private folder, in place of the file of an earlier run.
fn bind_socket(folder: &Path, name: &str) -> Result<UnixListener, ServeError> {
    let path = folder.join(name);
    let bound = || {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let found = fs::symlink_metadata(folder)?;
        let is_own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
        if !is_own || found.mode() & 0o077 != 0 {
            return Err(io::Error::other(
                "others may enter the folder or own it, or it is a link: change its owner and mode (chmod 700), or choose another folder",
            ));
        }
        if UnixStream::connect(&path).is_ok() {
            return Err(io::Error::other("another program serves this socket: stop it, or choose another folder"));
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    };
    bound().map_err(|error| ServeError::Socket { path: path.clone(), error })
}
