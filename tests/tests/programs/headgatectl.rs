//! Runs the `headgatectl` program against a server with fixed answers, and checks its output and
//! exit codes.

use std::net::SocketAddr;
use std::pin::Pin;
use std::process::{Command, Output, Stdio};

use futures::{Stream, StreamExt as _};
use headgate_proto::v1::inspect_server::{Inspect, InspectServer};
use headgate_proto::v1::{
    AgentInfo, BarrierAnswer, DrainPodRequest, EndpointInfo, FindPodRequest, FleetInfo, GetStatusRequest,
    GetStatusResponse, Laggard, ListAgentsRequest, ListEndpointsRequest, ListServicesRequest, NodeAnswer,
    NodeVerification, PodInfo, QueryNodeRequest, ReplicaInfo, ServiceInfo, ServicePortInfo, VerifyNodesRequest,
    VerifyNodesResponse, WaitAnswer, WaitRequest, WatchEvent, WatchRequest,
};
use headgate_tests::testbed::{port::ReservedPort, process::program};
use serde_json::Value;
use tonic::{Request, Response, Status};

type Items<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A server with two Services, one endpoint, the agents of two nodes, and a Node without an agent.
struct Fake;

fn items<T: Send + 'static>(items: Vec<T>) -> Response<Items<T>> {
    Response::new(Box::pin(futures::stream::iter(items.into_iter().map(Ok))))
}

fn service(namespace: &str, name: &str) -> ServiceInfo {
    let port = ServicePortInfo { name: "http".into(), protocol: "TCP".into(), port: 80, node_port: 30080 };
    ServiceInfo {
        namespace: namespace.into(),
        name: name.into(),
        cluster_ips: vec!["10.96.0.10".into()],
        ports: vec![port],
        endpoints: 2,
        ready_endpoints: 1,
        version: 9_007_199_254_740_993,
        ..ServiceInfo::default()
    }
}

fn endpoint() -> EndpointInfo {
    EndpointInfo {
        namespace: "demo".into(),
        name: "web".into(),
        address: "10.244.1.10".into(),
        ports: vec!["http 8081/TCP".into()],
        ready: true,
        serving: true,
        node: "node-a".into(),
        weight: 1,
        ..EndpointInfo::default()
    }
}

fn agent(node: &str) -> AgentInfo {
    if node == "node-c" {
        return AgentInfo {
            node: node.into(),
            state: "no_agent".into(),
            reason: "its stream to cp-2 ended".into(),
            programmed_version: 3,
            departed_ms: 252_000,
            ..AgentInfo::default()
        };
    }
    AgentInfo {
        node: node.into(),
        head_version: 5,
        sent_version: 5,
        programmed_version: if node == "node-b" { 4 } else { 5 },
        last_error: if node == "node-b" { "no space in the table".into() } else { String::new() },
        resume: "log".into(),
        ..AgentInfo::default()
    }
}

fn laggard(node: &str, reason: &str) -> Laggard {
    Laggard { node: node.into(), reason: reason.into(), version: 5, ..Laggard::default() }
}

#[tonic::async_trait]
impl Inspect for Fake {
    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<GetStatusResponse>, Status> {
        let fleet = Some(FleetInfo { up_to_date: 1, failing: 1, no_agent: 1, nodes: 3, ..FleetInfo::default() });
        let vanished = ReplicaInfo {
            replica: "cp-2".into(),
            state: "vanished".into(),
            for_ms: 252_000,
            agents: 1,
            problem: "its stream ended without a goodbye".into(),
            ..ReplicaInfo::default()
        };
        let replicas = vec![vanished];
        let status = GetStatusResponse {
            replica: "fake".into(),
            version: 5,
            synced: true,
            fleet,
            replicas,
            ..Default::default()
        };
        Ok(Response::new(status))
    }

    type ListServicesStream = Items<ServiceInfo>;
    async fn list_services(
        &self,
        request: Request<ListServicesRequest>,
    ) -> Result<Response<Items<ServiceInfo>>, Status> {
        let wanted = request.into_inner();
        let all = vec![service("demo", "web"), service("prod", "api")];
        let chosen = |info: &ServiceInfo| {
            (wanted.namespace.is_empty() || wanted.namespace == info.namespace)
                && (wanted.name.is_empty() || wanted.name == info.name)
        };
        Ok(items(all.into_iter().filter(chosen).collect()))
    }

    type ListEndpointsStream = Items<EndpointInfo>;
    async fn list_endpoints(
        &self,
        request: Request<ListEndpointsRequest>,
    ) -> Result<Response<Items<EndpointInfo>>, Status> {
        let wanted = request.into_inner();
        match (wanted.namespace.as_str(), wanted.name.as_str()) {
            ("demo", "web") | ("", "") => Ok(items(vec![endpoint()])),
            ("broken", _) => Err(Status::internal("the store failed")),
            _ => Err(Status::not_found("no such service")),
        }
    }

    type ListAgentsStream = Items<AgentInfo>;
    async fn list_agents(&self, request: Request<ListAgentsRequest>) -> Result<Response<Items<AgentInfo>>, Status> {
        let wanted = request.into_inner().node;
        let all = ["node-a", "node-b", "node-c"].into_iter().filter(|node| wanted.is_empty() || wanted == *node);
        Ok(items(all.map(agent).collect()))
    }

    type WatchStream = Items<WatchEvent>;
    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Items<WatchEvent>>, Status> {
        let event = |version, action: &str| WatchEvent {
            version,
            unix_ms: 0,
            action: action.into(),
            service: None,
            endpoint: Some(endpoint()),
        };
        let events = vec![Ok(event(6, "changed")), Ok(event(7, "removed"))];
        Ok(Response::new(futures::stream::iter(events).boxed()))
    }

    type WaitStream = Items<WaitAnswer>;
    async fn wait(&self, request: Request<WaitRequest>) -> Result<Response<Items<WaitAnswer>>, Status> {
        let WaitRequest { name, allow_absent, .. } = request.into_inner();
        let laggards = if name == "lags" { vec![laggard("node-b", "no space in the table")] } else { Vec::new() };
        let answer = WaitAnswer {
            done: allow_absent && laggards.is_empty(),
            waiting_for: "nodes".into(),
            version: 5,
            nodes: 3,
            programmed: 2 - laggards.len() as u64,
            laggard_count: laggards.len() as u64,
            laggards,
            absent: vec![laggard("node-c", "its stream to cp-2 ended")],
            absent_count: 1,
            ..WaitAnswer::default()
        };
        Ok(items(vec![answer]))
    }

    type QueryNodeStream = Items<NodeAnswer>;
    async fn query_node(&self, _: Request<QueryNodeRequest>) -> Result<Response<Items<NodeAnswer>>, Status> {
        Err(Status::unimplemented("streams/query_node.rs tests QueryNode with real replicas"))
    }

    async fn find_pod(&self, _: Request<FindPodRequest>) -> Result<Response<PodInfo>, Status> {
        Err(Status::unimplemented("streams/query_node.rs tests FindPod with real replicas"))
    }

    type DrainPodStream = Items<BarrierAnswer>;
    async fn drain_pod(&self, _: Request<DrainPodRequest>) -> Result<Response<Items<BarrierAnswer>>, Status> {
        Err(Status::unimplemented("process/drain.rs tests DrainPod with real replicas"))
    }

    type VerifyNodesStream = Items<VerifyNodesResponse>;
    async fn verify_nodes(
        &self,
        request: Request<VerifyNodesRequest>,
    ) -> Result<Response<Items<VerifyNodesResponse>>, Status> {
        if request.into_inner().node == "node-c" {
            return Err(Status::not_found("node node-c has no stream to any replica"));
        }
        let verified = NodeVerification { node: "node-a".into(), result: "verified".into(), ..Default::default() };
        let absent = vec![laggard("node-c", "its stream to cp-2 ended")];
        Ok(items(vec![
            VerifyNodesResponse { verification: Some(verified), ..VerifyNodesResponse::default() },
            VerifyNodesResponse { absent, absent_count: 1, ..VerifyNodesResponse::default() },
        ]))
    }
}

/// Serves [`Fake`] until the runtime of the test ends.
async fn fake_server() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let server = tonic::transport::Server::builder().add_service(InspectServer::new(Fake));
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

/// Runs the program without the environment variables that it reads.
async fn headgatectl(server: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program("headgatectl").unwrap());
    for variable in ["HEADGATE_SERVER", "HEADGATE_TLS_CA", "HEADGATE_TLS_CERT", "HEADGATE_TLS_KEY"] {
        command.env_remove(variable);
    }
    command.args(["--server", server]).args(arguments).stdin(Stdio::null());
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns the standard output of a run. Panics if the run fails or writes to standard error.
async fn answer(server: &str, arguments: &[&str]) -> String {
    let output = headgatectl(server, arguments).await;
    assert!(output.status.success(), "{arguments:?}: {}: {}", output.status, text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "{arguments:?}");
    text(&output.stdout)
}

/// Returns the exit code and standard error of a run. Panics if the run writes to standard output.
async fn refusal(server: &str, arguments: &[&str]) -> (i32, String) {
    let output = headgatectl(server, arguments).await;
    assert_eq!(text(&output.stdout), "", "{arguments:?}");
    (output.status.code().unwrap(), text(&output.stderr))
}

#[tokio::test]
async fn tables_have_a_header_and_a_row_for_each_item() {
    let server = format!("http://{}", fake_server().await);
    let services = answer(&server, &["services"]).await;
    let lines: Vec<&str> = services.lines().collect();
    assert_eq!(lines.len(), 3, "{services}");
    assert!(lines[0].starts_with("NAMESPACE  NAME  CLUSTER-IP"), "{services}");
    assert!(lines[1].contains("80:30080/TCP") && lines[1].contains("1/2"), "{services}");
    assert!(!services.contains('\u{1b}'), "the output to a pipe has colours: {services:?}");
    assert_eq!(answer(&server, &["services", "-n", "prod"]).await.lines().count(), 2);
    assert_eq!(answer(&server, &["services", "-n", "empty"]).await, "No services in namespace empty.\n");

    let endpoints = answer(&server, &["endpoints", "web", "-n", "demo"]).await;
    assert!(endpoints.contains("10.244.1.10  http 8081/TCP  ready"), "{endpoints}");

    let agents = answer(&server, &["agents"]).await;
    assert!(agents.contains("node-b: error: no space in the table"), "{agents}");
    assert_eq!(answer(&server, &["agents", "node-a"]).await.lines().count(), 2);
    assert!(agents.ends_with("\nfleet: 1 of 3 nodes up to date, 1 failing, 1 without an agent\n"), "{agents}");
    let absent = answer(&server, &["agents", "--absent"]).await;
    let row: Vec<&str> = absent.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row, ["node-c", "no", "agent", "3", "-", "-", "-", "4m12s", "ago"], "{absent}");
    assert_eq!(absent.lines().nth(2), Some("node-c: no agent: its stream to cp-2 ended"));
    assert!(answer(&server, &["agents", "--behind"]).await.contains("node-c"));

    let status = answer(&server, &["status"]).await;
    assert!(status.contains("replica     fake"), "{status}");
    assert!(status.ends_with("cp-2: its stream ended without a goodbye\n"), "{status}");
}

#[tokio::test]
async fn json_is_one_array_with_exact_numbers() {
    let server = format!("http://{}", fake_server().await);
    let services: Value = serde_json::from_str(&answer(&server, &["services", "-o", "json"]).await).unwrap();
    let first = &services.as_array().unwrap()[0];
    assert_eq!(first["cluster_ips"][0], "10.96.0.10");
    assert_eq!(first["ports"][0]["node_port"], 30080);
    assert_eq!(first["version"].as_u64(), Some(9_007_199_254_740_993));

    let none: Value = serde_json::from_str(&answer(&server, &["-o", "json", "services", "-n", "empty"]).await).unwrap();
    assert_eq!(none, Value::Array(Vec::new()));

    let agents: Value = serde_json::from_str(&answer(&server, &["agents", "-o", "json"]).await).unwrap();
    // The agent with an error is listed first.
    assert_eq!((&agents[0]["node"], &agents[0]["programmed_version"]), (&"node-b".into(), &4.into()));
    let status: Value = serde_json::from_str(&answer(&server, &["status", "-o", "json"]).await).unwrap();
    assert_eq!(status["synced"], true);
}

#[tokio::test]
async fn watch_writes_a_line_for_each_change_and_reports_its_end() {
    let server = format!("http://{}", fake_server().await);
    let output = headgatectl(&server, &["watch", "-o", "json"]).await;
    let events: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.iter().map(|event| event["version"].as_u64()).collect::<Vec<_>>(), [Some(6), Some(7)]);
    assert_eq!(events[0]["endpoint"]["address"], "10.244.1.10");
    assert_eq!(events[0]["service"], Value::Null);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("the replica ended the watch"), "{}", text(&output.stderr));

    let table = text(&headgatectl(&server, &["watch"]).await.stdout);
    assert_eq!(table.lines().count(), 2, "{table}");
    assert!(table.lines().nth(1).unwrap().contains("removed   endpoint  demo/web  10.244.1.10"), "{table}");
}

#[tokio::test]
async fn missing_objects_are_named_and_the_exit_code_is_1() {
    let server = format!("http://{}", fake_server().await);
    for (arguments, expected) in [
        (&["endpoints", "demo/nope"][..], "no service demo/nope"),
        (&["services", "nope"], "no service default/nope"),
        (&["agents", "node-z"], "no node node-z"),
        (&["endpoints", "broken/x"], "the store failed"),
    ] {
        let (code, error) = refusal(&server, arguments).await;
        assert_eq!(code, 1, "{error}");
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

#[tokio::test]
async fn nodes_without_an_agent_have_their_own_exit_code() {
    let server = format!("http://{}", fake_server().await);
    let (code, error) = refusal(&server, &["wait", "prod/web"]).await;
    assert!(code == 4 && error.contains("2 of 3 nodes have programmed it"), "{error}");
    assert!(error.contains("\n  node-c: no agent: its stream to cp-2 ended\n"), "{error}");
    let (code, error) = refusal(&server, &["wait", "prod/lags", "--allow-absent"]).await;
    assert!(code == 3 && error.contains("node-b: at version 0 of 5, "), "{error}");
    let said = answer(&server, &["wait", "prod/web", "--allow-absent"]).await;
    assert!(said.starts_with("service prod/web: 2 nodes have programmed it, "), "{said}");
    assert!(said.ends_with("\n  node-c: no agent: its stream to cp-2 ended\n"), "{said}");
    let output = headgatectl(&server, &["wait", "prod/web", "-o", "json"]).await;
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["done"], &json["absent"][0]["node"]), (&false.into(), &"node-c".into()));
    assert!(json["took_ms"].is_u64() && output.status.code() == Some(4), "{json}");

    let output = headgatectl(&server, &["verify"]).await;
    let (shown, error) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(4), "{error}");
    assert!(shown.ends_with("\n1 of 2 nodes verified, 1 without an agent\n"), "{shown}");
    assert!(error.contains("these Nodes have no agent: node-c: "), "{error}");
    assert!(answer(&server, &["verify", "--allow-absent"]).await.contains("node-c  absent"));
    let (code, error) = refusal(&server, &["verify", "node-c"]).await;
    assert!(code == 1 && error == "headgatectl: node node-c has no stream to any replica\n", "{error}");
}

#[tokio::test]
async fn the_next_replica_answers_if_the_first_is_down() {
    let (good, nobody) = (format!("http://{}", fake_server().await), ReservedPort::reserve().unwrap());
    let dead = format!("http://{}", nobody.address());
    for arguments in
        [&["agents"][..], &["status"], &["services"], &["wait", "prod/web", "--allow-absent", "-o", "json"]]
    {
        let first = answer(&dead, &[&["--server", &good], arguments].concat()).await;
        assert!(!first.is_empty(), "{arguments:?}");
    }
    let list = format!("{dead},{good}");
    assert!(answer(&list, &["agents"]).await.contains("node-b: error: no space in the table"));

    let (code, error) = refusal(&dead, &["agents"]).await;
    assert!(code == 1 && error.starts_with("headgatectl: cannot reach"), "{error}");
    let (code, error) = refusal(&dead, &["--server", "http://127.0.0.1:1", "agents"]).await;
    assert!(code == 1 && error.starts_with("headgatectl: no replica of --server answers:\n"), "{error}");
    assert!(error.contains(&format!("cannot reach {dead}:")), "{error}");
    assert!(error.contains("cannot reach http://127.0.0.1:1:"), "{error}");
}

#[tokio::test]
async fn an_unreachable_server_is_named_with_a_remedy() {
    let nobody = ReservedPort::reserve().unwrap();
    let server = format!("http://{}", nobody.address());
    let (code, error) = refusal(&server, &["services"]).await;
    assert_eq!(code, 1);
    assert!(error.contains(&format!("cannot reach {server}")) && error.contains("refused"), "{error}");
    assert!(error.contains("--server URL, or HEADGATE_SERVER"), "{error}");
}

#[tokio::test]
async fn a_replica_that_hangs_is_named_after_a_timeout() {
    // The kernel accepts connections, but no program reads from them.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, folder) = (listener.local_addr().unwrap(), tempfile::tempdir().unwrap());
    let (authority, out) = (folder.path().join("ca.crt"), folder.path().to_str().unwrap());
    answer("http://127.0.0.1:1", &["certs", "--out", out, "--reader", "me"]).await;
    let (plain, secured) = (format!("http://{address}"), format!("https://{address}"));
    let ask_plain = refusal(&plain, &["wait", "web", "--timeout", "1s"]);
    let arguments = ["--tls-ca", authority.to_str().unwrap(), "agents"];
    let ask_secured = refusal(&secured, &arguments);
    let refusals = tokio::time::timeout(std::time::Duration::from_secs(120), async {
        let (plain, secured) = tokio::join!(ask_plain, ask_secured);
        [plain, secured]
    });
    for ((code, error), server) in
        refusals.await.expect("headgatectl waits without end").into_iter().zip([plain, secured])
    {
        assert_eq!(code, 1, "{error}");
        assert!(error.contains(&format!("cannot reach {server}: the server accepts connections")), "{error}");
        assert!(error.contains("look at its log"), "{error}");
    }
}

#[tokio::test]
async fn usage_errors_have_exit_code_2_and_contact_no_server() {
    let nowhere = "http://127.0.0.1:1";
    for (server, arguments, expected) in [
        (nowhere, &["frobnicate"][..], "unrecognized subcommand"),
        (nowhere, &["services", "a/b/c"], "write NAMESPACE/NAME"),
        (nowhere, &["endpoints", "prod/web", "-n", "test"], "another namespace"),
        ("http://10.0.0.1:7443", &["services"], "only loopback and test addresses"),
        ("https://127.0.0.1:7443", &["services"], "--tls-ca"),
        ("7443", &["services"], "write https://HOST:7444"),
    ] {
        let (code, error) = refusal(server, arguments).await;
        assert_eq!(code, 2, "{arguments:?}: {error}");
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

#[tokio::test]
async fn settings_of_kube_proxy_are_checked_without_a_server() {
    let nowhere = "http://127.0.0.1:1";
    let table = answer(nowhere, &["migrate", "check", "--", "--proxy-mode=ipvs", "--masquerade-all", "-v", "2"]).await;
    let lines: Vec<&str> = table.lines().map(str::trim_end).collect();
    assert!(lines[0].starts_with("SETTING") && lines[0].ends_with("EXPLANATION"), "{table}");
    assert!(lines[1].starts_with("--proxy-mode") && lines[1].contains("carries over"), "{table}");
    assert!(table.contains("2 carries over, 1 other default, 1 no effect, 0 invalid."), "{table}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.conf");
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    std::fs::write(&file, format!("{head}clusterCIDR: nonsense\n")).unwrap();
    let output = headgatectl(nowhere, &["migrate", "check", "-o", "json", file.to_str().unwrap()]).await;
    let lines: Value = serde_json::from_slice(&output.stdout).unwrap();
    let line = lines.as_array().unwrap().iter().find(|line| line["setting"] == "clusterCIDR").unwrap();
    assert_eq!((&line["outcome"], &line["value"]), (&"invalid".into(), &"nonsense".into()));
    assert!(text(&output.stderr).contains("the agent rejects 1 setting"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(1));

    let (code, error) = refusal(nowhere, &["migrate", "check", "/nonexistent"]).await;
    assert!(code == 1 && error.contains("/nonexistent"), "{error}");
}

/// The check knows the flags that belong to the program, and the agent has all of them.
#[test]
fn the_agent_has_the_flags_that_the_check_calls_its_own() {
    let flags = [
        "--config=x",
        "--hostname-override=n",
        "--write-config-to=x",
        "--cleanup",
        "--init-only",
        "--version",
        "--help",
    ];
    for flag in flags {
        let given = [flag.to_owned()];
        let checked = headgate_settings::migration::check_arguments(&given);
        let line = checked.lines.iter().find(|line| flag.starts_with(&line.setting)).unwrap();
        assert_eq!(line.outcome, headgate_settings::migration::Outcome::CarriesOver, "{flag}");
        let arguments = ["headgate-node-agent", "--control-plane=http://127.0.0.1:1", "--insecure-loopback", flag];
        if let Err(error) = headgate_node_agent::options::Options::read(arguments) {
            use clap::error::ErrorKind::{DisplayHelp, DisplayVersion};
            assert!(matches!(error.kind(), DisplayHelp | DisplayVersion), "{flag}: {error}");
        }
    }
}

#[tokio::test]
async fn a_file_without_a_certificate_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, "hello").unwrap();
    let (code, error) = refusal("https://127.0.0.1:7443", &["--tls-ca", file.to_str().unwrap(), "status"]).await;
    assert_eq!(code, 1);
    assert!(error.contains("--tls-ca") && error.contains("ca.pem") && error.contains("not in PEM format"), "{error}");
}

#[tokio::test]
async fn a_closed_pipe_ends_the_program_without_an_error() {
    let server = format!("http://{}", fake_server().await);
    let mut command = Command::new(program("headgatectl").unwrap());
    command.args(["--server", &server, "services"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = tokio::task::spawn_blocking(move || {
        let mut child = command.spawn().unwrap();
        drop(child.stdout.take());
        child.wait_with_output().unwrap()
    });
    let output = output.await.unwrap();
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
}
