//! Settings of the servers, from the command line.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use headgate_core::ServiceKey;
use headgate_listener::Carrier;

use crate::serve::tls::ServerTls;

/// The settings of a replica's servers.
#[derive(Clone)]
pub struct Settings {
    /// The name of this replica, which agents and people see.
    pub replica_name: String,
    /// The name of the source: `files:DIR` or `kubernetes`.
    pub source_name: String,
    /// Longest time between two messages to an agent.
    pub heartbeat_interval: Duration,
    /// How long an agent that has seen newer state waits for this replica to catch up.
    pub behind_wait: Duration,
    /// How long the agent of a new stream may take to send `Hello`.
    pub hello_timeout: Duration,
    /// How long a client may read nothing of a pending response before the replica closes the
    /// connection. Applies to all gRPC requests except streams of agents.
    pub stalled_response_timeout: Duration,
    /// The time of which questions about all nodes wait for a node that does not confirm them: 20
    /// times at once, and then once in 15 such times.
    pub patience_part: Duration,
    /// Time in which agents can move to another replica before this replica stops.
    pub drain_grace: Duration,
    /// True if clients with the identity of a node may use Inspect and reflection, like readers.
    pub nodes_may_inspect: bool,
    /// True if a stream must come from an address of its Node.
    pub streams_from_node_address: bool,
    /// The Service whose ready endpoints are the replicas. Agents are balanced between these
    /// replicas. `None` turns balancing off.
    pub balance_service: Option<ServiceKey>,
    /// The other replicas, for the drain barrier. `None` turns the barrier off.
    pub peers: Option<PeerSettings>,
    /// How long all replicas must have run before a Node without a stream counts as not covered by
    /// the drain barrier.
    pub uncovered_after: Duration,
    /// How agents get certificates for service-account tokens. `None` turns enrolment off.
    pub enrolment: Option<EnrolmentSettings>,
    /// How conditions of readiness gates are set. `None` turns this off.
    pub readiness: Option<ReadinessSettings>,
    /// The name and port of the API server; `None` if the replica uses none.
    pub api_server: Option<(String, u16)>,
    /// What carries the connections to both gRPC ports and to other replicas, instead of TCP. The
    /// gRPC ports then have no TLS.
    pub carrier: Option<Arc<dyn Carrier>>,
    /// The bound addresses. The start of the servers sets this field.
    pub ports: Ports,
}

/// The bound addresses of the ports of a replica.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    /// The address of `--listen`.
    pub agents: SocketAddr,
    /// The address of `--inspect-listen`.
    pub inspect: SocketAddr,
    /// The address of `--metrics-listen`, where the kubelet asks how the replica is.
    pub pages: Option<SocketAddr>,
}

/// How conditions of readiness gates are set.
#[derive(Clone)]
pub struct ReadinessSettings {
    /// The longest time that a pod waits for nodes.
    pub bound: Duration,
    /// The kubeconfig file; `None` for the in-cluster configuration.
    pub kubeconfig: Option<PathBuf>,
    /// The client for the API server; `None` if it is made from the kubeconfig file.
    pub client: Option<kube::Client>,
}

/// How agents get certificates for service-account tokens.
#[derive(Debug, Clone)]
pub struct EnrolmentSettings {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// The key of the authority, whose certificate is the first in the file of `--tls-node-ca`.
    pub ca_key: PathBuf,
    /// The audience that tokens must have.
    pub audience: String,
    /// Namespace and name of the agents' ServiceAccount.
    pub service_account: ServiceKey,
    /// True if the address of the client does not have to be an address of its Node.
    pub any_address: bool,
    /// The validity of the certificates.
    pub certificate_lifetime: Duration,
    /// The kubeconfig file of the API server that reviews tokens; `None` for the in-cluster
    /// configuration.
    pub kubeconfig: Option<PathBuf>,
}

/// The other replicas, and how to connect to them.
#[derive(Debug, Clone, Default)]
pub struct PeerSettings {
    /// `HOST:PORT` of each replica, or of a headless Service whose addresses are the replicas. The
    /// list may include this replica. Empty if this replica is the only one.
    pub names: Vec<(String, u16)>,
    /// A Service in the source whose endpoints are the replicas, with the port of the own Inspect.
    pub service: Option<ServiceKey>,
    /// How this replica joins the others; `None` without TLS. [`crate::serve::start`] sets it.
    pub tls: Option<Arc<ServerTls>>,
}

impl Default for Settings {
    fn default() -> Self {
        let unbound = SocketAddr::from(([0; 4], 0));
        Self {
            replica_name: "headgate".into(),
            source_name: String::new(),
            heartbeat_interval: Duration::from_secs(10),
            behind_wait: Duration::from_secs(30),
            hello_timeout: Duration::from_secs(10),
            stalled_response_timeout: Duration::from_secs(300),
            patience_part: Duration::from_secs(3),
            drain_grace: Duration::from_secs(2),
            nodes_may_inspect: false,
            streams_from_node_address: false,
            balance_service: None,
            peers: None,
            uncovered_after: Duration::from_secs(600),
            enrolment: None,
            readiness: None,
            api_server: None,
            carrier: None,
            ports: Ports { agents: unbound, inspect: unbound, pages: None },
        }
    }
}
