//! Many agents and three replicas. The first replica follows the API server, the second replica
//! never reaches the API server, and the third replica loses its connection after a while. Later
//! all replicas lose their connections. Replicas are real processes. Each agent consists of the
//! real session and the real reconcile loop.

mod gate;
mod replica;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use headgate_control_plane::{
    metrics::Metrics,
    model::Sink,
    source::{self, SourceSettings, SourceSpec},
    store::{Limits, Store},
};
use headgate_core::digest::Digests;
use headgate_node_agent::backoff::Backoff;
use tempfile::TempDir;
use tokio::time::sleep;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::{
    gate::{Edit, Gate, Mode},
    replica::Replica,
};
use crate::{
    agent::Agent,
    apiserver::{
        ApiServer,
        objects::{endpoint_slice, service},
    },
};

/// Longest wait for any condition.
const LIMIT: Duration = Duration::from_secs(120);

// The indices of the replicas.
const HEALTHY: usize = 0;
const NEVER_LISTS: usize = 1;
const CUT_OFF: usize = 2;

/// Sizes and times of a run.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// The number of agents at the beginning.
    pub agents: usize,
    /// The number of agents without state that start while no replica is connected to its API
    /// server.
    pub newcomers: usize,
    /// The number of Services. Each Service has two endpoints.
    pub services: u32,
    /// The time from the start of the agents until one replica loses the connection to its API
    /// server.
    pub cut_after: Duration,
    /// How the connection between the replica and its API server is cut.
    pub cut: Mode,
    /// The length of each calm period, in which no agent should move. The run counts moves in these
    /// periods.
    pub calm: Duration,
}

/// The results of a run.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// The largest number of moves of one agent until the failover was complete.
    pub most_moves: u64,
    /// The number of moves in the calm period after the failover. It should be 0.
    pub moves_in_calm: u64,
    /// The number of moves of agents with state while no replica was connected to its API server.
    pub moves_while_all_cut_off: u64,
}

/// A store that follows the API server directly. Tests expect the agents to have the digests of
/// this store.
struct Reference {
    store: Arc<Store>,
    _folder: TempDir,
    _stops: DropGuard,
}

impl Reference {
    async fn start(api: &ApiServer) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("kubeconfig");
        std::fs::write(&kubeconfig, api.kubeconfig())?;
        let store = Arc::new(Store::new(Limits::default(), Arc::new(Metrics::default())));
        let sink: Arc<dyn Sink> = Arc::<Store>::clone(&store);
        let settings = SourceSettings { kubeconfig: Some(kubeconfig), ..SourceSettings::default() };
        let shutdown = CancellationToken::new();
        tokio::spawn(source::run(SourceSpec::Kubernetes, settings, sink, shutdown.clone()));
        let reference = Self { store, _folder: folder, _stops: shutdown.drop_guard() };
        until("the reference has listed the API server", || reference.store.is_synced()).await?;
        Ok(reference)
    }

    /// Waits until the store has the last write, and returns its digests.
    async fn digests(&self, api: &ApiServer) -> Result<Digests> {
        let version = api.version();
        let has_all = || self.store.changed_positions().values().any(|position| *position >= version);
        until("the reference has the last write", has_all).await?;
        Ok(self.store.digests())
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) -> Result<()> {
    let limit = Instant::now() + LIMIT;
    while !is_so() {
        ensure!(Instant::now() < limit, "gave up waiting until {what}");
        sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// A running API server, its replicas and their agents.
pub struct Scene {
    api: ApiServer,
    reference: Reference,
    replicas: Vec<Replica>,
    agents: Vec<Agent>,
    changes: u8,
    _folder: TempDir,
}

impl Scene {
    /// Starts the API server, and a replica for each of `modes`. The mode determines how the
    /// replica is connected to the API server. This function starts no agents.
    ///
    /// # Errors
    /// A program does not start, or a replica does not list the objects of the API server.
    pub async fn set(services: u32, modes: &[Mode]) -> Result<Self> {
        let api = ApiServer::start()?;
        for number in 0..services {
            let name = format!("svc-{number}");
            let [high, low] = [(number >> 8) & 0xff, number & 0xff];
            let object = service("ns", &name).cluster_ip(&format!("10.96.{high}.{low}")).port("http", "TCP", 80, 8080);
            apply(&api, object.build())?;
            apply(&api, slice(number, 1))?;
        }
        let (folder, reference) = (tempfile::tempdir()?, Reference::start(&api).await?);
        let mut replicas = Vec::new();
        for (number, mode) in modes.iter().enumerate() {
            replicas.push(Replica::start(&format!("replica-{number}"), folder.path(), &api, *mode).await?);
        }
        for replica in replicas.iter().zip(modes).filter(|(_, mode)| **mode == Mode::Open).map(|(replica, _)| replica) {
            let limit = Instant::now() + LIMIT;
            while !replica.status().await?.synced {
                ensure!(Instant::now() < limit, "a replica does not list the API server: {}", replica.log_tail());
                sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(Self { api, reference, replicas, agents: Vec::new(), changes: 1, _folder: folder })
    }

    /// The API server.
    #[must_use]
    pub fn api(&self) -> &ApiServer {
        &self.api
    }

    /// The replicas, in the order of their modes.
    #[must_use]
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// The agents, in the order in which they were started.
    #[must_use]
    pub fn agents(&self) -> &[Agent] {
        &self.agents
    }

    /// Starts agents without state. The agents may connect to the replicas with these indices.
    ///
    /// # Errors
    /// An agent cannot be started.
    pub fn add_agents(&mut self, count: usize, replicas: &[usize]) -> Result<()> {
        let urls: Vec<String> = replicas.iter().map(|replica| self.replicas[*replica].url()).collect();
        for _ in 0..count {
            let node = format!("node-{}", self.agents.len());
            self.agents.push(Agent::start(&node, &urls, None, Backoff::default, None)?);
        }
        Ok(())
    }

    /// Changes one endpoint.
    ///
    /// # Errors
    /// The stand-in API server refuses the change, which is a defect of the test.
    pub fn change(&mut self) -> Result<()> {
        self.changes += 1;
        apply(&self.api, slice(0, self.changes))
    }

    /// Waits until all agents have programmed everything that the API server has.
    ///
    /// # Errors
    /// An agent has not programmed everything in time.
    pub async fn until_programmed(&self) -> Result<()> {
        let started = Instant::now();
        let wanted = self.reference.digests(&self.api).await?;
        loop {
            let lacking = self.agents.iter().filter(|agent| agent.programmed().as_ref() != Some(&wanted));
            let lacking = lacking.count();
            if lacking == 0 {
                return Ok(());
            }
            if started.elapsed() > LIMIT {
                bail!(
                    "{lacking} of {} agents have not programmed everything: {:?}",
                    self.agents.len(),
                    self.places().await
                );
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until a replica's readiness equals `is_ready`.
    ///
    /// # Errors
    /// The readiness does not change in time.
    pub async fn until_ready(&self, replica: usize, is_ready: bool) -> Result<()> {
        let limit = Instant::now() + LIMIT;
        while self.replicas[replica].is_ready().await? != is_ready {
            ensure!(Instant::now() < limit, "the readiness of replica {replica} does not become {is_ready}");
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// The number of agents at each replica.
    ///
    /// # Errors
    /// A replica does not answer.
    pub async fn places(&self) -> Result<Vec<usize>> {
        let mut places = Vec::new();
        for replica in &self.replicas {
            places.push(replica.agents().await?.len());
        }
        Ok(places)
    }

    /// The number of moves of each agent so far.
    #[must_use]
    pub fn moves(&self) -> Vec<u64> {
        self.agents.iter().map(Agent::moves).collect()
    }
}

fn apply(api: &ApiServer, object: serde_json::Value) -> Result<()> {
    api.apply(object).map(drop).map_err(|failure| anyhow::anyhow!("writing to the API: {failure:?}"))
}

fn slice(number: u32, last: u8) -> serde_json::Value {
    let [high, low] = [(number >> 8) & 0xff, number & 0xff];
    let slice = endpoint_slice("ns", &format!("svc-{number}-a"), &format!("svc-{number}")).port("http", "TCP", 8080);
    slice
        .endpoint(&format!("10.{high}.{low}.{last}"), "node-0")
        .endpoint(&format!("10.{high}.{low}.200"), "node-1")
        .build()
}

/// Runs the whole scenario.
///
/// # Errors
/// An agent does not program everything in time, or is not at the healthy replica after the
/// failover.
pub async fn run(scenario: Scenario) -> Result<Outcome> {
    let Scenario { agents, newcomers, services, cut_after, cut, calm } = scenario;
    let mut scene = Scene::set(services, &[Mode::Open, Mode::Refusing, Mode::Open]).await?;
    let all = [HEALTHY, NEVER_LISTS, CUT_OFF];
    let started = Instant::now();
    scene.add_agents(agents, &all)?;
    scene.until_programmed().await.context("at the start")?;
    sleep(cut_after.saturating_sub(started.elapsed())).await;
    scene.replicas[CUT_OFF].gate.set(cut).await;
    scene.change()?;
    scene.until_programmed().await.context("after the connection of one replica to its API server was cut")?;
    let places = scene.places().await?;
    ensure!(places == [agents, 0, 0], "not all agents are at the healthy replica: {places:?}");
    let before = scene.moves();
    let most_moves = before.iter().copied().max().unwrap_or_default();
    sleep(calm).await;
    let moved =
        |scene: &Scene, before: &[u64]| scene.moves().iter().zip(before).map(|(now, earlier)| now - earlier).sum();
    let moves_in_calm: u64 = moved(&scene, &before);

    scene.replicas[HEALTHY].gate.set(cut).await;
    scene.until_ready(HEALTHY, false).await?;
    scene.add_agents(newcomers, &all)?;
    let newcomers_programmed = || scene.agents[agents..].iter().all(|agent| agent.programmed().is_some());
    until("agents without state have programmed a state while no replica reaches its API server", newcomers_programmed)
        .await?;
    sleep(calm).await;
    let moves_while_all_cut_off: u64 = moved(&scene, &before[..]) - moves_in_calm;

    for replica in &scene.replicas {
        replica.gate.set(Mode::Open).await;
    }
    scene.change()?;
    scene.until_programmed().await.context("after the connections to the API server were restored")?;
    Ok(Outcome { most_moves, moves_in_calm, moves_while_all_cut_off })
}
