//! "Degraded" is what the operator has to fix, and nothing else.

use super::rig::{Rig, eventually, node, service, service_v4, slice};

fn serving_v4() -> Rig {
    Rig::serving(&[
        ("node", node("podCIDRs: [10.244.1.0/24]")),
        ("web", service_v4("web", 10, "")),
        ("web-1", slice("web", &[("node-a", 10)], "")),
    ])
}

/// What the agent itself calls degraded.
fn told(rig: &Rig) -> Vec<String> {
    let (_, page) = eventually("the page is served", || rig.page("/status"));
    let page: serde_json::Value = serde_json::from_str(&page).unwrap();
    page["degraded"].as_array().unwrap().iter().map(|sentence| sentence.as_str().unwrap().to_owned()).collect()
}

fn until_told(rig: &Rig, what: &str, is_so: impl Fn(&[String]) -> bool) {
    eventually(what, || {
        let told = told(rig);
        if is_so(&told) { Ok(()) } else { Err(format!("{told:?}")) }
    });
}

fn until_up_to_date(rig: &Rig) {
    eventually("headgatectl agents shows nothing to fix", || {
        let said = rig.headgatectl(&["agents"])?;
        let is_so = said.contains("node-a  up to date") && !said.contains("degraded");
        if is_so && told(rig).is_empty() && rig.metric("headgate_agent_degraded_modes") == 0.0 {
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
        until_told(&rig, "the range that is missing", |told| told.len() == 1 && (told[0].contains("no IPv6 range")));
        assert_eq!(rig.metric("headgate_agent_degraded_modes"), 1.0);
        eventually("headgatectl agents shows it", || {
            let said = rig.headgatectl(&["agents"])?;
            if said.contains("node-a: degraded: ") && said.contains("no IPv6 range") { Ok(()) } else { Err(said) }
        });
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
    until_told(&rig, "what is missing and how to get it", |told| {
        told.len() == 1 && told[0].contains("IPv6 is off on this node") && told[0].contains("disable_ipv6=0")
    });
    rig.remove("more");
    until_up_to_date(&rig);
}

#[test]
fn a_node_port_that_answers_nowhere_is_to_be_fixed_and_only_while_there_is_one() {
    let rig = serving_v4();
    let _agent = rig.agent(&["--nodeport-addresses=198.18.0.0/24"]);
    until_told(&rig, "the range that is not the node's", |told| {
        told.len() == 1 && told[0].contains("nodePortAddresses selects no IPv4 address of this node")
    });
    let plain = service_v4("web", 10, "").replace("  type: NodePort\n", "").replace(", nodePort: 30010", "");
    assert!(!plain.contains("30010"), "{plain}");
    rig.put("web", &plain);
    until_up_to_date(&rig);
}
