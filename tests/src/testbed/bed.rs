//! A whole cluster: machines, the control plane, and an agent on every node.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use headgate_proto::v1::{ExplainQuery, Explanation};

use super::backend::Backend;
use super::cluster::{self, AgentInfo, AgentSetup, Glance};
use super::container;
use super::machines::Machines;
use super::manifests::{Manifests, Service, Via, ready};
use super::plan::{Family, NODES};
use super::process::Process;

/// Longest wait until every agent has programmed a change. Agents usually need well under a second.
const PROGRAMMED_TIMEOUT: Duration = Duration::from_secs(120);
/// Shortest and longest pause between two polls of the control plane. Pauses grow with the time
/// waited, and are at least twice as long as the last poll, so that polling does not slow down a
/// busy machine.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(250)];

/// A cluster under test. Dropping it ends its programs and removes its machines. Logs and manifests
/// stay if the test has failed.
#[derive(Debug)]
pub struct Testbed {
    // Fields are dropped in this order: agents and control plane, then machines.
    processes: Mutex<Processes>,
    desired: Mutex<Desired>,
    machines: Machines,
    backend: Backend,
}

#[derive(Debug, Default)]
struct Processes {
    agents: BTreeMap<&'static str, Process>,
    control_plane: Option<Process>,
}

#[derive(Debug)]
struct Desired {
    manifests: Manifests,
    generation: u16,
}

/// What the control plane must hold after a change. The counts are needed because the control plane
/// removes deleted resources some time after it adds new resources.
#[derive(Debug)]
struct Expected {
    generation: u32,
    services: u64,
    endpoints: u64,
}

impl Testbed {
    /// Starts machines, control plane and agents, and waits until all nodes have programmed
    /// `manifests`.
    pub fn start(backend: Backend, manifests: Manifests) -> Result<Self> {
        Self::start_with(backend, manifests, |bed| NODES.iter().try_for_each(|node| bed.start_agent(node.name)))
    }

    /// Starts a cluster like [`Self::start`], whose agents run as in the manifests: a privileged
    /// program sets the kernel parameters, and then the agent runs with the rights of its
    /// container.
    pub fn start_in_containers(backend: Backend, manifests: Manifests) -> Result<Self> {
        let setup = AgentSetup { in_container: true, ..AgentSetup::default() };
        let bed = Self::start_with(backend, manifests, |bed| {
            NODES.iter().try_for_each(|node| {
                bed.set_parameters(node.name, &AgentSetup::default())?;
                bed.start_agent_with(node.name, &setup)
            })
        })?;
        bed.processes().agents.values().try_for_each(|agent| container::check(agent.id()))?;
        Ok(bed)
    }

    fn start_with(
        backend: Backend,
        manifests: Manifests,
        start_agents: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Self> {
        let bed = Self::machines_only(backend, manifests)?;
        match bed.start_control_plane().and_then(|()| start_agents(&bed)).and_then(|()| bed.wait_programmed()) {
            Ok(()) => Ok(bed),
            Err(error) => {
                bed.machines.keep_folder();
                Err(error)
            }
        }
    }

    /// Starts the machines and writes the manifests. Control plane and agents are not started.
    pub fn machines_only(backend: Backend, manifests: Manifests) -> Result<Self> {
        let machines = Machines::start()?;
        std::fs::create_dir(machines.folder().join("manifests")).context("creating the folder of manifests")?;
        let bed = Self {
            processes: Mutex::default(),
            desired: Mutex::new(Desired { manifests, generation: 0 }),
            machines,
            backend,
        };
        bed.write(|_| Ok(()))?;
        Ok(bed)
    }

    /// The machines, from which tests send requests.
    pub fn machines(&self) -> &Machines {
        &self.machines
    }

    /// The backend under test.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// A copy of the named service, as last written.
    pub fn service(&self, name: &str) -> Result<Service> {
        self.desired().manifests.service(name).cloned()
    }

    /// The address and port at which clients reach a service's port by `via`.
    pub fn address(&self, service: &str, via: Via, family: Family, port: &str) -> Result<std::net::SocketAddr> {
        self.service(service)?.socket_address(via, family, port)
    }

    /// Changes the manifests and waits until all running agents have programmed the change.
    pub fn update(&self, change: impl FnOnce(&mut Manifests) -> Result<()>) -> Result<()> {
        self.write(change)?;
        self.wait_programmed()
    }

    /// Changes a service and waits until all running agents have programmed the change.
    pub fn update_service(&self, name: &str, change: impl FnOnce(&mut Service)) -> Result<()> {
        self.update(|manifests| manifests.service_mut(name).map(change))
    }

    /// Replaces the endpoints of a service by these ready ones, and waits like [`Self::update`].
    pub fn set_endpoints(&self, service: &str, endpoints: &[&str]) -> Result<()> {
        self.update_service(service, |service| service.endpoints = ready(endpoints))
    }

    /// Replaces the endpoints of a service by these ready ones, without waiting.
    pub fn write_endpoints(&self, service: &str, endpoints: &[&str]) -> Result<()> {
        self.write(|manifests| manifests.service_mut(service).map(|service| service.endpoints = ready(endpoints)))
    }

    /// Changes the manifests, without waiting.
    pub fn write(&self, change: impl FnOnce(&mut Manifests) -> Result<()>) -> Result<()> {
        let mut desired = self.desired();
        change(&mut desired.manifests)?;
        desired.generation += 1;
        let yaml = desired.manifests.yaml(desired.generation)?;
        // Renaming is atomic: a reader never sees a half-written file.
        let draft = self.machines.folder().join("manifests.draft");
        std::fs::write(&draft, yaml).with_context(|| format!("writing {}", draft.display()))?;
        let target = self.manifests_folder().join("cluster.yaml");
        std::fs::rename(&draft, &target).with_context(|| format!("writing {}", target.display()))
    }

    /// Waits until the control plane holds the manifests as last written and all running agents
    /// have programmed them.
    pub fn wait_programmed(&self) -> Result<()> {
        let expected = {
            let desired = self.desired();
            let (services, endpoints) = desired.manifests.counts();
            Expected { generation: desired.generation.into(), services, endpoints }
        };
        let asked = Instant::now();
        loop {
            let polled = Instant::now();
            let glance = self.check_running().and_then(|()| cluster::glance(&self.machines));
            let poll_time = polled.elapsed();
            if glance.as_ref().is_ok_and(|glance| self.is_programmed(glance, &expected)) {
                return Ok(());
            }
            if asked.elapsed() >= PROGRAMMED_TIMEOUT {
                bail!("not all agents have programmed {expected:?}; the control plane reports {glance:#?}");
            }
            if let Err(error) = glance
                && self.check_running().is_err()
            {
                return Err(error);
            }
            std::thread::sleep((asked.elapsed() / 8).clamp(PAUSES[0], PAUSES[1]).max(poll_time * 2));
        }
    }

    fn is_programmed(&self, glance: &Glance, expected: &Expected) -> bool {
        glance.generation() == Some(expected.generation)
            && (glance.status.services, glance.status.endpoints) == (expected.services, expected.endpoints)
            && self.processes().agents.iter().all(|(node, process)| {
                glance.agents.iter().any(|agent| {
                    // The control plane may still list an earlier agent of the node.
                    agent.node == *node
                        && agent.connected_unix_ms >= process.started_unix_ms()
                        && agent.programmed_version >= glance.status.version
                        && agent.last_error.is_empty()
                })
            })
    }

    /// The agents, as the control plane's `Inspect` API lists them.
    pub fn agents(&self) -> Result<Vec<AgentInfo>> {
        Ok(cluster::glance(&self.machines)?.agents)
    }

    /// Asks the agents of nodes to explain packets. Returns the parts of each answer, in order.
    pub fn explain(&self, questions: Vec<(&'static str, ExplainQuery)>) -> Result<Vec<Vec<Explanation>>> {
        cluster::explain(&self.machines, questions)
    }

    /// Starts the control plane.
    pub fn start_control_plane(&self) -> Result<()> {
        let process = cluster::start_control_plane(&self.machines, &self.manifests_folder())?;
        self.processes().control_plane = Some(process);
        Ok(())
    }

    /// Stops the control plane with SIGTERM.
    pub fn stop_control_plane(&self) -> Result<()> {
        let process = self.processes().control_plane.take().context("the control plane is not running")?;
        process.terminate().map(drop)
    }

    /// Starts the agent of a node.
    pub fn start_agent(&self, node: &'static str) -> Result<()> {
        self.start_agent_with(node, &AgentSetup::default())
    }

    /// Starts the agent of a node with the given setup.
    pub fn start_agent_with(&self, node: &'static str, setup: &AgentSetup) -> Result<()> {
        let process = cluster::start_agent(&self.machines, self.backend, node, setup)?;
        self.processes().agents.insert(node, process);
        Ok(())
    }

    /// Starts the agent of a node, and waits until all running agents have programmed everything.
    pub fn start_programmed(&self, node: &'static str, setup: &AgentSetup) -> Result<()> {
        self.start_agent_with(node, setup)?;
        self.wait_programmed()
    }

    /// Starts the control plane, and the agent of a node like [`Self::start_programmed`].
    pub fn start_programs(&self, node: &'static str, setup: &AgentSetup) -> Result<()> {
        self.start_control_plane()?;
        self.start_programmed(node, setup)
    }

    /// Stops the agent of a node with SIGTERM.
    pub fn stop_agent(&self, node: &str) -> Result<()> {
        self.take_agent(node)?.terminate().map(drop)
    }

    /// Kills the agent of a node with SIGKILL.
    pub fn kill_agent(&self, node: &str) -> Result<()> {
        self.take_agent(node)?.kill()
    }

    /// Runs the agent's program with `--cleanup` on a node.
    pub fn clean_up(&self, node: &str) -> Result<()> {
        self.clean_up_with(node, &AgentSetup::default())
    }

    /// Runs the agent's program with `--cleanup` on a node, with the given setup. The setup should
    /// equal the setup of the node's agent.
    pub fn clean_up_with(&self, node: &str, setup: &AgentSetup) -> Result<()> {
        cluster::run_agent_once(&self.machines, self.backend, node, setup, "--cleanup")
    }

    /// Runs the agent's program with `--init-only` on a node. The program sets the kernel
    /// parameters that an agent with this setup needs.
    pub fn set_parameters(&self, node: &str, setup: &AgentSetup) -> Result<()> {
        cluster::run_agent_once(&self.machines, self.backend, node, setup, "--init-only")
    }

    /// Takes the running agent of a node out of the testbed. The caller may start another agent of
    /// the node meanwhile.
    pub fn take_agent(&self, node: &str) -> Result<Process> {
        self.processes().agents.remove(node).with_context(|| format!("no agent runs on {node}"))
    }

    fn check_running(&self) -> Result<()> {
        let mut processes = self.processes();
        let Processes { agents, control_plane } = &mut *processes;
        control_plane.as_mut().context("the control plane is not running")?.check_running()?;
        agents.values_mut().try_for_each(Process::check_running)
    }

    fn manifests_folder(&self) -> PathBuf {
        self.machines.folder().join("manifests")
    }

    fn desired(&self) -> MutexGuard<'_, Desired> {
        self.desired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn processes(&self) -> MutexGuard<'_, Processes> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
