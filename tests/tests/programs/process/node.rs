use super::rig::{Rig, eventually, node, service, slice};

fn web() -> Rig {
    Rig::web_with(10, node("podCIDRs: [10.244.1.0/24]"), "")
}

/// The conditions of the rules in KUBE-SERVICES that jump to KUBE-NODEPORTS.
fn node_port_jumps(rules: &[String]) -> Vec<String> {
    let jumps =
        rules.iter().filter(|rule| rule.starts_with("-A KUBE-SERVICES ") && rule.ends_with("-j KUBE-NODEPORTS"));
    jumps
        .map(|rule| rule.split(" -m comment").next().unwrap_or(rule).trim_start_matches("-A KUBE-SERVICES ").to_owned())
        .collect()
}

// rows: 47
#[test]
fn row_47_ranges_restrict_node_ports_and_follow_the_interfaces() {
    let rig = web();
    // The sync period is long, so only a notification makes the agent read the interfaces again.
    let _agent = rig.agent(&["--nodeport-addresses=192.0.2.0/24", "--iptables-sync-period=1h"]);
    let is_only = |addresses: &'static [&'static str]| {
        move |rules: &[String]| {
            let mut found = node_port_jumps(rules);
            found.sort();
            found == addresses.iter().map(|address| format!("-d {address}/32")).collect::<Vec<_>>()
        }
    };
    rig.until_rules("NodePorts on the one address", "nat", is_only(&["192.0.2.11"]));
    // No range is given for IPv6, so IPv6 node ports answer on every address.
    rig.until_rules_of("ip6tables-nft-save", "IPv6 NodePorts everywhere", "nat", |rules| {
        rules.iter().any(|rule| rule.ends_with("-j KUBE-NODEPORTS") && rule.contains("--dst-type LOCAL"))
    });
    rig.ip("addr add 192.0.2.12/24 dev uplink\n");
    rig.until_rules("NodePorts on the new address too", "nat", is_only(&["192.0.2.11", "192.0.2.12"]));
    rig.ip("addr del 192.0.2.12/24 dev uplink\n");
    rig.until_rules("NodePorts on the one address again", "nat", is_only(&["192.0.2.11"]));
}

/// The default is mode auto, which changes no outcome of mode iptables. Mode nftables by name has
/// the default of kube-proxy's mode nftables.
// rows: 46, 47
#[test]
fn row_47_node_ports_answer_on_every_address_unless_mode_nftables_is_asked_for_by_name() {
    let rig = web();
    rig.ip("addr add 192.0.2.12/24 dev uplink\n");
    for (mode, is_on_all) in [("--proxy-mode=", true), ("--proxy-mode=nftables", false)] {
        let agent = rig.agent(&[mode]);
        rig.until_programmed();
        eventually(mode, || {
            let listed = rig.node_port_addresses()?;
            let found = ["192.0.2.11", "192.0.2.12"].map(|address| listed.contains(address));
            if found == [true, is_on_all] { Ok(()) } else { Err(listed) }
        });
        assert_eq!(rig.page("/proxyMode").unwrap(), (200, "nftables".to_owned()));
        assert!(agent.terminate().0.success());
    }
}

// rows: 112, 47
#[test]
fn row_112_primary_is_the_internal_address_unless_the_operator_names_one() {
    let rig = web();
    let agent = rig.agent(&["--nodeport-addresses=primary"]);
    let is_at = |address: &'static str| move |rules: &[String]| node_port_jumps(rules) == [format!("-d {address}/32")];
    rig.until_rules("node ports on the InternalIP, and not on the ExternalIP", "nat", is_at("192.0.2.11"));
    rig.until_rules_of("ip6tables-nft-save", "node ports on the IPv6 InternalIP", "nat", |rules| {
        node_port_jumps(rules) == ["-d 2001:db8::11/128"]
    });
    assert!(agent.terminate().0.success());
    let _agent = rig.agent(&["--nodeport-addresses=primary", "--bind-address=203.0.113.5"]);
    rig.until_rules("node ports on the operator's address", "nat", is_at("203.0.113.5"));
}

// rows of iptables: 48
#[test]
fn row_48_node_ports_on_localhost_can_be_turned_off() {
    let rig = web();
    let agent = rig.agent(&[]);
    rig.until_programmed();
    assert_eq!(rig.parameter("net/ipv4/conf/all/route_localnet"), "1");
    assert!(agent.terminate().0.success());
    let (status, log) = rig.run_agent(&["--cleanup"]);
    assert!(status.success() && log.contains("route_localnet stays 1"), "{log}");
    let rig = web();
    let _agent = rig.agent(&["--iptables-localhost-nodeports=false"]);
    rig.until_programmed();
    let jumps = node_port_jumps(&rig.rules("iptables-nft-save", "nat"));
    assert_eq!(jumps, ["! -d 127.0.0.0/8"]);
    assert_eq!(rig.parameter("net/ipv4/conf/all/route_localnet"), "0");
    // `--init-only` sets the parameter before the agent starts, so that the agent needs fewer
    // privileges.
    for (argument, expected) in [
        ("--iptables-localhost-nodeports=false", "0"),
        ("--nodeport-addresses=192.0.2.0/24", "0"),
        ("--nodeport-addresses=127.0.0.0/8", "1"),
    ] {
        let (status, log) = rig.run_agent(&["--init-only", argument]);
        assert!(status.success(), "{log}");
        assert_eq!(rig.parameter("net/ipv4/conf/all/route_localnet"), expected, "{argument}");
        // The rules that protect 127.0.0.0/8 come before the parameter, and come once.
        let guards = || {
            let rules = rig.rules("iptables-nft-save", "filter");
            rules.into_iter().filter(|rule| rule.ends_with("-j KUBE-LOCALNET-GUARD")).count()
        };
        assert_eq!(guards(), if expected == "1" { 2 } else { 0 }, "{argument}");
        assert!(rig.run_agent(&["--init-only", argument]).0.success());
        assert_eq!(guards(), if expected == "1" { 2 } else { 0 }, "{argument}, again");
    }
}

// rows: 107, 112, 113
#[test]
fn row_107_a_deleted_node_keeps_its_addresses_and_pod_ranges_also_after_a_restart() {
    let rig = web();
    let state = rig.path("state");
    let state = format!("--state-dir={}", state.display());
    let arguments = ["--detect-local-mode=NodeCIDR", "--nodeport-addresses=primary", &state];
    let agent = rig.agent(&arguments);
    let has_both = |rules: &[String]| {
        let detects = |rule: &String| rule.contains("! -s 10.244.1.0/24") && rule.ends_with("-j KUBE-MARK-MASQ");
        node_port_jumps(rules) == ["-d 192.0.2.11/32"] && rules.iter().any(detects)
    };
    let has = |rules: &[String], name: &str| rules.iter().any(|rule| rule.contains(&format!("ns/{name}:http")));
    rig.until_rules("the Node's values are in the rules", "nat", has_both);
    rig.remove("node");
    rig.until_ineligible();
    rig.put("more", &service("more", 20, ""));
    rig.put("more-1", &slice("more", &[("node-a", 20)], ""));
    let rules = rig.until_rules("a change after the deletion", "nat", |rules| has(rules, "more"));
    assert!(has_both(&rules), "{rules:#?}");
    assert!(agent.terminate().0.success());

    rig.flush("iptables-nft");
    let _agent = rig.agent(&arguments);
    // The source has no Node, so the values come from the disk.
    rig.until_rules("the restarted agent's rules", "nat", |rules| has(rules, "more") && has_both(rules));
    rig.until_ineligible();
    rig.put("node", &node("podCIDRs: [10.244.7.0/24]"));
    rig.until_health("/healthz", 200);
    rig.until_rules("the new Node's range is in the rules", "nat", |rules| {
        rules.iter().any(|rule| rule.contains("! -s 10.244.7.0/24"))
            && !rules.iter().any(|rule| rule.contains("10.244.1.0/24"))
    });
}
