//! The programs under test: starts the control plane and the agents, and asks `Inspect` about them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
pub use headgate_proto::v1::AgentInfo;
use headgate_proto::v1::inspect_client::InspectClient;
use headgate_proto::v1::{
    ExplainQuery, Explanation, GetStatusRequest, GetStatusResponse, ListAgentsRequest, ListServicesRequest, NodeQuery,
    QueryNodeRequest, ServiceInfo, node_answer, node_query,
};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::backend::Backend;
use super::container;
use super::machines::Machines;
use super::manifests::{MARKER, NAMESPACE};
use super::plan::{self, CLUSTER_CIDR, CONTROL, CONTROL_PORT, INSPECT_PORT};
use super::process::{self, Process};

/// A busy machine may pause for seconds.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The answers of `Inspect` at one time.
#[derive(Debug, Clone)]
pub(super) struct Glance {
    pub(super) status: GetStatusResponse,
    pub(super) agents: Vec<AgentInfo>,
    marker: Option<ServiceInfo>,
}

impl Glance {
    /// The generation of the manifests that the control plane holds. Each write of the manifests
    /// increases the generation by one.
    pub(super) fn generation(&self) -> Option<u32> {
        Some(self.marker.as_ref()?.ports.first()?.port)
    }
}

fn control_plane_url(port: u16) -> Result<String> {
    let address = plan::address(CONTROL).context("the plan has no address for the control plane")?;
    Ok(format!("http://{}:{port}", address.v4))
}

/// Starts the control plane on a folder of manifests.
pub(super) fn start_control_plane(machines: &Machines, manifests: &Path) -> Result<Process> {
    let address = plan::address(CONTROL).context("the plan has no address for the control plane")?;
    let mut command = Command::new(process::program("headgate-control-plane")?);
    command
        .args(["--source", &format!("files:{}", manifests.display())])
        .args(["--listen", &format!("{}:{CONTROL_PORT}", address.v4)])
        .args(["--insecure-loopback", "--replica-name", "testbed", "--peers", "none"])
        .env("HEADGATE_LOG", LOG_FILTER);
    let log = machines.folder().join("control-plane.log");
    Process::start("headgate-control-plane", machines.machine(CONTROL)?, command, &log)
}

const LOG_FILTER: &str = "info,headgate_control_plane=debug,headgate_node_agent=debug";

/// How the agent of a node is started.
#[derive(Debug, Clone, Default)]
pub struct AgentSetup {
    /// The backend; `None` for the testbed's backend.
    pub backend: Option<Backend>,
    /// A folder that is put in front of `PATH`.
    pub tools: Option<PathBuf>,
    /// Mounts `/proc/sys` read-only, as in a container that is not privileged.
    pub read_only_parameters: bool,
    /// Runs the agent with the rights of its container in the manifests: their capabilities, no
    /// new privileges, and a read-only root. The agent can write only to the folder of the testbed.
    pub in_container: bool,
    /// Omits `--cluster-cidr`, so that the agent cannot tell pods from other clients.
    pub cannot_tell_pods: bool,
    /// Where the agent reaches the control plane; `None` for the control plane's own address.
    pub control_plane: Option<SocketAddr>,
    /// Additional arguments.
    pub arguments: Vec<String>,
}

impl AgentSetup {
    /// The default setup with additional arguments.
    pub fn with(arguments: &[&str]) -> Self {
        Self { arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(), ..Self::default() }
    }
}

/// The agent's command line for a node, without the flags for the control plane.
fn agent_command(machines: &Machines, backend: Backend, node: &str, setup: &AgentSetup) -> Result<Command> {
    let program = process::program("headgate-node-agent")?;
    let backend = setup.backend.unwrap_or(backend);
    let mut command = if setup.in_container {
        container::command(&program, machines.folder())?
    } else if setup.read_only_parameters {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", container::READ_ONLY_PARAMETERS]).arg(program);
        command
    } else {
        Command::new(program)
    };
    if backend.carries_tcp() {
        command = process::before_others(&command);
    }
    // Every node has its own state folder. Agents save their state often, so that tests need not
    // wait long for a saved state.
    let state = machines.folder().join(format!("state-{node}"));
    command.arg("--state-dir").arg(state).args(["--state-save-period", "200ms"]);
    command.args(["--node-name", node]).args(backend.agent_arguments());
    if !setup.arguments.iter().any(|argument| argument.starts_with("--standby")) {
        // Many tests begin with the rules of kube-proxy or of another agent.
        command.arg("--standby=never");
    }
    command.args(["--pod-ranges", CLUSTER_CIDR, "--health-check-namespaces", "*"]);
    const NODE_PORTS: &str = "--nodeport-addresses";
    if backend == Backend::Nftables && !setup.arguments.iter().any(|argument| argument.starts_with(NODE_PORTS)) {
        // In the other modes, NodePorts answer on all addresses by default.
        command.args([NODE_PORTS, "0.0.0.0/0,::/0"]);
    }
    if !setup.cannot_tell_pods {
        command.args(["--cluster-cidr", CLUSTER_CIDR]);
    }
    command.args(&setup.arguments).env("XTABLES_LOCKFILE", machines.xtables_lock(node)).env("HEADGATE_LOG", LOG_FILTER);
    Ok(command)
}

/// Starts the agent of a node.
pub(super) fn start_agent(machines: &Machines, backend: Backend, node: &str, setup: &AgentSetup) -> Result<Process> {
    let mut command = agent_command(machines, backend, node, setup)?;
    let url = match setup.control_plane {
        Some(address) => format!("http://{address}"),
        None => control_plane_url(CONTROL_PORT)?,
    };
    command.args(["--control-plane", &url, "--insecure-loopback"]);
    if let Some(tools) = &setup.tools {
        command.env("PATH", format!("{}:{}", tools.display(), std::env::var("PATH").context("PATH is not set")?));
    }
    let log = machines.folder().join(format!("agent-{node}.log"));
    Process::start(&format!("headgate-node-agent of {node}"), machines.machine(node)?, command, &log)
}

/// Runs the agent's program on a node with a flag such as `--cleanup`, and waits until the program
/// ends.
pub(super) fn run_agent_once(
    machines: &Machines,
    backend: Backend,
    node: &str,
    setup: &AgentSetup,
    flag: &str,
) -> Result<()> {
    let mut command = agent_command(machines, backend, node, setup)?;
    command.arg(flag);
    machines.machine(node)?.output(command).map(drop)
}

/// Asks the control plane for its status, its agents and the marker Service.
pub(super) fn glance(machines: &Machines) -> Result<Glance> {
    let url = control_plane_url(INSPECT_PORT)?;
    machines.machine(CONTROL)?.run(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("creating a runtime")?;
        runtime.block_on(async { tokio::time::timeout(CALL_TIMEOUT, ask(url)).await.context("calling Inspect")? })
    })
}

/// Asks agents to explain packets. Returns the parts of each answer. An answer about a Service that
/// agents do not serve has no part.
pub(super) fn explain(
    machines: &Machines,
    questions: Vec<(&'static str, ExplainQuery)>,
) -> Result<Vec<Vec<Explanation>>> {
    let url = control_plane_url(INSPECT_PORT)?;
    machines.machine(CONTROL)?.run(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("creating a runtime")?;
        runtime.block_on(async {
            let mut inspect = connect(url).await?;
            let mut answers = Vec::new();
            for (node, query) in questions {
                let query = Some(NodeQuery { kind: Some(node_query::Kind::Explain(query)) });
                let request = QueryNodeRequest { node: node.to_owned(), query, only_this_replica: false };
                answers.push(explanations(&mut inspect, request).await?);
            }
            Ok(answers)
        })
    })
}

async fn explanations(inspect: &mut InspectClient<Channel>, request: QueryNodeRequest) -> Result<Vec<Explanation>> {
    let mut stream = inspect.query_node(request).await?.into_inner();
    let mut parts = Vec::new();
    loop {
        match stream.message().await {
            Ok(Some(part)) => match part.kind {
                Some(node_answer::Kind::Explanation(part)) => parts.push(part),
                other => bail!("not an explanation: {other:?}"),
            },
            Ok(None) => return Ok(parts),
            Err(status) if status.code() == Code::FailedPrecondition => return Ok(Vec::new()),
            Err(status) => return Err(status.into()),
        }
    }
}

async fn connect(url: String) -> Result<InspectClient<Channel>> {
    let endpoint = Endpoint::from_shared(url)?.connect_timeout(CALL_TIMEOUT);
    Ok(InspectClient::new(endpoint.connect().await.context("connecting to the control plane")?))
}

async fn ask(url: String) -> Result<Glance> {
    let mut inspect = connect(url).await?;
    // The marker is requested first, so that the other answers are at least as new as the marker.
    let marker = marker(&mut inspect).await?;
    let status = inspect.get_status(GetStatusRequest::default()).await?.into_inner();
    let mut stream =
        inspect.list_agents(ListAgentsRequest { only_this_replica: true, ..Default::default() }).await?.into_inner();
    let mut agents = Vec::new();
    while let Some(agent) = stream.message().await? {
        agents.push(agent);
    }
    Ok(Glance { status, agents, marker })
}

async fn marker(inspect: &mut InspectClient<Channel>) -> Result<Option<ServiceInfo>> {
    let request = ListServicesRequest { namespace: NAMESPACE.to_owned(), name: MARKER.to_owned() };
    Ok(inspect.list_services(request).await?.into_inner().message().await?)
}
