//! The complete environment of a fleet: machines, a source, replicas and agents.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};

use super::{
    Fleet, Member, Settings,
    certificates::{Authority, ServerFiles},
    latency::Timetable,
    rig::{self, LOAD_CORE, Machines, Replica, ReplicaSetup, SERVER_CORE},
    source::{Source, StartSource},
};

/// Longest wait until all agents have everything, at the start and after the last change.
pub const CONVERGENCE_LIMIT: Duration = Duration::from_secs(300);
/// Open files for each agent: its connection, a previous connection that is being closed, and more,
/// because only a part of the files is for connections of one network that wait for a handshake.
const FILES_PER_AGENT: u64 = 3;
/// Open files for all other purposes.
const SPARE_FILES: u64 = 4_096;

/// The settings of a stage.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The number of Services in the source.
    pub services: u32,
    /// The number of endpoints of each Service.
    pub endpoints: u32,
    /// The largest number of agents.
    pub agents: usize,
    /// The number of agents that decode all messages into the state of a real agent. These are the
    /// agents with the lowest numbers.
    pub full_agents: usize,
    /// The settings of all agents.
    pub settings: Settings,
    /// Whether replicas and load are pinned to one core each.
    pub is_pinned: bool,
}

/// The environment of a fleet.
pub struct Stage {
    // Fields are dropped in this order: the agents before the replicas to which they are connected.
    /// The agents.
    pub fleet: Fleet,
    /// The running replicas.
    pub replicas: Vec<Replica>,
    /// The API server that the replicas watch.
    pub source: Source,
    /// The machines of replicas and agents.
    pub machines: Machines,
    authority: Arc<Authority>,
    files: ServerFiles,
    folder: tempfile::TempDir,
    setup: Setup,
    started: usize,
}

/// The port for agents of the replica that was started with this number.
fn port(number: usize) -> Result<u16> {
    u16::try_from(7443 + 10 * number).context("too many replicas")
}

impl Stage {
    /// Starts the machines, and a stand-in API server as the source. Replicas and agents are
    /// started later. With [`Setup::is_pinned`], the calling thread is pinned to the load's core.
    ///
    /// # Errors
    /// A part does not start.
    pub fn set(setup: Setup) -> Result<Self> {
        Self::set_with(setup, Source::start)
    }

    /// As [`Self::set`], with a source that `start` starts.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_with(setup: Setup, start: StartSource) -> Result<Self> {
        if setup.is_pinned {
            rig::pin_this_thread(LOAD_CORE)?;
        }
        rig::allow_open_files(FILES_PER_AGENT * setup.agents as u64 + SPARE_FILES)?;
        let folder = tempfile::tempdir().context("creating a folder")?;
        let authority = Arc::new(Authority::new()?);
        let machines = Machines::create(setup.is_pinned)?;
        let files = authority.write_server_files(folder.path(), machines.server_address())?;
        let timetable = Arc::new(Timetable::default());
        let source = start(machines.server(), Arc::clone(&timetable), setup.services, setup.endpoints)?;
        let core = setup.is_pinned.then_some(LOAD_CORE);
        let fleet = Fleet::start(setup.settings.clone(), Arc::clone(&authority), timetable, machines.agents(), core)?;
        Ok(Self { fleet, replicas: Vec::new(), source, machines, authority, files, folder, setup, started: 0 })
    }

    /// Starts a replica, and waits until it has listed the source. Returns its index in
    /// [`Self::replicas`].
    ///
    /// # Errors
    /// The replica does not serve in time.
    pub fn start_replica(&mut self) -> Result<usize> {
        self.spawn_replica(None)?;
        let last = self.replicas.len() - 1;
        self.replicas[last].wait_until_ready(&self.machines)?;
        Ok(last)
    }

    /// Starts replicas that know each other, and waits until all have listed the source.
    ///
    /// # Errors
    /// A replica does not serve in time.
    pub fn start_joined_replicas(&mut self, count: usize) -> Result<()> {
        let inspect = |number: usize| -> Result<String> {
            Ok(SocketAddr::new(self.machines.server_address(), port(number)? + 1).to_string())
        };
        let addresses = (self.started..self.started + count).map(inspect).collect::<Result<Vec<_>>>()?;
        let peers = if count == 1 { "none".to_owned() } else { addresses.join(",") };
        (0..count).try_for_each(|_| self.spawn_replica(Some(&peers)))?;
        self.replicas.iter_mut().try_for_each(|replica| replica.wait_until_ready(&self.machines))
    }

    fn spawn_replica(&mut self, peers: Option<&str>) -> Result<()> {
        let name = format!("replica-{}", self.started);
        let setup = ReplicaSetup {
            name: &name,
            port: port(self.started)?,
            kubeconfig: &self.source.kubeconfig(),
            files: &self.files,
            core: self.setup.is_pinned.then_some(SERVER_CORE),
            peers,
        };
        self.replicas.push(Replica::spawn(&self.machines, self.folder.path(), &setup)?);
        self.started += 1;
        Ok(())
    }

    /// Writes the files for a client's options `--tls-ca`, `--tls-cert` and `--tls-key`. Returns
    /// their paths. The client may use `Inspect`.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn reader_files(&self) -> Result<[std::path::PathBuf; 3]> {
        let [cert, key] = self.authority.write_reader_files(self.folder.path())?;
        Ok([self.files.client_ca.clone(), cert, key])
    }

    /// The name of the node of the agent with this number.
    #[must_use]
    pub fn node_name(agent: usize) -> String {
        format!("node-{agent:05}")
    }

    /// Kills a replica with SIGKILL. The other replicas keep their order.
    ///
    /// # Errors
    /// The process survives SIGKILL.
    pub fn kill_replica(&mut self, replica: usize) -> Result<()> {
        self.replicas.remove(replica).into_process().kill()
    }

    /// Describes `count` agents of a replica, numbered from `first` on. Agents with numbers below
    /// [`Setup::full_agents`] hold a state.
    ///
    /// # Panics
    /// The replica does not exist.
    #[must_use]
    pub fn members(&self, first: usize, count: usize, replica: usize) -> Vec<Member> {
        let member = |number: usize| Member {
            node: Self::node_name(number),
            replicas: vec![self.replicas[replica].address()],
            source: Some(self.machines.host(number)),
            is_full: number < self.setup.full_agents,
            is_measured: true,
            ..Member::default()
        };
        (first..first + count).map(member).collect()
    }

    /// Adds `count` agents of a replica, and waits until they have everything.
    ///
    /// # Errors
    /// The agents take too long, or an agent finds a violation of the contract.
    pub fn join(&self, first: usize, count: usize, replica: usize) -> Result<()> {
        self.fleet.join(self.members(first, count, replica))?;
        let what = format!("{count} agents have their first snapshot");
        self.fleet.wait_until(&what, CONVERGENCE_LIMIT, |worker| worker.having(0) == worker.healthy())
    }

    /// Waits until every healthy agent has reached the source position `slices`, which counts
    /// changes of EndpointSlices.
    ///
    /// # Errors
    /// The agents take too long, or an agent finds a violation of the contract.
    pub fn wait_for_all(&self, slices: u64) -> Result<()> {
        let what = format!("every agent has reached position {slices} of EndpointSlices");
        self.fleet.wait_until(&what, CONVERGENCE_LIMIT, move |worker| worker.having(slices) == worker.healthy())
    }

    /// The settings of the stage.
    #[must_use]
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Compares the states of all agents that hold a state with the source. Returns the number of
    /// compared agents.
    ///
    /// # Errors
    /// A state differs, or no agent holds a state.
    pub fn compare_digests(&self) -> Result<usize> {
        let expected = self.source.digests();
        let found = self.fleet.ask(|worker| worker.digests())?;
        for (agent, digests) in found.iter().enumerate() {
            let differing = expected.differing(digests).len();
            if differing > 0 {
                bail!("the state of agent {agent} differs from the source in {differing} of 1,024 buckets");
            }
        }
        if found.is_empty() {
            bail!("no agent holds a state that could be compared");
        }
        Ok(found.len())
    }
}
