//! A node is degraded only if the operator has something to fix.

use super::rig::{Rig, eventually, node, service, service_v4, slice};

fn serving_v4() -> Rig {
    Rig::serving(&[
        ("node", node("podCIDRs: [10.244.1.0/24]")),
        ("web", service_v4("web", 10, "")),
        ("web-1", slice("web", &[("node-a", 10)], "")),
    ])
}

/// The degraded modes that the agent reports.
fn degraded_modes(rig: &Rig) -> Vec<String> {
    let (_, page) = eventually("the page is served", || rig.page("/status"));
    let page: serde_json::Value = serde_json::from_str(&page).unwrap();
    page["degraded"].as_array().unwrap().iter().map(|sentence| sentence.as_str().unwrap().to_owned()).collect()
}

fn until_degraded_modes(rig: &Rig, what: &str, is_so: impl Fn(&[String]) -> bool) {
    eventually(what, || {
        let degraded = degraded_modes(rig);
        if is_so(&degraded) { Ok(()) } else { Err(format!("{degraded:?}")) }
    });
}

fn until_up_to_date(rig: &Rig) {
    eventually("headgatectl agents shows nothing to fix", || {
        let said = rig.headgatectl(&["agents"])?;
        let is_so = said.contains("node-a  up to date") && !said.contains("degraded");
        if is_so && degraded_modes(rig).is_empty() && rig.metric("headgate_agent_degraded_modes") == 0.0 {
            Ok(())
        } else {
            Err(said)
        }
    });
}

#[test]
fn a_cluster_without_ipv6_is_not_degraded_until_there_is_an_ipv6_service() {
    let rig = serving_v4();
    for arguments in [&["--cluster-cidr=10.244.0.0/16"][..], &["--detect-local-mode=NodeCIDR"]] {
        let agent = rig.agent(arguments);
        rig.until_programmed();
        until_up_to_date(&rig);
        rig.put("more", &service("more", 20, ""));
        until_degraded_modes(&rig, "the agent reports the missing range", |found| {
            found.len() == 1 && (found[0].contains("no IPv6 range"))
        });
        rig.until_metric("headgate_agent_degraded_modes", |count| count == 1.0);
        rig.until_said(&["agents"], &["node-a: degraded: ", "no IPv6 range"]);
        rig.remove("more");
        until_up_to_date(&rig);
        assert!(agent.terminate().0.success());
    }
}

#[test]
fn a_node_without_ipv6_is_not_degraded_until_there_is_an_ipv6_service() {
    let rig = serving_v4();
    rig.set_parameter("net/ipv6/conf/all/disable_ipv6", "1");
    let _agent = rig.agent(&[]);
    rig.until_programmed();
    until_up_to_date(&rig);
    rig.put("more", &service("more", 20, ""));
    until_degraded_modes(&rig, "the agent reports that IPv6 is off, and the remedy", |found| {
        found.len() == 1 && found[0].contains("IPv6 is off on this node") && found[0].contains("disable_ipv6=0")
    });
    rig.remove("more");
    until_up_to_date(&rig);
}

#[test]
fn a_node_is_degraded_while_a_node_port_has_no_address() {
    let rig = serving_v4();
    let _agent = rig.agent(&["--nodeport-addresses=198.18.0.0/24"]);
    until_degraded_modes(&rig, "the agent reports a range without an address of the node", |found| {
        found.len() == 1 && found[0].contains("nodePortAddresses selects no IPv4 address of this node")
    });
    let plain = service_v4("web", 10, "").replace("  type: NodePort\n", "").replace(", nodePort: 30010", "");
    assert!(!plain.contains("30010"), "{plain}");
    rig.put("web", &plain);
    until_up_to_date(&rig);
}
