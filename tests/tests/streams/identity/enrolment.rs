//! Agents that get their certificates for a service-account token, from the real control plane. A
//! stand-in API server reviews the tokens.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use headgate_tests::{
    apiserver::{ApiServer, Token},
    testbed::port::ReservedPort,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    agent::Agent,
    certs::{headgatectl, made},
    program::{ControlPlane, metric},
    server::eventually,
};

/// A control plane with an authority that has signed for no node, and a stand-in API server. The
/// Node n1 has the address of this test, and the Node n2 has another address.
struct Cluster {
    api: ApiServer,
    control_plane: ControlPlane,
    enrolment: ReservedPort,
    folder: TempDir,
}

impl Cluster {
    fn start(options: &[&str]) -> Self {
        let (folder, api) = (tempfile::tempdir().unwrap(), ApiServer::start().unwrap());
        let path = |name: &str| folder.path().join(name);
        made(&path("certs"), &["--server-ip=127.0.0.1"]);
        fs::write(path("kubeconfig"), api.kubeconfig()).unwrap();
        for (node, address) in [("n1", "127.0.0.1"), ("n2", "192.0.2.2")] {
            let status = json!({"addresses": [{"type": "InternalIP", "address": address}]});
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}, "status": status});
            api.apply(node).unwrap();
        }
        let enrolment = ReservedPort::reserve().unwrap();
        let mut arguments = vec![
            "--source=kubernetes".to_owned(),
            format!("--kubeconfig={}", path("kubeconfig").display()),
            format!("--enrolment-listen={}", enrolment.address()),
            format!("--enrolment-ca-cert={}", path("certs/ca.crt").display()),
            format!("--enrolment-ca-key={}", path("certs/ca.key").display()),
        ];
        arguments.extend(options.iter().map(|option| (*option).to_owned()));
        let control_plane = ControlPlane::start_with(folder.path(), &path("certs/control-plane"), &arguments);
        Self { api, control_plane, enrolment, folder }
    }

    /// Starts an agent that has nothing but the authority and a token.
    async fn agent(&self, node: &str, token: &str, authority: &Path) -> (Agent, PathBuf) {
        let folder = self.folder.path().join(format!("{node}-{token}"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("token"), format!("{token}\n")).unwrap();
        let options = [
            format!("--enrolment-address={}", self.enrolment.address()),
            format!("--enrolment-token={}", folder.join("token").display()),
        ];
        let url = format!("https://{}", self.control_plane.address);
        let agent = Agent::with_options(node, &url, &folder.join("tls"), authority, &options);
        eventually("the agent answers", || async { agent.status() != Value::Null }).await;
        (agent, folder)
    }

    fn authority(&self) -> PathBuf {
        self.folder.path().join("certs/ca.crt")
    }

    fn enrolments(&self, result: &str) -> u64 {
        metric(self.control_plane.metrics, &format!("headgate_enrolments_total{{result=\"{result}\"}}"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_enrols_with_nothing_but_its_token() {
    let cluster = Cluster::start(&[]);
    cluster.api.put_token("good", Token::of_agent("n1"));
    let (agent, folder) = cluster.agent("n1", "good", &cluster.authority()).await;
    agent.until_connected(true).await;
    for file in ["tls.crt", "tls.key"] {
        assert_eq!(fs::metadata(folder.join(file)).unwrap().permissions().mode() & 0o777, 0o600, "{file}");
    }
    assert_eq!(agent.metric("headgate_agent_enrolments_total{result=\"success\"}"), 1);
    assert_eq!(cluster.enrolments("success"), 1);
    let line = cluster.control_plane.until_logged("a node has enrolled");
    assert!(line.contains("agent-n1"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_comes_from_the_token() {
    let cluster = Cluster::start(&[]);
    cluster.api.put_token("good", Token::of_agent("n1"));
    // The agent claims to be n2. It gets a certificate for n1, with which it has no stream as n2.
    let (agent, _) = cluster.agent("n2", "good", &cluster.authority()).await;
    eventually("the stream is refused", || async {
        agent.metric("headgate_agent_stream_errors_total{reason=\"status\"}") > 0
    })
    .await;
    assert_eq!((cluster.enrolments("success"), agent.status()["connected"].as_bool()), (1, Some(false)));
}

#[tokio::test(flavor = "multi_thread")]
async fn other_tokens_get_nothing() {
    let cluster = Cluster::start(&[]);
    let good = || Token::of_agent("n1");
    let tokens = [
        ("other-address", Token::of_agent("n2"), "address"),
        ("unknown-node", Token::of_agent("n3"), "unknown_node"),
        ("audience", Token { audience: "https://kubernetes.default.svc".to_owned(), ..good() }, "token_rejected"),
        ("expired", Token { problem: Some("service account token has expired"), ..good() }, "token_rejected"),
        ("pod-gone", Token { problem: Some("pod has been deleted"), ..good() }, "token_rejected"),
        ("namespace", Token { service_account: "default:headgate-node-agent".to_owned(), ..good() }, "service_account"),
        ("account", Token { service_account: "headgate-system:default".to_owned(), ..good() }, "service_account"),
        ("no-pod", Token { pod: None, node: None, ..good() }, "no_pod"),
    ];
    for (name, token, result) in tokens {
        cluster.api.put_token(name, token);
        let before = cluster.enrolments(result);
        let (agent, folder) = cluster.agent("n1", name, &cluster.authority()).await;
        eventually(name, || async { cluster.enrolments(result) > before }).await;
        eventually(name, || async { agent.metric("headgate_agent_enrolments_total{result=\"failure\"}") > 0 }).await;
        assert!(!folder.join("tls.crt").exists(), "{name}: the agent has a certificate");
    }
    assert_eq!(cluster.enrolments("success"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_sends_its_token_only_to_a_server_of_its_authority() {
    let cluster = Cluster::start(&[]);
    cluster.api.put_token("good", Token::of_agent("n1"));
    let other = cluster.folder.path().join("other");
    let output = headgatectl(&["ca", "init", "--out", &other.display().to_string()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (agent, _) = cluster.agent("n1", "good", &other.join("ca.crt")).await;
    eventually("the agent does not trust the server", || async { cluster.enrolments("tls") > 0 }).await;
    eventually("the agent counts", || async {
        agent.metric("headgate_agent_enrolments_total{result=\"failure\"}") > 0
    })
    .await;
    assert_eq!(cluster.api.recorded().iter().filter(|request| request.path.contains("tokenreviews")).count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_and_the_stream_resumes_with_the_new_one() {
    let cluster = Cluster::start(&["--enrolment-certificate-seconds=60", "--enrolment-any-address"]);
    cluster.api.put_token("far", Token::of_agent("n2"));
    let (agent, folder) = cluster.agent("n2", "far", &cluster.authority()).await;
    agent.until_connected(true).await;
    let first = fs::read(folder.join("tls.crt")).unwrap();
    let key = fs::read(folder.join("tls.key")).unwrap();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(80);
    while agent.metric("headgate_agent_stream_errors_total{reason=\"renewed\"}") == 0 {
        assert!(tokio::time::Instant::now() < deadline, "the stream was not renewed");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    agent.until_connected(true).await;
    assert_ne!(fs::read(folder.join("tls.crt")).unwrap(), first);
    assert_eq!(fs::read(folder.join("tls.key")).unwrap(), key);
    assert_eq!(agent.metric("headgate_agent_resumes_total{mode=\"log\"}"), 1);
}
