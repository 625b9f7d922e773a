//! Rules that stand beside virtual servers of IPVS: whom to masquerade, refuse and drop. They look up [sets](crate::dataplane::ipsets) and do not
//! depend on services, so that their number is the same for any number of services.
//!
//! Where a virtual server sees a packet decides where its rules must stand. What comes from elsewhere is taken at INPUT, behind
//! table filter; what the node itself sends is taken at OUTPUT, between nat and filter: filter sees it translated, so what must not get
//! through is dropped in mangle.

use super::{
    Table,
    config::RenderConfig,
    fixed::{self, FixedChain, Jump, jump},
    line::Line,
};
use crate::{
    dataplane::ipsets::Set,
    model::{Family, Protocol},
};

/// `KUBE-LOAD-BALANCER`, in nat: masquerades traffic to load balancer IPs with Cluster policy.
pub const LOAD_BALANCER: &str = "KUBE-LOAD-BALANCER";
/// `KUBE-NODE-PORT`: in nat it masquerades traffic to NodePorts with Cluster policy, in filter it admits health checks.
pub const NODE_PORT: &str = "KUBE-NODE-PORT";
/// `KUBE-SOURCE-RANGES-FIREWALL`, in filter and mangle: drops what no source range admits.
pub const SOURCE_RANGES: &str = "KUBE-SOURCE-RANGES-FIREWALL";
/// `KUBE-IPVS-FILTER`, in filter: refuses what no virtual server wants of that which comes to the services' addresses.
pub const IN_FILTER: &str = "KUBE-IPVS-FILTER";
/// `KUBE-IPVS-OUT-FILTER`: the node's own traffic; in filter refusals, in mangle source ranges.
pub const OUT_FILTER: &str = "KUBE-IPVS-OUT-FILTER";

/// Chains besides those of [`fixed`] and the dispatch chains; what is led to comes first.
pub(super) fn chains(family: Family) -> Vec<FixedChain> {
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
        chain(Table::Filter, fixed::PROXY_FIREWALL, to_ranges(fixed::PROXY_FIREWALL)),
        chain(Table::Filter, IN_FILTER, in_filter(family)),
        chain(Table::Filter, OUT_FILTER, out_filter(family)),
    ]
}

/// As [`fixed::jumps`].
pub(super) fn jumps() -> Vec<Jump> {
    let (mangle, nat, filter) = (Table::Mangle, Table::Nat, Table::Filter);
    let portals = "kubernetes service portals";
    let access = "kubernetes ipvs access filter";
    vec![
        jump(mangle, "OUTPUT", OUT_FILTER, access, true),
        jump(nat, "PREROUTING", fixed::SERVICES, portals, false),
        jump(nat, "OUTPUT", fixed::SERVICES, portals, false),
        jump(nat, "POSTROUTING", fixed::POSTROUTING, "kubernetes postrouting rules", false),
        jump(filter, "INPUT", fixed::PROXY_FIREWALL, "kubernetes load balancer firewall", true),
        jump(filter, "INPUT", NODE_PORT, "kubernetes health check rules", false),
        jump(filter, "INPUT", IN_FILTER, access, true),
        jump(filter, "FORWARD", fixed::FORWARD, "kubernetes forwarding rules", false),
        jump(filter, "OUTPUT", OUT_FILTER, access, true),
    ]
}

/// Rules of nat KUBE-SERVICES behind those of services with Local policy, each without its chain.
pub(super) fn service_rules(config: &RenderConfig) -> Vec<String> {
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
            .jump(fixed::MARK_MASQ);
    };
    // The services' addresses are the node's own here. What goes to them must not reach the rules behind ours that translate what goes to
    // the node (a CNI plugin's host ports, Docker's published ports), nor those for NodePorts. An address that the node had before is not on our
    // device, but in a set with its ports.
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
            // The node reaches an address of its own from that very address, to which no endpoint could reply.
            None => cluster_ip(line, "src,dst"),
        }),
        rule(&|line| {
            line.comment("Kubernetes service external ip + port for masquerade and filter purpose")
                .in_set(Set::ExternalIp, family, "dst,dst")
                .jump(fixed::MARK_MASQ);
        }),
        accept(Set::BoundAddresses, "dst"),
        accept(Set::LoadBalancer, "dst,dst"),
        accept(Set::ExternalIp, "dst,dst"),
        accept(Set::ExternalIpLocal, "dst,dst"),
        rule(&|line| line.destination_is_node().jump(NODE_PORT)),
    ]
}

/// The rule of KUBE-POSTROUTING for an endpoint that was sent to itself.
pub(super) fn hairpin(line: Line<'_>, family: Family) {
    line.comment("Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose")
        .in_set(Set::LoopBack, family, "dst,dst,src")
        .jump("MASQUERADE --random-fully");
}

fn load_balancer(family: Family) -> String {
    let mut rules = String::new();
    Line::append(&mut rules, LOAD_BALANCER)
        .comment("Kubernetes service load balancer ip + port with externalTrafficPolicy=local")
        .in_set(Set::LoadBalancerLocal, family, "dst,dst")
        .jump("RETURN");
    Line::append(&mut rules, LOAD_BALANCER).jump(fixed::MARK_MASQ);
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
            .jump(fixed::MARK_MASQ);
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

/// Ports without endpoints, and those of Local policy without one here.
fn refusals(chain: &str, family: Family) -> String {
    let mut rules = String::new();
    Line::append(&mut rules, chain).comment("no endpoints").in_set(Set::NoEndpoints, family, "dst,dst").reject(family);
    Line::append(&mut rules, chain)
        .comment("no local endpoints")
        .in_set(Set::NoLocalEndpoints, family, "dst,dst")
        .jump("DROP");
    rules
}

/// What the node sends to services' addresses is refused at once. What it sends to its other addresses, such as NodePorts, is refused in INPUT, as in
/// [`fixed::jumps`].
fn out_filter(family: Family) -> String {
    let mut rules = String::new();
    Line::append(&mut rules, OUT_FILTER).not_in_set(Set::BoundAddresses, family, "dst").jump("RETURN");
    rules + &refusals(OUT_FILTER, family)
}

/// The services' addresses are the node's own here, so that without this whatever listens on all addresses would answer on them. They
/// answer pings.
fn in_filter(family: Family) -> String {
    let mut rules = refusals(IN_FILTER, family);
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
    Line::append(&mut rules, IN_FILTER).in_set(Set::BoundAddresses, family, "dst").reject(family);
    rules
}
