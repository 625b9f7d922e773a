//! The iptables rules of IPVS mode: they masquerade, reject and drop. Except for the
//! [short ways](super::short_ways) they look up [sets](crate::dataplane::ipsets), so that their
//! number does not depend on the number of services.
//!
//! The rules stand where they see packets in time. IPVS takes packets from elsewhere at INPUT,
//! behind table filter. It takes packets of the node itself at OUTPUT, between nat and filter.
//! Filter sees those translated, so mangle drops what must not pass.

use super::{config::IpvsConfig, short_ways};
use crate::{
    dataplane::{
        ipsets::Set,
        rules::{
            FixedChain, Jump, NodePortAddresses, RenderConfig, Ruleset, Table,
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

/// The rules of IPVS mode for one family. INVALID packets are not dropped: IPVS translates by its
/// own table.
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
        render: short_ways::render,
        config,
    }
}

/// Chains that look up sets. A chain comes before those that jump to it.
fn set_chains(family: Family) -> Vec<FixedChain> {
    let chain = |table, name, rules| FixedChain { table, name, rules };
    let to_ranges = |name| {
        let mut rules = String::new();
        Line::append(&mut rules, name).in_set(Set::LoadBalancerFirewall, family, "dst,dst").jump(SOURCE_RANGES);
        rules
    };
    vec![
        chain(Table::Mangle, SOURCE_RANGES, source_ranges(family)),
        chain(Table::Mangle, OUT_FILTER, to_ranges(OUT_FILTER)),
        chain(Table::Nat, LOAD_BALANCER, load_balancer(family)),
        chain(Table::Nat, NODE_PORT, node_port_masquerade(family)),
        chain(Table::Filter, NODE_PORT, health_checks(family)),
        chain(Table::Filter, SOURCE_RANGES, source_ranges(family)),
        chain(Table::Filter, PROXY_FIREWALL, to_ranges(PROXY_FIREWALL)),
        chain(Table::Filter, IN_FILTER, in_filter(family)),
        chain(Table::Filter, OUT_FILTER, out_filter(family)),
    ]
}

fn jumps() -> Vec<Jump> {
    let (mangle, nat, filter) = (Table::Mangle, Table::Nat, Table::Filter);
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

/// Rules of nat KUBE-SERVICES behind those of single services, each without its chain.
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
    // The services' addresses are addresses of the node in this mode. Packets to them must not
    // reach rules behind ours that translate packets to the node (host ports of a CNI plugin,
    // published ports of Docker), nor the rules for NodePorts. An address that another device has
    // is not on our device, but in a set with its ports.
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
            // The node connects to an address of its own from this same address, and no endpoint
            // could reply.
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

/// The rule of KUBE-POSTROUTING that masquerades connections of endpoints to themselves.
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
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
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

/// Rejects packets to ports without endpoints, and drops those to ports of Local policy without one
/// here.
fn reject_and_drop(chain: &str, family: Family) -> String {
    let mut rules = String::new();
    Line::append(&mut rules, chain).comment("no endpoints").in_set(Set::NoEndpoints, family, "dst,dst").reject(family);
    Line::append(&mut rules, chain)
        .comment("no local endpoints")
        .in_set(Set::NoLocalEndpoints, family, "dst,dst")
        .jump("DROP");
    rules
}

/// Packets of the node to services' addresses are rejected at once. Those to its other addresses,
/// such as NodePorts, are rejected in INPUT: a rule in OUTPUT would fail the system call that
/// sends, with EPERM.
fn out_filter(family: Family) -> String {
    let mut rules = String::new();
    Line::append(&mut rules, OUT_FILTER).not_in_set(Set::DeviceAddresses, family, "dst").jump("RETURN");
    rules + &reject_and_drop(OUT_FILTER, family)
}

/// The services' addresses are addresses of the node in this mode. Without this, programs that
/// listen on all addresses would answer on them. The addresses answer pings.
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
