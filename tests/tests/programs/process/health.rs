use super::rig::{Rig, eventually, node, service, slice};

// rows: 105
#[test]
fn row_105_healthz_and_livez_answer_before_and_after_the_first_sync() {
    let rig = Rig::new();
    // There is no control plane, so no change waits and a restart would not help. Therefore /livez
    // succeeds. The node has no rules, so load balancers must not send requests to the node.
    // Therefore /healthz fails. kube-proxy serves neither page before kube-proxy has read its Node.
    let agent = rig.agent(&[]);
    let found = rig.until_health("/livez", 200);
    assert_eq!(found["healthy"], true);
    assert_eq!(found["lastUpdated"], found["currentTime"]);
    assert_eq!(found.get("status"), None, "{found}");
    let found = rig.until_health("/healthz", 503);
    assert_eq!(found["healthy"], true);
    assert_eq!(found["nodeEligible"], true);
    assert_eq!(found["lastUpdated"], "0001-01-01T00:00:00Z");
    assert_eq!(found.get("status"), None, "{found}");
    let found = rig.until_health("/livez", 200);
    assert!(found.get("nodeEligible").is_none(), "{found}");
    assert_eq!(rig.health("/other").unwrap().0, 404);
    // The metrics page may start later than the health pages.
    rig.until_metric("kubeproxy_proxy_livez_total{code=\"200\"}", |count| count >= 2.0);
    drop(agent);

    let rig = Rig::web(10);
    let _agent = rig.agent(&[]);
    rig.until_programmed();
    let found = rig.until_health("/healthz", 200);
    assert_eq!((&found["healthy"], found["status"].as_object().unwrap().len()), (&true.into(), 2), "{found}");
    for family in ["IPv4", "IPv6"] {
        assert_eq!(found["status"][family]["healthy"], true, "{found}");
        // Both times come from one clock and have one format, so they can be compared as text.
        assert!(found["status"][family]["lastUpdated"].as_str() <= found["currentTime"].as_str(), "{found}");
    }
}

// rows: 105
#[test]
fn row_105_pages_at_0_0_0_0_answer_over_both_families_as_kube_proxys_do() {
    let rig = Rig::new();
    let both = |port: u16| {
        for address in ["127.0.0.1", "192.0.2.11", "[::1]", "[2001:db8::11]"] {
            let address = format!("{address}:{port}");
            eventually(&address, || rig.get_at(&address, "/healthz"));
        }
    };
    let agent = rig.agent(&[]);
    both(10256);
    // By default, the agent serves metrics on 127.0.0.1, and not on ::1.
    assert!(rig.get_at("[::1]:10249", "/healthz").is_err());
    assert!(agent.terminate().0.success());
    // An explicit 0.0.0.0 or [::] also serves both families. --bind-address-hard-fail would end the
    // agent if a bind failed.
    for everywhere in ["0.0.0.0", "[::]"] {
        let [healthz, metrics] =
            ["healthz-bind-address", "metrics-bind-address"].map(|flag| format!("--{flag}={everywhere}"));
        let agent = rig.agent(&[&format!("{healthz}:10256"), &format!("{metrics}:10249"), "--bind-address-hard-fail"]);
        both(10256);
        both(10249);
        assert!(agent.terminate().0.success());
    }
}

// rows: 105
#[test]
fn row_105_pages_at_0_0_0_0_answer_on_a_host_without_ipv6() {
    let rig = Rig::new();
    let answers = || eventually("the page is served", || rig.get_at("192.0.2.11:10256", "/healthz"));
    let agent = rig.agent_without_ipv6_sockets(&["--proxy-mode=", "--bind-address-hard-fail"]);
    answers();
    assert!(rig.get_at("[2001:db8::11]:10256", "/healthz").is_err());
    assert!(agent.terminate().0.success());
    rig.set_parameter("net/ipv6/conf/all/disable_ipv6", "1");
    let _agent = rig.agent(&["--bind-address-hard-fail"]);
    answers();
}

// rows: 105
#[test]
fn row_105_a_restarted_agent_with_its_rules_in_place_is_healthy_without_a_control_plane() {
    let mut rig = Rig::web(10);
    let folder = tempfile::tempdir().unwrap();
    let folder = format!("--state-dir={}", folder.path().display());
    let agent = rig.agent(&[&folder]);
    rig.until_programmed();
    assert!(agent.terminate().0.success());
    rig.stop_control_plane();
    // The state is saved. Rules that may be newer than the file stay, as after a crash.
    for is_saved in [true, false] {
        let run = format!("{}/run", folder.trim_start_matches("--state-dir="));
        assert_eq!(std::fs::read_to_string(&run).unwrap().trim_end(), "saved");
        if !is_saved {
            std::fs::copy("/proc/sys/kernel/random/boot_id", &run).unwrap();
        }
        let agent = rig.agent(&[&folder]);
        rig.until_health("/healthz", 200);
        let stay = agent.log().contains("the rules of the last run are in place");
        assert_eq!(stay, !is_saved, "{}", agent.log());
        assert!(agent.terminate().0.success());
    }
    // The rules are missing, as after a reboot. The agent programs the state from disk.
    rig.flush("iptables-nft");
    rig.flush("ip6tables-nft");
    let _agent = rig.agent(&[&folder]);
    rig.until_health("/healthz", 200);
    // The last state is programmed.
    rig.until_rule("nat", "ns/web:http");
}

// rows: 105
#[test]
fn row_105_a_family_that_the_node_lacks_is_not_on_the_health_pages() {
    let rig = Rig::web(10);
    rig.set_parameter("net/ipv6/conf/all/disable_ipv6", "1");
    let agent = rig.agent(&["--iptables-sync-period=1s"]);
    rig.until_programmed();
    assert!(agent.log().contains("IPv6 is off on this node"), "{}", agent.log());
    let families = |page: &serde_json::Value| page["status"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let found = rig.until_health("/healthz", 200);
    assert_eq!(families(&found), ["IPv4"], "{found}");
    assert_eq!(rig.metric("kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"}"), 0.0);
    // The missing family does not make the node unhealthy after later changes.
    rig.put("more", &service("more", 20, ""));
    rig.until_rule("filter", "ns/more:http");
    assert_eq!(families(&rig.until_health("/livez", 200)), ["IPv4"]);
}

// rows: 105, 109
#[test]
fn row_105_the_metrics_port_serves_and_counts_the_ping_health_check() {
    let rig = Rig::new();
    let _agent = rig.agent(&[]);
    let ok = |body: &str| Ok((200, body.to_owned()));
    eventually("the page is served", || rig.page("/healthz"));
    assert_eq!(rig.delete("/metrics/slis"), ok("metrics reset\n"));
    assert_eq!(rig.page("/metrics/slis"), ok(""));
    assert_eq!(rig.page("/healthz"), ok("ok"));
    assert_eq!(rig.page("/healthz/ping"), ok("ok"));
    assert_eq!(rig.page("/healthz?verbose"), ok("[+]ping ok\nhealthz check passed\n"));
    let found = rig.page("/healthz?verbose&exclude=ping&exclude=etcd&exclude=%2Fb");
    let warning = "warn: some health checks cannot be excluded: no matches for \"/b\",\"etcd\"\n";
    assert_eq!(found, ok(&format!("[+]ping excluded: ok\n{warning}healthz check passed\n")));
    assert_eq!(rig.page("/healthz/etcd").unwrap().0, 404);
    let (code, body) = rig.page("/metrics/slis").unwrap();
    assert_eq!(code, 200);
    for sample in [
        "kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1",
        "kubernetes_healthchecks_total{name=\"ping\",type=\"healthz\",status=\"success\"} 2",
    ] {
        assert!(body.lines().any(|line| line == sample), "{sample} is not in\n{body}");
    }
}

// rows: 106, 94
#[test]
fn row_106_a_change_that_waits_too_long_makes_its_family_unhealthy_until_it_is_programmed() {
    let rig = Rig::web(10);
    rig.make_breakable("ip6tables-nft-restore");
    let _agent = rig.agent(&["--iptables-sync-period=1s", "--cluster-cidr=10.244.0.0/16"]);
    rig.until_programmed();
    rig.break_tool("ip6tables-nft-restore");
    // No change waits, so the node is healthy although `ip6tables-nft-restore` is broken.
    assert_eq!(rig.health("/livez").unwrap().0, 200);
    rig.put("more", &service("more", 20, ""));
    // On a busy machine, IPv4 may be unhealthy for a moment, too.
    let found = eventually("only IPv6 is unhealthy", || match rig.health("/livez")? {
        (503, body) if body["status"]["IPv4"]["healthy"] == true => Ok(body),
        (found, body) => Err(format!("{found} {body}")),
    });
    assert_eq!(found["healthy"], false);
    assert_eq!(found["status"]["IPv6"]["healthy"], false, "{found}");
    assert_eq!(rig.health("/healthz").unwrap().0, 503);
    let failures = "kubeproxy_sync_proxy_rules_iptables_restore_failures_total{ip_family=\"IPv6\"}";
    rig.until_metric(failures, |failures| failures >= 1.0);
    assert_eq!(rig.metric("kubeproxy_sync_proxy_rules_iptables_restore_failures_total{ip_family=\"IPv4\"}"), 0.0);
    rig.until_metric("kubeproxy_proxy_livez_total{code=\"503\"}", |count| count >= 1.0);
    // The agent has programmed IPv4 although IPv6 fails.
    rig.until_rule("filter", "ns/more:http");
    rig.mend_tool("ip6tables-nft-restore");
    rig.until_health("/livez", 200);
    let is_there = |rules: &[String]| rules.iter().any(|rule| rule.contains("ns/more:http"));
    rig.until_rules_of("ip6tables-nft-save", "everything is programmed again", "filter", is_there);
    let full = "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"}";
    rig.until_metric(full, |count| count >= 1.0);
}

// rows: 106
#[test]
fn row_106_a_family_that_is_broken_from_the_start_is_unhealthy_after_two_sync_periods() {
    let rig = Rig::web(10);
    for tool in ["iptables-nft-restore", "ip6tables-nft-restore"] {
        rig.make_breakable(tool);
        rig.break_tool(tool);
    }
    let _agent = rig.agent(&["--iptables-sync-period=1s"]);
    let found = rig.until_health("/livez", 503);
    assert_eq!(found["healthy"], false, "{found}");
    assert_eq!(rig.health("/healthz").unwrap().0, 503);
    for tool in ["iptables-nft-restore", "ip6tables-nft-restore"] {
        rig.mend_tool(tool);
    }
    rig.until_health("/livez", 200);
    rig.until_health("/healthz", 200);
}

// rows: 67
#[test]
fn row_67_health_check_node_ports_fail_while_the_proxy_is_unhealthy() {
    let balanced = "  type: LoadBalancer\n  externalTrafficPolicy: Local\n  healthCheckNodePort: 31500\n";
    let service_text = service("web", 10, "").replace("  type: NodePort\n", balanced);
    let rig =
        Rig::serving(&[("node", node("")), ("web", service_text), ("web-1", slice("web", &[("node-a", 10)], ""))]);
    rig.make_breakable("ip6tables-nft-restore");
    let _agent = rig.agent(&["--iptables-sync-period=1s"]);
    let until = |code: u16, is_healthy: bool| {
        eventually(&format!("the port answers {code}"), || {
            let (found, body) = rig.get(31_500, "/")?;
            let body: serde_json::Value = serde_json::from_str(&body).map_err(|error| error.to_string())?;
            let is_so = found == code && body["serviceProxyHealthy"] == is_healthy && body["localEndpoints"] == 1;
            if is_so { Ok(()) } else { Err(format!("{found} {body}")) }
        });
    };
    until(200, true);
    rig.break_tool("ip6tables-nft-restore");
    rig.put("more", &service("more", 20, ""));
    until(503, false);
    rig.mend_tool("ip6tables-nft-restore");
    until(200, true);
}

// rows: 107
#[test]
fn row_107_only_healthz_fails_for_a_node_that_is_about_to_be_deleted() {
    let rig = Rig::web(10);
    let _agent = rig.agent(&[]);
    rig.until_programmed();
    assert_eq!(rig.until_health("/healthz", 200)["nodeEligible"], true);
    rig.put("node", &node("taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]"));
    let found = rig.until_health("/healthz", 503);
    assert_eq!((&found["nodeEligible"], &found["healthy"]), (&false.into(), &true.into()), "{found}");
    assert_eq!(rig.health("/livez").unwrap().0, 200);
    rig.put("node", &node(""));
    rig.until_health("/healthz", 200);
    rig.remove("node");
    rig.until_health("/healthz", 503);
    assert_eq!(rig.health("/livez").unwrap().0, 200);
}
