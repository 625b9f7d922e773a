//! The iptables rules of IPVS mode, which masquerade, reject and drop packets. The rules match
//! [sets](crate::dataplane::ipsets), so their number does not depend on the number of services. The
//! [short circuit](super::short_circuit) is the exception.
//!
//! The hooks of IPVS determine the tables of the rules. IPVS translates packets that the node
//! receives at INPUT, after table filter. It translates packets from the node itself at OUTPUT,
//! between nat and filter. Filter would see packets from the node with translated addresses, so
//! mangle checks source ranges for these packets.

use super::{config::IpvsConfig, short_circuit};
use crate::{
    dataplane::{
        ipsets::Set,
        rules::{
            FixedChain, Jump, NodePortAddresses, RenderConfig, RulesTable, Ruleset,
            line::Line,
            names::{
                DispatchChain, FORWARD, IN_FILTER, LOAD_BALANCER, MARK_MASQ, NODE_PORT, OUT_FILTER, POSTROUTING,
                PROXY_FIREWALL, SERVICES, SOURCE_RANGES,
            },
            ruleset::{canaries, forward, jump, mark_masq, node_ports_jumps, postrouting},
        },
    },
    model::{Family, Protocol},
};

/// Returns the rules of IPVS mode for one family. The rules do not drop packets in the conntrack
/// state INVALID, because IPVS translates addresses with its own connection table.
#[must_use]
pub(super) fn ruleset(config: &IpvsConfig) -> Ruleset {
    let config = RenderConfig {
        masquerade: config.masquerade.clone(),
        node_port_addresses: NodePortAddresses::Only(config.node_port_addresses.clone()),
        localhost_node_ports: false,
        leaves_out_sctp: config.leaves_out_sctp,
        ..RenderConfig::new(config.family)
    };
    let mut chains = vec![mark_masq(&config)];
    chains.extend(set_chains(config.family));
    chains.extend(canaries());
    let mut last_service_rules = service_rules(&config);
    last_service_rules.extend(node_ports_jumps(&config));
    Ruleset {
        chains,
        postrouting: hairpin(config.family) + &postrouting(&config),
        forward: forward(&config),
        dispatch: &[DispatchChain::NatNodePorts, DispatchChain::NatServices],
        last_service_rules,
        jumps: jumps(),
        render_port: short_circuit::render_port,
        config,
    }
}

/// Creates the chains that match sets. A chain comes before the chains that jump to it.
fn set_chains(family: Family) -> Vec<FixedChain> {
    let chain = |table, name, rules| FixedChain { table, name, rules };
    let to_ranges = |name| {
        let mut rules = String::new();
        Line::append(&mut rules, name).in_set(Set::LoadBalancerFirewall, family, "dst,dst").jump(SOURCE_RANGES);
        rules
    };
    vec![
        chain(RulesTable::Mangle, SOURCE_RANGES, source_ranges(family)),
        chain(RulesTable::Mangle, OUT_FILTER, to_ranges(OUT_FILTER)),
        chain(RulesTable::Nat, LOAD_BALANCER, load_balancer(family)),
        chain(RulesTable::Nat, NODE_PORT, node_port_masquerade(family)),
        chain(RulesTable::Filter, NODE_PORT, health_checks(family)),
        chain(RulesTable::Filter, SOURCE_RANGES, source_ranges(family)),
        chain(RulesTable::Filter, PROXY_FIREWALL, to_ranges(PROXY_FIREWALL)),
        chain(RulesTable::Filter, IN_FILTER, in_filter(family)),
        chain(RulesTable::Filter, OUT_FILTER, out_filter(family)),
    ]
}

fn jumps() -> Vec<Jump> {
    let (mangle, nat, filter) = (RulesTable::Mangle, RulesTable::Nat, RulesTable::Filter);
    let portals = "kubernetes service portals";
    let access = "kubernetes ipvs access filter";
    vec![
        jump(mangle, "OUTPUT", OUT_FILTER, access, true),
        jump(nat, "PREROUTING", SERVICES, portals, false),
        jump(nat, "OUTPUT", SERVICES, portals, false),
        jump(nat, "POSTROUTING", POSTROUTING, "kubernetes postrouting rules", false),
        jump(filter, "INPUT", PROXY_FIREWALL, "kubernetes load balancer firewall", true),
        jump(filter, "INPUT", NODE_PORT, "kubernetes health check rules", false),
        jump(filter, "INPUT", IN_FILTER, access, true),
        jump(filter, "FORWARD", FORWARD, "kubernetes forwarding rules", false),
        jump(filter, "OUTPUT", OUT_FILTER, access, true),
    ]
}

/// Renders the rules of nat KUBE-SERVICES that follow the rules of single services. The returned
/// rules do not contain the name of the chain.
fn service_rules(config: &RenderConfig) -> Vec<String> {
    let family = config.family;
    let rule = |build: &dyn Fn(Line<'_>)| {
        let mut rule = String::new();
        build(Line::bare(&mut rule));
        rule
    };
    let loopback = if family == Family::V4 { "127.0.0.0/8" } else { "::1/128" };
    let cluster_ip = |line: Line<'_>, flags: &str| {
        line.comment("Kubernetes service cluster ip + port for masquerade purpose")
            .in_set(Set::ClusterIp, family, flags)
            .jump(MARK_MASQ);
    };
    // In this mode, addresses of services are addresses of the node. Packets to these addresses
    // must not reach the rules for NodePorts. They must also not reach foreign rules that translate
    // packets to the node, such as host ports of a CNI plugin or published ports of Docker. If
    // another device has the address of a service, Headgate's device does not have it, but a set
    // contains the address with its ports.
    let accept = |set, flags: &str| rule(&|line| line.in_set(set, family, flags).jump("ACCEPT"));
    let masquerade = &config.masquerade;
    vec![
        rule(&|line| line.source(loopback).jump("RETURN")),
        rule(&|line| {
            line.comment("Kubernetes service lb portal")
                .in_set(Set::LoadBalancer, family, "dst,dst")
                .jump(LOAD_BALANCER);
        }),
        rule(&|line| match masquerade.detector(family) {
            _ if masquerade.all => cluster_ip(line, "dst,dst"),
            Some(detector) => cluster_ip(line.local(detector, false), "dst,dst"),
            // When the node connects to a ClusterIP on its own device, the source is also that
            // ClusterIP. Without masquerading, no endpoint could reply.
            None => cluster_ip(line, "src,dst"),
        }),
        rule(&|line| {
            line.comment("Kubernetes service external ip + port for masquerade and filter purpose")
                .in_set(Set::ExternalIp, family, "dst,dst")
                .jump(MARK_MASQ);
        }),
        accept(Set::DeviceAddresses, "dst"),
        accept(Set::LoadBalancer, "dst,dst"),
        accept(Set::ExternalIp, "dst,dst"),
        accept(Set::ExternalIpLocal, "dst,dst"),
        rule(&|line| line.destination_is_node().jump(NODE_PORT)),
    ]
}

/// Renders the rule of KUBE-POSTROUTING that masquerades connections of endpoints to themselves.
fn hairpin(family: Family) -> String {
    let mut rule = String::new();
    Line::append(&mut rule, POSTROUTING)
        .comment("Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose")
        .in_set(Set::LoopBack, family, "dst,dst,src")
        .jump("MASQUERADE --random-fully");
    rule
}

fn load_balancer(family: Family) -> String {
    let mut rules = String::new();
    Line::append(&mut rules, LOAD_BALANCER)
        .comment("Kubernetes service load balancer ip + port with externalTrafficPolicy=local")
        .in_set(Set::LoadBalancerLocal, family, "dst,dst")
        .jump("RETURN");
    Line::append(&mut rules, LOAD_BALANCER).jump(MARK_MASQ);
    rules
}

fn node_port_masquerade(family: Family) -> String {
    let mut rules = String::new();
    for protocol in Protocol::ALL {
        let name = protocol.to_string();
        let flags = if protocol == Protocol::Sctp { "dst,dst" } else { "dst" };
        Line::append(&mut rules, NODE_PORT)
            .protocol(protocol)
            .comment(format_args!("Kubernetes nodeport {name} port with externalTrafficPolicy=local"))
            .in_set(Set::node_port_local(protocol), family, flags)
            .jump("RETURN");
        Line::append(&mut rules, NODE_PORT)
            .protocol(protocol)
            .comment(format_args!("Kubernetes nodeport {name} port for masquerade purpose"))
            .in_set(Set::node_port(protocol), family, flags)
            .jump(MARK_MASQ);
    }
    rules
}

fn health_checks(family: Family) -> String {
    let mut rules = String::new();
    Line::append(&mut rules, NODE_PORT)
        .protocol(Protocol::Tcp)
        .comment("Kubernetes health check node port")
        .in_set(Set::HealthCheckNodePort, family, "dst")
        .jump("ACCEPT");
    rules
}

fn source_ranges(family: Family) -> String {
    let mut rules = String::new();
    for (set, flags) in [(Set::LoadBalancerSourceCidr, "dst,dst,src"), (Set::LoadBalancerSourceIp, "dst,dst,src")] {
        Line::append(&mut rules, SOURCE_RANGES).in_set(set, family, flags).jump("RETURN");
    }
    Line::append(&mut rules, SOURCE_RANGES).jump("DROP");
    rules
}

/// Renders the rules that reject packets to ports without endpoints, and that drop packets to ports
/// with Local policy whose endpoints are all on other nodes.
fn reject_and_drop(chain: &str, family: Family) -> String {
    let mut rules = String::new();
    Line::append(&mut rules, chain).comment("no endpoints").in_set(Set::NoEndpoints, family, "dst,dst").reject(family);
    Line::append(&mut rules, chain)
        .comment("no local endpoints")
        .in_set(Set::NoLocalEndpoints, family, "dst,dst")
        .jump("DROP");
    rules
}

/// Renders the rules for packets from the node itself. The rules reject or drop packets to
/// addresses of services. INPUT handles packets to other addresses of the node, such as NodePorts:
/// if OUTPUT rejected them, the sending system call would fail with EPERM instead of ECONNREFUSED.
fn out_filter(family: Family) -> String {
    let mut rules = String::new();
    Line::append(&mut rules, OUT_FILTER).not_in_set(Set::DeviceAddresses, family, "dst").jump("RETURN");
    rules + &reject_and_drop(OUT_FILTER, family)
}

/// Renders the rules for packets that the node receives. In this mode, addresses of services are
/// addresses of the node. Without these rules, programs that listen on all addresses would answer
/// packets to ports that the services do not have. Pings to these addresses are answered.
fn in_filter(family: Family) -> String {
    let mut rules = reject_and_drop(IN_FILTER, family);
    let served = [Set::LoadBalancer, Set::ClusterIp, Set::ExternalIp, Set::ExternalIpLocal];
    for set in served {
        Line::append(&mut rules, IN_FILTER).in_set(set, family, "dst,dst").jump("RETURN");
    }
    Line::append(&mut rules, IN_FILTER)
        .protocol(Protocol::Tcp)
        .in_set(Set::HealthCheckNodePort, family, "dst")
        .jump("RETURN");
    let ping = match family {
        Family::V4 => "-p icmp -m icmp --icmp-type 8",
        Family::V6 => "-p ipv6-icmp -m icmp6 --icmpv6-type 128",
    };
    Line::append(&mut rules, IN_FILTER).add(ping).jump("RETURN");
    Line::append(&mut rules, IN_FILTER).in_set(Set::DeviceAddresses, family, "dst").reject(family);
    rules
}
