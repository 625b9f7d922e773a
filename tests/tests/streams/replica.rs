//! A replica in the test's process, with a store that the test commits to.

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use futures::TryStreamExt as _;
use headgate_control_plane::{
    metrics::Metrics,
    model::{NodeChange, Sink as _, Transaction, TriggeredChange},
    objects::SourceKind,
    serve::{self, CancellationToken, Listen, Running, Security, Settings},
    store::{Limits, Store},
};
use headgate_core::{Change, Endpoint, EndpointPort, Node, Placement, Protocol, Service, ServiceKey, ServicePort};
use headgate_proto::v1::{self, inspect_client::InspectClient};
use headgate_tests::testbed::{page, process::program};
use serde_json::Value;
use tokio::{process::Command, time::timeout};
use tonic::transport::Channel;

use crate::{
    client::{Client, GUARD, Held, channel, eventually},
    identity::authority::{Authority, load},
};

pub(crate) struct Replica {
    pub(crate) store: Arc<Store>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) running: Running,
}

pub(crate) fn settings() -> Settings {
    Settings { replica_name: "replica-1".into(), drain_grace: Duration::from_millis(500), ..Settings::default() }
}

impl Replica {
    /// Starts a replica with an empty store whose source has been listed.
    pub(crate) async fn start() -> Self {
        let replica = Self::start_with(settings(), Security::Plaintext).await;
        replica.store.synced();
        replica
    }

    /// Starts a replica with an empty store whose source has not been listed.
    pub(crate) async fn start_with(settings: Settings, security: Security) -> Self {
        Self::start_at((Ipv4Addr::LOCALHOST, 0).into(), settings, security).await
    }

    /// Starts a replica like [`Self::start_with`], at this address for agents.
    pub(crate) async fn start_at(address: SocketAddr, settings: Settings, security: Security) -> Self {
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let (serving, counting) = (Arc::clone(&store), Arc::clone(&metrics));
        let token = CancellationToken::new();
        let listen = Listen { metrics: Some((Ipv4Addr::LOCALHOST, 0).into()), ..Listen::at(address) };
        let running = serve::start(listen, security, settings, serving, counting, token).await.unwrap();
        Self { store, metrics, running }
    }

    /// Starts a replica whose source has been listed. Its certificate, for 127.0.0.1, comes from
    /// the authority that it trusts.
    pub(crate) async fn start_with_tls(authority: &Authority) -> Self {
        let folder = tempfile::tempdir().unwrap();
        authority.server(|_| {}).write(folder.path(), &[authority]);
        let replica = Self::start_with(settings(), Security::Tls(load(folder.path()))).await;
        replica.store.synced();
        replica
    }

    /// Opens the stream of an agent that holds nothing.
    pub(crate) async fn open(&self, node: &str) -> Client {
        Client::open(channel(self.running.local_addr).await, node, None).await.unwrap()
    }

    /// Opens the stream of an agent that holds this state.
    pub(crate) async fn resume(&self, node: &str, held: Held) -> Client {
        Client::open(channel(self.running.local_addr).await, node, Some(held)).await.unwrap()
    }

    /// Opens the stream of an agent that has received and acknowledged everything, and waits until
    /// the replica has the ACK.
    pub(crate) async fn agent(&self, node: &str) -> Client {
        let mut client = self.open(node).await;
        client.reach(self.store.version()).await;
        self.acknowledge(&client).await;
        client
    }

    /// Sends an ACK of what an agent holds, and waits until the replica has the ACK. Requests come
    /// on other connections, and could overtake the ACK.
    pub(crate) async fn acknowledge(&self, client: &Client) {
        client.ack().await;
        let has_ack = async || {
            let request = v1::ListAgentsRequest { node: client.node.clone(), only_this_replica: true };
            let agents = self.inspect().await.list_agents(request).await.unwrap().into_inner();
            let agents: Vec<v1::AgentInfo> = agents.try_collect().await.unwrap();
            agents.iter().any(|agent| agent.programmed_version >= client.held.version && agent.state != "waiting")
        };
        eventually(&format!("the replica has the ACK of {}", client.node), has_ack).await;
    }

    pub(crate) async fn inspect(&self) -> InspectClient<Channel> {
        InspectClient::new(channel(self.running.inspect_addr).await)
    }

    pub(crate) fn put(&self, changes: impl IntoIterator<Item = Change>) {
        self.put_at(None, changes);
    }

    pub(crate) fn put_at(&self, position: Option<u64>, changes: impl IntoIterator<Item = Change>) {
        let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).collect();
        let positions = position.map(|position| (SourceKind::Services, position)).into_iter().collect();
        self.store.commit(Transaction { changes, positions, ..Transaction::default() });
    }

    pub(crate) fn put_nodes(&self, nodes: impl IntoIterator<Item = NodeChange>) {
        self.store.commit(Transaction { nodes: nodes.into_iter().collect(), ..Transaction::default() });
    }

    /// The agents that the replica lists.
    pub(crate) async fn agents(&self) -> Vec<v1::AgentInfo> {
        let agents = self.inspect().await.list_agents(v1::ListAgentsRequest::default()).await.unwrap();
        agents.into_inner().try_collect().await.unwrap()
    }

    pub(crate) async fn status(&self) -> v1::GetStatusResponse {
        self.inspect().await.get_status(v1::GetStatusRequest::default()).await.unwrap().into_inner()
    }

    /// The value of a sample in the metrics, or 0 if the sample is missing.
    pub(crate) fn metric(&self, sample: &str) -> u64 {
        page::sample(&self.metrics.render(), sample)
    }
}

/// What headgatectl printed, and its exit code.
pub(crate) struct Printed {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Printed {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {} {}", self.out, self.err))
    }
}

/// Starts headgatectl against these replicas. Single spaces separate the arguments.
pub(crate) fn headgatectl(replicas: &[&Replica], arguments: &str) -> impl Future<Output = Printed> + use<> {
    let servers = replicas.iter().map(|replica| format!("http://{}", replica.running.inspect_addr));
    let mut command = Command::new(program("headgatectl").unwrap());
    command.args(["--server", &servers.collect::<Vec<_>>().join(",")]).args(arguments.split(' '));
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    async {
        let output = timeout(GUARD, output).await.expect("headgatectl does not end").unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Printed { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
    }
}

/// A Node without addresses.
pub(crate) fn node(name: &str, zone: Option<&str>) -> Node {
    let (name, zone) = (name.into(), zone.map(Into::into));
    Node { name, zone, pod_cidrs: Vec::new(), addresses: Vec::new(), going_away: false }
}

pub(crate) fn key(number: u16) -> ServiceKey {
    ServiceKey::new("default", &format!("service-{number}"))
}

pub(crate) fn service(number: u16, port: u16) -> Change {
    let [high, low] = number.to_be_bytes();
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port, node_port: 0 };
    Change::from(Service::new(key(number), vec![Ipv4Addr::new(10, 96, high, low).into()], vec![port]))
}

pub(crate) fn endpoint(service: u16, host: u8, port: u16) -> Change {
    let [high, low] = service.to_be_bytes();
    let ports = [EndpointPort::new("http", Protocol::Tcp, port)];
    let mut endpoint = Endpoint::new(Ipv4Addr::new(10, high, low, host).into(), Arc::new(ports));
    let placement = Placement { zone: Some("zone-a".into()), ..Placement::on(&format!("node-{}", host % 8)) };
    endpoint.placement = placement.into();
    Change::Endpoint(key(service), endpoint)
}

pub(crate) fn remove_endpoint(service: u16, host: u8) -> Change {
    let [high, low] = service.to_be_bytes();
    Change::RemoveEndpoint(key(service), Ipv4Addr::new(10, high, low, host).into())
}

pub(crate) fn remove_service(number: u16) -> Change {
    Change::RemoveService(key(number))
}

/// Services 1 to `count` with two endpoints each.
pub(crate) fn cluster(count: u16) -> impl Iterator<Item = Change> {
    (1..=count).flat_map(|number| [service(number, 80), endpoint(number, 1, 8080), endpoint(number, 2, 8080)])
}
