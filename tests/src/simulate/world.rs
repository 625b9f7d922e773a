//! The simulated cluster: an API server, replicas, nodes with an agent each, and a client that
//! asks.

use std::{
    future::poll_fn,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use anyhow::Result;
use fastrand::Rng;
use futures::{future::BoxFuture, task::AtomicWaker};
use headgate_control_plane::{
    metrics::Metrics,
    model::{ModelSettings, Sink},
    serve::{self, Listen, PeerSettings, ReadinessSettings, Security, Settings},
    source::{self, SourceSettings},
    store::{Limits, Store},
};
use headgate_core::{
    Protocol,
    forwarding::{Fate, Origin, Table},
    frontends::Frontend,
};
use headgate_listener::{Accept, Carrier, HttpConnections, Io};
use headgate_node_agent::{
    Parts,
    backoff::{Backoff, Jitter},
    control_planes::ControlPlane,
    dataplane::{DataplaneError, ErrorKind},
    http::Pages,
    metrics::Metrics as AgentMetrics,
    reconcile::Timing,
    session::{barriers::Barriers, client::SessionConfig},
    state::progress::Progress,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    api::WayToApi,
    clock,
    disk::SimulatedDisk,
    net::{Network, Route, SimulatedListener},
    process::Process,
    source::{Forwarding, NODES, Source, size},
};
use crate::{
    apiserver::ApiServer,
    in_memory::{self, Control},
};

/// The number of places for replicas.
#[must_use]
pub fn places() -> usize {
    size().replicas + 1
}

/// After this time, replicas know that a node has lost its power: pings are 10 s apart.
const DARK: u64 = 30_000_000_000;
/// After this time, a replica knows what an agent knows.
const TOLD: u64 = 2_000_000_000;
/// The host of the client.
pub const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 19, 0, 100));
const AGENTS_PORT: u16 = 7443;
const INSPECT_PORT: u16 = 7444;

/// The host of the replica at a place.
#[must_use]
pub fn replica_host(place: usize) -> IpAddr {
    Ipv4Addr::new(198, 19, 0, u8::try_from(place + 1).unwrap_or(u8::MAX)).into()
}

/// The address of a replica that answers questions.
#[must_use]
pub fn inspect_address(place: usize) -> SocketAddr {
    SocketAddr::new(replica_host(place), INSPECT_PORT)
}

/// The host of a node.
#[must_use]
pub fn node_host(node: usize) -> IpAddr {
    Ipv4Addr::new(192, 0, 2, u8::try_from(11 + node).unwrap_or(u8::MAX)).into()
}

/// The name of all replicas.
const REPLICAS: &str = "replicas.test";

/// Connections from one host.
#[derive(Debug)]
pub struct Host {
    network: Network,
    host: IpAddr,
    named: Arc<Mutex<Vec<usize>>>,
}

impl Host {
    /// The network as a host sees it. `named` are the places to which the name of the replicas
    /// leads.
    #[must_use]
    pub fn carrier(network: &Network, host: IpAddr, named: &Arc<Mutex<Vec<usize>>>) -> Arc<dyn Carrier> {
        Arc::new(Self { network: network.clone(), host, named: Arc::clone(named) })
    }
}

impl Carrier for Host {
    fn connect(&self, to: SocketAddr) -> BoxFuture<'static, std::io::Result<Box<dyn Io>>> {
        let (network, host) = (self.network.clone(), self.host);
        Box::pin(async move { Ok(Box::new(network.connect(host, to).await?) as Box<dyn Io>) })
    }

    fn resolve(&self, host: &str, port: u16) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> {
        let is_known = host == REPLICAS;
        let found = lock(&self.named).iter().map(|place| SocketAddr::new(replica_host(*place), port)).collect();
        let found = is_known.then_some(found).ok_or_else(|| std::io::ErrorKind::NotFound.into());
        Box::pin(std::future::ready(found))
    }

    fn listen(&self, at: SocketAddr) -> std::io::Result<(Box<dyn Accept>, SocketAddr)> {
        Ok((Box::new(self.network.listen(at)), at))
    }
}

impl Accept for SimulatedListener {
    fn poll_accept(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<(Box<dyn Io>, SocketAddr)>> {
        let accepted = Self::poll_accept(self, context);
        accepted.map(|accepted| accepted.map(|(stream, client)| (Box::new(stream) as Box<dyn Io>, client)))
    }
}

/// What an agent knows about itself.
fn pages(parts: &Parts, metrics: Arc<AgentMetrics>) -> Pages {
    Pages {
        connections: HttpConnections::new(false, metrics.http_closed.clone()),
        metrics,
        interfaces: watch::channel(None).1,
        progress: parts.progress.clone(),
        backlog: Arc::clone(parts.state.backlog()),
        patience: Duration::from_secs(60),
        configz: Arc::default(),
        flags: Arc::default(),
        service_counters: None,
        proxy: None,
        userspace_service_counters: false,
    }
}

/// What a table forwards, for clients on the node.
fn forwarding(table: &Table) -> Forwarding {
    let mut found = Forwarding::new();
    for (frontend, entry) in &table.entries {
        let Frontend::Address(IpAddr::V4(address), Protocol::Tcp, 80) = frontend else { continue };
        if let Fate::Forwarded(endpoints) = &entry.fates[Origin::Node as usize] {
            let endpoints = endpoints.iter().filter_map(|endpoint| match endpoint.ip() {
                IpAddr::V4(address) => Some(address),
                IpAddr::V6(_) => None,
            });
            found.entry(*address).or_default().extend(endpoints);
        }
    }
    found
}

/// A kernel that may hang: then the loop that programs it waits, and the rest of the agent goes on.
#[derive(Debug, Clone, Default)]
struct Hang(Arc<(AtomicBool, AtomicWaker)>);

impl Hang {
    fn set(&self, hangs: bool) {
        self.0.0.store(hangs, Ordering::Relaxed);
        self.0.1.wake();
    }

    /// `work`, which waits while the kernel hangs.
    async fn around(self, work: impl Future<Output = ()>) {
        let mut work = std::pin::pin!(work);
        poll_fn(|context| {
            self.0.1.register(context.waker());
            if self.0.0.load(Ordering::Relaxed) { Poll::Pending } else { work.as_mut().poll(context) }
        })
        .await;
    }
}

/// What questions, faults and the driver share.
pub struct Shared {
    /// The API server.
    pub api: Arc<ApiServer>,
    source: Mutex<Source>,
    /// The kernel of each node.
    pub kernels: Vec<Control>,
    /// The places whose replica runs.
    pub running: Mutex<Vec<usize>>,
    /// Passes the questions of each node's pods to the drain barrier.
    pub barriers: Mutex<Vec<Option<Arc<Barriers>>>>,
    /// Since when each agent knows that it cannot repair its kernel.
    pub failing_since: Mutex<Vec<Option<u64>>>,
    /// True once a node's kernel failed or lost rules.
    pub is_tampered: Mutex<Vec<bool>>,
    /// The node that most faults hit, and most verifications ask about.
    pub usual_node: usize,
    /// When each node lost its power last.
    pub lost_power: Mutex<Vec<Option<u64>>>,
    /// The places to which the name of the replicas leads.
    pub named: Arc<Mutex<Vec<usize>>>,
    /// The number of questions that wait for an answer.
    pub open_questions: AtomicUsize,
    /// What happened, line by line.
    pub story: Mutex<Vec<String>>,
    /// The claims that differ from the kernels.
    pub false_claims: Mutex<Vec<String>>,
    /// The number of answers by question and outcome.
    pub answers: Mutex<std::collections::BTreeMap<String, u64>>,
    /// The network.
    pub network: Network,
}

/// Locks a mutex, also after a panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The objects.
    pub fn source(&self) -> MutexGuard<'_, Source> {
        lock(&self.source)
    }

    /// Calls `change` with the source and its API server.
    pub fn change<T>(&self, change: impl FnOnce(&mut Source, &ApiServer) -> T) -> T {
        change(&mut self.source(), &self.api)
    }

    /// Adds a line to the story.
    pub fn tell(&self, text: impl AsRef<str>) {
        let line = format!("{:9.3} {}", clock::local() as f64 / 1e9, text.as_ref());
        lock(&self.story).push(line);
    }

    /// Records a claim that differs from the kernels.
    pub fn is_false(&self, claim: &str) {
        self.tell(format!("FALSE: {claim}"));
        let mut known = lock(&self.false_claims);
        if !known.iter().any(|old| old == claim) {
            known.push(claim.to_owned());
        }
    }

    /// What a node's kernel forwards, for clients on the node.
    pub fn read(&self, node: usize) -> Forwarding {
        forwarding(&self.kernels[node].forwarding())
    }

    /// What a node's kernel forwarded, for clients on the node, in each dump after the first
    /// `count`.
    pub fn dumped_since(&self, node: usize, count: usize) -> Vec<Forwarding> {
        self.kernels[node].dumped_since(count).iter().map(forwarding).collect()
    }

    /// Whether a node's agent has known for some time that it cannot repair its kernel, and could
    /// say so all this time.
    pub fn is_known_to_fail(&self, node: usize) -> bool {
        lock(&self.failing_since)[node].is_some_and(|since| clock::local() > since + TOLD)
    }

    /// Whether a node lost its power a short time ago. Replicas cannot know that at once.
    pub fn is_dark(&self, node: usize) -> bool {
        lock(&self.lost_power)[node].is_some_and(|at| clock::local() < at + DARK)
    }

    /// The places whose replica runs.
    pub fn running(&self) -> Vec<usize> {
        lock(&self.running).clone()
    }
}

/// The processes and what outlives them.
pub struct World {
    /// What questions share.
    pub shared: Arc<Shared>,
    /// A place for each replica.
    pub replicas: Vec<Process>,
    /// The way from each place to the API server.
    pub ways: Vec<WayToApi>,
    /// A place for the agent of each node.
    pub agents: Vec<Process>,
    /// The disk of each node.
    pub disks: Vec<SimulatedDisk>,
    /// Where questions are asked.
    pub client: Process,
    /// How often each place got a new replica, which is part of the replica's name.
    pub generations: Vec<u32>,
    /// Each one stops the replica at a place.
    tokens: Vec<Option<CancellationToken>>,
    /// Each one stops the agent of a node.
    agents_tokens: Vec<Option<CancellationToken>>,
    /// Lets the kernel of a node hang.
    hangs: Vec<Hang>,
    /// After this time without an agent, a replica takes a Node for one that never had one.
    pub uncovered_after: Duration,
    /// The place of the replica that most faults hit.
    pub usual_place: usize,
    progress: Vec<Option<watch::Receiver<Progress>>>,
}

impl World {
    /// Creates the objects and the places. No process runs yet.
    ///
    /// # Errors
    /// A runtime cannot be created.
    pub fn new(rng: &mut Rng) -> Result<Self> {
        let network = Network::new(rng.u64(..));
        // Some replicas remember each agent for much longer than a fault lasts, others only a bit
        // longer than the longest pause of an agent that tries to connect.
        let uncovered_after = Duration::from_secs(if rng.bool() { 45 } else { 600 });
        let (usual_place, usual_node) = (rng.usize(0..2), rng.usize(0..NODES.len()));
        let api = Arc::new(ApiServer::without_port());
        let source = Mutex::new(Source::new(&api));
        let shared = Arc::new(Shared {
            api: Arc::clone(&api),
            source,
            kernels: NODES.iter().map(|_| Control::default()).collect(),
            running: Mutex::default(),
            barriers: Mutex::new(vec![None; NODES.len()]),
            failing_since: Mutex::new(vec![None; NODES.len()]),
            is_tampered: Mutex::new(vec![false; NODES.len()]),
            lost_power: Mutex::new(vec![None; NODES.len()]),
            usual_node,
            named: Arc::new(Mutex::new((0..size().replicas).collect())),
            open_questions: AtomicUsize::default(),
            story: Mutex::default(),
            false_claims: Mutex::default(),
            answers: Mutex::default(),
            network: network.clone(),
        });
        let place = |host| Process::new(host, network.clone());
        let mut client = place(CLIENT);
        client.start(|| ())?;
        Ok(Self {
            replicas: (0..places()).map(|index| place(replica_host(index))).collect(),
            ways: (0..places()).map(|_| WayToApi::new(Arc::clone(&api))).collect(),
            agents: (0..NODES.len()).map(|node| place(node_host(node))).collect(),
            // Some disks are full before the first start.
            disks: NODES.iter().map(|_| SimulatedDisk::new(rng.u8(0..32) == 0)).collect(),
            hangs: NODES.iter().map(|_| Hang::default()).collect(),
            client,
            generations: vec![0; places()],
            tokens: vec![None; places()],
            agents_tokens: vec![None; NODES.len()],
            uncovered_after,
            usual_place,
            progress: vec![None; NODES.len()],
            shared,
        })
    }

    /// All processes, in a fixed order.
    pub fn processes(&mut self) -> Vec<&mut Process> {
        self.replicas.iter_mut().chain(&mut self.agents).chain([&mut self.client]).collect()
    }

    /// Starts the replica at a place, unless it runs.
    ///
    /// # Errors
    /// A runtime cannot be created.
    pub fn start_replica(&mut self, place: usize) -> Result<()> {
        if self.replicas[place].exists() {
            return Ok(());
        }
        self.shared.tell(format!("start replica-{place}"));
        let (host, way) = (replica_host(place), self.ways[place].clone());
        let settings = Settings {
            replica_name: format!("replica-{place}-{}", self.generations[place]),
            source_name: "kubernetes".into(),
            heartbeat_interval: Duration::from_secs(1),
            drain_grace: Duration::from_millis(500),
            uncovered_after: self.uncovered_after,
            peers: Some(PeerSettings { names: vec![(REPLICAS.into(), INSPECT_PORT)], ..PeerSettings::default() }),
            carrier: Some(Host::carrier(&self.shared.network, host, &self.shared.named)),
            ..Settings::default()
        };
        let token = CancellationToken::new();
        self.tokens[place] = Some(token.clone());
        let shared = Arc::clone(&self.shared);
        self.replicas[place].start(|| {
            let client = way.client();
            let bound = Duration::from_secs(30);
            let readiness = ReadinessSettings { bound, kubeconfig: None, client: Some(client.clone()) };
            let settings = Settings { readiness: Some(readiness), ..settings };
            let model = ModelSettings { reads_pods: true, ..ModelSettings::default() };
            let source_settings = SourceSettings { model, ..SourceSettings::default() };
            let metrics = Arc::new(Metrics::default());
            let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
            let listen = Listen::at(SocketAddr::new(host, AGENTS_PORT));
            tokio::spawn(async move {
                let serving = Arc::clone(&store);
                let started =
                    serve::start(listen, Security::Plaintext, settings, serving, metrics, token.clone()).await;
                let running = match started {
                    Ok(running) => running,
                    Err(error) => return shared.is_false(&format!("replica-{place} does not start: {error}")),
                };
                let sink: Arc<dyn Sink> = store;
                if let Err(error) = source::follow(client, source_settings, sink, token).await {
                    shared.is_false(&format!("the source of replica-{place} ended: {error}"));
                }
                running.join().await;
            });
        })?;
        lock(&self.shared.running).push(place);
        Ok(())
    }

    /// Starts the agent of a node, unless it runs.
    ///
    /// # Errors
    /// A runtime cannot be created.
    pub fn start_agent(&mut self, node: usize) -> Result<()> {
        if self.agents_tokens[node].as_ref().is_some_and(CancellationToken::is_cancelled) {
            // It has ended.
            self.kill_agent(node, false);
        }
        if self.agents[node].exists() {
            return Ok(());
        }
        self.shared.tell(format!("start the agent of {}", NODES[node]));
        let token = CancellationToken::new();
        self.agents_tokens[node] = Some(token.clone());
        // Replicas announce the other places. Two places are named when the world has healed.
        let seeds = [node, node + 1].map(|seed| replica_host(seed % places()));
        let urls = seeds.into_iter().map(|host| format!("http://{}", SocketAddr::new(host, AGENTS_PORT)));
        let control_planes: Result<Vec<_>, _> = urls.map(|url| ControlPlane::parse(&url, true)).collect();
        let config = SessionConfig {
            node_name: NODES[node].into(),
            control_planes: control_planes.map_err(anyhow::Error::msg)?,
            tls: None,
            backoff: Backoff::default(),
            carrier: Some(Host::carrier(&self.shared.network, node_host(node), &self.shared.named)),
        };
        let timing = Timing {
            quarantine: Backoff::new(Duration::from_secs(5), Duration::from_secs(60), Jitter::Half),
            sync_period: Duration::from_secs(2),
            rules_period: Duration::from_secs(3),
            ..Timing::default()
        };
        let (kernel, disk) = (self.shared.kernels[node].clone(), self.disks[node].clone());
        let hang = self.hangs[node].clone();
        let (barriers, progress) = self.agents[node].start(|| {
            let dataplane = Box::new(in_memory::dataplane_of(&kernel));
            let metrics = Arc::new(AgentMetrics::registered());
            let period = Duration::from_millis(500);
            let mut parts = Parts::connect(dataplane, config, timing, Some(Box::new(disk)), period, &metrics);
            parts.answer_queries(NODES[node].into(), pages(&parts, metrics), false, false);
            let Parts { reconciler, session, barriers, saver, progress, .. } = parts;
            let reconciling = tokio::spawn(hang.around(reconciler.follow()));
            tokio::spawn(session.run(token.clone()));
            tokio::spawn(async move {
                if let Some(saver) = saver {
                    let saver = saver.run(token).await;
                    reconciling.abort();
                    saver.save_last();
                }
            });
            (barriers, progress)
        })?;
        self.progress[node] = Some(progress);
        lock(&self.shared.barriers)[node] = Some(barriers);
        Ok(())
    }

    /// Asks a replica to stop, as SIGTERM does. It goes on until [`Self::kill_replica`].
    pub fn stop_replica(&mut self, place: usize) {
        lock(&self.shared.running).retain(|running| *running != place);
        self.replicas[place].freeze(false);
        if let Some(token) = &self.tokens[place] {
            token.cancel();
        }
    }

    /// Asks an agent to stop, as SIGTERM does.
    pub fn stop_agent(&mut self, node: usize) {
        self.agents[node].freeze(false);
        if let Some(token) = &self.agents_tokens[node] {
            token.cancel();
        }
        self.progress[node] = None;
        lock(&self.shared.barriers)[node] = None;
    }

    /// Lets the kernel of a node hang, or go on: what the agent writes and reads waits.
    pub fn hang(&self, node: usize, hangs: bool) {
        self.hangs[node].set(hangs);
    }

    /// Ends a replica at once.
    pub fn kill_replica(&mut self, place: usize, is_silent: bool) {
        lock(&self.shared.running).retain(|running| *running != place);
        self.replicas[place].kill(is_silent);
    }

    /// Ends an agent at once.
    pub fn kill_agent(&mut self, node: usize, is_silent: bool) {
        self.agents[node].kill(is_silent);
        self.progress[node] = None;
        lock(&self.shared.barriers)[node] = None;
    }

    /// Notes which agents know that they cannot repair their kernels, and can tell all replicas.
    pub fn note_failures(&self) {
        let replicas_run = !self.replicas.iter().any(Process::is_frozen);
        let mut failing = lock(&self.shared.failing_since);
        for (node, (since, progress)) in failing.iter_mut().zip(&self.progress).enumerate() {
            let knows = |progress: &watch::Receiver<Progress>| {
                progress.borrow().failure.as_ref().is_some_and(|failure| failure.is_lost)
            };
            let can_tell =
                replicas_run && !self.agents[node].is_frozen() && self.shared.network.is_open(node_host(node));
            let is_told = can_tell && progress.as_ref().is_some_and(knows);
            *since = if is_told { since.or(Some(clock::now())) } else { None };
        }
    }

    /// Sets what happens between two hosts, in both directions.
    pub fn set_routes(&self, one: IpAddr, other: IpAddr, route: Route) {
        self.shared.network.set_route(one, other, route);
        self.shared.network.set_route(other, one, route);
    }

    /// Makes the next calls to a node's kernel fail.
    pub fn fail_kernel(&self, node: usize, calls: usize) {
        for _ in 0..calls {
            self.shared.kernels[node]
                .fail_next(DataplaneError::new(ErrorKind::Retry, "the simulation fails this call"));
        }
    }
}
