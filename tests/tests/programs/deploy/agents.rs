//! What users set for agents, and the certificates that the pages make.

use std::process::Command;

use headgate_tests::testbed::process::program;
use serde_json::{Value, json};

use super::{
    agent_pod, assert_valid, by_name, chart, commands, deploy, documents_of, object, ready_everywhere::overlay_with,
    run, strings,
};

/// Agents that run only on moved nodes (docs/faq.md).
#[test]
fn agents_can_be_limited_to_nodes_with_a_label() {
    let yaml = overlay_with("production", "labelled-nodes");
    assert_valid(&yaml);
    let mut from_overlay = by_name(&yaml);
    from_overlay.remove(&("Namespace".to_owned(), "headgate-system".to_owned())).unwrap();
    let value = r"nodeAgent.nodeSelector.headgate\.io/node-agent=true";
    let mut command = chart(&object("ConfigMap", "headgate-settings"));
    command.arg("--values").arg(deploy().join("chart/values-production.yaml"));
    let from_chart = by_name(&run(command.args(["--set-string", value])));
    assert_eq!(from_chart, from_overlay);
    let agents = &from_chart[&("DaemonSet".to_owned(), "headgate-node-agent".to_owned())];
    let selector = json!({ "kubernetes.io/os": "linux", "headgate.io/node-agent": "true" });
    assert_eq!(agents["spec"]["template"]["spec"]["nodeSelector"], selector);
}

/// Kernel parameters follow from options such as `--conntrack-tcp-timeout-established`. The init
/// container sets them, because the agent's container must not.
#[test]
fn the_init_container_gets_the_users_options_of_the_agent() {
    let extra = ["--iptables-localhost-nodeports=false", "--conntrack-tcp-timeout-established=1h", "--ipvs-strict-arp"];
    let mut command = chart(&object("ConfigMap", "headgate-settings"));
    command.args(["--set", &format!("nodeAgent.extraArgs={{{}}}", extra.join(","))]);
    let from_chart = by_name(&run(command.args(["--set", "nodeAgent.proxyMode=ipvs"])));
    let agents = &from_chart[&("DaemonSet".to_owned(), "headgate-node-agent".to_owned())];
    let of_chart = &agents["spec"]["template"]["spec"];
    let init: Vec<&str> = strings(&of_chart["initContainers"][0]["args"]).into_iter().collect();
    for option in extra.iter().chain(&["--init-only", "--proxy-mode=ipvs"]) {
        assert!(init.contains(option), "{option} is missing: {init:?}");
    }
    // With --help, the program checks the options before it, and ends.
    run(Command::new(program("headgate-node-agent").unwrap()).args(&init).arg("--help"));
    let agrees = |pod: &Value| {
        let [init, agent] = ["initContainers", "containers"].map(|kind| strings(&pod[kind][0]["args"]));
        init.iter().all(|option| *option == "--init-only" || agent.contains(option))
    };
    assert!(agrees(of_chart) && agrees(&agent_pod()), "an init container has an option that the agent lacks");
}

/// Each way to certificates needs the namespace, and makes the files that the last step reads.
#[test]
fn both_ways_to_certificates_lead_to_the_last_step() {
    let commands = commands(&std::fs::read_to_string(deploy().join("README.md")).unwrap());
    let position = |text: &str| commands.find(text).unwrap_or_else(|| panic!("no {text} in:\n{commands}"));
    let namespace = position("kubectl apply -f deploy/kustomize/base/namespace.yaml\n");
    let by_headgatectl = position("headgatectl certs --out ~/headgate-certs ");
    let by_cert_manager = position("kubectl apply -f deploy/cert-manager/certificates.yaml\n");
    assert!(namespace < by_headgatectl && namespace < by_cert_manager, "{commands}");
    let last = &commands[position("headgatectl --server ")..];
    let certificates = documents_of(&deploy().join("cert-manager/certificates.yaml"));
    for (option, file, secret, key) in [
        ("--tls-ca", "ca.crt", "headgate-authority", "tls\\.crt"),
        ("--tls-cert", "readers/me.crt", "headgate-reader", "tls\\.crt"),
        ("--tls-key", "readers/me.key", "headgate-reader", "tls\\.key"),
    ] {
        assert!(last.contains(&format!("{option} ~/headgate-certs/{file} ")), "{last}");
        position(&format!("secret {secret} -o jsonpath='{{.data.{key}}}' | base64 -d > ~/headgate-certs/{file}\n"));
        assert!(certificates.iter().any(|object| object["spec"]["secretName"] == secret), "{secret}");
    }
}
