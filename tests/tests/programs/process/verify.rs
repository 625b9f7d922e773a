//! `headgatectl verify` with real programs and a real kernel: it verifies a node, and finds what
//! somebody changes in the kernel. The agent repairs it.

use std::process::Command;

use headgate_tests::testbed::process::program;

use super::rig::{Rig, eventually, node, service, slice};

fn rig() -> Rig {
    Rig::serving(&[
        ("node", node("podCIDRs: [10.244.1.0/24]")),
        ("web", service("web", 10, "  externalTrafficPolicy: Local\n")),
        ("web-1", slice("web", &[("node-a", 10), ("node-b", 11)], "")),
        ("api", service("api", 20, "  sessionAffinity: ClientIP\n")),
        ("api-1", slice("api", &[("node-a", 20)], "")),
        ("empty", service("empty", 30, "")),
    ])
}

/// Runs a command of a shell on the node. Returns its exit code, and everything that it prints.
fn shell(rig: &Rig, command: &str) -> (Option<i32>, String) {
    let output = rig.run(|| Command::new("sh").args(["-c", &format!("exec 2>&1\n{command}")]).output().unwrap());
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

fn verify(rig: &Rig) -> (Option<i32>, String) {
    shell(
        rig,
        &format!(
            "NO_COLOR=1 HEADGATE_SERVER=http://127.0.0.1:7444 {} verify",
            program("headgatectl").unwrap().display()
        ),
    )
}

/// Waits until the node is verified. The agent may not be connected at first.
fn until_verified(rig: &Rig) {
    eventually("the node is verified", || match verify(rig) {
        (Some(0), out) if out.ends_with("1 of 1 node verified\n") => Ok(()),
        (_, out) => Err(out),
    });
}

/// The rule of the table nat that contains all these texts, as `iptables-save` prints it.
fn rule(rules: &[String], texts: &[&str]) -> String {
    let found = rules.iter().find(|rule| texts.iter().all(|text| rule.contains(text)));
    found.unwrap_or_else(|| panic!("no rule with {texts:?}: {rules:#?}")).clone()
}

#[test]
fn a_deleted_rule_and_a_swapped_address_are_named_and_repaired() {
    let rig = rig();
    // The period is long, so nothing but the command finds the changes.
    let _agent = rig.agent(&["--iptables-sync-period=1h"]);
    until_verified(&rig);
    let rules = rig.rules("iptables-nft-save", "nat");
    let to_web = rule(&rules, &["-A KUBE-SEP-", "--to-destination 10.244.1.11:8080"]);
    let deleted = to_web.replacen("-A", "-D", 1);
    let added = to_web.replace("10.244.1.11:8080", "10.244.9.9:8080");
    for (change, sentence) in [
        (format!("iptables-nft -t nat {deleted}"), "10.244.1.11:8080"),
        (format!("iptables-nft -t nat {deleted} && iptables-nft -t nat {added}"), "10.244.9.9:8080"),
    ] {
        assert_eq!(shell(&rig, &change), (Some(0), String::new()));
        let (code, out) = verify(&rig);
        assert_eq!(code, Some(1), "{out}");
        let named = out.lines().find(|line| line.starts_with("node-a: Service ns/web: ")).unwrap_or_default();
        assert!(named.contains(sentence), "{out}");
        assert!(!out.contains("ns/api"), "{out}");
        assert!(out.contains("node-a: repaired: a later verification found no difference"), "{out}");
        assert!(out.contains("0 of 1 node verified, 1 with differences"), "{out}");
        assert_eq!(rig.rules("iptables-nft-save", "nat").len(), rules.len());
        until_verified(&rig);
    }
    let agents = rig.headgatectl(&["agents"]).unwrap();
    assert!(agents.contains("VERIFIED") && !agents.contains("differ"), "{agents}");
}

#[test]
fn every_mode_is_verified() {
    verify_every_mode(&rig());
}

/// No packet reaches the rules for the addresses that answer NodePorts.
#[test]
fn a_cluster_without_node_ports_is_verified_in_every_mode() {
    let web = service("web", 10, "").replace("NodePort", "ClusterIP").replace(", nodePort: 30010", "");
    verify_every_mode(&Rig::serving(&[
        ("node", node("podCIDRs: [10.244.1.0/24]")),
        ("web", web),
        ("web-1", slice("web", &[("node-a", 10)], "")),
    ]));
}

fn verify_every_mode(rig: &Rig) {
    for mode in ["nftables", "userspace", "iptables"] {
        let agent =
            rig.agent(&[&format!("--proxy-mode={mode}"), "--iptables-sync-period=1h", "--pod-ranges=10.244.0.0/16"]);
        rig.until_programmed();
        until_verified(rig);
        assert!(agent.terminate().0.success());
    }
}
