//! TLS files of the agent: invalid files, renewed files, and TLS sessions that survive reconnects.
//! Queries of an operator to the agent.

use std::{fs, path::Path};

use clap::Parser as _;
use headgate_node_agent::{options::Options, run_with};
use headgate_proto::v1::{ListAgentsRequest, inspect_client::InspectClient};
use headgate_tests::{
    in_memory::{self, Control},
    testbed::{page::sample, port::ReservedPort, process::program},
};
use serde_json::Value;
use tokio::{process::Command, time::timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    authority::{Authority, Pair, in_seconds},
    client::{Client, Connected},
    program::{metric, page},
    server::{GUARD, Server, eventually},
};

/// An agent in the test's process. Dropping the value stops the agent.
pub(crate) struct Agent {
    metrics: ReservedPort,
    pub(crate) kernel: Control,
    _stops: DropGuard,
}

impl Agent {
    fn start(server: &Server, folder: &Path) -> Self {
        Self::of_node("n1", &server.url(), &folder.join("tls"), &folder.join("ca.crt"))
    }

    /// Starts the agent of a node with the files `OWN.crt` and `OWN.key`.
    pub(crate) fn of_node(node: &str, url: &str, own: &Path, authorities: &Path) -> Self {
        Self::with_options(node, url, own, authorities, &[])
    }

    /// As [`Self::of_node`], with further options.
    pub(crate) fn with_options(node: &str, url: &str, own: &Path, authorities: &Path, options: &[String]) -> Self {
        let metrics = ReservedPort::reserve().unwrap();
        let arguments = [
            "headgate-node-agent".to_owned(),
            format!("--node-name={node}"),
            "--state-dir=".to_owned(),
            "--healthz-bind-address=".to_owned(),
            format!("--metrics-bind-address={}", metrics.address()),
            format!("--control-plane={url}"),
            format!("--tls-cert={}.crt", own.display()),
            format!("--tls-key={}.key", own.display()),
            format!("--tls-ca={}", authorities.display()),
        ];
        let (options, shutdown) =
            (Options::try_parse_from(arguments.iter().chain(options)).unwrap(), CancellationToken::new());
        let (backend, kernel) = in_memory::dataplane();
        tokio::spawn(run_with(options, Box::new(backend), shutdown.clone()));
        Self { metrics, kernel, _stops: shutdown.drop_guard() }
    }

    pub(crate) fn status(&self) -> Value {
        let page = page(self.metrics.address(), "/status").unwrap_or_default();
        serde_json::from_str(&page).unwrap_or_default()
    }

    pub(crate) fn tls_problem(&self) -> String {
        self.status()["tlsProblem"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn metric(&self, sample: &str) -> u64 {
        metric(self.metrics.address(), sample)
    }

    /// The values of samples on the same page.
    pub(crate) fn metrics<const N: usize>(&self, samples: [&str; N]) -> [u64; N] {
        let page = page(self.metrics.address(), "/metrics").unwrap();
        samples.map(|name| sample(&page, name))
    }

    pub(crate) async fn until_connected(&self, is_connected: bool) {
        eventually("the status shows whether the agent is connected", || async {
            self.status()["connected"] == is_connected
        })
        .await;
    }
}

/// Opens a stream in the node's name, so that the replica ends the agent's stream.
async fn replace(server: &Server, authority: &Authority) -> Connected {
    let client = Client::new(authority, &authority.node("n1"));
    let connected = client.connect(server.running.local_addr).await.unwrap();
    connected.sync("n1").await.map(drop).unwrap();
    connected
}

async fn degraded(reader: &Connected) -> Vec<String> {
    let mut inspect = InspectClient::new(reader.channel.clone());
    let mut agents = inspect.list_agents(ListAgentsRequest::default()).await.unwrap().into_inner();
    agents.message().await.unwrap().map_or_else(Vec::new, |agent| agent.degraded)
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_files_are_reported_and_keep_the_open_stream_but_prevent_a_new_one() {
    let (authority, server) = Server::of_new_authority().await;
    let reader = Client::new(&authority, &authority.client(&["headgate://reader/me"], |_| {}));
    let reader = reader.connect(server.running.inspect_addr).await.unwrap();
    let (folder, own) = (tempfile::tempdir().unwrap(), authority.node("n1"));
    own.write(folder.path(), &[&authority]);
    let agent = Agent::start(&server, folder.path());
    agent.until_connected(true).await;
    assert_eq!(agent.status()["tlsProblem"], Value::Null);

    // Replace the file in one step. If the agent read a half-written file, it would count another
    // failure.
    fs::write(folder.path().join("new"), "garbage").unwrap();
    fs::rename(folder.path().join("new"), folder.path().join("tls.key")).unwrap();
    let is_named =
        |text: &str| text.contains("--tls-key") && text.contains("tls.key") && text.contains("it must be a PEM");
    eventually("the status page shows the problem", || async {
        agent.status()["tlsProblem"].as_str().is_some_and(is_named)
    })
    .await;
    eventually("the replica shows the problem", || async { degraded(&reader).await.iter().any(|text| is_named(text)) })
        .await;
    assert_eq!(agent.metric("headgate_agent_tls_reloads_total{result=\"failure\"}"), 1);
    server.put(2);
    eventually("the stream stays open", || async { agent.status()["version"] == 2 }).await;
    assert_eq!(agent.status()["connected"], true);

    let _ = replace(&server, &authority).await;
    let refused = "headgate_agent_stream_errors_total{reason=\"tls_files\"}";
    eventually("the agent makes no new connection", || async { agent.metric(refused) > 0 }).await;
    assert_eq!(agent.status()["connected"], false);
    own.write(folder.path(), &[&authority]);
    agent.until_connected(true).await;
    eventually("the status page shows no problem", || async { agent.status()["tlsProblem"].is_null() }).await;
    eventually("the replica shows no problem", || async { degraded(&reader).await.is_empty() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_reconnects_resumes_its_tls_session() {
    let (authority, server) = Server::of_new_authority().await;
    let folder = tempfile::tempdir().unwrap();
    authority.node("n1").write(folder.path(), &[&authority]);
    let agent = Agent::start(&server, folder.path());
    agent.until_connected(true).await;
    let _ = replace(&server, &authority).await;
    let resumed = "headgate_agent_tls_handshakes_total{kind=\"resumed\"}";
    eventually("a session is resumed", || async { agent.metric(resumed) == 1 }).await;
    agent.until_connected(true).await;
    assert_eq!(agent.metric("headgate_agent_tls_handshakes_total{kind=\"full\"}"), 1);
    assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"resumed\"}"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_used_before_the_old_one_expires() {
    let (authority, server) = Server::of_new_authority().await;
    let folder = tempfile::tempdir().unwrap();
    let expiring = |seconds| -> Pair {
        let not_after = in_seconds(seconds).into();
        authority.client(&["headgate://node/n1"], |params| params.not_after = not_after)
    };
    expiring(20).write(folder.path(), &[&authority]);
    let agent = Agent::start(&server, folder.path());
    agent.until_connected(true).await;
    expiring(3600).write(folder.path(), &[&authority]);
    let renewed = "headgate_agent_stream_errors_total{reason=\"renewed\"}";
    eventually("the agent connects again", || async { agent.metric(renewed) == 1 }).await;
    agent.until_connected(true).await;
    assert_eq!(server.metric("headgate_streams_rejected_total{reason=\"certificate_expired\"}"), 0);
}

/// An operator who may read asks any replica for the status and the metrics of a node, over TLS
/// alone. The agent answers on its own stream. A certificate of a node may not ask.
#[tokio::test(flavor = "multi_thread")]
async fn headgatectl_asks_an_agent_over_tls() {
    let (authority, server) = Server::of_new_authority().await;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    authority.node("n1").write(&path("node"), &[&authority]);
    authority.client(&["headgate://reader/me"], |_| {}).write(&path("reader"), &[&authority]);
    let agent = Agent::start(&server, &path("node"));
    agent.until_connected(true).await;
    eventually("the Service is programmed", || async {
        agent.metric("headgate_agent_version_programmed") == agent.metric("headgate_agent_head_version")
    })
    .await;
    let ask = |who: &str, arguments: &[&str]| {
        let mut command = Command::new(program("headgatectl").unwrap());
        let file = |option: &str, name: &str| format!("{option}={}", path(who).join(name).display());
        command.arg(format!("--server=https://{}", server.running.inspect_addr)).env("NO_COLOR", "1");
        command.args([file("--tls-cert", "tls.crt"), file("--tls-key", "tls.key"), file("--tls-ca", "ca.crt")]);
        command.args(arguments);
        async move {
            let output = timeout(GUARD, command.output()).await.expect("headgatectl does not end").unwrap();
            (output.status.code(), format!("{output:?}"), String::from_utf8(output.stdout).unwrap())
        }
    };
    let (code, output, status) = ask("reader", &["node", "n1", "-o", "json"]).await;
    assert_eq!(code, Some(0), "{output}");
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!((&status["node"], &status["backend"]), (&"n1".into(), &"iptables-memory".into()), "{output}");
    let (_, output, metrics) = ask("reader", &["node", "n1", "--metrics", "headgate_agent_connected"]).await;
    assert!(metrics.lines().any(|line| line == "headgate_agent_connected 1"), "{output}");
    // The dataplane of this agent counts no Services.
    let (code, output, _) = ask("reader", &["counters", "n1"]).await;
    assert!(code == Some(1) && output.contains("--nftables-service-counters"), "{output}");
    let (code, output, _) = ask("node", &["node", "n1"]).await;
    assert!(code == Some(1) && output.contains("headgate://reader/"), "{output}");
}
