//! Virtual servers, sets and rules of mode IPVS, on the kernel of User-Mode Linux.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use headgate_core::{
    Family,
    explain::Mode,
    ipvs::{DEVICE, Set},
};
use headgate_netlink::route::{self, Prefix, Routing};
use headgate_node_agent::dataplane::{
    iptables::Variant,
    ipvs::{Config, IpvsDataplane},
};
use headgate_tests::{
    testbed::{iptables as programs, plan},
    uml,
};
use ipset_netlink::{Change, Element, IpSets, Protocol as OfSet};
use ipvs_netlink::{Command, Destination, Forwarding, Ipvs, Protocol, ServiceId};

use super::{Rig, Tables, masquerade, namespace};

/// What the corruptions of one family hit.
struct Targets {
    family: Family,
    rules: plan::Family,
    /// The ClusterIP of `svc0`.
    address: IpAddr,
    /// The address and NodePort of `svc0`.
    node_port: SocketAddr,
    /// An endpoint of `svc0`.
    endpoint: SocketAddr,
    /// An address that no endpoint has.
    other: SocketAddr,
    /// The load balancer IP of `svc1`.
    balancer: IpAddr,
    /// The ClusterIP of `svc2`.
    empty: IpAddr,
    /// A range of clients of `svc1`.
    range: (IpAddr, u8),
}

fn targets() -> [Targets; 2] {
    let at = |address: &str| address.parse().unwrap();
    let endpoint = |address| SocketAddr::new(at(address), 8080);
    [
        Targets {
            family: Family::V4,
            rules: plan::Family::V4,
            address: at("10.96.0.0"),
            node_port: SocketAddr::new(at("192.0.2.11"), 30000),
            endpoint: endpoint("10.244.0.1"),
            other: endpoint("10.244.0.77"),
            balancer: at("203.0.114.1"),
            empty: at("10.96.0.2"),
            range: (at("192.0.2.0"), 24),
        },
        Targets {
            family: Family::V6,
            rules: plan::Family::V6,
            address: at("fd00:10:96::"),
            node_port: SocketAddr::new(at("2001:db8:1::11"), 30000),
            endpoint: endpoint("fd00:10:244::1"),
            other: endpoint("fd00:10:244::77"),
            balancer: at("2001:db8:b::1"),
            empty: at("fd00:10:96::2"),
            range: (at("2001:db8::"), 32),
        },
    ]
}

fn change_servers(commands: &[Command]) -> Result<()> {
    let refused = Ipvs::open()?.execute(commands)?;
    ensure!(refused.is_empty(), "{refused:?}");
    Ok(())
}

fn change_sets(changes: &[Change]) -> Result<()> {
    let refused = IpSets::open()?.execute(changes)?;
    ensure!(refused.is_empty(), "{refused:?}");
    Ok(())
}

fn corrupt_family(rig: &mut Rig, tables: Tables<'_>, targets: &Targets) -> Result<()> {
    let Targets { family, rules, address, node_port, endpoint, other, balancer, empty, range } = *targets;
    let web = ServiceId::new(Protocol::Tcp, SocketAddr::new(address, 80));
    rig.corrupt("a deleted destination", "svc0", || change_servers(&[Command::RemoveDestination(web, endpoint)]))?;
    rig.corrupt("a swapped destination", "svc0", || {
        let swapped = Command::AddDestination(web, Destination::new(other));
        change_servers(&[Command::RemoveDestination(web, endpoint), swapped])
    })?;
    rig.corrupt("a destination without weight", "svc0", || {
        change_servers(&[Command::SetDestination(web, Destination::new(endpoint).weighing(0))])
    })?;
    rig.corrupt("a destination whose packets are not translated", "svc0", || {
        let destination = Destination { forwarding: Forwarding::Direct, ..Destination::new(endpoint) };
        change_servers(&[Command::SetDestination(web, destination)])
    })?;
    rig.corrupt("a deleted virtual server", "svc0", || change_servers(&[Command::RemoveService(web)]))?;
    rig.corrupt("a deleted virtual server of a NodePort", "svc0", || {
        change_servers(&[Command::RemoveService(ServiceId::new(Protocol::Tcp, node_port))])
    })?;
    rig.corrupt("a deleted address", "svc0", || {
        let mut routing = Routing::open()?;
        let link = routing.link(DEVICE)?.context("no device")?.index;
        let removal = route::Change::RemoveAddress { link, address: Prefix::host(address) };
        let mut refused = Vec::new();
        routing.change(&[removal], |_, refusal| refused.push(refusal))?;
        ensure!(refused.is_empty(), "{refused:?}");
        Ok(())
    })?;
    let name = |set: Set| set.name(family);
    rig.corrupt("a changed range of clients", "svc1", || {
        let element = |length| Element::IpPortNet(balancer, OfSet::Tcp, 80, range.0, length);
        let set = name(Set::LoadBalancerSourceCidr);
        change_sets(&[Change::delete(&set, element(range.1)), Change::add(&set, element(range.1 - 8))])
    })?;
    rig.corrupt("an address that is no longer guarded", "svc1", || {
        let element = Element::IpPort(balancer, OfSet::Tcp, 80);
        change_sets(&[Change::delete(name(Set::LoadBalancerFirewall), element)])
    })?;
    rig.corrupt("a deleted element of a refused address", "svc2", || {
        let element = Element::IpPort(empty, OfSet::Tcp, 80);
        change_sets(&[Change::delete(name(Set::NoEndpoints), element)])
    })?;
    rig.corrupt("an element that refuses a served address", "svc0", || {
        let element = Element::IpPort(address, OfSet::Tcp, 80);
        change_sets(&[Change::add(name(Set::NoEndpoints), element)])
    })?;
    rig.corrupt("a deleted rule for clients on the node", "svc1", || {
        tables.delete(rules, "nat", &[&format!("-d {balancer}/"), "-p tcp"])
    })?;
    let refused = format!("Service shop/svc2: connections from outside to {empty} port 80/TCP are");
    rig.corrupt_shared("a deleted rule that refuses connections", &refused, || {
        tables.delete(rules, "filter", &["-A KUBE-IPVS-FILTER", "REJECT", "no endpoints"])
    })?;
    for (table, base, chain) in [
        ("mangle", "OUTPUT", "KUBE-IPVS-OUT-FILTER"),
        ("nat", "PREROUTING", "KUBE-SERVICES"),
        ("nat", "OUTPUT", "KUBE-SERVICES"),
        ("filter", "INPUT", "KUBE-PROXY-FIREWALL"),
        ("filter", "INPUT", "KUBE-IPVS-FILTER"),
        ("filter", "OUTPUT", "KUBE-IPVS-OUT-FILTER"),
    ] {
        let wanted = format!("no rule of chain {base} in table {table}");
        rig.corrupt_shared(&format!("a deleted jump to {chain}"), &wanted, || {
            tables.delete(rules, table, &[&format!("-A {base} "), &format!("-j {chain}")])
        })?;
    }
    Ok(())
}

#[test]
fn virtual_servers_are_verified() {
    uml::inside(|| {
        let namespace = namespace("ipvs");
        let tables = Tables { namespace: &namespace, by: programs::Variant::Legacy };
        let verified = || {
            let config = Config { variant: Variant::Legacy, masquerade: masquerade(), ..Config::default() };
            let mut rig = Rig::new(Mode::Ipvs, Box::new(IpvsDataplane::new(config)?))?;
            rig.ensure_equal()?;
            targets().iter().try_for_each(|targets| corrupt_family(&mut rig, tables, targets))
        };
        namespace.run(verified).unwrap();
    });
}
