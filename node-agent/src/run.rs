//! Starts the agent's parts, connects them, and stops them in order.

use std::{
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use futures::{FutureExt as _, future::BoxFuture};
use headgate_core::{Demand, addresses::DialPolicy};
use headgate_listener::{HttpConnections, open_files};
use headgate_settings::Settings;
use tokio::{
    runtime::Handle,
    sync::{oneshot, watch},
    task,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    backoff::Backoff,
    config_watch,
    dataplane::{ConnectionProxy, DataplaneError, NodeDataplane, nftables::ServiceCounters, proxy_mode, standby},
    dataplane_choice,
    http::{self, Pages, listen::Server},
    instance,
    interfaces::{self, Interfaces},
    metrics::Metrics,
    node_inputs::NodeSettings,
    node_queries::{Explainer, Knowledge},
    observers::{conntrack::ConntrackCleaner, endpoint_checks, health_check_ports},
    options::{Configured, Options, OptionsError, ProxyMode},
    other_proxy::OtherProxyWatch,
    persist::{self, Disk, Folder, Saver},
    reconcile::{Reconciler, Timing},
    session::{
        barriers::Barriers,
        client::{Session, SessionConfig},
        enrolment::Enrolment,
        tls::AgentTls,
    },
    state::{AgentState, NodePolicy, Wake, progress::Progress},
    sysctl::{self, SysctlError},
};

/// How long the first sync waits for the Node, if rules depend on the Node. After this time the
/// agent writes the rules without the Node.
const NODE_TIMEOUT: Duration = Duration::from_secs(30);

/// Why the agent could not start, or ended by itself. Never an unreachable control plane.
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
    #[error("{0}")]
    Bind(String),
    /// The configuration file was edited. The agent reads the file only at its start.
    #[error("{0} was edited; the agent ends, so that its next start reads the new content")]
    ConfigEdited(String),
    /// The system creates no socket for the claim of the network namespace.
    #[error("cannot claim this network namespace")]
    Claim(#[source] std::io::Error),
    /// The system cannot start a thread.
    #[error("cannot start a thread")]
    Thread(#[from] std::io::Error),
    /// The reconcile loop ended, which is a defect. The rules stay. Start the agent again.
    #[error("the reconcile loop ended unexpectedly; this is a defect of the agent")]
    ReconcileEnded,
}

/// Runs the agent until `shutdown`, with the dataplane that the options name. The rules stay in the
/// kernel afterwards. Errors: see [`AgentError`]. No failure of a stream ends the agent.
pub async fn run(options: Options, shutdown: CancellationToken) -> Result<(), AgentError> {
    let configured = options.configured()?;
    if let Some(warning) = &configured.warning {
        warn!("{warning}");
    }
    // Check these options before changing the machine.
    if configured.settings.mode == ProxyMode::Userspace
        && node_settings(&options, &configured.settings).ranges_of_pods().is_empty()
    {
        return Err(OptionsError::NoPodRanges.into());
    }
    options.node_name(&configured.settings)?;
    options.control_planes()?;
    let _claim = tokio::select! {
        claim = instance::claim() => claim.map_err(AgentError::Claim)?,
        () = shutdown.cancelled() => return Ok(()),
    };
    prepare_process(&configured.settings);
    let mut watch = OtherProxyWatch::begin(&options, &configured.settings).await;
    loop {
        // Each role is a run of its own: it ends when another role begins.
        let (stop, mut tells_chains) = (shutdown.child_token(), false);
        let (dataplane, role, ends) = match watch.standby() {
            Some(other) => {
                let dataplane: Box<dyn NodeDataplane> = Box::new(standby::dataplane());
                (dataplane, Role::StandsBy(other.to_string().into()), stop.clone())
            }
            None => {
                sysctl::set_conntrack(Path::new("/"), &configured.settings.conntrack)?;
                let dataplane = dataplane_choice::build(&options, &configured.settings)?;
                let drain = |proxy| after_draining(proxy, options.userspace_drain_limit, stop.clone());
                let ends = dataplane.proxy().map_or_else(|| stop.clone(), drain);
                tells_chains = matches!(dataplane.name(), "nftables" | "userspace");
                (dataplane, Role::Programs(watch.beside()), ends)
            }
        };
        let run = run_configured(options.clone(), configured.clone(), dataplane, role, ends);
        let change = async {
            watch.changed(tells_chains).await;
            stop.cancel();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            ended = run => ended?,
            () = change => {}
        }
        if shutdown.is_cancelled() || !stop.is_cancelled() {
            return Ok(());
        }
    }
}

/// What a run of the agent does on the node.
enum Role {
    /// It programs the node, perhaps beside another proxy.
    Programs(watch::Receiver<Option<String>>),
    /// It writes nothing, because this other proxy works on the node.
    StandsBy(Arc<str>),
    /// It programs with the caller's dataplane, and changes nothing else.
    Embedded,
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

/// Sets the kernel's connection tracking parameters, and this process's OOM score and limit of open
/// files. Errors: a kernel parameter cannot be set. Only a warning is logged if another value
/// cannot be set.
pub fn prepare(settings: &Settings) -> Result<(), SysctlError> {
    prepare_process(settings);
    sysctl::set_conntrack(Path::new("/"), &settings.conntrack).map(drop)
}

fn prepare_process(settings: &Settings) {
    open_files::raise();
    let path = "/proc/self/oom_score_adj";
    if let Err(error) = std::fs::write(path, settings.oom_score_adj.to_string()) {
        warn!(%error, "cannot write {} to {path}; the agent runs with the present OOM score", settings.oom_score_adj);
    }
}

/// Runs the agent until `shutdown` with the caller's dataplane. Changes no kernel parameter and no
/// connection tracking entry. Errors: the same errors as [`run`].
pub async fn run_with(
    options: Options,
    dataplane: Box<dyn NodeDataplane>,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let configured = options.configured()?;
    run_configured(options, configured, dataplane, Role::Embedded, shutdown).await
}

async fn run_configured(
    options: Options,
    configured: Configured,
    dataplane: Box<dyn NodeDataplane>,
    role: Role,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let Configured { settings, file, .. } = configured;
    let node_name = options.node_name(&settings)?;
    let (control_planes, files) = options.control_planes()?;
    for sentence in &dataplane.degraded(&Demand::default()) {
        warn!("{sentence}");
    }
    info!(node = %node_name, backend = dataplane.name(), version = env!("CARGO_PKG_VERSION"), "starting");

    // Connect the parts.
    let metrics = Arc::new(Metrics::registered());
    let tls = files.clone().map(|files| AgentTls::new(files, metrics.session.tls.clone()));
    let (backoff, node) = (Backoff::default(), Arc::clone(&node_name));
    let config = SessionConfig { node_name: node, control_planes, tls: tls.clone(), backoff, carrier: None };
    let Settings { min_sync_period, sync_period, .. } = settings;
    let timing = Timing { min_sync_period, sync_period, ..Timing::default() };
    let disk = options.state_folder().map(|folder| Box::new(Folder::new(folder)) as Box<dyn Disk>);
    let mut parts = Parts::connect(dataplane, config, timing, disk, options.state_save_period, &metrics);
    // The guard stops all parts of the agent when this function returns, even with an error.
    let running = shutdown.child_token();
    let _stops = running.clone().drop_guard();
    if let Role::StandsBy(other) = &role {
        parts.session.standby = Arc::clone(other);
        metrics.sync.set_standby(other);
    }
    let (pages, mut tasks) = workers(&options, &settings, &mut parts, metrics, &role, &running)?;
    let Settings { masquerade_all, localhost_node_ports, .. } = settings;
    parts.answer_queries(node_name, pages.clone(), masquerade_all, localhost_node_ports);
    let Parts { state, reconciler, session, barriers, saver, .. } = parts;
    let enrolment = files.filter(|_| !options.enrolment_address.is_empty()).map(|files| {
        let (token, address) = (options.enrolment_token.clone(), options.enrolment_address.clone());
        Enrolment::new(files, token, address, Arc::clone(&state), pages.metrics.session.clone())
    });
    let servers = servers(&options, &settings, &pages, &barriers, &role)?;
    tasks.extend(servers.into_iter().map(|server| server.run(running.clone()).boxed()));
    let has_certificate = CancellationToken::new();
    tasks.push(until(&running, certificates(enrolment, tls, has_certificate.clone())));

    // Start them.
    let (reconcile_thread, reconcile_ended) = start_reconcile_thread(reconciler)?;
    let stop_reconciler = StopOnDrop(state);
    for task in tasks {
        tokio::spawn(task);
    }
    let saving = saver.map(|saver| {
        let running = running.clone();
        // Writing the file blocks.
        task::spawn_blocking(move || Handle::current().block_on(saver.run(running)))
    });
    let following = async {
        if running.run_until_cancelled(has_certificate.cancelled()).await.is_some() {
            session.run(running.clone()).await;
        }
    };
    let ended_by = tokio::select! {
        () = following => None,
        _ = reconcile_ended => Some(AgentError::ReconcileEnded),
        path = config_watch::edited(file) => Some(AgentError::ConfigEdited(path)),
    };

    // Stop them.
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
        let _ = task::spawn_blocking(move || saver.save_last()).await;
    }
    info!("stopped; the rules stay in the kernel");
    ended_by.map_or(Ok(()), Err)
}

/// The connected parts of an agent. [`run`] starts them on threads, a test may use one thread.
#[doc(hidden)]
pub struct Parts {
    /// What the agent holds, also from its last run. It may get a policy before the first sync.
    pub state: Arc<AgentState>,
    /// Programs the state.
    pub reconciler: Reconciler,
    /// What the reconcile loop has programmed.
    pub progress: watch::Receiver<Progress>,
    /// Follows the replicas.
    pub session: Session,
    /// Passes on requests of pods that stop.
    pub barriers: Arc<Barriers>,
    /// Writes the state to the disk; `None` without a disk.
    pub saver: Option<Saver>,
}

impl Parts {
    /// Reads the state on the disk, and connects the parts.
    pub fn connect(
        dataplane: Box<dyn NodeDataplane>,
        config: SessionConfig,
        timing: Timing,
        disk: Option<Box<dyn Disk>>,
        save_period: Duration,
        metrics: &Metrics,
    ) -> Self {
        let (restored, file) = disk.map(|disk| persist::open(disk, Arc::clone(&config.node_name))).unzip();
        let restored = restored.unwrap_or_default();
        metrics.saves.restored.set(restored.held.position().is_some().into());
        let state = Arc::new(AgentState::restored(&config.node_name, restored));
        file.iter().for_each(|file| state.set_replicas(file.replicas.clone()));
        let shared = || Arc::clone(&state);
        let (reconciler, progress) = Reconciler::new(dataplane, shared(), metrics.sync.clone(), timing);
        let saver = file.map(|file| Saver::new(file, save_period, shared(), metrics.saves.clone(), progress.clone()));
        let session = Session::new(config, shared(), metrics.session.clone(), progress.clone());
        let barriers = Arc::clone(&session.barriers);
        Self { state, reconciler, progress, session, barriers, saver }
    }

    /// Lets replicas ask about the node (discovery.proto, section 17).
    pub fn answer_queries(&mut self, node: Arc<str>, pages: Pages, masquerade_all: bool, localhost_node_ports: bool) {
        let (state, inputs) = (Arc::clone(&self.state), self.reconciler.inputs());
        let explainer = Explainer { state, inputs, masquerade_all, localhost_node_ports };
        self.session.knowledge = Some(Arc::new(Knowledge::new(node, pages, explainer)));
    }
}

/// The operator's settings about the node.
fn node_policy(settings: &Settings, mode: &str) -> NodePolicy {
    if settings.node_ports.names_ipv6_loopback() {
        warn!("NodePorts do not answer on ::1, which nodePortAddresses names: clients on this node can use 127.0.0.1");
    }
    NodePolicy {
        bind_address: settings.bind_address,
        ignores_external_ips: !settings.allow_external_ips,
        holds_service_addresses: mode == "ipvs",
        node_awaited_until: NodeSettings::of(settings).needs_node().then(|| Instant::now() + NODE_TIMEOUT),
    }
}

/// The settings that depend on the Node, without what the dataplane adds.
fn node_settings(options: &Options, settings: &Settings) -> NodeSettings {
    NodeSettings { pod_ranges: options.pod_ranges.clone(), ..NodeSettings::of(settings) }
}

/// Sets what the reconcile loop and its observers need. Returns the data of the pages, and the
/// tasks of the observers.
fn workers(
    options: &Options,
    settings: &Settings,
    parts: &mut Parts,
    metrics: Arc<Metrics>,
    role: &Role,
    running: &CancellationToken,
) -> std::io::Result<(Pages, Vec<BoxFuture<'static, ()>>)> {
    let Parts { state, reconciler, progress, .. } = parts;
    let (stands_by, cleans_conntrack) = (matches!(role, Role::StandsBy(_)), matches!(role, Role::Programs(_)));
    let (backlog, patience) = (Arc::clone(state.backlog()), settings.sync_period.saturating_mul(2));
    let (mode, proxy) = (proxy_mode(reconciler.dataplane.name()), reconciler.dataplane.proxy());
    state.set_policy(node_policy(settings, mode));
    let counts_services = options.nftables_service_counters && mode == "nftables";
    let service_counters = counts_services.then(|| Arc::new(ServiceCounters::new(Arc::clone(state))));
    let has_proxy = proxy.is_some();
    // The proxy connects to no address before the addresses of the node are known.
    state.set_dialled(Arc::new(DialPolicy { has_proxy, ..DialPolicy::default() }));
    let dials = has_proxy || !options.health_check_namespaces.is_empty();
    reconciler.node_settings = NodeSettings { dials, has_proxy, ..node_settings(options, settings) };
    let needs_interfaces = cleans_conntrack || options.drain_address.is_some() || reconciler.needs_interfaces();
    let follow = || interfaces::follow(metrics.interfaces.clone(), interfaces::RECEIVE_BUFFER_BYTES);
    let interfaces = needs_interfaces.then(follow).transpose()?.unwrap_or_else(|| tokio::sync::watch::channel(None).1);
    let inputs = reconciler.inputs();
    let connections = HttpConnections::new(false, metrics.http_closed.clone());
    let of_ports = metrics.health_check_ports.clone();
    let (health_check_ports, health_check_server) =
        health_check_ports::new(of_ports, inputs.clone(), Arc::clone(&backlog), patience, Arc::clone(&connections));
    let namespaces = if stands_by { Vec::new() } else { options.health_check_namespaces.clone() };
    let (checked_endpoints, checker) =
        endpoint_checks::new(namespaces, options.check_timing(), Arc::clone(state), metrics.endpoint_checks.clone());
    if !stands_by {
        // In standby, the ports belong to the other proxy.
        reconciler.observers.push(Box::new(health_check_ports));
    }
    reconciler.observers.push(Box::new(checked_endpoints));
    let mut tasks = vec![health_check_server.run(running.clone()).boxed(), checker.run(running.clone()).boxed()];
    tasks.push(until(running, report_interfaces(interfaces.clone(), Arc::clone(state))));
    if let Role::Programs(beside) = role {
        reconciler.beside = beside.clone();
    }
    reconciler.interfaces = interfaces.clone();
    if cleans_conntrack {
        let followed = interfaces.clone();
        let start = |earlier: &_| ConntrackCleaner::start(metrics.conntrack.clone(), inputs, followed, earlier);
        reconciler.observers.push(Box::new(state.with_state(start)?));
        // Else the first sync programs the last run's state, from which observers know its rules.
        reconciler.has_unknown_rules = state.position().is_none() || state.is_unconfirmed();
    }
    let pages = Pages {
        connections,
        metrics,
        interfaces,
        progress: progress.clone(),
        backlog,
        patience,
        configz: Arc::new(settings.document.clone()),
        flags: Arc::new(options.flags.clone()),
        service_counters,
        proxy,
        userspace_service_counters: options.userspace_service_counters,
    };
    Ok((pages, tasks))
}

/// Returns the servers of all pages. With `--bind-address-hard-fail`, they listen already.
fn servers(
    options: &Options,
    settings: &Settings,
    pages: &Pages,
    barriers: &Arc<Barriers>,
    role: &Role,
) -> Result<Vec<Server>, AgentError> {
    // In standby, kube-proxy's addresses belong to the other proxy.
    let (standby, mut servers) = match role {
        Role::StandsBy(other) => (Some(&**other), Vec::new()),
        Role::Programs(_) | Role::Embedded => (None, http::servers(settings, pages)),
    };
    if let Some(address) = options.drain_address {
        let app = http::drain::router(Arc::clone(barriers), pages.interfaces.clone(), pages.metrics.drain.clone());
        let (what, setting) = ("/v1/drain", "--drain-address");
        let connections = HttpConnections::of_waiting_clients(pages.metrics.http_closed.clone());
        servers.push(Server { port: "drain", what, setting, address, app, connections, listener: None });
    }
    if settings.bind_address_hard_fail {
        servers.iter_mut().try_for_each(Server::bind_now).map_err(AgentError::Bind)?;
    }
    let address = options.standby_address.filter(|_| !matches!(role, Role::Embedded));
    servers.extend(address.map(|address| http::probes(address, pages, standby)));
    Ok(servers)
}

/// A task that ends when the agent stops.
fn until(running: &CancellationToken, task: impl Future<Output = ()> + Send + 'static) -> BoxFuture<'static, ()> {
    running.clone().run_until_cancelled_owned(task).map(drop).boxed()
}

/// Gets certificates for a token, and reads new TLS files. Cancels `has_certificate` once the
/// session can connect.
async fn certificates(enrolment: Option<Enrolment>, tls: Option<Arc<AgentTls>>, has_certificate: CancellationToken) {
    let Some(tls) = tls else { return has_certificate.cancel() };
    let enrol = async {
        match enrolment {
            Some(enrolment) => enrolment.run(Arc::clone(&tls), has_certificate.clone()).await,
            None => has_certificate.cancel(),
        }
    };
    let follow = async {
        has_certificate.cancelled().await;
        Arc::clone(&tls).follow().await;
    };
    tokio::join!(enrol, follow);
}

/// Wakes the reconcile loop after each change of the interfaces' addresses.
async fn report_interfaces(mut interfaces: Interfaces, state: Arc<AgentState>) {
    while interfaces.changed().await.is_ok() {
        state.blocking(|state| state.signal(Wake::Interfaces)).await;
    }
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
