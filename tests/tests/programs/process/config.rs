use super::rig::{Rig, eventually, node};

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

// rows: 110
#[test]
fn row_110_unknown_fields_are_only_warnings_and_the_file_overrides_flags() {
    let rig = Rig::web(10);
    let body = "hostnameOverride: other\niptables: {masqueradeAll: true, masqueradeBit: 5, foo: 1}\nipvs: {scheduler: rr}\nmode: ''\nmode: iptables\n\
                clientConnection: {kubeconfig: /var/lib/kube-proxy/kubeconfig.conf}\n";
    let file = rig.write("config.yaml", &format!("{HEAD}{body}"));
    let agent =
        rig.agent(&[&format!("--config={}", file.display()), "--cluster-cidr=10.0.0.0/8", "--masquerade-all=false"]);
    rig.until_programmed();
    let log = agent.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("have no effect in Headgate")).collect();
    assert_eq!(warnings.len(), 1, "{log}");
    for part in [
        "iptables.foo (unknown)",
        "mode (appears more than once",
        "ipvs.scheduler (not used while mode is iptables)",
        "clientConnection.kubeconfig (the agent holds no API credentials",
        "--cluster-cidr (--config is given",
        "--masquerade-all (--config is given",
    ] {
        assert!(warnings[0].contains(part), "{part} is not in {}", warnings[0]);
    }
    // `--node-name` overrides `hostnameOverride`.
    assert!(log.contains("node=node-a"), "{log}");
    let rules = rig.rules("iptables-nft-save", "nat");
    assert!(rules.iter().any(|rule| rule.contains("--set-xmark 0x20/0x20")), "{rules:?}");
    let masqueraded = |rule: &String| rule.starts_with("-A KUBE-SVC") && rule.ends_with("-j KUBE-MARK-MASQ");
    assert!(rules.iter().any(|rule| masqueraded(rule) && !rule.contains("! -s")), "{rules:?}");
}

// rows: 110
#[test]
fn row_110_all_invalid_values_are_reported_at_once() {
    let rig = Rig::new();
    let file = rig
        .write("config.yaml", &format!("{HEAD}iptables: {{masqueradeBit: 99, syncPeriod: 0x}}\nclusterCIDR: here\n"));
    let (status, log) = rig.agent(&[&format!("--config={}", file.display())]).ended();
    assert_eq!(status.code(), Some(1));
    for part in ["iptables.masqueradeBit: 99", "iptables.syncPeriod: \"0x\"", "clusterCIDR: \"here\" is not a CIDR"] {
        assert!(log.contains(part), "{part} is not in {log}");
    }
    let (status, log) = rig
        .agent(&["--nodeport-addresses=10.0.0.1", "--pod-bridge-interface=", "--detect-local-mode=BridgeInterface"])
        .ended();
    assert_eq!(status.code(), Some(1));
    assert!(
        log.contains("--nodeport-addresses: \"10.0.0.1\" is not a CIDR")
            && log.contains("--pod-bridge-interface: is needed"),
        "{log}"
    );
}

#[test]
fn invalid_arguments_are_reported_once_and_change_nothing() {
    let rig = Rig::new();
    let parameter = "net/netfilter/nf_conntrack_tcp_timeout_close_wait";
    let before = rig.parameter(parameter);
    for (arguments, said) in [
        (["--control-plane=http://10.0.0.1:7443", "--log=info"], "would be plaintext"),
        (["--control-plane=https://10.0.0.1:7443", "--log=info"], "needs --tls-cert"),
        (["--control-plane=https://10.0.0.1:7443", "--node-name=a b"], "is not a DNS name"),
        (["--control-plane=https://10.0.0.1:7443", "--log=a=b"], "error parsing level filter"),
    ] {
        let (status, log) = rig.run_agent(&arguments);
        assert_eq!((status.code(), log.matches(said).count()), (Some(1), 1), "{arguments:?}: {log}");
        assert_eq!(rig.parameter(parameter), before, "{arguments:?}: {log}");
    }
}

// rows: 110
#[test]
fn row_110_the_defaults_can_be_written_and_used() {
    let rig = Rig::new();
    let file = rig.path("defaults.yaml");
    let (status, log) = rig.run_agent(&[&format!("--write-config-to={}", file.display())]);
    assert!(status.success(), "{log}");
    let written = std::fs::read_to_string(&file).unwrap();
    assert!(written.contains("kind: KubeProxyConfiguration") && written.contains("oomScoreAdj: -999"), "{written}");
    let agent = rig.agent(&[&format!("--config={}", file.display())]);
    rig.until_health("/livez", 200);
    assert!(!agent.log().contains("have no effect"), "{}", agent.log());
}

// rows: 111
#[test]
fn row_111_the_process_ends_when_its_configuration_is_edited_and_the_rules_stay() {
    let rig = Rig::web(10);
    let file = rig.write("config.yaml", &format!("{HEAD}mode: iptables\n"));
    let agent = rig.agent(&[&format!("--config={}", file.display())]);
    rig.until_programmed();
    let before = rig.rules("iptables-nft-save", "nat");
    rig.write("config.yaml", &format!("{HEAD}mode: iptables\niptables: {{masqueradeAll: true}}\n"));
    let (status, log) = agent.ended();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("config.yaml was edited"), "{log}");
    let rules = |save: Vec<String>| save.into_iter().filter(|line| line.starts_with("-A")).collect::<Vec<_>>();
    assert_eq!(rules(rig.rules("iptables-nft-save", "nat")), rules(before));
}

// rows: 111
#[test]
fn row_111_changed_pod_ranges_are_applied_without_a_restart() {
    let rig = Rig::web_with(10, node("podCIDRs: [10.244.1.0/24, \"fd00:244:1::/64\"]"), "");
    let mut agent = rig.agent(&["--detect-local-mode=NodeCIDR"]);
    let detects =
        |range: &'static str| move |rules: &[String]| rules.iter().any(|rule| rule.contains(&format!("! -s {range}")));
    rig.until_rules("the rules detect pods by the node's range", "nat", detects("10.244.1.0/24"));
    rig.put("node", &node("podCIDRs: [10.244.9.0/24, \"fd00:244:1::/64\"]"));
    let rules = rig.until_rules("the rules detect pods by the new range", "nat", detects("10.244.9.0/24"));
    assert!(!rules.iter().any(|rule| rule.contains("10.244.1.0/24")), "{rules:?}");
    // Without a pod range, the agent cannot detect pods. The agent reports the missing range, and
    // forwarding continues.
    rig.put("node", &node(""));
    let is_undetected = |rules: &[String]| !rules.iter().any(|rule| rule.contains("! -s 10.244"));
    rig.until_rules("the rules without a range detect no pods", "nat", is_undetected);
    eventually("the page reports the missing range", || {
        let (_, page) = rig.page("/status")?;
        if page.contains("the Node has no IPv4 range among its podCIDRs") { Ok(()) } else { Err(page) }
    });
    assert!(agent.is_running());
}

// rows: 110
#[test]
fn row_110_an_address_in_use_ends_the_process_only_with_bind_address_hard_fail() {
    let rig = Rig::new();
    let _other = rig.listen(10256);
    let (status, log) = rig.agent(&["--bind-address-hard-fail"]).ended();
    assert_eq!(status.code(), Some(1));
    assert!(log.contains("cannot serve /healthz and /livez on 0.0.0.0:10256"), "{log}");
    let mut second = rig.agent(&[]);
    second.until_logged("cannot serve /healthz and /livez; trying again");
    assert!(second.is_running());
    assert!(second.terminate().0.success());
}
