//! Runs the `headgatectl` program, and checks its errors and exit codes. `cli/src/render` tests its
//! tables, `inspect`, `streams/wait.rs` and `streams/verify_nodes.rs` its answers.

use std::process::{Command, Output, Stdio};

use headgate_tests::{
    apiserver::{ApiServer, objects::node},
    testbed::{port::ReservedPort, process::program},
};
use serde_json::Value;

use crate::inspect::ControlPlane;

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
async fn missing_objects_are_named_and_the_exit_code_is_1() {
    let control_plane = ControlPlane::start();
    for (arguments, expected) in [
        (&["endpoints", "demo/nope"][..], "no service demo/nope"),
        (&["services", "nope"], "no service default/nope"),
        (&["agents", "node-z"], "no node node-z"),
        (&["services", "web"], "no service default/web, but shop/web: write shop/web, or --namespace shop"),
        (&["endpoints", "web"], "no service default/web, but shop/web"),
    ] {
        let (code, error) = refusal(&control_plane.url(), arguments).await;
        assert_eq!(code, 1, "{error}");
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

#[tokio::test]
async fn the_next_replica_answers_if_the_first_is_down() {
    let control_plane = ControlPlane::start();
    let (good, nobody) = (control_plane.url(), ReservedPort::reserve().unwrap());
    let dead = format!("http://{}", nobody.address());
    for arguments in
        [&["agents"][..], &["status"], &["services"], &["wait", "shop/web", "--allow-absent", "-o", "json"]]
    {
        let first = answer(&dead, &[&["--server", &good], arguments].concat()).await;
        assert!(!first.is_empty(), "{arguments:?}");
    }
    let list = format!("{dead},{good}");
    assert!(answer(&list, &["agents"]).await.contains("node-a  no agent"));

    let (code, error) = refusal(&dead, &["agents"]).await;
    assert!(code == 1 && error.starts_with("headgatectl: cannot reach"), "{error}");
    assert!(error.contains(&format!("cannot reach {dead}")) && error.contains("refused"), "{error}");
    assert!(error.contains("--server URL, or HEADGATE_SERVER"), "{error}");
    let (code, error) = refusal(&dead, &["--server", "http://127.0.0.1:1", "agents"]).await;
    assert!(code == 1 && error.starts_with("headgatectl: no replica of --server answers:\n"), "{error}");
    assert!(error.contains(&format!("cannot reach {dead}:")), "{error}");
    assert!(error.contains("cannot reach http://127.0.0.1:1:"), "{error}");
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
    assert!(lines[0].starts_with("SETTING") && lines[0].ends_with("OUTCOME"), "{table}");
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
async fn lists_have_the_formats_of_kubectl() {
    let control_plane = ControlPlane::start();
    let url = control_plane.url();
    assert_eq!(answer(&url, &["services", "-A", "-o", "name"]).await, "shop/web\n");
    let endpoints = answer(&url, &["endpoints", "-o", "name"]).await;
    assert_eq!(endpoints, "shop/web 10.244.1.10\nshop/web 10.244.2.10\n");
    assert_eq!(answer(&url, &["agents", "-o", "name"]).await, "node-a\n");
    let rows = answer(&url, &["endpoints", "shop/web", "--no-headers"]).await;
    assert!(rows.lines().count() == 2 && rows.starts_with("10.244.1.10  "), "{rows}");
    assert_eq!(answer(&url, &["agents", "--no-headers"]).await.lines().count(), 1);
    let (narrow, wide) = (answer(&url, &["services"]).await, answer(&url, &["services", "-o", "wide"]).await);
    assert!(!narrow.contains("SOURCE-RANGES") && wide.contains("SOURCE-RANGES"), "{wide}");
    let yaml = answer(&url, &["services", "-o", "yaml"]).await;
    let json: Value = serde_json::from_str(&answer(&url, &["services", "-o", "json"]).await).unwrap();
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), json, "{yaml}");
    let versions: Value = serde_json::from_str(&answer(&url, &["version", "-o", "json"]).await).unwrap();
    assert_eq!(versions["replicas"][0]["replica"], "example");
    assert!(answer(&url, &["version"]).await.ends_with(&format!("All have version {}.\n", env!("CARGO_PKG_VERSION"))));
    let (code, error) = refusal(&url, &["status", "-o", "name"]).await;
    assert!(code == 2 && error.contains("works with services, endpoints and agents"), "{error}");

    let absent = headgatectl(&url, &["agents", "--absent", "--exit-code"]).await;
    assert_eq!((absent.status.code(), text(&absent.stderr)), (Some(1), "headgatectl: 1 node in the list\n".into()));
    assert!(answer(&url, &["agents", "--failing", "--exit-code"]).await.starts_with("No node of 1 matches.\n"));
    // Without a replica, the version of this program is known.
    let alone = headgatectl("http://127.0.0.1:1", &["version"]).await;
    assert!(alone.status.code() == Some(1) && text(&alone.stdout).contains("\nheadgatectl  "), "{alone:?}");
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
    let control_plane = ControlPlane::start();
    let mut command = Command::new(program("headgatectl").unwrap());
    command.args(["--server", &control_plane.url(), "services"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = tokio::task::spawn_blocking(move || {
        let mut child = command.spawn().unwrap();
        drop(child.stdout.take());
        child.wait_with_output().unwrap()
    });
    let output = output.await.unwrap();
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
}

/// The distribution is known by the versions of its kubelets. No replica answers here.
#[tokio::test]
async fn migrate_run_says_what_a_person_must_do_where_kube_proxy_is_no_daemon_set() {
    let (api, folder) = (ApiServer::start().unwrap(), tempfile::tempdir().unwrap());
    let (kubeconfig, nobody) = (folder.path().join("kubeconfig"), ReservedPort::reserve().unwrap());
    std::fs::write(&kubeconfig, api.kubeconfig()).unwrap();
    let server = format!("http://{}", nobody.address());
    for (version, expected) in [
        ("v1.36.2+k3s1", "kube-proxy is a part of the program k3s. One node after the other, servers first:\n"),
        ("v1.36.2+rke2r1", "RKE2 runs kube-proxy as a static pod. One node after the other, servers first:\n"),
        ("v1.36.2", "no kube-proxy was found: no DaemonSet (--kube-proxy), no static pod, no k3s and no RKE2. If it"),
    ] {
        let mut object = node("node-a").build();
        object["status"]["nodeInfo"] = serde_json::json!({ "kubeletVersion": version });
        api.apply(object).unwrap();
        let output = headgatectl(&server, &["migrate", "run", "--kubeconfig", kubeconfig.to_str().unwrap()]).await;
        let (said, error) = (text(&output.stdout), text(&output.stderr));
        assert!(said.starts_with(expected) && error.contains(&nobody.address().to_string()), "{said}\n{error}");
    }
}
