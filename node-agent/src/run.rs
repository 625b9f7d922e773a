//! Starts the agent's parts, connects them, and stops them in order.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use headgate_core::Demand;
use headgate_settings::Settings;
use tokio::{sync::oneshot, task};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    backoff::Backoff,
    dataplane::{ConnectionProxy, DataplaneError, NodeDataplane, nftables::ServiceCounters, proxy_mode},
    dataplane_choice,
    http::{
        self, Pages,
        listen::{BindError, Server},
    },
    instance,
    interfaces::{self, Interfaces},
    metrics::Metrics,
    node_inputs::NodeSettings,
    node_queries::{Explainer, Knowledge},
    observers::{
        NodePorts, Observer,
        conntrack::ConntrackCleaner,
        endpoint_checks,
        health_check_ports::{self, IsHealthy},
    },
    options::{Configured, Options, OptionsError},
    persist::{self, SaverInputs},
    reconcile::{Reconciler, Timing},
    session::{
        client::{Session, SessionConfig},
        enrolment::Enrolment,
        tls::AgentTls,
    },
    state::{AgentState, NodePolicy, Wake},
    sysctl::{SysctlError, Sysctls},
};

/// How long the first sync waits for the Node, if rules depend on the Node. After this time the
/// agent writes the rules without the Node.
const NODE_TIMEOUT: Duration = Duration::from_secs(30);

/// Why the agent could not start, or ended by itself. An unreachable control plane is never the
/// reason.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The options or settings cannot be used.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// This machine cannot run the dataplane.
    #[error("cannot program this node")]
    Dataplane(#[from] DataplaneError),
    /// A kernel parameter cannot be set.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// An address cannot be bound, and `--bind-address-hard-fail` is set.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The configuration file was edited. The agent reads the file only at its start.
    #[error("{0} was edited; the agent ends, so that its next start reads the new content")]
    ConfigEdited(String),
    /// The system creates no socket for the claim of the network namespace.
    #[error("cannot claim this network namespace")]
    Claim(#[source] std::io::Error),
    /// The system cannot start a thread.
    #[error("cannot start a thread")]
    Thread(#[from] std::io::Error),
    /// The reconcile loop ended, which is a defect. The rules stay in the kernel. Start the agent
    /// again.
    #[error("the reconcile loop ended unexpectedly; this is a defect of the agent")]
    ReconcileEnded,
}

/// Runs the agent until `shutdown`, with the dataplane that the options name. The rules stay in the
/// kernel afterwards.
///
/// # Errors
/// See [`AgentError`]. No failure of a stream ends the agent.
pub async fn run(options: Options, shutdown: CancellationToken) -> Result<(), AgentError> {
    let configured = options.configured()?;
    if let Some(warning) = &configured.warning {
        warn!("{warning}");
    }
    // Check these options before changing the machine.
    options.node_name(&configured.settings)?;
    options.control_planes()?;
    let _claim = tokio::select! {
        claim = instance::claim() => claim.map_err(AgentError::Claim)?,
        () = shutdown.cancelled() => return Ok(()),
    };
    prepare(&configured.settings)?;
    let dataplane = dataplane_choice::build(&options, &configured.settings)?;
    let shutdown = match dataplane.proxy() {
        Some(proxy) => after_draining(proxy, options.userspace_drain_limit, shutdown),
        None => shutdown,
    };
    run_configured(options, configured, dataplane, Conntrack::Cleaned, shutdown).await
}

/// Returns a token that is cancelled after `shutdown`, when the connections of the proxy have ended
/// or the limit has passed. Until then, the agent continues to program the rules.
fn after_draining(proxy: Arc<dyn ConnectionProxy>, limit: Duration, shutdown: CancellationToken) -> CancellationToken {
    let drained = CancellationToken::new();
    let done = drained.clone().drop_guard();
    tokio::spawn(async move {
        let _done = done;
        shutdown.cancelled().await;
        match task::spawn_blocking(move || proxy.drain(limit)).await {
            Ok(0) => info!("all connections of the proxy have ended"),
            Ok(lost) => warn!("{lost} connections of the proxy are reset, because --userspace-drain-limit has passed"),
            Err(error) => warn!(%error, "the proxy was not drained"),
        }
    });
    drained
}

/// Sets the kernel's connection tracking parameters and this process's OOM score.
///
/// # Errors
/// A kernel parameter cannot be set. Only a warning is logged if the OOM score cannot be set.
pub fn prepare(settings: &Settings) -> Result<(), SysctlError> {
    let path = "/proc/self/oom_score_adj";
    if let Err(error) = std::fs::write(path, settings.oom_score_adj.to_string()) {
        warn!(%error, "cannot write {} to {path}; the agent runs with the present OOM score", settings.oom_score_adj);
    }
    Sysctls::default().set_conntrack(&settings.conntrack).map(drop)
}

/// Runs the agent until `shutdown` with the caller's dataplane. Changes no kernel parameter and no
/// connection tracking entry.
///
/// # Errors
/// The same errors as [`run`].
pub async fn run_with(
    options: Options,
    dataplane: Box<dyn NodeDataplane>,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let configured = options.configured()?;
    run_configured(options, configured, dataplane, Conntrack::Untouched, shutdown).await
}

/// Whether stale UDP flows are deleted from the kernel's connection tracking table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conntrack {
    Cleaned,
    Untouched,
}

async fn run_configured(
    options: Options,
    configured: Configured,
    dataplane: Box<dyn NodeDataplane>,
    conntrack: Conntrack,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let Configured { settings, file, .. } = configured;
    let node_name = options.node_name(&settings)?;
    let (control_planes, tls) = options.control_planes()?;
    for sentence in &dataplane.degraded(&Demand::default()) {
        warn!("{sentence}");
    }
    info!(node = %node_name, backend = dataplane.name(), version = env!("CARGO_PKG_VERSION"), "starting");

    let metrics = Arc::new(Metrics::default());
    let opened =
        options.state_folder().map(|folder| persist::open(folder, Arc::clone(&node_name), options.state_save_period));
    let (restored, saver) = opened.unzip();
    let restored = restored.flatten();
    metrics.saves.restored.set(restored.is_some().into());
    let knows_rules = restored.as_ref().is_some_and(|restored| !restored.may_be_behind);
    let state = Arc::new(AgentState::restored(&node_name, restored.unwrap_or_default()));
    let Settings { bind_address, allow_external_ips, min_sync_period, sync_period, .. } = settings;
    let Settings { masquerade_all, localhost_node_ports, .. } = settings;
    if settings.node_ports.names_ipv6_loopback() {
        warn!("NodePorts do not answer on ::1, which nodePortAddresses names: clients on this node can use 127.0.0.1");
    }
    let node_settings = NodeSettings::of(&settings);
    let node_awaited_until = node_settings.needs_node().then(|| Instant::now() + NODE_TIMEOUT);
    state.set_policy(NodePolicy { bind_address, ignores_external_ips: !allow_external_ips, node_awaited_until });
    let counts_services = options.nftables_service_counters && proxy_mode(dataplane.name()) == "nftables";
    let service_counters = counts_services.then(|| Arc::new(ServiceCounters::new(Arc::clone(&state))));
    let proxy = dataplane.proxy();
    let timing = Timing { min_sync_period, sync_period, ..Timing::default() };
    let (reconciler, progress) = Reconciler::new(dataplane, Arc::clone(&state), metrics.sync.clone(), timing);
    let mut reconciler = reconciler.with_node_settings(node_settings);
    let needs_interfaces = conntrack == Conntrack::Cleaned || reconciler.needs_interfaces();
    let follow = || interfaces::follow(metrics.interfaces.clone(), interfaces::RECEIVE_BUFFER_BYTES);
    let interfaces = needs_interfaces.then(follow).transpose()?;
    let node_ports = NodePorts::of_inputs(reconciler.inputs());
    let explained_inputs = reconciler.inputs();
    let is_alive = is_alive(&state, sync_period);
    let (health_check_ports, health_check_server) =
        health_check_ports::new(metrics.health_check_ports.clone(), node_ports.clone(), is_alive);
    let (checked_endpoints, checker) =
        endpoint_checks::new(options.check_timing(), Arc::clone(&state), metrics.endpoint_checks.clone());
    let mut observers: Vec<Box<dyn Observer>> = vec![Box::new(health_check_ports), Box::new(checked_endpoints)];
    if let Some(interfaces) = &interfaces {
        reconciler = reconciler.with_interfaces(interfaces.clone());
        if conntrack == Conntrack::Cleaned {
            let cleaner = state.with_state(|earlier| {
                ConntrackCleaner::start(metrics.conntrack.clone(), node_ports, interfaces.clone(), earlier)
            });
            observers.push(Box::new(cleaner?));
            reconciler = reconciler.with_unknown_rules(!knows_rules);
        }
    }
    let reconciler = reconciler.with_observers(observers);
    let token = options.enrolment_token.clone();
    let enrolment = tls
        .as_ref()
        .filter(|_| !options.enrolment_address.is_empty())
        .map(|files| Enrolment::new(files.clone(), token, options.enrolment_address.clone(), metrics.session.clone()));
    let tls = tls.map(|files| AgentTls::new(files, metrics.session.tls.clone()));
    let config = SessionConfig {
        node_name: Arc::clone(&node_name),
        control_planes,
        tls: tls.clone(),
        backoff: Backoff::default(),
    };
    let session = Session::new(config, Arc::clone(&state), metrics.session.clone(), progress.clone());
    let saver_inputs =
        SaverInputs { state: Arc::clone(&state), metrics: metrics.saves.clone(), progress: progress.clone() };
    let configz = Arc::new(settings.document.clone());
    let flags = Arc::new(options.flags.clone());
    let userspace_service_counters = options.userspace_service_counters;
    let backlog = Arc::clone(state.backlog());
    let pages =
        Pages { metrics, progress, backlog, configz, flags, service_counters, proxy, userspace_service_counters };
    let mut servers = http::servers(&settings, &pages);
    if let Some(address) = options.drain_address {
        let app = http::drain::router(session.barriers(), pages.metrics.drain.clone());
        servers.push(Server::new("/v1/drain", "--drain-address", address, app));
    }
    let explainer =
        Explainer { state: Arc::clone(&state), inputs: explained_inputs, masquerade_all, localhost_node_ports };
    let session = session.with_knowledge(Arc::new(Knowledge::new(node_name, pages, explainer)));
    if settings.bind_address_hard_fail {
        for server in &mut servers {
            server.bind_now()?;
        }
    }

    let (reconcile_thread, reconcile_ended) = start_reconcile_thread(reconciler)?;
    // The guards `_stops` and `stop_reconciler` stop all parts of the agent when this function
    // returns, even if it returns an error.
    let running = shutdown.child_token();
    let _stops = running.clone().drop_guard();
    if let Some(interfaces) = interfaces {
        tokio::spawn(running.clone().run_until_cancelled_owned(report_interfaces(interfaces, Arc::clone(&state))));
    }
    let stop_reconciler = StopOnDrop(state);
    for server in servers {
        tokio::spawn(server.run(running.clone()));
    }
    tokio::spawn(health_check_server.run(running.clone()));
    tokio::spawn(checker.run(running.clone()));
    let has_certificate = CancellationToken::new();
    match (enrolment, &tls) {
        (Some(enrolment), Some(tls)) => {
            let enrolment = enrolment.run(Arc::clone(tls), has_certificate.clone());
            tokio::spawn(running.clone().run_until_cancelled_owned(enrolment));
        }
        _ => has_certificate.cancel(),
    }
    if let Some(tls) = tls {
        let has_certificate = has_certificate.clone();
        let running = running.clone();
        let follow = async move {
            has_certificate.cancelled().await;
            tls.follow().await;
        };
        tokio::spawn(running.run_until_cancelled_owned(follow));
    }
    let edited = async {
        match file {
            Some((path, text)) => {
                crate::config_watch::edited(path.clone(), text).await;
                path.display().to_string()
            }
            None => std::future::pending().await,
        }
    };
    let saving = saver.map(|saver| {
        let (inputs, running) = (saver_inputs.clone(), running.clone());
        task::spawn_blocking(move || saver.run(&inputs, &running))
    });
    let following = async {
        if running.run_until_cancelled(has_certificate.cancelled()).await.is_some() {
            session.run(running.clone()).await;
        }
    };
    let ended_by = tokio::select! {
        () = following => None,
        _ = reconcile_ended => Some(AgentError::ReconcileEnded),
        path = edited => Some(AgentError::ConfigEdited(path)),
    };
    running.cancel();
    drop(stop_reconciler);
    // The thread finishes the current sync, so rules are not left half written.
    let joined = task::spawn_blocking(move || reconcile_thread.join()).await;
    if !matches!(joined, Ok(Ok(()))) {
        return Err(AgentError::ReconcileEnded);
    }
    if let Some(saving) = saving
        && let Ok(saver) = saving.await
    {
        // The task cannot fail: it does not panic, and nobody stops it.
        let _ = task::spawn_blocking(move || saver.save_last(&saver_inputs)).await;
    }
    info!("stopped; the rules stay in the kernel");
    ended_by.map_or(Ok(()), Err)
}

/// Wakes the reconcile loop after each change of the interfaces' addresses.
async fn report_interfaces(mut interfaces: Interfaces, state: Arc<AgentState>) {
    while interfaces.changed().await.is_ok() {
        let state = Arc::clone(&state);
        // The call may wait long for the lock of the state.
        let _ = task::spawn_blocking(move || state.signal(Wake::Interfaces)).await;
    }
}

/// Returns a check that `/livez` uses too: the agent is alive unless a change has waited for longer
/// than two sync periods.
fn is_alive(state: &AgentState, sync_period: Duration) -> IsHealthy {
    let (backlog, patience) = (Arc::clone(state.backlog()), sync_period.saturating_mul(2));
    IsHealthy::new(move || backlog.health(patience).is_alive())
}

/// Starts the thread of the reconcile loop. The receiver completes when the loop ends or panics.
fn start_reconcile_thread(reconciler: Reconciler) -> std::io::Result<(JoinHandle<()>, oneshot::Receiver<()>)> {
    let (ended, reconcile_ended) = oneshot::channel::<()>();
    let thread = thread::Builder::new().name("reconcile".into()).spawn(move || {
        // A panic drops the sender too, so the receiver completes.
        let _ended = ended;
        reconciler.run();
    })?;
    Ok((thread, reconcile_ended))
}

/// Stops the reconcile loop when it is dropped.
struct StopOnDrop(Arc<AgentState>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}
