//! What the real kernel forwards is decoded to the table that the state asks for: random Services,
//! both families, every backend. Elements of nftables that another program changes are found and
//! name the Service, and a full sync repairs them. For rules and virtual servers,
//! `crates/oracle/tests/iptables.rs` and `crates/oracle/tests/ipvs.rs` show this.

mod ipvs;

use std::{net::IpAddr, path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use headgate_core::{
    Change, ClientIpAffinity, Conditions, Dirty, Endpoint, EndpointPort, Family, NodeFacts, Placement, Protocol,
    Service, ServiceKey, ServicePort, State, TrafficPolicy,
    addresses::DialPolicy,
    explain::{Mode, NodeSettings},
    iptables::{Layout, NodePortAddresses},
    view::{LocalDetector, MasqueradeConfig},
};
use headgate_node_agent::{
    dataplane::{
        FixedState, NodeDataplane,
        iptables::{IptablesDataplane, IptablesOptions, Variant},
        nftables::{NftablesDataplane, NftablesOptions},
        userspace,
    },
    node_inputs::NodeInputs,
};
use headgate_oracle::{Comparison, compare};
use headgate_tests::testbed::{Namespace, iptables as programs, plan};
use nftables_netlink::{Element, ElementData, Nftables, TableName, Transaction};

use crate::mirrored;

const SERVICES: u8 = 14;

pub(crate) fn node() -> NodeFacts {
    NodeFacts { addresses: vec![IpAddr::from([192, 0, 2, 11])], ..NodeFacts::named("node-a") }
}

pub(crate) fn masquerade() -> MasqueradeConfig {
    MasqueradeConfig {
        detector_v4: Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap())),
        detector_v6: Some(LocalDetector::Cidr("fd00:10:244::/48".parse().unwrap())),
        ..MasqueradeConfig::default()
    }
}

fn inputs() -> NodeInputs {
    let MasqueradeConfig { detector_v4, detector_v6, .. } = masquerade();
    let interfaces = vec![IpAddr::from([192, 0, 2, 11]), "2001:db8:1::11".parse().unwrap()];
    NodeInputs { detector_v4, detector_v6, interfaces, ..NodeInputs::default() }
}

/// Random Services with random endpoints. `svc0` has NodePorts and three endpoints. `svc1` has an
/// external policy Local, source ranges, and endpoints on both nodes. `svc2` has no endpoints.
pub(crate) fn random_state(rng: &mut fastrand::Rng) -> State {
    let mut state = State::default();
    let mut apply = |change: Change| state.apply(change, &mut Dirty::default());
    for i in 0..SERVICES {
        let key = ServiceKey::new("shop", &format!("svc{i}"));
        let port = |name: &str, protocol, port, node_port| ServicePort { name: name.into(), protocol, port, node_port };
        let node_port = |base: u16, rng: &mut fastrand::Rng| if i == 0 || rng.bool() { base + u16::from(i) } else { 0 };
        let ports = vec![
            port("web", Protocol::Tcp, 80, node_port(30000, rng)),
            port("dns", Protocol::Udp, 53, node_port(31000, rng)),
            port("sig", Protocol::Sctp, 99, 0),
        ];
        let cluster_ips = vec![IpAddr::from([10, 96, 0, i]), format!("fd00:10:96::{i:x}").parse().unwrap()];
        let policy = |rng: &mut fastrand::Rng| if rng.bool() { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
        let addresses = |v4: u8, v6: &str| vec![IpAddr::from([203, 0, v4, i]), format!("{v6}{i:x}").parse().unwrap()];
        let mut service = Service::new(key.clone(), cluster_ips, ports);
        if i > 0 {
            service.internal_traffic_policy = policy(rng);
            service.external_traffic_policy = if i == 1 { TrafficPolicy::Local } else { policy(rng) };
            service.session_affinity = rng.bool().then_some(ClientIpAffinity { timeout_seconds: 60 });
        }
        if rng.bool() {
            service.external_ips = addresses(113, "2001:db8:e::");
        }
        if i == 1 || rng.bool() {
            service.load_balancer_ips = addresses(114, "2001:db8:b::");
            let ranges: &[&str] =
                if i == 1 || rng.bool() { &["192.0.2.0/24", "198.51.100.7/32", "2001:db8::/32"] } else { &[] };
            service.load_balancer_source_ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
        }
        apply(Change::from(service));
        let ports: Arc<[EndpointPort]> = Arc::from([
            EndpointPort::new("web", Protocol::Tcp, 8080),
            EndpointPort::new("dns", Protocol::Udp, 5353),
            EndpointPort::new("sig", Protocol::Sctp, 9999),
        ]);
        let count = match i {
            0 | 1 => 3,
            2 => 0,
            _ => rng.u8(0..4),
        };
        for j in 0..count {
            let is_here = if i == 1 { j == 0 } else { rng.bool() };
            let node = if is_here { "node-a" } else { "node-b" };
            let addresses = [IpAddr::from([10, 244, i, j]), format!("fd00:10:244:{i:x}::{j:x}").parse().unwrap()];
            let conditions = if i > 1 && rng.u8(0..4) == 0 {
                Conditions { ready: false, serving: true, terminating: true }
            } else {
                Conditions::READY
            };
            for address in addresses {
                let placement = Placement::on(node).into();
                let endpoint = Endpoint { conditions, placement, ..Endpoint::new(address, Arc::clone(&ports)) };
                apply(Change::Endpoint(key.clone(), endpoint));
            }
        }
    }
    state
}

struct Rig {
    mode: Mode,
    dataplane: Box<dyn NodeDataplane>,
    state: State,
}

impl Rig {
    fn new(mode: Mode, mut dataplane: Box<dyn NodeDataplane>) -> Result<Self> {
        let state = random_state(&mut mirrored::rng());
        dataplane.configure(&inputs());
        let mut rig = Self { mode, dataplane, state };
        rig.sync()?;
        Ok(rig)
    }

    /// The proxy connects to the endpoints of `svc0` to `svc7`, except to one of them.
    fn facts(&self) -> NodeFacts {
        let ranges = ["10.244.0.0/21", "fd00:10:244::/61"].map(|range| range.parse().unwrap());
        let has_proxy = matches!(self.mode, Mode::Userspace | Mode::UserspaceIptables);
        let dialled = DialPolicy { has_proxy, ..DialPolicy::new(ranges.to_vec(), [[10, 244, 1, 0].into()]) };
        NodeFacts { dialled: dialled.into(), ..node() }
    }

    fn sync(&mut self) -> Result<()> {
        self.dataplane.sync_full(&FixedState(&self.state, &self.facts())).map_err(anyhow::Error::from).map(drop)
    }

    fn verify(&mut self) -> Result<Comparison> {
        let settings = NodeSettings {
            mode: self.mode,
            masquerade: masquerade(),
            node_ports_v4: NodePortAddresses::All,
            node_ports_v6: NodePortAddresses::All,
            localhost_node_ports: false,
        };
        let mut all = Comparison::default();
        for table in self.dataplane.decode()? {
            all.merge(compare(&self.state, &self.facts(), &settings, table, &|_| true));
        }
        Ok(all)
    }

    fn ensure_equal(&mut self) -> Result<()> {
        let comparison = self.verify()?;
        let sentences = sentences(&comparison);
        ensure!(sentences.is_empty(), "{sentences:#?}");
        ensure!(comparison.not_understood.is_empty(), "{:#?}", comparison.not_understood);
        ensure!(comparison.frontends > u64::from(SERVICES) * 6, "{} frontends", comparison.frontends);
        Ok(())
    }

    /// Corrupts the kernel. The differences must name `svc0` and no other Service, and a full sync
    /// must repair the kernel.
    fn corrupt(&mut self, what: &str, corrupt: impl FnOnce() -> Result<()>) -> Result<()> {
        corrupt().with_context(|| what.to_owned())?;
        let comparison = self.verify().with_context(|| what.to_owned())?;
        let named: Vec<String> = comparison.services().iter().map(ToString::to_string).collect();
        ensure!(named == ["shop/svc0"], "{what}: {:#?}", sentences(&comparison));
        self.sync().with_context(|| format!("the repair of {what}"))?;
        self.ensure_equal().with_context(|| format!("after the repair of {what}"))
    }
}

fn sentences(comparison: &Comparison) -> Vec<String> {
    comparison.differences.iter().map(ToString::to_string).collect()
}

/// A network namespace whose loopback interface is up, because the proxies of mode userspace route
/// their addresses there.
pub(crate) fn namespace(name: &str) -> Namespace {
    let namespace = Namespace::for_test(&format!("forward-{name}")).unwrap();
    namespace.ip_batch("link set lo up\n").unwrap();
    namespace
}

/// The rules of iptables in a namespace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tables<'a> {
    pub(crate) namespace: &'a Namespace,
    pub(crate) by: programs::Variant,
}

impl Tables<'_> {
    const LOCK: &'static str = "/run/xtables.lock";

    /// Runs these lines of a script for one table.
    pub(crate) fn run(&self, family: plan::Family, table: &str, lines: &[&str]) -> Result<()> {
        let path = std::env::temp_dir().join(format!("{}-rules", self.namespace.name()));
        std::fs::write(&path, format!("*{table}\n{}\nCOMMIT\n", lines.join("\n")))?;
        let done = programs::restore(self.namespace, self.by, family, Path::new(Self::LOCK), &path);
        std::fs::remove_file(&path)?;
        done
    }

    /// All rules, as `iptables-save` prints them.
    pub(crate) fn saved(&self, family: plan::Family) -> Result<String> {
        programs::save(self.namespace, self.by, family, Path::new(Self::LOCK))
    }
}

fn iptables_rules_are_verified(mode: Mode, variant: Variant, layout: Layout) {
    let namespace = namespace(&format!("{}-{variant:?}-{layout:?}", mode.as_str()));
    let verified = || {
        let config = IptablesOptions { variant, layout, masquerade: masquerade(), ..IptablesOptions::default() };
        let dataplane: Box<dyn NodeDataplane> = match mode {
            Mode::UserspaceIptables => {
                Box::new(userspace::over_iptables(&config, userspace::ProxySettings::default())?)
            }
            _ => Box::new(IptablesDataplane::new(config)?),
        };
        Rig::new(mode, dataplane)?.ensure_equal()
    };
    namespace.run(verified).unwrap();
}

#[test]
fn rules_of_iptables_legacy_are_verified() {
    for layout in [Layout::Classic, Layout::Compact] {
        iptables_rules_are_verified(Mode::Iptables, Variant::Legacy, layout);
    }
}

#[test]
fn rules_of_iptables_in_front_of_the_proxy_are_verified() {
    for layout in [Layout::Classic, Layout::Compact] {
        iptables_rules_are_verified(Mode::UserspaceIptables, Variant::Legacy, layout);
    }
}

#[test]
fn rules_of_iptables_nft_are_verified() {
    for layout in [Layout::Classic, Layout::Compact] {
        iptables_rules_are_verified(Mode::Iptables, Variant::Nft, layout);
    }
}

fn nftables_config() -> NftablesOptions {
    NftablesOptions {
        families: Family::BOTH.into(),
        masquerade: masquerade(),
        localhost_node_ports: false,
        conntrack_tcp_be_liberal: true,
        owns_tables: false,
        replies_to_ping: true,
        unused_features: Vec::new(),
        counts_services: false,
        has_proxy: false,
    }
}

/// Changes elements of the table for IPv4.
fn corrupt_table(mut rig: Rig) -> Result<()> {
    rig.ensure_equal()?;
    let table = TableName::new(nftables_netlink::Family::Ip, "headgate");
    let find = |set: &str, part: &[u8], in_key: bool| -> Result<Element> {
        let all = Nftables::open()?.elements(&table, set)?;
        let has = |element: &&Element| match &element.data {
            Some(ElementData::Value(value)) if !in_key => value.0.starts_with(part),
            _ => in_key && element.key.0.starts_with(part),
        };
        all.iter().find(has).cloned().with_context(|| format!("{set} has no {part:?}: {all:?}"))
    };
    let change = |set: &str, delete: &Element, add: Option<Element>| -> Result<()> {
        let mut transaction = Transaction::new();
        transaction.delete_elements(&table, set, [delete.clone()]);
        transaction.add_elements(&table, set, add);
        Ok(Nftables::open()?.commit(&transaction)?)
    };
    let endpoint = [10, 244, 0, 1, 0x1f, 0x90];
    let element = find("endpoints", &endpoint, false)?;
    rig.corrupt("a deleted element", || change("endpoints", &element, None))?;
    let element = find("endpoints", &endpoint, false)?;
    let mut swapped = element.clone();
    if let Some(ElementData::Value(value)) = &mut swapped.data {
        value.0[3] = 77;
    }
    rig.corrupt("a swapped address", || change("endpoints", &element, Some(swapped)))?;
    let element = find("services", &[10, 96, 0, 0, 6], true)?;
    rig.corrupt("a deleted frontend", || change("services", &element, None))
}

#[test]
fn the_tables_of_mode_nftables_are_verified() {
    namespace("nftables")
        .run(|| corrupt_table(Rig::new(Mode::Nftables, Box::new(NftablesDataplane::new(&nftables_config())?))?))
        .unwrap();
}

#[test]
fn the_tables_of_mode_userspace_are_verified() {
    namespace("userspace")
        .run(|| {
            let dataplane = userspace::over_nftables(nftables_config(), userspace::ProxySettings::default())?;
            corrupt_table(Rig::new(Mode::Userspace, Box::new(dataplane))?)
        })
        .unwrap();
}
