//! Compares kube-proxy on node-b with Headgate's agent on node-a, at one real API server. See
//! [`crate::mirrored`]. And tests what `--cleanup` removes beside a kube-proxy.
//!
//! The tests that compare need `kube-proxy` beside `etcd` and `kube-apiserver` in the folder that
//! `KUBEBUILDER_ASSETS` names. If `kube-proxy` is missing, these tests print a message and pass.
//! `HEADGATE_PAIRS` sets the number of random Services.

use std::{collections::BTreeSet, env, fmt, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use headgate_node_agent::{
    dataplane::{
        DataplaneError, FixedState, NodeDataplane as _,
        iptables::{IptablesOptions, Variant},
        userspace,
    },
    dataplane_choice::leftovers,
    options::Options,
};
use headgate_tests::{
    testbed::{
        Backend, Machines, Manifests, iptables as programs,
        kube_proxy::{self, Mode, RealKubeProxies},
        manifests::{Service, ServiceType, Via},
        plan::{self, CLUSTER_CIDR, CONTROL, CONTROL_PORT},
        process::{Process, program},
    },
    uml,
};

use ipset_netlink::IpSets;

use crate::{
    forwarding::{Tables, namespace, node, random_state},
    mirrored::{self, Question, Seen},
};

/// The number of random Services without `HEADGATE_PAIRS`. Each also has a mirror image.
const PAIRS: usize = 24;
/// The same inside User-Mode Linux.
const PAIRS_INSIDE: usize = 6;

struct Programs {
    agent: Process,
    kube_proxy: Process,
    control_plane: Process,
    // Fields are dropped in order, so the API server stops last.
    _server: RealKubeProxies,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Programs").finish_non_exhaustive()
    }
}

impl Programs {
    fn start(machines: &Machines, assets: &Path, manifests: &Manifests, backend: Backend, mode: Mode) -> Self {
        let address = plan::address(CONTROL).unwrap().v4;
        let server = RealKubeProxies::start(machines, assets, manifests).unwrap();
        let start = |name: &str, machine: &str, command: Command| {
            let log = machines.folder().join(format!("{name}.log"));
            Process::start(name, machines.machine(machine).unwrap(), command, &log).unwrap()
        };
        let mut command = Command::new(program("headgate-control-plane").unwrap());
        command.arg("--source=kubernetes").arg("--kubeconfig").arg(server.kubeconfig());
        command.args(["--listen", &format!("{address}:{CONTROL_PORT}"), "--insecure-loopback"]);
        let control_plane = start("headgate-control-plane", CONTROL, command);
        let mut command = Command::new(program("headgate-node-agent").unwrap());
        command.args(["--node-name", "node-a", "--state-dir=", "--insecure-loopback", "--cluster-cidr", CLUSTER_CIDR]);
        command.args(["--control-plane", &format!("http://{address}:{CONTROL_PORT}")]);
        command.args(backend.agent_arguments());
        let agent = start("headgate-node-agent", "node-a", command);
        let kube_proxy = server.run(machines, "node-b", mode).unwrap();
        Self { agent, kube_proxy, control_plane, _server: server }
    }

    fn check_running(&mut self) {
        for process in [&mut self.agent, &mut self.kube_proxy, &mut self.control_plane] {
            process.check_running().unwrap();
        }
    }
}

#[test]
fn random_services_are_served_as_kube_proxy_serves_them() {
    compare_random_services(Backend::IptablesLegacy, Mode::Iptables, is_refused_to_the_node);
}

#[test]
fn random_services_are_served_as_kube_proxy_serves_them_in_the_compact_layout() {
    compare_random_services(Backend::IptablesNftCompact, Mode::Iptables, is_refused_to_the_node);
}

#[test]
fn random_services_are_served_as_kube_proxy_serves_them_in_mode_nftables() {
    compare_random_services(Backend::Nftables, Mode::Nftables, |_, _, _, _| false);
}

#[test]
fn random_services_are_served_as_kube_proxy_serves_them_in_mode_userspace() {
    compare_random_services(Backend::Userspace, Mode::Nftables, is_from_the_proxy);
}

/// User-Mode Linux has IPVS and legacy iptables. It is slow, so there are fewer Services.
#[test]
fn random_services_are_served_as_kube_proxy_serves_them_in_mode_ipvs() {
    uml::inside(|| compare_random_services(Backend::Ipvs, Mode::IptablesLegacy, is_refused_to_the_node));
}

fn compare_random_services(backend: Backend, mode: Mode, is_known: mirrored::IsKnown) {
    let Some(assets) = kube_proxy::assets() else { return };
    let pairs = if uml::guest::is_here() { PAIRS_INSIDE } else { PAIRS };
    let pairs = env::var("HEADGATE_PAIRS").map_or(pairs, |pairs| pairs.parse().unwrap());
    let mut rng = mirrored::rng();
    let mut manifests = Manifests::default();
    // The API server assigns the first address of the range to the Service `kubernetes`. The first
    // Service of the test has no address, so no Service of the test requests the assigned address.
    let first = Service { service_type: ServiceType::ExternalName, ..Service::new("first", &[]) };
    manifests.add(first).unwrap();
    let names = mirrored::add_pairs(&mut manifests, pairs, &mut rng);
    let machines = Machines::start().unwrap();
    let mut programs = Programs::start(&machines, &assets, &manifests, backend, mode);
    mirrored::compare_all(&machines, &manifests, &names, &mut rng, is_known);
    programs.check_running();
}

/// In mode userspace, the proxy is the client of each endpoint. So it gets the answers to a pod of
/// another node, which otherwise do not pass through this node with policy Local. See
/// docs/userspace.md.
fn is_from_the_proxy(_: &Service, question: Question, ours: &BTreeSet<Seen>, theirs: &BTreeSet<Seen>) -> bool {
    let without_client = |seen: &BTreeSet<Seen>| -> BTreeSet<Seen> {
        let of_any_client = |seen: &Seen| match seen.clone() {
            Seen::Answered { server, port, .. } => Seen::Answered { server, port, sees_client: false },
            other => other,
        };
        seen.iter().map(of_any_client).collect()
    };
    let (ours, mut theirs) = (without_client(ours), without_client(theirs));
    let is_lost = question.from == "c2" && theirs.remove(&Seen::TimedOut);
    ours == theirs || is_lost && theirs.is_subset(&ours)
}

/// Headgate refuses a node's own connection to an external address without endpoints. kube-proxy in
/// iptables mode has no rule for this connection, so the connection times out.
fn is_refused_to_the_node(_: &Service, question: Question, ours: &BTreeSet<Seen>, theirs: &BTreeSet<Seen>) -> bool {
    let is_own = question.from == "node-a" && matches!(question.via, Via::ExternalIp | Via::LoadBalancerIp);
    is_own && *ours == [Seen::Refused].into() && *theirs == [Seen::TimedOut].into()
}

/// Removes the gate of mode userspace as `--cleanup` does beside a kube-proxy in mode iptables.
fn remove_gate() -> Result<Result<(), DataplaneError>> {
    let settings =
        Options::try_parse_from(["agent", "--cleanup", "--node-name=n1", "--control-plane=http://127.0.0.1:1"])?
            .configured()?
            .settings;
    let mut leftovers = leftovers(&settings, Some("iptables")).into_iter();
    Ok(leftovers.find(|leftover| leftover.name == "gate of userspace").context("no such leftover")?.remove())
}

/// A kube-proxy in mode iptables takes over the chains of Services. Before it has replaced them,
/// they jump to the chains of the gate, which the kernel then does not delete.
#[test]
fn the_gate_of_mode_userspace_is_removed_beside_a_kube_proxy_in_mode_iptables() {
    let namespace = namespace("gate");
    let tables = Tables { namespace: &namespace, by: programs::Variant::Legacy };
    let families = plan::Family::BOTH;
    let removed = || {
        let config = IptablesOptions { variant: Variant::Legacy, ..IptablesOptions::default() };
        let mut dataplane = userspace::over_iptables(&config, userspace::ProxySettings::default())?;
        dataplane.sync_full(&FixedState(&random_state(&mut mirrored::rng()), &node()))?;
        drop(dataplane);
        let error = remove_gate()?.err().context("chains of Services jump to the gate")?.to_string();
        ensure!(error.contains("chain KUBE-GATE-CLUSTER of table nat (IPv4)"), "{error}");
        ensure!(error.contains("chain KUBE-GATE-CLUSTER of table nat (IPv6)"), "{error}");
        for family in families {
            let saved = tables.saved(family)?;
            ensure!(!saved.contains("--match-set") && !saved.contains("KUBE-GATE-INPUT"), "{saved}");
            let jumps = saved.lines().filter_map(|line| line.strip_prefix("-A ")?.split_once(" -j KUBE-GATE-"));
            let chains = jumps.filter_map(|(rule, _)| rule.split(' ').next());
            let emptied: BTreeSet<String> = chains.map(|chain| format!(":{chain} - [0:0]")).collect();
            ensure!(!emptied.is_empty(), "no chain of a Service jumps to the gate:\n{saved}");
            tables.run(family, "nat", &emptied.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        remove_gate()??;
        for family in families {
            let saved = tables.saved(family)?;
            ensure!(!saved.contains("KUBE-GATE"), "{saved}");
            ensure!(saved.contains("-j KUBE-SERVICES"), "the rules that kube-proxy uses stay:\n{saved}");
        }
        for set in ["KUBE-GATE", "KUBE-6-GATE"] {
            ensure!(IpSets::open()?.header(set)?.is_none(), "the set {set} is left");
        }
        Ok(())
    };
    namespace.run(removed).unwrap();
}
