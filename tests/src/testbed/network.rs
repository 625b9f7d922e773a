//! Namespaces, links, addresses, routes and kernel settings of one testbed.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result};

use super::netns::{self, Namespace};
use super::plan::{self, Addresses, CONTROL, NODES, NodePlan, OUTSIDE, SERVICE_PREFIXES};

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
    ///
    /// Starting a program takes time, most of all inside User-Mode Linux, so one run of `ip`
    /// executes all commands of a namespace.
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
        underlay.ip_batch(&underlay_commands(&on_underlay, &machines)?)?;
        find(&machines, CONTROL)?.ip_batch(&uplink_commands(CONTROL)?)?;
        for (name, via) in OUTSIDE {
            find(&machines, name)?.ip_batch(&(uplink_commands(name)? + &service_routes(via)?))?;
        }
        for node in &NODES {
            let machine = find(&machines, node.name)?;
            machine.set_sysctls(&NODE_SYSCTLS)?;
            machine.ip_batch(&node_commands(node, &machines)?)?;
            for pod in node.pods {
                find(&machines, pod)?.ip_batch(&pod_commands(pod)?)?;
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

const LOOPBACK: &str = "link set lo up\n";

/// Creates the bridge, a veth pair from the bridge to the `eth0` of each machine, and blackhole
/// default routes.
fn underlay_commands(names: &[&str], machines: &BTreeMap<&'static str, Namespace>) -> Result<String> {
    let gateway = plan::gateway();
    let mut commands = format!(
        "{LOOPBACK}link add br0 type bridge mcast_snooping 0\nlink set br0 up\n\
         addr add {}/24 dev br0\naddr add {}/64 dev br0 nodad\n\
         route add blackhole default\nroute add blackhole ::/0\n",
        gateway.v4, gateway.v6,
    );
    for name in names {
        let netns = find(machines, name)?.name();
        let _ = write!(
            commands,
            "link add {name} type veth peer name eth0 netns {netns}\nlink set {name} master br0\nlink set {name} up\n"
        );
    }
    Ok(commands)
}

/// Sets up a machine's side of its link to the underlay, and a default route to the gateway, which
/// drops packets.
fn uplink_commands(name: &str) -> Result<String> {
    let (own, gateway) = (address(name)?, plan::gateway());
    Ok(format!(
        "{LOOPBACK}link set eth0 up\naddr add {}/24 dev eth0\naddr add {}/64 dev eth0 nodad\n\
         route add default via {}\nroute add default via {}\n",
        own.v4, own.v6, gateway.v4, gateway.v6,
    ))
}

/// Sends an outside client's packets for service addresses to one node.
fn service_routes(via: &str) -> Result<String> {
    let gateway = address(via)?;
    let mut commands = String::new();
    for prefix in SERVICE_PREFIXES {
        let via = if prefix.contains(':') { gateway.v6.to_string() } else { gateway.v4.to_string() };
        let _ = writeln!(commands, "route add {prefix} via {via}");
    }
    Ok(commands)
}

/// Sets up a node's link to the underlay, its sides of the links to its pods, and routes to the
/// pods of other nodes. Host routes connect both sides of a pod's link, so that every packet is
/// routed.
fn node_commands(node: &NodePlan, machines: &BTreeMap<&'static str, Namespace>) -> Result<String> {
    let host = address(node.name)?;
    let mut commands = uplink_commands(node.name)?;
    for pod in node.pods {
        let (own, netns) = (address(pod)?, find(machines, pod)?.name());
        let _ = write!(
            commands,
            "link add veth-{pod} type veth peer name eth0 netns {netns}\nlink set veth-{pod} up\n\
             addr add 169.254.1.1/32 dev veth-{pod} scope link\naddr add fe80::1/64 dev veth-{pod} nodad\n\
             route add {}/32 dev veth-{pod} src {}\nroute add {}/128 dev veth-{pod}\n",
            own.v4, host.v4, own.v6,
        );
    }
    for other in NODES.iter().filter(|other| other.name != node.name) {
        let via = address(other.name)?;
        let [v4, v6] = plan::pod_networks(other.name).context("the plan has no pod networks for a node")?;
        let _ = writeln!(commands, "route add {v4} via {}\nroute add {v6} via {}", via.v4, via.v6);
    }
    Ok(commands)
}

/// Sets up a pod's side of the link to its node.
fn pod_commands(name: &str) -> Result<String> {
    let own = address(name)?;
    Ok(format!(
        "{LOOPBACK}link set eth0 up\naddr add {}/32 dev eth0\naddr add {}/128 dev eth0 nodad\n\
         route add 169.254.1.1/32 dev eth0 scope link\nroute add default via 169.254.1.1 dev eth0\n\
         route add default via fe80::1 dev eth0\n",
        own.v4, own.v6,
    ))
}
