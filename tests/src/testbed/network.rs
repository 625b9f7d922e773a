//! Namespaces, links, addresses, routes and kernel settings of one testbed.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result};
use headgate_netlink::route::Prefix;
use nix::libc;

use super::netns::{self, Namespace};
use super::plan::{self, Addresses, CONTROL, Family, NODES, NodePlan, OUTSIDE, SERVICE_PREFIXES};
use super::wiring::{Route, Wiring};

/// Settings of every namespace. Settings under `default` apply to links that are created later.
const SYSCTLS: [(&str, &str); 12] = [
    // Duplicate address detection would make new addresses unusable for a second.
    ("ipv6/conf/all/accept_dad", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/all/accept_ra", "0"),
    ("ipv6/conf/default/accept_ra", "0"),
    // Replies may take another path than requests, so reverse path filtering would drop packets.
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    // A node may send a packet out of the link on which the packet arrived. Without these settings,
    // the node would send redirects, and clients would bypass the node.
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
    ("ipv6/conf/all/accept_redirects", "0"),
    ("ipv6/conf/default/accept_redirects", "0"),
    // Every ICMP refusal must reach its client. A rate limit would drop some of many refusals.
    ("ipv4/icmp_ratelimit", "0"),
    ("ipv6/icmp/ratelimit", "0"),
];

const NODE_SYSCTLS: [(&str, &str); 2] = [("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")];

/// The machines of a testbed and the links between them.
#[derive(Debug)]
pub struct Network {
    machines: BTreeMap<&'static str, Namespace>,
    // This field is dropped last, because the links of all machines end in the underlay.
    _underlay: Namespace,
}

impl Network {
    /// Creates all machines and links. If a step fails, everything is removed again.
    pub fn create() -> Result<Self> {
        netns::check_prerequisites()?;
        netns::sweep_stale()?;
        let prefix = netns::unique_prefix();
        let namespace = |machine: &str| -> Result<Namespace> {
            let namespace = Namespace::create(format!("{prefix}-{machine}"))?;
            namespace.set_sysctls(&SYSCTLS)?;
            Ok(namespace)
        };
        let underlay = namespace("underlay")?;
        let on_underlay = [CONTROL].into_iter().chain(OUTSIDE.map(|(name, _)| name)).chain(NODES.map(|node| node.name));
        let on_underlay: Vec<&'static str> = on_underlay.collect();
        let mut machines = BTreeMap::new();
        for name in on_underlay.iter().copied().chain(NODES.iter().flat_map(|node| node.pods.iter().copied())) {
            machines.insert(name, namespace(name)?);
        }
        wire(&underlay, |wiring| wire_underlay(wiring, &on_underlay, &machines))?;
        wire(find(&machines, CONTROL)?, |wiring| wire_uplink(wiring, CONTROL))?;
        for (name, via) in OUTSIDE {
            wire(find(&machines, name)?, |wiring| {
                wire_uplink(wiring, name)?;
                add_service_routes(wiring, via)
            })?;
        }
        for node in &NODES {
            let machine = find(&machines, node.name)?;
            machine.set_sysctls(&NODE_SYSCTLS)?;
            wire(machine, |wiring| wire_node(wiring, node, &machines))?;
            for pod in node.pods {
                wire(find(&machines, pod)?, |wiring| wire_pod(wiring, pod))?;
            }
        }
        Ok(Self { machines, _underlay: underlay })
    }

    /// The namespace of a node, a pod, an outside client or the control plane's machine.
    pub fn machine(&self, name: &str) -> Result<&Namespace> {
        find(&self.machines, name)
    }
}

fn find<'a>(machines: &'a BTreeMap<&'static str, Namespace>, name: &str) -> Result<&'a Namespace> {
    machines.get(name).with_context(|| format!("the testbed has no machine called {name}"))
}

fn address(name: &str) -> Result<Addresses> {
    plan::address(name).with_context(|| format!("the testbed's plan has no address for {name}"))
}

/// Brings `lo` up in a namespace, and creates what `wire` adds.
fn wire(namespace: &Namespace, wire: impl FnOnce(&mut Wiring) -> Result<()> + Send) -> Result<()> {
    let work = || {
        let mut wiring = Wiring::open()?;
        wiring.up("lo");
        wire(&mut wiring)?;
        wiring.apply()
    };
    namespace.run(work).with_context(|| format!("links, addresses and routes of {}", namespace.name()))
}

/// Creates the bridge, a veth pair from the bridge to the `eth0` of each machine, and blackhole
/// default routes.
fn wire_underlay(wiring: &mut Wiring, names: &[&str], machines: &BTreeMap<&'static str, Namespace>) -> Result<()> {
    wiring.bridge("br0");
    wiring.up("br0");
    add_underlay_addresses(wiring, "br0", plan::gateway())?;
    for family in Family::BOTH {
        wiring.route(all(family), Route::Blackhole)?;
    }
    for name in names {
        wiring.veth(name, find(machines, name)?.handle());
        wiring.join(name, "br0")?;
        wiring.up(name);
    }
    Ok(())
}

fn add_underlay_addresses(wiring: &mut Wiring, device: &str, addresses: Addresses) -> Result<()> {
    wiring.address(device, addresses.v4.into(), 24, libc::RT_SCOPE_UNIVERSE)?;
    wiring.address(device, addresses.v6.into(), 64, libc::RT_SCOPE_UNIVERSE)
}

/// Sets up a machine's side of its link to the underlay, and a default route to the gateway, which
/// drops packets.
fn wire_uplink(wiring: &mut Wiring, name: &str) -> Result<()> {
    wiring.up("eth0");
    add_underlay_addresses(wiring, "eth0", address(name)?)?;
    Family::BOTH.into_iter().try_for_each(|family| wiring.route(all(family), Route::Via(plan::gateway().of(family))))
}

/// Sends an outside client's packets for service addresses to one node.
fn add_service_routes(wiring: &mut Wiring, via: &str) -> Result<()> {
    let node = address(via)?;
    SERVICE_PREFIXES.into_iter().try_for_each(|network| add_route_via(wiring, network, node))
}

/// Adds a route to the network by the machine with these addresses.
fn add_route_via(wiring: &mut Wiring, network: &str, machine: Addresses) -> Result<()> {
    let (address, length) = network.split_once('/').with_context(|| format!("no prefix length in {network}"))?;
    let network = Prefix { address: address.parse()?, length: length.parse()? };
    wiring.route(network, Route::Via(machine.of(Family::of(network.address))))
}

/// Sets up a node's link to the underlay, its sides of the links to its pods, and routes to the
/// pods of other nodes. Host routes connect both sides of a pod's link, so that every packet is
/// routed.
fn wire_node(wiring: &mut Wiring, node: &NodePlan, machines: &BTreeMap<&'static str, Namespace>) -> Result<()> {
    wire_uplink(wiring, node.name)?;
    let host = address(node.name)?;
    for pod in node.pods {
        let (own, device) = (address(pod)?, format!("veth-{pod}"));
        wiring.veth(&device, find(machines, pod)?.handle());
        wiring.up(&device);
        wiring.address(&device, NODE_OF_POD.0.into(), 32, libc::RT_SCOPE_LINK)?;
        wiring.address(&device, NODE_OF_POD.1.into(), 64, libc::RT_SCOPE_UNIVERSE)?;
        wiring.route(Prefix::host(own.v4.into()), Route::To(&device, Some(host.v4.into())))?;
        wiring.route(Prefix::host(own.v6.into()), Route::To(&device, None))?;
    }
    for other in NODES.iter().filter(|other| other.name != node.name) {
        let via = address(other.name)?;
        for network in plan::pod_networks(other.name).context("the plan has no pod networks for a node")? {
            add_route_via(wiring, &network, via)?;
        }
    }
    Ok(())
}

/// Sets up a pod's side of the link to its node.
fn wire_pod(wiring: &mut Wiring, name: &str) -> Result<()> {
    wiring.up("eth0");
    for own in address(name)?.both() {
        wiring.address("eth0", own, Prefix::host(own).length, libc::RT_SCOPE_UNIVERSE)?;
    }
    wiring.route(Prefix::host(NODE_OF_POD.0.into()), Route::To("eth0", None))?;
    wiring.route(all(Family::V4), Route::ViaOn(NODE_OF_POD.0.into(), "eth0"))?;
    wiring.route(all(Family::V6), Route::ViaOn(NODE_OF_POD.1.into(), "eth0"))
}

/// The address of every node on its links to its pods.
const NODE_OF_POD: (Ipv4Addr, Ipv6Addr) = (Ipv4Addr::new(169, 254, 1, 1), Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));

/// The network of all addresses of a family.
fn all(family: Family) -> Prefix {
    let address = if family == Family::V4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    Prefix { address, length: 0 }
}
