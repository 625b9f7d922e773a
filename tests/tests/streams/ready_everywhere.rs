//! Ready everywhere: two control planes at a stand-in API server, with simulated agents
//! (discovery.proto, section 20).

mod real;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use clap::Parser as _;
use headgate_control_plane::{options::Options, run::ControlPlane, serve::CancellationToken, store::Store};
use headgate_core::ServiceKey;
use headgate_proto::v1::{self, inspect_client::InspectClient};
use headgate_tests::apiserver::{
    ApiServer, Kind, RequestFault, RequestFilter, Rights, Verb,
    objects::{PodBuilder, endpoint_slice, node, pod, service},
};
use headgate_tests::testbed::page;
use http::Method;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{task::spawn_blocking, time::sleep};

use crate::client::{Client, channel, eventually};

const GATE: &str = "headgate.io/programmed";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);

/// A control plane in this process. Dropping the value stops it.
struct Replica {
    store: Arc<Store>,
    address: SocketAddr,
    metrics: SocketAddr,
    shutdown: CancellationToken,
    _folder: TempDir,
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// The addresses of the two replicas of this process.
fn addresses() -> [SocketAddr; 2] {
    let [high, low] = u16::try_from(std::process::id() % 65_536).unwrap().to_be_bytes();
    [1, 2].map(|host| SocketAddr::from((Ipv4Addr::new(127, high, low, host), 7448)))
}

impl Replica {
    /// Starts a control plane. `index` is its place among the replicas.
    async fn start(index: usize, kubeconfig: &str, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        std::fs::write(&path, kubeconfig).unwrap();
        let peers = addresses().map(|address| format!("{}:{}", address.ip(), address.port() + 1)).join(",");
        let arguments = [
            "headgate-control-plane",
            "--source=kubernetes",
            "--insecure-loopback",
            "--metrics-listen=127.0.0.1:0",
            "--drain-grace-ms=200",
            "--ready-everywhere",
            &format!("--replica-name=replica-{index}"),
            &format!("--listen={}", addresses()[index]),
            &format!("--kubeconfig={}", path.display()),
            &format!("--peers={peers}"),
        ];
        let options = Options::try_parse_from(arguments.iter().chain(options)).unwrap();
        let shutdown = CancellationToken::new();
        let control_plane = ControlPlane::start(&options, shutdown.clone()).await.unwrap();
        let running = &control_plane.running;
        let (address, metrics) = (running.local_addr, running.metrics_addr.unwrap());
        let store = Arc::clone(&control_plane.store);
        tokio::spawn(async move { control_plane.run().await.unwrap() });
        Self { store, address, metrics, shutdown, _folder: folder }
    }

    /// Whether the endpoint at [`ADDRESS`] of Service `shop/web` is ready.
    fn is_ready(&self) -> bool {
        self.store.ready_since(&ServiceKey::new("shop", "web"), ADDRESS.into()).is_some()
    }

    /// Whether this replica has joined the other one.
    async fn has_joined(&self) -> bool {
        let inspect = SocketAddr::new(self.address.ip(), self.address.port() + 1);
        let mut inspect = InspectClient::new(channel(inspect).await);
        let status = inspect.get_status(v1::GetStatusRequest::default()).await.unwrap().into_inner();
        status.replicas.iter().any(|other| other.state == "joined")
    }

    /// The value of a sample in the metrics; 0 if the sample is missing.
    async fn metric(&self, sample: &str) -> u64 {
        let address = self.metrics;
        let page = spawn_blocking(move || page::get(address, "/metrics")).await.unwrap().unwrap();
        page::sample(&page, sample)
    }
}

/// The sum of a metric of both replicas, without the beginning of its name.
async fn sum(replicas: &[Replica; 2], sample: &str) -> u64 {
    let sample = format!("headgate_readiness_gate{sample}");
    replicas[0].metric(&sample).await + replicas[1].metric(&sample).await
}

/// The pod `shop/NAME` with the gate, whose containers are ready.
fn waiting_pod(name: &str) -> PodBuilder {
    let built = pod("shop", name, &format!("uid-{name}")).gate(GATE).condition("ContainersReady", "True", "");
    built.condition("Ready", "False", "ReadinessGatesNotReady")
}

/// The slice of Service `shop/web`, as the EndpointSlice controller writes it for the pod `web-1`.
fn slice(is_ready: bool) -> Value {
    slice_of("web-1", ADDRESS, is_ready)
}

/// A slice of Service `shop/web` with one pod.
fn slice_of(pod: &str, address: Ipv4Addr, is_ready: bool) -> Value {
    let slice = endpoint_slice("shop", pod, "web").port("http", "TCP", 8080);
    slice.pod_endpoint(&address.to_string(), "a", (pod, &format!("uid-{pod}")), is_ready).build()
}

fn condition_of(pod: &Value, name: &str) -> Option<Value> {
    pod["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == name).cloned()
}

/// The condition of the gate of the pod `shop/NAME`.
fn condition(api: &ApiServer, name: &str) -> Option<Value> {
    condition_of(&api.get(Kind::Pod, "shop", name)?, GATE)
}

/// The pods whose conditions were patched, with the codes of the answers.
fn patches(api: &ApiServer) -> Vec<(String, Option<u16>)> {
    let patches = api.recorded().into_iter().filter(|request| request.method == Method::PATCH);
    patches.map(|request| (request.path, request.answered)).collect()
}

/// Asserts that no condition is set for a while. If one came too early, it would come in this time.
async fn assert_unset(api: &ApiServer, name: &str) {
    sleep(Duration::from_millis(500)).await;
    assert_eq!(condition(api, name), None);
}

/// An API server with Service `shop/web`, the pod `web-1` that is not ready, and the nodes a, b, c.
fn cluster() -> ApiServer {
    let api = ApiServer::start().unwrap();
    let web = service("shop", "web").cluster_ip("10.0.0.10").port("http", "TCP", 80, 8080).build();
    let starting = pod("shop", "web-1", "uid-web-1").gate(GATE).condition("ContainersReady", "False", "");
    let nodes = ["a", "b", "c"].map(|name| node(name).build());
    for object in [web, starting.build(), slice(false)].into_iter().chain(nodes) {
        api.apply(object).unwrap();
    }
    api
}

/// Starts two replicas, and waits until they know each other: the one with the higher epoch writes
/// no condition before the other.
async fn replicas(api: &ApiServer, options: &[&str]) -> [Replica; 2] {
    let start = |index| {
        let kubeconfig = api.kubeconfig();
        async move { Replica::start(index, &kubeconfig, options).await }
    };
    let replicas = [start(0).await, start(1).await];
    for replica in &replicas {
        eventually("a replica is synced", async || replica.store.is_synced()).await;
        eventually("the replicas have joined each other", async || replica.has_joined().await).await;
    }
    replicas
}

/// Opens the stream of a node that has everything in its kernel.
async fn agent(replica: &Replica, node: &str) -> Client {
    let mut client = Client::open(channel(replica.address).await, node, None).await.unwrap();
    client.reach(replica.store.version()).await;
    client.ack().await;
    client
}

/// Programs the version in which the pod is ready.
async fn program(replica: &Replica, client: &mut Client) {
    eventually("the endpoint is ready", async || replica.is_ready()).await;
    let version = replica.store.version();
    client.until(|client| client.held.version >= version).await;
    client.ack().await;
}

async fn until_set(api: &ApiServer, name: &str, reason: &str) -> Value {
    let is_set = async || condition(api, name).is_some();
    eventually(&format!("the condition of {name} is set"), is_set).await;
    let condition = condition(api, name).unwrap();
    assert_eq!((&condition["status"], &condition["reason"]), (&json!("True"), &json!(reason)), "{condition}");
    condition
}

#[tokio::test(flavor = "multi_thread")]
async fn the_condition_is_set_once_the_last_node_of_all_replicas_has_programmed_the_pod() {
    let api = cluster();
    let replicas = replicas(&api, &[]).await;
    let [first, second] = &replicas;
    let (mut a, mut b, mut c) = (agent(first, "a").await, agent(second, "b").await, agent(second, "c").await);
    assert!(!first.is_ready());
    api.apply(waiting_pod("web-1").build()).unwrap();
    program(first, &mut a).await;
    program(second, &mut b).await;
    assert!(!a.urgent.is_empty(), "agents acknowledge at once while a pod waits");
    assert_unset(&api, "web-1").await;
    program(second, &mut c).await;
    let set = until_set(&api, "web-1", "Programmed").await;
    assert!(set["lastTransitionTime"].as_str().unwrap().ends_with('Z'), "{set}");
    eventually("one condition is counted", async || sum(&replicas, "s_set_total{reason=\"programmed\"}").await == 1)
        .await;
    for replica in &replicas {
        eventually("no pod waits", async || replica.metric("headgate_readiness_gates_waiting").await == 0).await;
    }
    // The kubelet and the EndpointSlice controller follow. Agents notice nothing of it.
    let versions = [0, 1].map(|index| replicas[index].store.version());
    let ready = pod("shop", "web-1", "uid-web-1").gate(GATE).condition("ContainersReady", "True", "");
    api.apply(ready.condition(GATE, "True", "Programmed").condition("Ready", "True", "").build()).unwrap();
    for replica in &replicas {
        let version = api.version();
        let position = || replica.store.positions().values().max().copied();
        eventually("the replica follows", async || position() >= Some(version)).await;
    }
    api.apply(slice(true)).unwrap();
    // A later change has the next version.
    api.apply(service("shop", "other").cluster_ip("10.0.0.11").port("", "TCP", 80, 80).build()).unwrap();
    for (replica, version) in replicas.iter().zip(versions) {
        eventually("the next change arrives", async || replica.store.version() == version + 1).await;
        assert!(replica.is_ready());
    }
    // From now on, only the EndpointSlice counts.
    api.apply(slice(false)).unwrap();
    for replica in &replicas {
        eventually("the endpoint is unready", async || !replica.is_ready()).await;
    }
    assert_eq!(patches(&api), [("/api/v1/namespaces/shop/pods/web-1/status".to_owned(), Some(200))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_bound_the_condition_names_the_nodes_that_have_not_confirmed() {
    let api = cluster();
    // Until then, node a has time to confirm, however slow the machine is.
    let [first, second] = replicas(&api, &["--ready-everywhere-timeout-seconds=12"]).await;
    let (mut a, _b) = (agent(&first, "a").await, agent(&second, "b").await);
    api.apply(waiting_pod("web-1").build()).unwrap();
    api.apply(waiting_pod("lonely").build()).unwrap();
    program(&first, &mut a).await;
    // Node b programs nothing, and node c has no stream.
    let set = until_set(&api, "web-1", "TimedOut").await;
    assert!(set["message"].as_str().unwrap().contains("send connections to this pod: b, c;"), "{set}");
    until_set(&api, "lonely", "NoEndpoints").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_pods_are_never_written() {
    let api = cluster();
    let [first, second] = replicas(&api, &["--ready-everywhere-timeout-seconds=1"]).await;
    let ready = pod("shop", "ready", "uid-ready").gate(GATE).condition("ContainersReady", "True", "");
    let others = [
        ready.condition(GATE, "True", "Programmed").condition("Ready", "True", ""),
        pod("shop", "ungated", "uid-ungated").condition("ContainersReady", "True", ""),
        waiting_pod("other-gate").gate("example.org/other"),
        waiting_pod("deleted").field("metadata.deletionTimestamp", "2025-01-01T00:00:00Z"),
        pod("shop", "starting", "uid-starting").gate(GATE).condition("ContainersReady", "False", ""),
    ];
    for other in others {
        api.apply(other.build()).unwrap();
    }
    api.apply(waiting_pod("last").build()).unwrap();
    until_set(&api, "last", "NoEndpoints").await;
    assert_eq!(patches(&api), [("/api/v1/namespaces/shop/pods/last/status".to_owned(), Some(200))]);
    drop((first, second));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_replica_sets_the_condition_if_the_first_one_stops() {
    let api = cluster();
    let [mut first, mut other] = replicas(&api, &[]).await;
    if first.store.epoch() > other.store.epoch() {
        std::mem::swap(&mut first, &mut other);
    }
    let mut clients = Vec::new();
    for name in ["a", "b", "c"] {
        clients.push(agent(&other, name).await);
    }
    drop(first);
    api.apply(waiting_pod("web-1").build()).unwrap();
    for client in &mut clients {
        program(&other, client).await;
    }
    until_set(&api, "web-1", "Programmed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_the_same_name_does_not_get_the_condition_of_an_older_pod() {
    let api = cluster();
    let replicas = replicas(&api, &[]).await;
    let mut clients = Vec::new();
    for name in ["a", "b", "c"] {
        clients.push(agent(&replicas[0], name).await);
    }
    api.apply(waiting_pod("web-1").build()).unwrap();
    for client in &mut clients[..2] {
        program(&replicas[0], client).await;
    }
    eventually("the endpoint is ready", async || replicas[1].is_ready()).await;
    // The replicas do not see that another pod gets the name.
    api.block(Kind::Pod);
    api.delete(Kind::Pod, "shop", "web-1").unwrap();
    api.apply(pod("shop", "web-1", "uid-2").gate(GATE).condition("ContainersReady", "False", "").build()).unwrap();
    program(&replicas[0], &mut clients[2]).await;
    eventually("the patch is refused", async || patches(&api).iter().any(|(_, code)| *code == Some(422))).await;
    assert_eq!(condition(&api, "web-1"), None);
    api.release(Kind::Pod);
    for replica in &replicas {
        eventually("no pod waits", async || replica.metric("headgate_readiness_gates_waiting").await == 0).await;
        eventually("the endpoint is unready", async || !replica.is_ready()).await;
    }
}

/// The rights that these manifests of `deploy/kustomize` grant.
fn rights(files: &[&str]) -> Rights {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kustomize");
    let read = |file: &&str| std::fs::read_to_string(folder.join(file)).unwrap();
    let objects = |text: String| serde_saphyr::from_multiple::<Value>(&text).unwrap();
    let objects: Vec<Value> = files.iter().map(read).flat_map(objects).collect();
    Rights::of_objects(&objects)
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_roles_services_are_served_and_conditions_stay_unset() {
    let api = cluster();
    api.apply(waiting_pod("web-1").build()).unwrap();
    api.set_options(|options| options.rights = Some(rights(&["base/rbac.yaml"])));
    let replicas = replicas(&api, &["--ready-everywhere-timeout-seconds=1"]).await;
    let forbidden = "headgate_source_errors_total{kind=\"pods\",reason=\"forbidden\"}";
    eventually("the refusal is counted", async || replicas[0].metric(forbidden).await > 0).await;
    assert_eq!((replicas[0].store.source_problem(), replicas[0].is_ready()), (None, false));
    let all = rights(&["base/rbac.yaml", "ready-everywhere/rbac.yaml"]);
    api.set_options(|options| options.rights = Some(all.without("patch pods/status.")));
    for replica in &replicas {
        eventually("the endpoint is ready", async || replica.is_ready()).await;
    }
    eventually("the patch is refused", async || patches(&api).iter().any(|(_, code)| *code == Some(403))).await;
    assert_eq!(condition(&api, "web-1"), None);
    api.set_options(|options| options.rights = Some(all));
    until_set(&api, "web-1", "TimedOut").await;
    eventually("the failures are counted", async || sum(&replicas, "_request_failures_total").await > 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_fail_are_repeated() {
    let api = cluster();
    let replicas = replicas(&api, &["--ready-everywhere-timeout-seconds=1"]).await;
    for code in [409, 429, 500] {
        let fault = RequestFault::Status { code, retry_after_seconds: (code == 429).then_some(1) };
        api.fail_next(2, RequestFilter::verb(Verb::Other), fault);
    }
    api.apply(waiting_pod("web-1").build()).unwrap();
    until_set(&api, "web-1", "TimedOut").await;
    let failed = patches(&api).iter().filter(|(_, code)| *code != Some(200)).count();
    assert!(failed > 0, "{:?}", patches(&api));
    drop(replicas);
}
