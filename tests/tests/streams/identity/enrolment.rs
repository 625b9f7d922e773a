//! Agents that get their certificates for a service-account token, from the real control plane. A
//! stand-in API server issues and reviews the tokens. A real one does where `KUBEBUILDER_ASSETS`
//! names it.

mod attacks;
mod limits;
mod outages;
mod real;
mod requests;
mod rights;
mod tokens;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use headgate_tests::{
    apiserver::{ApiServer, Options, Token, objects},
    in_memory::Call,
    testbed::{control_plane::ControlPlane, port::ReservedPort},
};
use serde_json::Value;
use tempfile::TempDir;

use self::rights::granted;
use super::{
    agent::Agent,
    certs::{headgatectl, made},
    program::{control_plane_with, metric},
    rotation::rotate_with,
    server::eventually,
};

const SUCCESS: &str = "headgate_agent_enrolments_total{result=\"success\"}";
const FAILURE: &str = "headgate_agent_enrolments_total{result=\"failure\"}";

/// Certificates for which an agent does not wait long.
const SHORT: &str = "--enrolment-certificate-seconds=20";

/// A control plane with an authority that has signed for no node, and an API server that grants it
/// the rights of the manifests. The Node n1 has the address of this test, and the Node n2 has
/// another address.
struct Cluster<A = ApiServer> {
    api: A,
    control_plane: Option<ControlPlane>,
    options: Vec<String>,
    listen: ReservedPort,
    enrolment: ReservedPort,
    folder: TempDir,
}

fn node(name: &str, address: &str) -> Value {
    objects::node(name).address("InternalIP", address).build()
}

fn add_node(api: &ApiServer, name: &str, address: &str) {
    api.apply(node(name, address)).unwrap();
}

/// Writes the pod of the agent on n1, with a UID and a node.
fn put_pod(api: &ApiServer, uid: &str, node: &str) {
    api.apply(objects::pod("headgate-system", "agent-n1", uid).field("spec.nodeName", node).build()).unwrap();
}

impl Cluster {
    fn start(options: &[&str]) -> Self {
        let api = ApiServer::start_with(Options { rights: Some(granted()), ..Options::default() }).unwrap();
        add_node(&api, "n1", "127.0.0.1");
        add_node(&api, "n2", "192.0.2.2");
        Self::with_api(api, options)
    }

    fn with_api(api: ApiServer, options: &[&str]) -> Self {
        let kubeconfig = api.kubeconfig();
        Self::with_kubeconfig(api, &kubeconfig, options)
    }

    /// Starts an agent of a node that has nothing but the authority and a token.
    async fn agent(&self, node: &str, token: Token) -> (Agent, PathBuf) {
        self.agent_with(node, &self.api.issue_token(token), &self.path("certs/ca.crt")).await
    }

    /// Starts an agent of a node with its token, and waits until it is connected.
    async fn connected(&self, node: &str) -> (Agent, PathBuf) {
        let (agent, folder) = self.agent(node, Token::of_agent(node)).await;
        agent.until_connected(true).await;
        (agent, folder)
    }

    /// Checks that a token gets nothing, with this result.
    async fn refuses(&self, name: &str, token: Token, result: &str) {
        self.refuses_text(name, &self.api.issue_token(token), result).await;
    }
}

impl<A> Cluster<A> {
    fn with_kubeconfig(api: A, kubeconfig: &str, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        made(&path("certs"), &["--server-ip=127.0.0.1"]);
        fs::write(path("kubeconfig"), kubeconfig).unwrap();
        let [listen, enrolment] = [(); 2].map(|()| ReservedPort::reserve().unwrap());
        let mut all = vec![
            format!("--listen={}", listen.address()),
            "--inspect-listen=127.0.0.1:0".to_owned(),
            "--source=kubernetes".to_owned(),
            format!("--kubeconfig={}", path("kubeconfig").display()),
            format!("--enrolment-listen={}", enrolment.address()),
            format!("--enrolment-ca-key={}", path("certs/node-ca.key").display()),
        ];
        all.extend(options.iter().map(|option| (*option).to_owned()));
        let mut cluster = Self { api, control_plane: None, options: all, listen, enrolment, folder };
        cluster.start_control_plane();
        cluster
    }

    fn start_control_plane(&mut self) {
        let tls = self.path("certs/control-plane");
        self.control_plane = Some(control_plane_with(self.folder.path(), &tls, &self.options));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    async fn agent_with(&self, node: &str, token: &str, authority: &Path) -> (Agent, PathBuf) {
        let folder = tempfile::tempdir_in(self.folder.path()).unwrap().keep();
        fs::write(folder.join("token"), format!("{token}\n")).unwrap();
        let options = [
            format!("--enrolment-address={}", self.enrolment.address()),
            format!("--enrolment-token={}", folder.join("token").display()),
        ];
        let url = format!("https://{}", self.listen.address());
        let agent = Agent::with_options(node, &url, &folder.join("tls"), authority, &options);
        eventually("the agent answers", || async { agent.status() != Value::Null }).await;
        (agent, folder)
    }

    fn metric(&self, sample: &str) -> u64 {
        metric(self.control_plane.as_ref().unwrap().metrics, sample)
    }

    fn enrolments(&self, result: &str) -> u64 {
        self.metric(&format!("headgate_enrolments_total{{result=\"{result}\"}}"))
    }

    async fn until_enrolments(&self, result: &str, count: u64) {
        eventually(result, || async { self.enrolments(result) >= count }).await;
    }

    async fn refuses_text(&self, name: &str, token: &str, result: &str) {
        let before = self.enrolments(result);
        let (agent, folder) = self.agent_with("n1", token, &self.path("certs/ca.crt")).await;
        eventually(&format!("{name}: {result}"), || async { self.enrolments(result) > before }).await;
        eventually(name, || async { agent.metric(FAILURE) > 0 }).await;
        assert!(!folder.join("tls.crt").exists(), "{name}: the agent has a certificate");
    }
}

impl Cluster {
    /// Creates a Service, and waits until the agent has programmed it.
    async fn add_service(&self, agent: &Agent, number: u8) {
        let is_synced = || agent.kernel.calls().iter().any(|call| matches!(call, Call::Full(..)));
        eventually("the agent has synced", || async { is_synced() }).await;
        let (name, address) = (format!("web-{number}"), format!("10.96.0.{number}"));
        let service = objects::service("default", &name).cluster_ip(&address).port("http", "TCP", 80, 80);
        self.api.apply(service.build()).unwrap();
        let key = format!("default/{name}");
        let is_web = |call: &Call| matches!(call, Call::Apply(services, _) if services.contains(&key));
        eventually("the Service is programmed", || async { agent.kernel.calls().iter().any(is_web) }).await;
    }
}

/// Waits until the agent's stream has changed to a new certificate, and checks that the agent has
/// left its replica for no other reason.
async fn until_renewed(agent: &Agent, times: u64) {
    let renewed = "headgate_agent_stream_errors_total{reason=\"renewed\"}";
    let (all, resumed) = ("headgate_agent_reconnects_total", "headgate_agent_resumes_total{mode=\"log\"}");
    // One page has all numbers, because the next renewal may come between two pages.
    let is_renewed = || async {
        let [renewed, all, resumed] = agent.metrics([renewed, all, resumed]);
        renewed >= times && all == renewed && resumed == renewed
    };
    eventually("the stream is renewed and resumed by log, and has no other reason to end", is_renewed).await;
    agent.until_connected(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_enrols_with_nothing_but_its_token() {
    let cluster = Cluster::start(&[]);
    let (agent, folder) = cluster.connected("n1").await;
    for file in ["tls.crt", "tls.key"] {
        assert_eq!(fs::metadata(folder.join(file)).unwrap().permissions().mode() & 0o777, 0o600, "{file}");
    }
    assert_eq!((agent.metric(SUCCESS), cluster.enrolments("success")), (1, 1));
    let line = cluster.control_plane.as_ref().unwrap().until_logged("a node has enrolled").unwrap();
    assert!(line.contains("agent-n1"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_sends_its_token_only_to_a_server_of_its_authority() {
    let cluster = Cluster::start(&[]);
    let other = cluster.path("other");
    let output = headgatectl(&["ca", "init", "--out", &other.display().to_string()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let token = cluster.api.issue_token(Token::of_agent("n1"));
    let (agent, _) = cluster.agent_with("n1", &token, &other.join("ca.crt")).await;
    cluster.until_enrolments("tls", 1).await;
    let problem = || agent.tls_problem();
    eventually("the status names the option", || async { problem().contains("--tls-ca") }).await;
    assert!(agent.metric(FAILURE) > 0);
    assert_eq!(cluster.api.recorded().iter().filter(|request| request.path.contains("tokenreviews")).count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_and_the_stream_resumes_with_the_new_one() {
    // The agent comes from another address than its Node's.
    let cluster = Cluster::start(&[SHORT, "--enrolment-any-address"]);
    let (agent, folder) = cluster.connected("n2").await;
    let [first, key] = ["tls.crt", "tls.key"].map(|file| fs::read(folder.join(file)).unwrap());
    until_renewed(&agent, 1).await;
    assert_ne!(fs::read(folder.join("tls.crt")).unwrap(), first);
    assert_eq!(fs::read(folder.join("tls.key")).unwrap(), key);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_authority_is_replaced_while_enrolled_agents_follow() {
    let cluster = Cluster::start(&[SHORT]);
    let certs = cluster.path("certs");
    let [old, old_of_nodes] = ["ca.crt", "node-ca.crt"].map(|file| fs::read_to_string(certs.join(file)).unwrap());
    let (agent, _) = cluster.connected("n1").await;
    let rotate = |step: &str| [&[][..], &["--nodes"]].map(|options| rotate_with(&certs, step, options).unwrap());
    rotate("trust");
    rotate("sign");
    made(&certs, &["--server-ip=127.0.0.1", "--force"]);
    // After two renewals, the stream's certificate comes from the new authority.
    until_renewed(&agent, 2).await;
    rotate("retire");
    for (file, old) in [("ca.crt", old), ("node-ca.crt", old_of_nodes)] {
        assert!(!fs::read_to_string(certs.join(file)).unwrap().contains(&old), "{file}");
    }
    until_renewed(&agent, 3).await;
    // An attempt fails, and is repeated, if it meets the files of the authority between two writes.
    assert!(agent.metric(FAILURE) <= 1);
    let (_late, _) = cluster.connected("n1").await;
}
