//! Mistakes of operators, and the messages that the programs print.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use headgate_tests::testbed::process::program;

use super::rig::{Program, REPLICA_OPTIONS, Rig, eventually, service, slice};

/// The ports of the control plane with TLS: for agents, and for headgatectl.
const WITH_TLS: [&str; 2] = ["127.0.0.1:7453", "127.0.0.1:7454"];

/// The options for three TLS files in a folder that `headgatectl certs` created.
fn tls(certs: &Path, files: [&str; 3], authorities: &str) -> Vec<String> {
    let options = ["--tls-cert", "--tls-key", authorities];
    options.iter().zip(files).map(|(option, file)| format!("{option}={}", certs.join(file).display())).collect()
}

/// Starts a rig with two control planes. The control plane without TLS listens on the ports 7443
/// and 7444, and serves metrics on port 7480. The control plane with TLS listens on [`WITH_TLS`].
/// The certificates are in the folder `certs`.
fn with_and_without_tls() -> (Rig, Program) {
    let rig = Rig::web(10);
    let certs = rig.path("certs");
    let out = format!("--out={}", certs.display());
    rig.headgatectl(&["certs", &out, "--server-ip=127.0.0.1", "--node=node-a", "--reader=me"]).unwrap();
    let mut files = tls(&certs, ["control-plane/tls.crt", "control-plane/tls.key", "ca.crt"], "--tls-client-ca");
    files.push(format!("--tls-node-ca={}", certs.join("node-ca.crt").display()));
    let listen = format!("--listen={}", WITH_TLS[0]);
    let with_tls = rig.control_plane(&[&rig.manifests(), &listen, "--metrics-listen=127.0.0.1:0"], &files);
    with_tls.until_logged("control plane runs");
    eventually("the other control plane runs, too", || match rig.control_plane_log() {
        log if log.contains("control plane runs") => Ok(()),
        log => Err(log),
    });
    (rig, with_tls)
}

#[test]
fn headgatectl_reports_a_wrong_scheme_or_port_of_its_server() {
    let (rig, _with_tls) = with_and_without_tls();
    let tls = tls(&rig.path("certs"), ["readers/me.crt", "readers/me.key", "ca.crt"], "--tls-ca");
    let says = |server: &str, command: &[&str], with_files: bool, parts: [&str; 2]| {
        let mut arguments = vec!["--server", server];
        arguments.extend(command);
        arguments.extend(tls.iter().map(String::as_str).filter(|_| with_files));
        eventually("headgatectl says what is wrong", || {
            let asked = Instant::now();
            let said = rig.headgatectl(&arguments).unwrap_err();
            if parts.iter().all(|part| said.contains(part)) {
                return Ok(());
            }
            // On a busy machine, the port may not show in time what it is. The time is two seconds.
            assert!(asked.elapsed() >= Duration::from_secs(2), "{arguments:?}: {parts:?} is not in\n{said}");
            Err(said)
        });
    };
    let commands: [&[&str]; 4] = [&["services"], &["agents"], &["status"], &["wait", "ns/web", "--timeout=1s"]];
    // The error that HTTP/2 reports for an http:// URL of a TLS port varies, so the test tries each
    // command three times.
    for command in commands.iter().cycle().take(12) {
        let expected = ["the server speaks TLS, but the URL begins with http://", "Write https:// in --server"];
        says(&format!("http://{}", WITH_TLS[1]), command, false, expected);
    }
    for command in commands {
        let expected = ["The server does not speak TLS: check the port", "an http:// URL"];
        says("https://127.0.0.1:7444", command, true, expected);
        says("https://127.0.0.1:7480", command, true, expected);
        says(
            "http://127.0.0.1:7480",
            command,
            false,
            ["the server speaks HTTP, but is not a control plane", "--inspect-listen"],
        );
        let expected = ["this port serves only agents", "are on port 7444, --inspect-listen"];
        says("http://127.0.0.1:7443", command, false, expected);
    }
    let right = format!("https://{}", WITH_TLS[1]);
    let expected = ["no client certificate was given\nGive --tls-cert", " and --tls-key"];
    says(&right, &[&tls[2], "services"], false, expected);
    let mut right = vec!["--server", right.as_str(), "services"];
    right.extend(tls.iter().map(String::as_str));
    rig.until_said(&right, &["web"]);
}

#[test]
fn the_agent_reports_a_wrong_scheme_or_port_of_its_control_plane() {
    let (rig, with_tls) = with_and_without_tls();
    let tls = tls(&rig.path("certs"), ["nodes/node-a.crt", "nodes/node-a.key", "nodes/ca.crt"], "--tls-ca");
    let says = |url: &str, expected: &str| {
        let url = format!("--control-plane={url}");
        let mut arguments = vec![url.as_str()];
        arguments.extend(tls.iter().map(String::as_str));
        rig.agent(&arguments).until_logged(expected);
    };
    let with_tls_url = |scheme: &str, port: usize| format!("{scheme}://{}", WITH_TLS[port]);
    says(&with_tls_url("http", 0), "the control plane speaks TLS, and its URL begins with http://; write https:// in");
    says("https://127.0.0.1:7443", "does not speak TLS, although its URL begins with https://; give the control plane");
    says("http://127.0.0.1:7480", "no control plane answers; check the port in --control-plane");
    says(&with_tls_url("https", 1), "is not a method on this port; agents connect to port 7453, --listen");
    // The control plane with TLS also logs a clear message about the agent that did not use TLS.
    with_tls.until_logged("the client does not speak TLS; use https:// in its URL");
}

#[test]
fn an_unreachable_api_server_is_logged_once_for_each_watch() {
    let rig = Rig::new();
    let kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: x\nclusters: [{name: c, cluster: {server: \"http://127.0.0.1:9\"}}]\n\
                      users: [{name: u, user: {}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\n";
    let kubeconfig = format!("--kubeconfig={}", rig.write("kubeconfig", kubeconfig).display());
    let options = [&["--source=kubernetes", &kubeconfig], &REPLICA_OPTIONS[..]].concat();
    let program = rig.control_plane(&options, &[]);
    let log = eventually("all four watches log the error", || {
        let log = program.log();
        let kinds = ["Service", "EndpointSlice", "Node", "ServiceCIDR"].map(|kind| format!("kind=\"{kind}\""));
        let is_logged = |kind: &String| {
            log.lines().any(|line| line.contains("WARN") && line.contains(kind) && line.contains("Connection refused"))
        };
        if kinds.iter().all(is_logged) { Ok(log) } else { Err(log) }
    });
    assert!(!log.contains("kube_client"), "a library logs the error too:\n{log}");
    drop(program);
    // `--log` turns on the messages of the library.
    let options = [&options[..], &["--log=info,kube_client=error"]].concat();
    let program = rig.control_plane(&options, &[]);
    eventually("the library logs the error", || {
        let log = program.log();
        if log.contains("ERROR") && log.contains("kube_client") { Ok(()) } else { Err(log) }
    });
}

#[test]
fn a_pipe_in_place_of_a_file_is_reported_and_blocks_no_program() {
    let rig = Rig::serving(&[("web", service("web", 10, "")), ("web-1", slice("web", &[("node-a", 10)], ""))]);
    let pipe = rig.path("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let pipe = pipe.display().to_string();

    // The agent programs rules although its state file is a pipe, and replaces the pipe.
    let state = rig.path("state");
    std::fs::create_dir(&state).unwrap();
    let file = state.join("state");
    nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let agent = rig.agent(&[&format!("--state-dir={}", state.display()), "--state-save-period=100ms"]);
    rig.until_programmed();
    assert!(agent.log().contains("the file with the last good state is not a regular file"), "{}", agent.log());
    eventually("the agent replaces the pipe", || {
        if std::fs::metadata(&file).unwrap().is_file() { Ok(()) } else { Err(agent.log()) }
    });
    assert!(agent.terminate().0.success());

    let (status, log) =
        rig.run_agent(&["--control-plane=http://127.0.0.1:7443", "--insecure-loopback", &format!("--config={pipe}")]);
    assert!(!status.success() && log.contains(&format!("--config {pipe}: it is not a regular file")), "{log}");

    let files: Vec<String> = ["cert", "key", "ca"].iter().map(|file| format!("--tls-{file}={pipe}")).collect();
    let mut arguments = vec!["--control-plane=https://127.0.0.1:7444"];
    arguments.extend(files.iter().map(String::as_str));
    let agent = rig.agent(&arguments);
    agent.until_logged(&format!("--tls-cert {pipe}: cannot read the file: it is not a regular file"));
    assert!(agent.terminate().0.success());

    let files: Vec<String> = ["cert", "key", "client-ca"].iter().map(|file| format!("--tls-{file}={pipe}")).collect();
    let source = rig.manifests();
    let options = [source.as_str(), "--listen=127.0.0.1:7444", "--metrics-listen=127.0.0.1:0"];
    let (status, log) = rig.control_plane(&options, &files).ended();
    assert!(!status.success() && log.contains("it is not a regular file"), "{log}");
}

#[test]
fn errors_of_command_lines_say_what_to_write() {
    let says = |name: &str, arguments: &[&str], expected: &str| {
        let output = Command::new(program(name).unwrap()).args(arguments).env("NO_COLOR", "1").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && said.contains(expected),
            "{name} {arguments:?}: {expected:?} is not in\n{said}"
        );
    };
    let control_plane = |arguments: &[&str], expected: &str| {
        says("headgate-control-plane", &[&["--source=files:/"], arguments].concat(), expected);
    };
    for wrong in ["localhost:7443", "127.0.0.1", "127.0.0.1:99999", ":7443"] {
        control_plane(
            &[&format!("--listen={wrong}")],
            "write an IP address and a port, such as 127.0.0.1:7443 or [::]:7443",
        );
        control_plane(&[&format!("--metrics-listen={wrong}")], "write an IP address and a port, such as");
    }
    // No machine has this address, because the address is reserved for documentation.
    control_plane(&["--listen=198.51.100.1:7443", "--insecure-loopback"], "this machine does not have this address");
    let agent = |arguments: &[&str], expected: &str| {
        let required = ["--control-plane=http://127.0.0.1:1", "--insecure-loopback", "--state-dir="];
        says("headgate-node-agent", &[&required, arguments].concat(), expected);
    };
    agent(&["--config=/nowhere/config.yaml"], "--config /nowhere/config.yaml: No such file or directory");
    agent(
        &["--write-config-to=/nowhere/config.yaml"],
        "--write-config-to /nowhere/config.yaml: No such file or directory",
    );
    agent(&["--control-plane=10.0.0.1:7443"], "\"10.0.0.1:7443\" has no scheme; write https://10.0.0.1:7443");
    let ctl = |arguments: &[&str], expected: &str| says("headgatectl", arguments, expected);
    ctl(&["--server=10.0.0.1:7443", "services"], "--server 10.0.0.1:7443 has no scheme: write https://10.0.0.1:7443");
    ctl(&["wait", "ns/web", "--endpoint=10.244.1"], "write an IP address, such as 10.244.1.10 or fd00::10");
}
