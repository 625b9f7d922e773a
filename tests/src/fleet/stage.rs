//! A stage for a fleet: machines, a source, replicas, and the agents.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};

use super::{
    Fleet, Member, Settings,
    certificates::{Authority, ServerFiles},
    latency::Timetable,
    rig::{self, LOAD_CORE, Machines, Replica, ReplicaSetup, SERVER_CORE, Wire},
    source::Source,
};

/// Longest time until all agents have everything, at first and after the last change.
pub const CONVERGENCE_LIMIT: Duration = Duration::from_secs(300);
/// Its connection, and the one of which it is about to let go.
const FILES_PER_AGENT: u64 = 2;
/// Open files that neither connections nor their epoll entries need.
const SPARE_FILES: u64 = 4_096;

/// What a stage is to be.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Services in the source.
    pub services: u32,
    /// Endpoints of each.
    pub endpoints: u32,
    /// The most agents that there will be.
    pub agents: usize,
    /// Agents that decode everything into the state of a real agent: the first so many.
    pub full_agents: usize,
    /// What is between replicas and agents.
    pub wire: Wire,
    /// What the agents have in common.
    pub settings: Settings,
    /// Whether replicas and load get a core each.
    pub is_pinned: bool,
}

/// A replica with its source, and a fleet without agents.
pub struct Stage {
    // In the order in which they have to go: agents first, then what they are connected to.
    /// The agents.
    pub fleet: Fleet,
    /// Replicas that run.
    pub replicas: Vec<Replica>,
    /// What they watch.
    pub source: Source,
    /// What they run on.
    pub machines: Machines,
    files: ServerFiles,
    folder: tempfile::TempDir,
    setup: Setup,
    started: usize,
}

impl Stage {
    /// The most agents that the system's limit on open files has room for.
    ///
    /// # Errors
    /// When the system does not tell its limit.
    pub fn most_agents() -> Result<usize> {
        let files = rig::open_files_allowed()?.saturating_sub(SPARE_FILES);
        Ok(usize::try_from(files / FILES_PER_AGENT).unwrap_or(usize::MAX))
    }

    /// Starts everything but replicas and agents. Where cores are given out, the calling thread is
    /// bound to the load's from then on.
    ///
    /// # Errors
    /// When something does not start.
    pub fn set(setup: Setup) -> Result<Self> {
        if setup.is_pinned {
            rig::pin_this_thread(LOAD_CORE)?;
        }
        rig::allow_open_files(FILES_PER_AGENT * setup.agents as u64 + SPARE_FILES)?;
        let folder = tempfile::tempdir().context("making a folder")?;
        let authority = Arc::new(Authority::new()?);
        let files = authority.write_server_files(folder.path())?;
        let machines = Machines::create(setup.wire)?;
        let timetable = Arc::new(Timetable::default());
        let source = Source::start(machines.server(), Arc::clone(&timetable), setup.services, setup.endpoints)?;
        let core = setup.is_pinned.then_some(LOAD_CORE);
        let fleet = Fleet::start(setup.settings.clone(), authority, timetable, machines.agents(), core)?;
        Ok(Self { fleet, replicas: Vec::new(), source, machines, files, folder, setup, started: 0 })
    }

    /// Starts a replica; the source is listed when this returns. Its place in [`Self::replicas`].
    ///
    /// # Errors
    /// When it does not serve.
    pub fn start_replica(&mut self, options: &[&str]) -> Result<usize> {
        let kubeconfig = self.source.api().kubeconfig();
        self.start_replica_on(&kubeconfig, options)
    }

    /// The same on an API server of the caller's choice.
    ///
    /// # Errors
    /// When it does not serve.
    pub fn start_replica_on(&mut self, kubeconfig: &str, options: &[&str]) -> Result<usize> {
        let name = format!("replica-{}", self.started);
        let setup = ReplicaSetup {
            name: &name,
            port: u16::try_from(7443 + 10 * self.started).context("too many replicas")?,
            kubeconfig,
            files: &self.files,
            options,
            core: self.setup.is_pinned.then_some(SERVER_CORE),
        };
        self.replicas.push(Replica::start(&self.machines, self.folder.path(), &setup)?);
        self.started += 1;
        Ok(self.replicas.len() - 1)
    }

    /// Kills a replica on the spot, as a crash would. The others keep their order.
    ///
    /// # Errors
    /// When it survives that.
    pub fn kill_replica(&mut self, replica: usize) -> Result<()> {
        self.replicas.remove(replica).into_process().kill()
    }

    /// Members for so many agents of a replica, numbered from `first` on. Those with the lowest
    /// numbers hold a state, as many as were asked for.
    ///
    /// # Panics
    /// When there is no such replica.
    #[must_use]
    pub fn members(&self, first: usize, count: usize, replica: usize) -> Vec<Member> {
        let member = |number: usize| Member {
            node: format!("node-{number:05}"),
            replicas: vec![self.replicas[replica].address()],
            source: Some(self.machines.host(number)),
            is_full: number < self.setup.full_agents,
            is_measured: true,
            ..Member::default()
        };
        (first..first + count).map(member).collect()
    }

    /// Adds so many agents to those of a replica, and waits until they have everything.
    ///
    /// # Errors
    /// When that takes too long, or an agent was sent what breaks the contract.
    pub fn join(&self, first: usize, count: usize, replica: usize) -> Result<()> {
        self.fleet.join(self.members(first, count, replica))?;
        let what = format!("{count} agents have their first snapshot");
        self.fleet.wait_until(&what, CONVERGENCE_LIMIT, |worker| worker.having(0) == worker.sound())
    }

    /// Waits until every sound agent has all that the source had at a position.
    ///
    /// # Errors
    /// When that takes too long, or an agent was sent what breaks the contract.
    pub fn wait_for_all(&self, slices: u64) -> Result<()> {
        let what = format!("every agent has version {slices} of the source");
        self.fleet.wait_until(&what, CONVERGENCE_LIMIT, move |worker| worker.having(slices) == worker.sound())
    }

    /// Makes a replica's API server known to it under another address: the text of a kubeconfig.
    #[must_use]
    pub fn kubeconfig_through(&self, address: std::net::SocketAddr) -> String {
        let api = self.source.api();
        api.kubeconfig().replace(&api.url(), &format!("http://{address}"))
    }

    /// What the stage was set with.
    #[must_use]
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Compares the state of every agent that holds one with the source's.
    ///
    /// # Errors
    /// When they differ, or there is none to compare.
    pub fn compare_digests(&self) -> Result<usize> {
        let expected = self.source.digests();
        let found = self.fleet.ask(|worker| worker.digests())?;
        for (agent, digests) in found.iter().enumerate() {
            let differing = expected.differing(digests).len();
            if differing > 0 {
                bail!("agent {agent} of those with a state differs from the source in {differing} of 1,024 buckets");
            }
        }
        if found.is_empty() {
            bail!("no agent holds a state that could be compared");
        }
        Ok(found.len())
    }
}
