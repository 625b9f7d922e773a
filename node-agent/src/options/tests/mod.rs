#![allow(clippy::unwrap_used)]
mod document;

use std::time::Duration;

use super::*;
use headgate_settings::DetectLocal;

fn parse(arguments: &[&str]) -> Result<Options, String> {
    let head = ["headgate-node-agent"];
    Options::read(head.iter().chain(arguments)).map_err(|error| error.to_string())
}

fn settings(arguments: &[&str]) -> Settings {
    configured(arguments).settings
}

fn configured(arguments: &[&str]) -> Configured {
    read(arguments).unwrap()
}

fn refused(arguments: &[&str]) -> String {
    read(arguments).map(drop).unwrap_err()
}

fn read(arguments: &[&str]) -> Result<Configured, String> {
    let all = [&["--cleanup"], arguments].concat();
    parse(&all).and_then(|options| options.configured().map_err(|error| error.to_string()))
}

#[test]
fn unsupported_modes_are_refused_by_name() {
    let error = refused(&["--proxy-mode=ebpf"]);
    assert!(error.contains("ebpf") && error.contains("auto, iptables, ipvs, nftables, userspace"), "{error}");
    let modes = [ProxyMode::Userspace, ProxyMode::Nftables, ProxyMode::Ipvs, ProxyMode::Iptables, ProxyMode::Auto];
    let names = ["userspace", "nftables", "ipvs", "iptables", "auto"];
    assert_eq!(names.map(|name| settings(&[&format!("--proxy-mode={name}")]).mode), modes);
    assert_eq!([&[][..], &["--proxy-mode="]].map(|given| settings(given).mode), [ProxyMode::Auto; 2]);
}

#[test]
fn a_control_plane_is_required_except_for_flags_that_make_the_agent_exit() {
    assert!(parse(&[]).unwrap_err().contains("--control-plane"));
    assert!(parse(&["--cleanup"]).unwrap().cleanup);
    assert!(parse(&["--init-only"]).unwrap().init_only);
    assert!(parse(&["--write-config-to=/x"]).is_ok());
    // Booleans have Go's syntax.
    assert!(parse(&["--cleanup=1"]).unwrap().cleanup && parse(&["--init-only=T"]).unwrap().init_only);
    assert!(parse(&["--cleanup", "--insecure-loopback=true"]).unwrap().insecure_loopback);
    assert!(parse(&["--cleanup=yes"]).unwrap_err().contains("write true or false"));
    assert!(parse(&["--cleanup=true"]).unwrap().cleanup && parse(&["--init-only=true"]).unwrap().init_only);
    let neither = parse(&["--cleanup=false", "--init-only=false"]).unwrap();
    assert!(!neither.cleanup && !neither.init_only);
    assert!(neither.control_planes().unwrap_err().to_string().contains("--control-plane: pass at least one URL"));
}

#[test]
fn node_names_are_lower_case_dns_names() {
    let name = |flag: &str, name: &str| {
        let options = parse(&["--cleanup", flag, name]).unwrap();
        options.node_name(&options.configured().unwrap().settings)
    };
    assert_eq!(&*name("--node-name", " Node-1.Example ").unwrap(), "node-1.example");
    assert_eq!(&*name("--hostname-override", "B").unwrap(), "b");
    assert!(name("--node-name", "").is_err() && name("--node-name", "a b").is_err());
    assert!(parse(&["--cleanup"]).unwrap().node_name(&settings(&[])).is_ok());
}

#[test]
fn old_names_of_the_sync_periods_are_accepted() {
    let settings = settings(&["--sync-period=1m0s", "--min-sync-period=250ms"]);
    assert_eq!((settings.sync_period, settings.min_sync_period), (Duration::from_secs(60), Duration::from_millis(250)));
    assert!(refused(&["--sync-period=0"]).contains("--iptables-sync-period: must be more than zero"));
    assert!(parse(&["--cleanup", "--sync-period=5"]).unwrap_err().contains("write a duration"));
    let error = refused(&["--iptables-sync-period=1s", "--iptables-min-sync-period=2s"]);
    assert!(error.contains("--iptables-min-sync-period: must not be more than --iptables-sync-period"), "{error}");
}

#[test]
fn the_last_value_of_a_repeated_flag_is_used_and_lists_are_joined() {
    let twice = "--node-name=a --hostname-override=b -v=2 --v=4 --masquerade-all --masquerade-all=false \
                 --iptables-masquerade-bit=3 --iptables-masquerade-bit=5 --nodeport-addresses=10.0.0.0/8 \
                 --nodeport-addresses=127.0.0.0/8 --feature-gates=A=true --feature-gates=AllowServiceExternalIPs=false";
    let configured = configured(&twice.split(' ').collect::<Vec<_>>());
    let settings = &configured.settings;
    assert_eq!((settings.masquerade_all, settings.masquerade_bit, settings.allow_external_ips), (false, 5, false));
    assert_eq!(settings.node_ports.cidrs.len(), 2);
    assert!(configured.warning.unwrap().contains("--feature-gates A (Headgate does not use"));
    let options = parse(&["--cleanup", "--node-name=a", "--hostname-override=b"]).unwrap();
    assert_eq!(&*options.node_name(settings).unwrap(), "b");
}

#[test]
fn flags_may_be_written_with_underscores_as_in_kube_proxy() {
    let settings = settings(&["--proxy_mode=ipvs", "--cluster_cidr", "10.0.0.0/8", "--iptables_sync-period=5s"]);
    assert_eq!(settings.mode, ProxyMode::Ipvs);
    assert!(matches!(&settings.detect_local, DetectLocal::ClusterCidr(cidrs) if cidrs.len() == 1));
    // Underscores in values are not replaced.
    let prefix = ["--detect_local_mode=InterfaceNamePrefix", "--pod_interface_name_prefix=my_pod"];
    assert_eq!(super::tests::settings(&prefix).detect_local, DetectLocal::InterfaceNamePrefix("my_pod".into()));
    assert!(refused(&["--proxy_modes=ipvs"]).contains("unexpected argument '--proxy-modes'"));
}

#[test]
fn all_flags_are_listed_with_their_values() {
    let arguments = "--cleanup --nodeport-addresses=10.0.0.0/8 --nodeport_addresses=primary -v=3 --cluster-cidr=";
    let options = parse(&arguments.split(' ').collect::<Vec<_>>());
    let flags = options.unwrap().flags;
    let value = |flag: &str| flags.get(flag).map(String::as_str);
    assert_eq!(value("nodeport-addresses"), Some("10.0.0.0/8,primary"));
    assert_eq!((value("v"), value("cleanup"), value("init-only")), (Some("3"), Some("true"), Some("false")));
    assert_eq!((value("insecure-loopback"), value("cluster-cidr")), (Some("false"), Some("")));
    assert_eq!(value("oom-score-adj"), Some("-999"));
    assert_eq!(value("machine-id-file"), Some("/etc/machine-id,/var/lib/dbus/machine-id"));
    assert_eq!((value("help"), value("version"), value("tls-key")), (None, None, Some("")));
}

#[test]
fn a_file_replaces_kube_proxys_flags_but_not_headgates_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    let text =
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nhostnameOverride: From-File\n";
    std::fs::write(&path, text).unwrap();
    let config = format!("--config={}", path.display());
    let arguments =
        ["--cleanup", &config, "--masquerade-all", "--cluster-cidr=10.0.0.0/8", "--iptables-layout=compact"];
    let options = parse(&arguments).unwrap();
    let configured = options.configured().unwrap();
    assert!(!configured.settings.masquerade_all);
    assert_eq!(options.iptables_layout, Layout::Compact);
    let warning = configured.warning.unwrap();
    assert!(warning.contains("--masquerade-all (--config is given") && warning.contains("--cluster-cidr (--config"));
    assert_eq!(&*options.node_name(&configured.settings).unwrap(), "from-file");
    let options = parse(&["--cleanup", &config, "--hostname-override=flag"]).unwrap();
    assert_eq!(&*options.node_name(&configured.settings).unwrap(), "flag");
    assert_eq!(configured.file.unwrap().1, text);
}

#[test]
fn the_page_has_the_defaults_by_version_and_those_of_this_agent() {
    let page = document::configuration_page();
    let (_, table) = page.split_once("## Defaults by version of Kubernetes").unwrap();
    let of_agent = |setting: &str| {
        let line = table.lines().find(|line| line.starts_with(&format!("| {setting} |"))).unwrap();
        line.rsplit(" | ").next().unwrap().to_owned()
    };
    let settings = settings(&[]);
    assert_eq!((settings.mode, settings.allow_external_ips), (ProxyMode::Auto, true));
    assert_eq!(settings.min_sync_period, Duration::ZERO);
    assert!(of_agent("`mode`").starts_with("`auto`"), "{table}");
    assert!(of_agent("`featureGates`: `AllowServiceExternalIPs`").starts_with("`true`"), "{table}");
    assert!(of_agent("`iptables.minSyncPeriod`").starts_with("`0s`"), "{table}");
}
