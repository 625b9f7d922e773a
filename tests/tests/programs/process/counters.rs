//! Packet counters of rules, and an agent whose iptables lacks the match `nfacct`, which the
//! counters need.

use std::net::TcpStream;

use super::rig::{Rig, node, service, slice};

const LOCALHOST: &str = "kubeproxy_iptables_localhost_nodeports_accepted_packets_total";
const INVALID: &str = "kubeproxy_iptables_ct_state_invalid_dropped_packets_total";
const COUNTS: &str = "headgate_agent_packet_counters";

fn rig() -> Rig {
    Rig::serving(&[
        ("node", node("")),
        ("web", service("web", 1, "")),
        ("web-1", slice("web", &[("node-a", 1)], "")),
        ("local", service("local", 2, "  externalTrafficPolicy: Local\n")),
        ("local-1", slice("local", &[("node-a", 2)], "")),
    ])
}

fn counts_packets(variant: &str) {
    let rig = rig();
    // The endpoint is an address of the node, and nothing listens on this address. The rules count
    // the packets although no program answers.
    rig.ip("addr add 10.244.1.1/32 dev lo\naddr add 10.244.1.2/32 dev lo\n");
    let agent = rig.agent(&[&format!("--iptables-variant={variant}")]);
    rig.until_metric(COUNTS, |value| value == 1.0);
    assert_eq!(rig.metric(LOCALHOST), 0.0);
    rig.run(|| {
        for port in [30001, 30002, 30001, 31999] {
            assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
        }
    });
    assert_eq!(rig.metric(LOCALHOST), 3.0, "expected one packet for each connection to a node port");
    rig.run(|| assert!(TcpStream::connect(("192.0.2.11", 30001)).is_err()));
    assert_eq!(rig.metric(LOCALHOST), 3.0, "a packet to an address outside of 127.0.0.0/8 was counted");
    assert_eq!(rig.metric(INVALID), 0.0);
    let forward = rig.rules(&format!("iptables-{variant}-save"), "filter");
    let drops =
        forward.iter().filter(|rule| rule.contains("INVALID") && rule.contains("ct_state_invalid_dropped_pkts"));
    assert_eq!(drops.count(), 1, "{forward:#?}");

    // The next agent finds all rules unchanged, and the counters continue.
    drop(agent);
    let agent = rig.agent(&[&format!("--iptables-variant={variant}")]);
    rig.until_metric(COUNTS, |value| value == 1.0);
    assert_eq!((rig.metric(LOCALHOST), rig.metric("headgate_agent_objects_written_total")), (3.0, 0.0));
    drop(agent);
    let (status, log) = rig.run_agent(&["--cleanup"]);
    assert!(status.success(), "{log}");
    let left = rig.run(headgate_node_agent::packet_counters::read);
    assert_eq!(left.unwrap_err().refusal_code(), Some(nix::libc::ENOENT), "the cleanup did not delete the counters");
}

// rows: 109
#[test]
fn packets_are_counted_as_by_kube_proxy_with_iptables_legacy() {
    counts_packets("legacy");
}

// rows: 109
#[test]
fn packets_are_counted_as_by_kube_proxy_with_iptables_nft() {
    counts_packets("nft");
}

// rows: 109
#[test]
fn packets_are_not_counted_without_the_nfacct_match() {
    let rig = rig();
    let agent = rig.agent_without_extension("libxt_nfacct.so", &["--iptables-variant=nft"]);
    rig.until_programmed();
    let rules = rig.until_rules("programmed", "nat", |rules| rules.iter().any(|rule| rule.contains("ns/web:http")));
    assert!(!rules.iter().any(|rule| rule.contains("nfacct")), "{rules:#?}");
    assert_eq!((rig.metric(COUNTS), rig.metric(LOCALHOST)), (0.0, 0.0));
    assert_eq!(rig.metric("headgate_agent_services_refused"), 0.0);
    assert_eq!(agent.log().matches("packets are not counted").count(), 2, "expected one warning for each family");
}
