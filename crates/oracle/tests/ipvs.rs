//! The table that is decoded from virtual servers, sets and rules of mode IPVS equals the table
//! that the state asks for, and a corrupted kernel makes a difference that names the Service.
#![allow(clippy::unwrap_used)]

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use fake_kernel::ipvs::FakeKernel;
use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, FixedState, NodeFacts, Placement, Protocol, Service, ServiceKey,
    ServicePort, State, TrafficPolicy,
    explain::{Mode, NodeSettings},
    forwarding::unverified,
    frontends::Frontend,
    iptables::{NodePortAddresses, RulesTable},
    ipvs::{IpSetElement, IpvsConfig, IpvsLedger, Set},
    view::{LocalDetector, MasqueradeConfig},
};
use headgate_oracle::{
    Comparison, compare,
    iptables::Rules,
    ipvs::{IpvsDump, Member, decode},
};
use proptest::prelude::*;

#[path = "../../core/tests/changes/mod.rs"]
mod changes;
#[path = "../../core/tests/fake_kernel/mod.rs"]
mod fake_kernel;
use changes::{any_event, node};

fn addresses() -> Vec<IpAddr> {
    ["192.0.2.1", "192.0.2.101", "2001:db8::1"].iter().map(|address| address.parse().unwrap()).collect()
}

fn settings() -> NodeSettings {
    NodeSettings {
        mode: Mode::Ipvs,
        masquerade: MasqueradeConfig {
            detector_v4: Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap())),
            ..MasqueradeConfig::default()
        },
        node_ports_v4: NodePortAddresses::Only(addresses()),
        node_ports_v6: NodePortAddresses::Only(addresses()),
        localhost_node_ports: false,
    }
}

fn programmed(state: &State, facts: &NodeFacts, family: Family) -> FakeKernel {
    let config = IpvsConfig {
        masquerade: settings().masquerade,
        node_port_addresses: addresses(),
        other_addresses: addresses().into_iter().collect(),
        ..IpvsConfig::new(family)
    };
    let mut kernel = FakeKernel::new(&config);
    let plan = IpvsLedger::new(config).full(&FixedState(state, facts), &kernel.existing(), 0);
    kernel.apply(&plan).unwrap();
    kernel
}

fn member(element: &IpSetElement) -> Member {
    let (address, port, source) = match *element {
        IpSetElement::Ip(address) => (Some(address), None, None),
        IpSetElement::Port(port) => (None, Some((None, port)), None),
        IpSetElement::IpPort(address, protocol, port) => (Some(address), Some((Some(protocol), port)), None),
        IpSetElement::IpPortIp(address, protocol, port, source) => {
            (Some(address), Some((Some(protocol), port)), Some(source.into()))
        }
        IpSetElement::IpPortNet(address, protocol, port, source) => {
            (Some(address), Some((Some(protocol), port)), Some(source))
        }
    };
    Member { address, port, source }
}

fn saved(kernel: &FakeKernel) -> String {
    RulesTable::ALL.map(|table| kernel.iptables.save(table)).concat()
}

fn verify(state: &State, facts: &NodeFacts, family: Family, kernel: &FakeKernel) -> Comparison {
    verify_with(state, facts, family, kernel, &saved(kernel))
}

fn verify_with(state: &State, facts: &NodeFacts, family: Family, kernel: &FakeKernel, saved: &str) -> Comparison {
    let of_family = addresses().into_iter().filter(|address| Family::of(*address) == family).collect();
    let found = decode(&dump(family, kernel, saved, &of_family), family, settings().masquerade.detector(family));
    compare(state, facts, &settings(), found, &|_| true)
}

/// What a node with these addresses has.
fn dump(family: Family, kernel: &FakeKernel, saved: &str, addresses: &BTreeSet<IpAddr>) -> IpvsDump {
    let mut rules = Rules::default();
    saved.lines().for_each(|line| rules.line(line));
    let servers = kernel.servers.iter().map(|(key, (_, destinations))| {
        let destinations = destinations.iter().map(|(address, weight)| (*address, *weight));
        ((key.address, key.protocol, key.port), destinations.collect())
    });
    IpvsDump {
        servers: servers.collect(),
        device: kernel.device_addresses.clone(),
        sets: kernel.sets.iter().map(|(set, all)| (set.name(family), all.iter().map(member).collect())).collect(),
        rules,
        node_addresses: addresses.clone(),
        node_port_addresses: addresses.clone(),
    }
}

fn sentences(comparison: &Comparison) -> Vec<String> {
    comparison.differences.iter().map(ToString::to_string).chain(comparison.not_understood.iter().cloned()).collect()
}

/// The Services with verified frontends at these addresses and ports. NodePorts included.
fn owners(
    state: &State,
    unverified: &BTreeSet<Frontend>,
    frontends: impl IntoIterator<Item = (IpAddr, Protocol, u16)>,
) -> BTreeSet<Arc<ServiceKey>> {
    let owner = |(address, protocol, port)| {
        let frontend = Frontend::Address(address, protocol, port);
        let of_node_port = || state.frontends().owner(&Frontend::NodePort(Family::of(address), protocol, port));
        let owner = state.frontends().owner(&frontend).or_else(of_node_port)?;
        (!unverified.contains(&frontend)).then(|| Arc::new(owner.clone()))
    };
    frontends.into_iter().filter_map(owner).collect()
}

/// The sets whose elements decide who is served.
const DECIDING: [Set; 5] = [
    Set::LoadBalancerSourceCidr,
    Set::LoadBalancerSourceIp,
    Set::LoadBalancerFirewall,
    Set::NoEndpoints,
    Set::NoLocalEndpoints,
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn kernels_with_random_services_decode_to_the_expected_table(
        events in prop::collection::vec(any_event(8), 1..60),
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
    ) {
        let (mut state, mut facts) = (State::default(), node());
        events.iter().for_each(|event| event.apply(&mut state, &mut facts, &mut Dirty::default()));
        let kernel = programmed(&state, &facts, family);
        let comparison = verify(&state, &facts, family, &kernel);
        prop_assert_eq!(sentences(&comparison), Vec::<String>::new());
    }

    #[test]
    fn each_lost_or_changed_object_is_found_and_names_its_service(
        events in prop::collection::vec(any_event(8), 1..60),
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
    ) {
        let (mut state, mut facts) = (State::default(), node());
        events.iter().for_each(|event| event.apply(&mut state, &mut facts, &mut Dirty::default()));
        let kernel = programmed(&state, &facts, family);
        let unverified = unverified(&state, &facts, &settings(), family);
        let check = |what: String, corrupted: &FakeKernel, frontends: Vec<_>| {
            let comparison = verify(&state, &facts, family, corrupted);
            let owners = owners(&state, &unverified, frontends);
            prop_assert_eq!(comparison.services(), owners, "{}: {:?}", what, sentences(&comparison));
            Ok(())
        };
        let other = "[2001:db8:9::9]:1".parse().unwrap();
        for (key, (settings, destinations)) in &kernel.servers {
            let frontend = vec![(key.address, key.protocol, key.port)];
            // Destinations whose health checks all fail have weight 0: the server forwards nothing.
            let Some((first, weight)) = destinations.iter().find(|(_, weight)| **weight > 0) else { continue };
            let mut corrupted = kernel.clone();
            corrupted.servers.remove(key);
            check(format!("without the virtual server {key}"), &corrupted, frontend.clone())?;
            let mut swapped = destinations.clone();
            swapped.remove(first);
            swapped.insert(other, *weight);
            corrupted.servers.insert(*key, (*settings, swapped));
            check(format!("with another destination of {key}"), &corrupted, frontend.clone())?;
            let mut without = destinations.clone();
            without.insert(*first, 0);
            corrupted.servers.insert(*key, (*settings, without));
            check(format!("with a destination of {key} without weight"), &corrupted, frontend)?;
        }
        for address in &kernel.device_addresses {
            let mut corrupted = kernel.clone();
            corrupted.device_addresses.remove(address);
            let served = kernel.servers.iter().filter(|(key, (_, destinations))| {
                key.address == *address && destinations.values().any(|weight| *weight > 0)
            });
            let served = served.map(|(key, _)| (key.address, key.protocol, key.port)).collect();
            check(format!("without {address} on the device"), &corrupted, served)?;
        }
        for set in DECIDING {
            for element in &kernel.sets[&set] {
                let Member { address: Some(address), port: Some((Some(protocol), port)), .. } = member(element) else {
                    panic!("{set:?} has {element}");
                };
                let mut corrupted = kernel.clone();
                corrupted.sets.get_mut(&set).unwrap().remove(element);
                check(format!("without {element} in {set:?}"), &corrupted, vec![(address, protocol, port)])?;
            }
        }
    }
}

/// A node without an address in a family, which therefore answers no NodePort there.
#[test]
fn a_node_without_an_address_for_node_ports_is_verified() {
    let state = two_services();
    let config = IpvsConfig { masquerade: settings().masquerade, ..IpvsConfig::new(Family::V4) };
    let mut kernel = FakeKernel::new(&config);
    kernel.apply(&IpvsLedger::new(config).full(&FixedState(&state, &node()), &kernel.existing(), 0)).unwrap();
    for node_ports in [NodePortAddresses::All, NodePortAddresses::Only(Vec::new())] {
        let settings = NodeSettings { node_ports_v4: node_ports, ..settings() };
        let dump = dump(Family::V4, &kernel, &saved(&kernel), &BTreeSet::new());
        let found = decode(&dump, Family::V4, settings.masquerade.detector(Family::V4));
        let comparison = compare(&state, &node(), &settings, found, &|_| true);
        assert_eq!(sentences(&comparison), Vec::<String>::new());
        assert!(comparison.frontends >= 4, "{}", comparison.frontends);
    }
}

/// A Service with policy Local, source ranges, endpoints on both nodes; one without endpoints.
fn two_services() -> State {
    let mut state = State::default();
    let mut apply = |change: Change| state.apply(change, &mut Dirty::default());
    let port = |node_port| vec![ServicePort { name: "web".into(), protocol: Protocol::Tcp, port: 80, node_port }];
    let mut front = Service::new(ServiceKey::new("shop", "front"), vec![[10, 96, 0, 1].into()], port(30001));
    front.external_traffic_policy = TrafficPolicy::Local;
    front.external_ips = vec![[203, 0, 113, 1].into()];
    front.load_balancer_ips = vec![[203, 0, 113, 2].into()];
    // The second range contains the node.
    front.load_balancer_source_ranges = ["198.51.100.0/24", "192.0.2.0/24"].map(|range| range.parse().unwrap()).into();
    let key = front.key.clone();
    apply(Change::from(front));
    for (address, node) in [([10, 244, 1, 1], "n1"), ([10, 244, 2, 1], "n2")] {
        let ports = Arc::from([EndpointPort::new("web", Protocol::Tcp, 8080)]);
        let endpoint = Endpoint { placement: Placement::on(node).into(), ..Endpoint::new(address.into(), ports) };
        apply(Change::Endpoint(key.clone(), endpoint));
    }
    apply(Change::from(Service::new(ServiceKey::new("shop", "empty"), vec![[10, 96, 0, 2].into()], port(30002))));
    state
}

/// True for a rule without which packets have another fate. Other rules masquerade packets, or
/// guard ports that no Service has.
fn is_essential(rule: &str) -> bool {
    let Some((rest, target)) = rule.split_once(" -j ") else { return false };
    let is_of_service = ["KUBE-SVC-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-", "DNAT"];
    let is_shared = rest.contains("no endpoints") || rest.contains("ipvs access filter") || rest.contains("FIREWALL");
    let is_jump =
        target == "KUBE-SERVICES" || target == "KUBE-PROXY-FIREWALL" || target == "KUBE-SOURCE-RANGES-FIREWALL";
    is_shared || is_jump || is_of_service.iter().any(|prefix| target.starts_with(prefix))
}

#[test]
fn each_deleted_rule_is_found() {
    let state = two_services();
    let kernel = programmed(&state, &node(), Family::V4);
    assert_eq!(sentences(&verify(&state, &node(), Family::V4, &kernel)), Vec::<String>::new());
    let dump = saved(&kernel);
    let essential: Vec<(usize, &str)> =
        dump.lines().enumerate().filter(|(_, rule)| rule.starts_with("-A ") && is_essential(rule)).collect();
    assert!(essential.len() > 20, "{dump}");
    for (at, rule) in essential {
        let without: String =
            dump.lines().enumerate().filter(|(i, _)| *i != at).map(|(_, line)| format!("{line}\n")).collect();
        let comparison = verify_with(&state, &node(), Family::V4, &kernel, &without);
        let found = sentences(&comparison);
        let names = |name: &str| comparison.services() == [Arc::new(ServiceKey::new("shop", name))].into();
        let is_of_base = ["INPUT", "OUTPUT", "PREROUTING"].iter().any(|base| rule.starts_with(&format!("-A {base} ")));
        let is_found = if is_of_base {
            found.iter().any(|sentence| sentence.starts_with("no rule of chain"))
        } else {
            names(if rule.contains("\"no endpoints\"") { "empty" } else { "front" })
        };
        assert!(is_found, "without {rule}: {found:?}\n{dump}");
    }
}
