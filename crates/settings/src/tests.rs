#![allow(clippy::unwrap_used)]
use std::time::Duration;

use headgate_core::ipvs::Scheduler;

use super::*;

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

fn read(body: &str) -> Result<ConfigFile, ConfigError> {
    parse("config.yaml", format!("{HEAD}{body}"))
}

fn notes(notes: &[Remark]) -> Vec<String> {
    notes.iter().map(Remark::note).collect()
}

/// The configuration that kubeadm writes, with every field.
pub(super) const KUBEADM: &str = r#"
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection: {acceptContentTypes: "", burst: 0, contentType: "", kubeconfig: /var/lib/kube-proxy/kubeconfig.conf, qps: 0}
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack: {maxPerCore: null, min: null, tcpBeLiberal: false, tcpCloseWaitTimeout: null, tcpEstablishedTimeout: null, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"#;

#[test]
fn a_file_of_kubeadm_is_read_without_needless_notes() {
    let file = read(KUBEADM).unwrap();
    assert_eq!(notes(&file.notes), Vec::<String>::new());
    let settings = Settings::check(&file.raw).unwrap();
    let notes = notes(&settings.notes);
    assert_eq!(notes.len(), 1);
    assert!(notes[0].starts_with("clientConnection.kubeconfig (the agent holds no API"), "{notes:?}");
    let defaults = Settings::check(&Raw::default()).unwrap();
    assert_eq!(settings.conntrack, defaults.conntrack);
    assert_eq!(settings.healthz_bind_address, Some("0.0.0.0:10256".parse().unwrap()));
    assert_eq!((settings.sync_period, settings.masquerade_bit), (Duration::from_secs(30), 14));
    assert!(settings.localhost_node_ports);
}

#[test]
fn bits_after_the_prefix_of_ranges_are_cleared() {
    let ranges = "clusterCIDR: 10.244.1.5/16,fd00:10:244:1::5/48\nnodePortAddresses: [192.0.2.77/24]\nipvs: {excludeCIDRs: [198.18.7.9/24]}\n";
    let settings = Settings::check(&read(ranges).unwrap().raw).unwrap();
    assert_eq!(settings.detect_local, DetectLocal::ClusterCidr(networks(&["10.244.0.0/16", "fd00:10:244::/48"])));
    assert_eq!(settings.node_ports.cidrs, networks(&["192.0.2.0/24"]));
    assert_eq!(settings.ipvs.exclude_cidrs, networks(&["198.18.7.0/24"]));
}

#[test]
fn unknown_and_repeated_fields_and_fields_without_effect_are_named() {
    let file =
        read("mode: iptables\nmode: auto\nfoo: 1\niptables: {bar: 2, masqueradeAll: true}\niptables.syncPeriod: 7s\nipvs: {scheduler: rr}\n")
            .unwrap();
    let expected = [
        "mode (appears more than once; the last value is used)",
        "foo (unknown)",
        "iptables.bar (unknown)",
        "iptables.syncPeriod (unknown)",
    ];
    assert_eq!(notes(&file.notes), expected);
    let settings = Settings::check(&file.raw).unwrap();
    assert_eq!((settings.mode, settings.sync_period), (ProxyMode::Auto, Duration::from_secs(30)));
    assert!(settings.masquerade_all);
    assert_eq!(notes(&settings.notes), ["ipvs.scheduler (not used while mode is auto)"]);
}

#[test]
fn mode_ipvs_has_its_own_settings_and_periods() {
    let file = read(
        "mode: ipvs\niptables: {syncPeriod: 7s}\nipvs: {scheduler: wlc, excludeCIDRs: [192.0.2.0/24], strictARP: true, syncPeriod: 9s, \
         tcpTimeout: 15m, tcpFinTimeout: 2m, udpTimeout: 5m}\n",
    );
    let settings = Settings::check(&file.unwrap().raw).unwrap();
    assert_eq!((settings.mode, settings.sync_period), (ProxyMode::Ipvs, Duration::from_secs(9)));
    assert_eq!(notes(&settings.notes), ["iptables.syncPeriod (not used while mode is ipvs)"]);
    let expected = IpvsSettings {
        scheduler: Scheduler::WeightedLeastConnection,
        exclude_cidrs: vec!["192.0.2.0/24".parse().unwrap()],
        strict_arp: true,
        tcp_timeout: Duration::from_secs(900),
        tcp_fin_timeout: Duration::from_secs(120),
        udp_timeout: Duration::from_secs(300),
    };
    assert_eq!(settings.ipvs, expected);
    let wrong =
        read("mode: ipvs\nipvs: {scheduler: best, excludeCIDRs: [here], minSyncPeriod: 1m}\n").unwrap_err().to_string();
    for part in [
        "ipvs.scheduler: \"best\" is not a scheduler",
        "ipvs.excludeCIDRs: \"here\" is not a CIDR",
        "ipvs.minSyncPeriod: must not be more",
    ] {
        assert!(wrong.contains(part), "{part} is not in {wrong}");
    }
}

#[test]
fn fields_of_mode_iptables_do_not_apply_to_a_file_with_mode_nftables() {
    let check = |body: &str| Settings::check(&read(body).unwrap().raw).unwrap();
    let settings = check("mode: nftables\niptables: {masqueradeAll: true, syncPeriod: 7s, minSyncPeriod: 3s}\n");
    assert_eq!((settings.masquerade_all, settings.sync_period), (false, Duration::from_secs(30)));
    assert_eq!(settings.min_sync_period, Duration::ZERO);
    assert_eq!(
        notes(&settings.notes),
        ["masqueradeAll", "syncPeriod", "minSyncPeriod"]
            .map(|field| format!("iptables.{field} (not used while mode is nftables)"))
    );
    let nftables = "nftables: {masqueradeAll: true, syncPeriod: 9s, minSyncPeriod: 2s, masqueradeBit: 5}\n";
    let settings = check(&format!("mode: nftables\n{nftables}"));
    assert_eq!((settings.masquerade_all, settings.sync_period), (true, Duration::from_secs(9)));
    assert_eq!(settings.min_sync_period, Duration::from_secs(2));
    assert!(!check(&format!("mode: ipvs\n{nftables}")).masquerade_all);
    for mode in ["auto", "iptables", "ipvs", "userspace"] {
        let body = format!("mode: {mode}\niptables: {{masqueradeAll: true}}\n");
        assert!(check(&body).masquerade_all, "{mode}");
    }
    assert!(check(&format!("mode: userspace\n{nftables}")).masquerade_all);
}

#[test]
fn flags_of_mode_iptables_apply_to_each_mode_except_ipvs() {
    let period = |seconds| value::show_duration(Duration::from_secs(seconds)).into();
    for (mode, seconds) in [("auto", 60), ("iptables", 60), ("nftables", 60), ("userspace", 60), ("ipvs", 30)] {
        let mut raw = Raw::default();
        raw.set("mode", mode.into());
        raw.set("iptables.masqueradeAll", true.into());
        raw.set("iptables.syncPeriod", period(60));
        raw.set("iptables.minSyncPeriod", period(3));
        let settings = Settings::check(&raw).unwrap();
        assert!(settings.masquerade_all, "{mode}");
        assert_eq!(settings.sync_period, Duration::from_secs(seconds), "{mode}");
        assert_eq!(settings.min_sync_period.is_zero(), mode == "ipvs", "{mode}");
        if mode == "nftables" {
            let expected = serde_json::json!(
                {"masqueradeAll": true, "masqueradeBit": 14, "syncPeriod": "1m0s", "minSyncPeriod": "3s"}
            );
            assert_eq!(settings.document["nftables"], expected);
        }
        raw.set("iptables.syncPeriod", period(1));
        let problems = Settings::check(&raw).err().unwrap_or_default();
        let expected = (mode != "ipvs").then_some("--iptables-min-sync-period");
        assert_eq!(problems.first().map(|problem| problem.setting.as_str()), expected, "{mode}");
    }
}

#[test]
fn every_problem_is_named_with_its_field_and_the_remedy() {
    let body = "iptables: {masqueradeBit: 40, syncPeriod: 30}\nconntrack: {min: -1}\nclusterCIDR: nonsense\noomScoreAdj: 2000\n\
                nodePortAddresses: [primary, everything]\ndetectLocal: 5\nmode: fast\nhealthzBindAddress: here\n";
    let error = read(body).unwrap_err().to_string();
    let lines: Vec<&str> = error.lines().collect();
    let expected = [
        "config.yaml cannot be used:",
        "  conntrack.min: -1 cannot be used; write a whole number of at least 0",
        "  detectLocal: 5 cannot be used; write a mapping",
        "  iptables.masqueradeBit: 40 cannot be used; write a whole number from 0 to 31",
        "  iptables.syncPeriod: 30 cannot be used; write a duration such as 250ms, 30s, 1m0s or 24h",
        "  mode: \"fast\" cannot be used; write one of auto, iptables, ipvs, nftables, userspace",
        "  oomScoreAdj: 2000 cannot be used; write a whole number from -1000 to 1000",
        "  healthzBindAddress: \"here\" is not an address with a port; write one such as 0.0.0.0:10256",
        "  clusterCIDR: \"nonsense\" is not a CIDR; write one such as 10.0.0.0/8",
        "  nodePortAddresses: \"everything\" is not a CIDR; write one such as 10.0.0.0/8",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn other_kinds_and_invalid_yaml_are_refused() {
    let error = parse("c", "apiVersion: v1\nkind: ConfigMap\n".into()).unwrap_err().to_string();
    assert!(error.contains("apiVersion: \"v1\" cannot be used; write kubeproxy.config.k8s.io/v1alpha1"), "{error}");
    assert!(error.contains("kind: \"ConfigMap\" cannot be used; write KubeProxyConfiguration"), "{error}");
    assert!(parse("c", "[1".into()).unwrap_err().to_string().starts_with("c is not YAML: "));
    assert!(parse("c", "just text".into()).unwrap_err().to_string().contains("not a mapping"));
    assert!(parse("c", String::new()).unwrap_err().to_string().contains("apiVersion: missing; write kubeproxy"));
    let two = format!("kind: ClusterConfiguration\n---\n{HEAD}");
    let expected = "c holds several YAML documents; keep only the document of kind KubeProxyConfiguration";
    assert_eq!(parse("c", two).unwrap_err().to_string(), expected);
}

#[test]
fn zero_is_a_value_in_fields_that_are_pointers_in_the_api() {
    let file = read("conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s}\niptables: {masqueradeBit: 0, localhostNodePorts: false}\n").unwrap();
    let settings = Settings::check(&file.raw).unwrap();
    assert_eq!((settings.conntrack.max_per_core, settings.conntrack.tcp_established_timeout), (0, Duration::ZERO));
    assert_eq!((settings.masquerade_bit, settings.localhost_node_ports), (0, false));
}

proptest::proptest! {
    #[test]
    fn any_value_of_any_field_is_accepted_or_refused_by_name(
        index in 0..fields::FIELDS.len(),
        value in proptest::sample::select(vec![
            "null", "true", "0", "-7", "1.5", "text", "10.0.0.0/8", "30s", "[a, b]", "{a: b}", "[{a: [1]}]", "''",
        ]),
    ) {
        let path = fields::FIELDS[index].path;
        if let Some((section, name)) = path.split_once('.').or(Some(("", path))).filter(|_| !path.is_empty()) {
            let body = if section.is_empty() { format!("{name}: {value}\n") } else { format!("{section}: {{{name}: {value}}}\n") };
            if let Err(error) = read(&body) {
                // A valid value may require another field, which the error then names.
                proptest::prop_assert!(error.to_string().contains(path) || error.to_string().contains("detectLocal"), "{error}");
            }
        }
    }
}

fn networks(list: &[&str]) -> Vec<ipnet::IpNet> {
    list.iter().map(|network| network.parse().unwrap()).collect()
}

// rows: 47
#[test]
fn row_47_without_node_port_addresses_only_mode_nftables_by_name_uses_the_nodes_own_addresses() {
    let check = |body: &str| {
        let settings = Settings::check(&read(body).unwrap().raw).unwrap();
        (settings.node_ports, settings.document["nodePortAddresses"].clone())
    };
    for body in ["", "mode: auto\n", "mode: iptables\n", "mode: ipvs\n"] {
        assert_eq!(check(body), (NodePortSelector::default(), serde_json::json!([])), "{body}");
    }
    let primary = NodePortSelector { primary: true, cidrs: Vec::new() };
    assert_eq!(check("mode: nftables\n"), (primary, serde_json::json!(["primary"])));
    let all = NodePortSelector { primary: false, cidrs: networks(&["0.0.0.0/0", "::/0"]) };
    assert_eq!(check("mode: nftables\nnodePortAddresses: [0.0.0.0/0, \"::/0\"]\n").0, all);
}

// rows: 47
#[test]
fn row_47_node_port_addresses_mix_words_and_ranges_as_in_kube_proxy_1_37() {
    let check = |list: &str| {
        let settings = Settings::check(&read(&format!("nodePortAddresses: [{list}]\n")).unwrap().raw).unwrap();
        let given: Vec<_> = list.split(", ").collect();
        assert_eq!(settings.document["nodePortAddresses"], serde_json::json!(given), "{list}");
        (settings.node_ports.primary, settings.node_ports.cidrs)
    };
    assert_eq!(check("primary"), (true, vec![]));
    assert_eq!(check("primary, localhost"), (true, networks(&["127.0.0.0/8", "::1/128"])));
    assert_eq!(check("10.0.0.0/8, primary"), (true, networks(&["10.0.0.0/8"])));
    assert_eq!(check("all, localhost, primary, 10.0.0.0/8").1.len(), 5);
    let names_loopback =
        |cidrs: &[&str]| NodePortSelector { primary: false, cidrs: networks(cidrs) }.names_ipv6_loopback();
    assert!(names_loopback(&["127.0.0.0/8", "::1/128"]));
    assert!(!names_loopback(&["127.0.0.0/8", "::/0", "fd00::/8"]));
}
