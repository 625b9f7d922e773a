//! The node agent: keeps one node's kernel at the state that a control plane streams to it.
//!
//! [`session`] → [`shared`] (the state, held once) → [`reconcile`] → [`dataplane`] → kernel, and back as an ACK.
//! Forwarding outlives all of it: an agent that stops, or loses its control plane, leaves the rules in place.

pub mod backlog;
pub mod companion;
pub mod config;
pub mod conntrack;
pub mod dataplane;
pub mod endpoint_health;
#[doc(hidden)]
pub mod fuzz;
pub mod health_check;
pub mod http;
mod isolate;
mod memory;
pub mod metrics;
pub mod node_inputs;
pub mod options;
pub mod packet_counters;
pub mod persist;
pub mod reconcile;
mod refused;
pub mod session;
pub mod shared;
pub mod sysctl;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use headgate_core::Demand;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    companion::{Companion, NodePorts},
    config::Settings,
    conntrack::ConntrackCleaner,
    dataplane::{DataplaneError, NodeDataplane},
    health_check::IsHealthy,
    http::{Pages, listen::BindError},
    metrics::Metrics,
    node_inputs::NodeSettings,
    options::{Configured, Options, OptionsError},
    persist::Surroundings,
    reconcile::{Reconciler, Timing},
    session::{
        backoff::Backoff,
        client::{Session, SessionConfig},
        tls::AgentTls,
    },
    shared::{NodePolicy, Shared},
    sysctl::{SysctlError, Sysctls},
};

/// How long the first sync waits for the Node where rules cannot be right without it. After that they are made as well as can be.
const NODE_TIMEOUT: Duration = Duration::from_secs(30);

/// Why the agent could not start, or ended although nobody asked it to. An unreachable control plane is never the reason.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The options contradict each other.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// This machine cannot run the backend.
    #[error("cannot program this node")]
    Dataplane(#[from] DataplaneError),
    /// A kernel parameter cannot be set.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// An address is taken, and the operator wants to know.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The configuration file was edited. Starting again takes up the new one.
    #[error("{0} was edited; the agent ends, so that it is started with the new content")]
    ConfigEdited(String),
    /// The system gives us no thread.
    #[error("cannot start a thread")]
    Thread(#[from] std::io::Error),
    /// A defect: the reconcile loop ended. The rules stay; starting again repairs.
    #[error("the reconcile loop ended unexpectedly; this is a defect of the agent")]
    ReconcileEnded,
}

/// Runs the agent until `shutdown`, with the backend that the options ask for. The rules stay in the kernel.
///
/// # Errors
/// The agent cannot start as configured. Nothing that happens later on the stream ends it.
pub async fn run(options: Options, shutdown: CancellationToken) -> Result<(), AgentError> {
    let configured = options.configured()?;
    if let Some(warning) = &configured.warning {
        warn!("{warning}");
    }
    // What cannot run should not have changed the machine.
    options.node_name(&configured.settings)?;
    options.control_planes()?;
    prepare(&configured.settings)?;
    let backend = dataplane::build(&options, &configured.settings)?;
    run_configured(options, configured, backend, Machine::Ours, shutdown).await
}

/// Sets what is set once on the machine: kernel parameters, and how soon the kernel may kill this process when memory is short.
///
/// # Errors
/// A kernel parameter cannot be set although it should be possible.
pub fn prepare(settings: &Settings) -> Result<(), SysctlError> {
    let path = "/proc/self/oom_score_adj";
    if let Err(error) = std::fs::write(path, settings.oom_score_adj.to_string()) {
        warn!(%error, "cannot write {} to {path}; the agent goes on without", settings.oom_score_adj);
    }
    Sysctls::default().set_conntrack(&settings.conntrack).map(drop)
}

/// The same, with a backend of the caller's, and without touching parameters of the machine.
///
/// # Errors
/// As [`run`].
pub async fn run_with(
    options: Options,
    backend: Box<dyn NodeDataplane>,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let configured = options.configured()?;
    run_configured(options, configured, backend, Machine::NotOurs, shutdown).await
}

/// Whether the machine's kernel, besides what the backend does with it, is the agent's to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Machine {
    Ours,
    NotOurs,
}

/// The proxy is healthy when no change has waited for too long, as for `/livez`.
fn is_alive(shared: &Arc<Shared>, sync_period: Duration) -> IsHealthy {
    let (backlog, patience) = (Arc::clone(shared.backlog()), sync_period.saturating_mul(2));
    IsHealthy::new(move || backlog.health(patience).is_alive())
}

async fn run_configured(
    options: Options,
    configured: Configured,
    backend: Box<dyn NodeDataplane>,
    machine: Machine,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let Configured { settings, file, .. } = configured;
    let node_name = options.node_name(&settings)?;
    let (control_planes, tls) = options.control_planes()?;
    for sentence in &backend.degraded(&Demand::default()) {
        warn!("{sentence}");
    }
    info!(node = %node_name, backend = backend.name(), version = env!("CARGO_PKG_VERSION"), "starting");

    let metrics = Arc::new(Metrics::default());
    let (shared, saver) = match options.state_folder() {
        Some(folder) => {
            let (restored, saver) = persist::open(folder, Arc::clone(&node_name));
            metrics.state_restored.set(restored.is_some().into());
            (Shared::persistent(&node_name, restored), Some(saver))
        }
        None => (Shared::new(&node_name), None),
    };
    let shared = Arc::new(shared);
    let bind_address = settings.bind_address;
    shared.set_policy(NodePolicy { bind_address, ignores_external_ips: !settings.allow_external_ips });
    let node_settings = NodeSettings::of(&settings);
    if node_settings.needs_node() {
        shared.await_node(Instant::now() + NODE_TIMEOUT);
    }
    let Settings { min_sync_period, sync_period, .. } = settings;
    let timing = Timing { min_sync_period, sync_period, ..Timing::default() };
    let (reconciler, progress) = Reconciler::new(backend, Arc::clone(&shared), Arc::clone(&metrics), timing);
    let reconciler = reconciler.with_node_settings(node_settings);
    let node_ports = NodePorts::of_inputs(reconciler.inputs());
    let (health_check_ports, health_check_server) =
        health_check::new(metrics.health_check.clone(), node_ports.clone(), is_alive(&shared, sync_period));
    let (checked_endpoints, checker) =
        endpoint_health::new(options.check_timing(), Arc::clone(&shared), Arc::clone(&metrics));
    let mut companions: Vec<Box<dyn Companion>> = vec![Box::new(health_check_ports), Box::new(checked_endpoints)];
    if machine == Machine::Ours {
        companions.push(Box::new(ConntrackCleaner::start(metrics.conntrack.clone(), node_ports)?));
    }
    let reconciler = reconciler.with_companions(companions);
    let tls = tls.map(|files| AgentTls::new(files, Arc::clone(&metrics)));
    let config = SessionConfig { node_name, control_planes, tls, backoff: Backoff::default() };
    let following_tls = config.tls.clone();
    let around =
        Surroundings { shared: Arc::clone(&shared), metrics: Arc::clone(&metrics), progress: progress.clone() };
    let session = Session::new(config, Arc::clone(&shared), Arc::clone(&metrics), progress.clone());
    let configz = Arc::new(settings.document.clone());
    let flags = Arc::new(options.flags.clone());
    let pages = Pages { metrics, progress, backlog: Arc::clone(shared.backlog()), configz, flags };
    let mut servers = http::servers(&settings, &pages);
    if settings.bind_address_hard_fail {
        for server in &mut servers {
            server.bind_now()?;
        }
    }

    let (ended, reconcile_ended) = oneshot::channel::<()>();
    let thread = thread::Builder::new().name("reconcile".into()).spawn(move || {
        // Dropped on the way out, also by a panic: then the receiver wakes.
        let _ended = ended;
        reconciler.run();
    })?;
    // Ends what was started here, however this function ends.
    let running = shutdown.child_token();
    let _stops = running.clone().drop_guard();
    let stop_thread = StopOnDrop(Arc::clone(&shared));
    for server in servers {
        tokio::spawn(server.run(running.clone()));
    }
    tokio::spawn(health_check_server.run(running.clone()));
    tokio::spawn(checker.run(running.clone()));
    if let Some(tls) = following_tls {
        let running = running.clone();
        tokio::spawn(async move { running.run_until_cancelled(tls.follow()).await });
    }
    let edited = async {
        match file {
            Some((path, text)) => {
                config::watch::edited(path.clone(), text).await;
                path.display().to_string()
            }
            None => std::future::pending().await,
        }
    };
    let saving = saver.map(|saver| tokio::spawn(saver.run(around.clone(), options.state_save_period, running.clone())));
    let ended_by = tokio::select! {
        () = session.run(running.clone()) => None,
        _ = reconcile_ended => Some(AgentError::ReconcileEnded),
        path = edited => Some(AgentError::ConfigEdited(path)),
    };
    running.cancel();
    drop(stop_thread);
    // What the kernel is at is finished: rules are written whole or not at all.
    let joined = tokio::task::spawn_blocking(move || thread.join()).await;
    let panicked = joined.map_or(true, |joined: thread::Result<()>| joined.is_err());
    if panicked {
        return Err(AgentError::ReconcileEnded);
    }
    if let Some(saving) = saving
        && let Ok(saver) = saving.await
    {
        saver.save_last(&around).await;
    }
    info!("stopped; the rules stay in the kernel");
    ended_by.map_or(Ok(()), Err)
}

/// Ends the reconcile loop, also when its owner is dropped in mid-flight.
struct StopOnDrop(Arc<Shared>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[cfg(test)]
mod tests;
