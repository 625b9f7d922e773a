use super::rig::{Rig, eventually, node, service, slice};

fn start() -> Rig {
    let local = "  internalTrafficPolicy: Local\n";
    Rig::serving(&[
        ("node", node("")),
        ("web", service("web", 10, "")),
        ("web-1", slice("web", &[("node-a", 10), ("node-b", 11)], "")),
        ("local", service("local", 20, local)),
        ("local-1", slice("local", &[("node-b", 20)], "")),
    ])
}

// rows: 108
#[test]
fn row_108_the_mode_and_the_configuration_are_shown() {
    let rig = Rig::new();
    let _agent = rig.agent(&["--masquerade-all", "--cluster-cidr=10.244.0.0/16"]);
    let found = eventually("the page is served", || rig.page("/proxyMode"));
    assert_eq!(found, (200, "iptables".to_owned()));
    let (code, body) = rig.page("/configz").unwrap();
    let found: serde_json::Value = serde_json::from_str(&body).unwrap();
    let config = &found["kubeproxy.config.k8s.io"];
    assert_eq!(code, 200);
    assert_eq!(config["kind"], "KubeProxyConfiguration");
    assert_eq!(config["iptables"]["masqueradeAll"], true);
    assert_eq!(config["iptables"]["syncPeriod"], "30s");
    assert_eq!(config["clusterCIDR"], "10.244.0.0/16");
}

// rows: 109
#[test]
fn row_109_metrics_have_kube_proxys_names_and_agree_with_the_kernel() {
    let rig = start();
    let _agent = rig.agent(&[]);
    rig.until_programmed();
    for table in ["nat", "filter"] {
        let rules = rig.rules("iptables-nft-save", table);
        let count = rules.iter().filter(|rule| rule.starts_with("-A ")).count();
        let metric = format!("kubeproxy_sync_proxy_rules_iptables_total{{ip_family=\"IPv4\",table=\"{table}\"}}");
        rig.until_metric(&metric, |value| value == f64::from(u32::try_from(count).unwrap()));
    }
    let no_local = |policy: &str| {
        format!("kubeproxy_sync_proxy_rules_no_local_endpoints_total{{ip_family=\"IPv4\",traffic_policy=\"{policy}\"}}")
    };
    assert_eq!(rig.metric(&no_local("internal")), 1.0);
    assert_eq!(rig.metric(&no_local("external")), 0.0);
    assert_eq!(rig.metric("kubeproxy_sync_proxy_rules_service_changes_total"), 2.0);
    assert_eq!(rig.metric("kubeproxy_sync_proxy_rules_endpoint_changes_total"), 3.0);
    assert_eq!(rig.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending"), 0.0);
    assert!(rig.metric("kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"}") > 0.0);
    assert!(rig.metric("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv4\"}") > 0.0);
    assert!(rig.metric("kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}") >= 1.0);

    rig.put("local-1", &slice("local", &[("node-a", 20)], ""));
    rig.until_metric(&no_local("internal"), |value| value == 0.0);
    rig.until_metric("kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}", |n| n >= 1.0);
}

// rows: 109
#[test]
fn row_109_metrics_are_served_in_the_requested_format() {
    let rig = Rig::new();
    let _agent = rig.agent(&[]);
    eventually("the page is served", || rig.page("/metrics"));
    let counter = "kubeproxy_sync_proxy_rules_service_changes";
    let type_line = |name: &str| format!("# TYPE {name} counter\n");
    // Both Accept headers select the Prometheus text format, which is also kube-proxy's default.
    for accept in ["*/*", "text/plain;version=0.0.4;q=0.3"] {
        let (content_type, text) = rig.metrics_for(accept);
        assert_eq!(content_type, "text/plain; version=0.0.4; charset=utf-8");
        assert!(text.contains(&type_line(&format!("{counter}_total"))) && !text.contains("# EOF"), "{text}");
    }
    let (content_type, text) = rig.metrics_for("text/plain;q=0.3, application/openmetrics-text;version=1.0.0;q=0.5");
    assert!(content_type.starts_with("application/openmetrics-text; version=1.0.0"), "{content_type}");
    assert!(text.contains(&type_line(counter)) && text.ends_with("# EOF\n"), "{text}");
    // The process metrics that kube-proxy's dashboards show.
    assert!(rig.metric("process_resident_memory_bytes") > 1e6);
    rig.until_metric("process_cpu_seconds_total", |seconds| seconds > 0.0);
}

// rows: 109
#[test]
fn row_109_programming_latency_counts_changes_with_a_trigger_time_since_the_start() {
    const COUNT: &str = "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"}";
    let annotation =
        |time: &str| format!("  annotations: {{endpoints.kubernetes.io/last-change-trigger-time: \"{time}\"}}\n");
    let rig = start();
    let _agent = rig.agent(&[]);
    rig.until_programmed();
    // The trigger time is before the start of the process, so the change does not count.
    rig.put("web-1", &slice("web", &[("node-a", 10)], &annotation("2024-01-01T00:00:00Z")));
    rig.until_rules("the change is programmed", "nat", |rules| !rules.iter().any(|rule| rule.contains("10.244.1.11")));
    assert_eq!(rig.metric(COUNT), 0.0);
    rig.put("web-1", &slice("web", &[("node-a", 10), ("node-a", 12)], &annotation("2999-01-01T00:00:00Z")));
    rig.until_metric(COUNT, |count| count == 1.0);
    // A removal does not count.
    rig.put("web-1", &slice("web", &[("node-a", 10)], &annotation("2999-01-02T00:00:00Z")));
    rig.until_rules("the removal is programmed", "nat", |rules| !rules.iter().any(|rule| rule.contains("10.244.1.12")));
    assert_eq!(rig.metric(COUNT), 1.0);
}

// rows: 108
#[test]
fn row_108_statusz_and_flagz_are_served_as_text_and_can_be_turned_off_by_their_gates() {
    let rig = Rig::new();
    let agent =
        rig.agent(&["--masquerade_all", "--cluster_cidr=10.244.0.0/16", "--boot-id-file=/x", "--machine_id_file=/y"]);
    let (code, text) = eventually("the page is served", || rig.page("/statusz"));
    assert_eq!(code, 200, "{text}");
    assert!(
        text.starts_with("\nheadgate-node-agent statusz\nWarning: This endpoint is not meant to be machine parseable"),
        "{text}"
    );
    let line = |label: &str| {
        text.lines().find_map(|line| line.strip_prefix(label)).unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    assert!(line("Started: ").ends_with('Z') && line("Up: ").starts_with("0 hr 00 min "), "{text}");
    assert_eq!(line("Binary version: "), env!("CARGO_PKG_VERSION"));
    assert_eq!(line("Emulation version: "), "1.36");
    assert_eq!(line("Paths: "), "/configz /flagz /healthz /metrics /proxyMode /status");
    let (code, text) = rig.page("/flagz").unwrap();
    assert_eq!(code, 200, "{text}");
    assert!(text.starts_with("\nheadgate-node-agent flagz\nWarning: "), "{text}");
    for flag in [
        "masquerade-all=true",
        "cluster-cidr=10.244.0.0/16",
        "node-name=node-a",
        "insecure-loopback=true",
        "iptables-sync-period=30s",
        "boot-id-file=/x",
        "state-dir=",
        "tls-key=",
    ] {
        assert!(text.lines().any(|line| line == flag), "{flag} is not in\n{text}");
    }
    // Clients that ask only for a structured form get status 406.
    for accept in ["application/json", "application/yaml;as=Statusz;v=v1beta1;g=config.k8s.io"] {
        assert_eq!(rig.page_for("/statusz", accept).unwrap().0, 406);
    }
    assert_eq!(rig.page_for("/flagz", "text/plain, */*;q=0.1").unwrap().0, 200);
    assert!(agent.terminate().0.success());

    let _agent = rig.agent(&["--feature-gates=ComponentStatusz=false,ComponentFlagz=false"]);
    eventually("the page is served", || rig.page("/healthz"));
    assert_eq!(rig.page("/statusz").unwrap().0, 404);
    assert_eq!(rig.page("/flagz").unwrap().0, 404);
}

// rows: 109
#[test]
fn row_109_build_info_has_kube_proxys_labels() {
    let rig = Rig::new();
    let _agent = rig.agent(&[]);
    let (_, text) = eventually("the page is served", || rig.page("/metrics"));
    let sample =
        text.lines().find(|line| line.starts_with("kubernetes_build_info{")).unwrap_or_else(|| panic!("{text}"));
    let labels = sample.trim_start_matches("kubernetes_build_info{").trim_end_matches("} 1");
    let names: Vec<&str> = labels.split(',').map(|label| label.split('=').next().unwrap()).collect();
    let expected = [
        "build_date",
        "compiler",
        "git_commit",
        "git_tree_state",
        "git_version",
        "go_version",
        "major",
        "minor",
        "platform",
    ];
    assert_eq!(names, expected, "{sample}");
    assert!(sample.contains(&format!("git_version=\"v{}\"", env!("CARGO_PKG_VERSION"))), "{sample}");
    assert!(text.contains("# TYPE kubernetes_build_info gauge\n"), "{text}");
}
