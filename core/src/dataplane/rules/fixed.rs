//! Chains that depend on configuration alone, and the jumps into them from the kernel's own chains.

use std::{fmt::Display, net::IpAddr};

use super::{
    Table, beside_ipvs,
    config::{NodePortAddresses, RenderConfig},
    line::Line,
    names::ChainName,
};
use crate::model::Family;

/// `KUBE-SERVICES`, in nat and filter.
pub const SERVICES: &str = "KUBE-SERVICES";
/// `KUBE-NODEPORTS`, in nat and filter.
pub const NODE_PORTS: &str = "KUBE-NODEPORTS";
/// `KUBE-EXTERNAL-SERVICES`, in filter.
pub const EXTERNAL_SERVICES: &str = "KUBE-EXTERNAL-SERVICES";
/// `KUBE-PROXY-FIREWALL`, in filter.
pub const PROXY_FIREWALL: &str = "KUBE-PROXY-FIREWALL";
/// `KUBE-MARK-MASQ`, in nat.
pub const MARK_MASQ: &str = "KUBE-MARK-MASQ";
/// `KUBE-POSTROUTING`, in nat.
pub const POSTROUTING: &str = "KUBE-POSTROUTING";
/// `KUBE-HAIRPIN`, compact layout only: connections of this node's endpoints to themselves. nat masquerades them, filter lets them through.
pub const HAIRPIN: &str = "KUBE-HAIRPIN";
/// `KUBE-FORWARD`, in filter.
pub const FORWARD: &str = "KUBE-FORWARD";
/// Guards 127.0.0.0/8 while localhost NodePorts are on. kube-proxy uses the kubelet's KUBE-FIREWALL for it, which cannot be
/// removed again without taking the kubelet's; this one is ours alone.
pub const LOCALNET_GUARD: &str = "KUBE-LOCALNET-GUARD";
/// `KUBE-PROXY-CANARY`: empty; gone when somebody flushed the tables.
pub const CANARY: &str = "KUBE-PROXY-CANARY";

/// Counts packets that KUBE-FORWARD drops as INVALID; kube-proxy's name.
pub const INVALID_COUNTER: &str = "ct_state_invalid_dropped_pkts";
/// Counts what NodePorts on 127.0.0.0/8 accept; kube-proxy's name.
pub const LOCALHOST_COUNTER: &str = "localhost_nps_accepted_pkts";

/// A jump from a chain of the kernel's into one of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jump {
    /// Table.
    pub table: Table,
    /// Chain of the kernel's.
    pub from: &'static str,
    /// The rule behind `-A FROM`, as `iptables-save` prints it.
    pub rule: String,
}

/// A chain with its complete rules, each a line `-A NAME …`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FixedChain {
    /// Table.
    pub table: Table,
    /// Name.
    pub name: &'static str,
    /// Rules.
    pub rules: String,
}

/// Every chain with a fixed name, except dispatch chains (their rules are not fixed) and the chains that lead to them (see
/// [`leading_to_dispatch`]).
#[must_use]
pub fn chains(config: &RenderConfig) -> Vec<FixedChain> {
    let canaries = Table::ALL.map(|table| FixedChain { table, name: CANARY, rules: String::new() });
    let mut chains = vec![mark_masq(config)];
    if config.beside_ipvs {
        chains.extend(beside_ipvs::chains(config.family));
    }
    chains.extend(has_localnet_guard(config).then(localnet_guard));
    chains.extend(canaries);
    chains
}

/// Names of all fixed chains that Headgate may ever have made in a table, dispatch chains included: what a cleanup removes.
#[must_use]
pub fn names(table: Table) -> &'static [&'static str] {
    match table {
        Table::Mangle => &[CANARY, beside_ipvs::OUT_FILTER, beside_ipvs::SOURCE_RANGES],
        Table::Nat => &[
            SERVICES,
            NODE_PORTS,
            POSTROUTING,
            HAIRPIN,
            MARK_MASQ,
            CANARY,
            beside_ipvs::LOAD_BALANCER,
            beside_ipvs::NODE_PORT,
        ],
        Table::Filter => &[
            SERVICES,
            EXTERNAL_SERVICES,
            NODE_PORTS,
            PROXY_FIREWALL,
            FORWARD,
            HAIRPIN,
            LOCALNET_GUARD,
            CANARY,
            beside_ipvs::NODE_PORT,
            beside_ipvs::SOURCE_RANGES,
            beside_ipvs::IN_FILTER,
            beside_ipvs::OUT_FILTER,
        ],
    }
}

/// The jumps, in the order in which they are to stand at the head of their chains.
#[must_use]
pub fn jumps(config: &RenderConfig) -> Vec<Jump> {
    if config.beside_ipvs {
        return beside_ipvs::jumps();
    }
    let portals = "kubernetes service portals";
    let visible = "kubernetes externally-visible service portals";
    let firewall = "kubernetes load balancer firewall";
    let (nat, filter) = (Table::Nat, Table::Filter);
    let mut jumps = Vec::new();
    // The guard comes first: KUBE-NODEPORTS accepts health checks, and must not accept them at 127.0.0.1 from a neighbour.
    if has_localnet_guard(config) {
        for from in ["INPUT", "OUTPUT"] {
            jumps.push(jump(filter, from, LOCALNET_GUARD, "block incoming localnet connections", false));
        }
    }
    jumps.extend([
        jump(nat, "PREROUTING", SERVICES, portals, false),
        jump(nat, "OUTPUT", SERVICES, portals, false),
        jump(nat, "POSTROUTING", POSTROUTING, "kubernetes postrouting rules", false),
    ]);
    for from in ["INPUT", "FORWARD", "OUTPUT"] {
        jumps.push(jump(filter, from, PROXY_FIREWALL, firewall, true));
    }
    jumps.push(jump(filter, "INPUT", NODE_PORTS, "kubernetes health check service ports", false));
    jumps.push(jump(filter, "INPUT", EXTERNAL_SERVICES, visible, true));
    jumps.push(jump(filter, "FORWARD", FORWARD, "kubernetes forwarding rules", false));
    jumps.push(jump(filter, "FORWARD", SERVICES, portals, true));
    jumps.push(jump(filter, "FORWARD", EXTERNAL_SERVICES, visible, true));
    jumps.push(jump(filter, "OUTPUT", SERVICES, portals, true));
    jumps.push(external_output_jump(visible));
    jumps
}

/// kube-proxy leaves this jump out in iptables mode, so that a node's own connections to external destinations without endpoints time out. What goes to
/// the node's own addresses, such as NodePorts, is refused in INPUT: a rule in OUTPUT would fail the system call that sends, with EPERM.
fn external_output_jump(comment: &str) -> Jump {
    let mut rule = String::new();
    Line::bare(&mut rule)
        .add("-m conntrack --ctstate NEW -m addrtype ! --dst-type LOCAL")
        .comment(comment)
        .jump(EXTERNAL_SERVICES);
    Jump { table: Table::Filter, from: "OUTPUT", rule: rule.trim().to_owned() }
}

/// One jump.
pub(super) fn jump(table: Table, from: &'static str, target: &str, comment: &str, new_only: bool) -> Jump {
    let mut rule = String::new();
    let mut line = Line::bare(&mut rule);
    if new_only {
        line = line.add("-m conntrack --ctstate NEW");
    }
    line.comment(comment).jump(target);
    Jump { table, from, rule: rule.trim().to_owned() }
}

/// The last rules of nat KUBE-SERVICES, each without its chain.
#[must_use]
pub fn last_service_rules(config: &RenderConfig) -> Vec<String> {
    let mut rules = if config.beside_ipvs { beside_ipvs::service_rules(config) } else { Vec::new() };
    rules.extend(node_ports_jumps(config));
    rules
}

/// To KUBE-NODEPORTS, for the addresses that answer NodePorts.
fn node_ports_jumps(config: &RenderConfig) -> Vec<String> {
    let comment = "kubernetes service nodeports; NOTE: this must be the last rule in this chain";
    let jump = |begin: &dyn Fn(Line<'_>)| {
        let mut rule = String::new();
        begin(Line::bare(&mut rule));
        rule
    };
    match &config.node_port_addresses {
        NodePortAddresses::All => vec![jump(&|line| {
            let line = match config.family {
                Family::V6 => line.add("! -d ::1/128"),
                Family::V4 if !config.localhost_node_ports => line.add("! -d 127.0.0.0/8"),
                Family::V4 => line,
            };
            line.comment(comment).destination_is_node().jump(NODE_PORTS);
        })],
        NodePortAddresses::Only(addresses) => {
            let of_family = addresses.iter().filter(|address| Family::of(**address) == config.family);
            let answering = of_family.filter(|address| !address.is_loopback() || config.localhost_node_ports);
            let mut answering: Vec<IpAddr> = answering.copied().collect();
            answering.sort_unstable();
            answering.dedup();
            let jumps = answering
                .into_iter()
                .map(|address| jump(&|line| line.destination_host(address).comment(comment).jump(NODE_PORTS)));
            jumps.collect()
        }
    }
}

/// NodePorts on 127.0.0.0/8 are possible, which takes `route_localnet` and a guard.
#[must_use]
pub fn has_localnet_guard(config: &RenderConfig) -> bool {
    let may_answer = match &config.node_port_addresses {
        NodePortAddresses::All => true,
        NodePortAddresses::Only(addresses) => addresses.iter().any(IpAddr::is_loopback),
    };
    config.family == Family::V4 && config.localhost_node_ports && may_answer && !config.beside_ipvs
}

fn mark_masq(config: &RenderConfig) -> FixedChain {
    let mut rules = String::new();
    let mark = config.masquerade.mark();
    Line::append(&mut rules, MARK_MASQ).jump(format_args!("MARK --set-xmark {mark:#x}/{mark:#x}"));
    FixedChain { table: Table::Nat, name: MARK_MASQ, rules }
}

/// The first and the last rule of a group of ClusterIPs in nat, compact layout; `None` where nothing to them is masqueraded. The mark is set before a
/// service is looked for, and taken back when there is none, so that two rules a group do what would take one in each service's chain.
pub(super) fn group_masquerade(config: &RenderConfig, group: ChainName) -> Option<[String; 2]> {
    if !config.masquerade.covers_cluster_ips(config.family) {
        return None;
    }
    let rule = |target: &dyn Display| {
        let mut rule = String::new();
        Line::append(&mut rule, group).masqueraded_to_cluster_ips(&config.masquerade, config.family).jump(target);
        rule
    };
    let mark = config.masquerade.mark();
    Some([rule(&MARK_MASQ), rule(&format_args!("MARK --set-xmark 0x0/{mark:#x}"))])
}

/// KUBE-POSTROUTING and KUBE-FORWARD. In the compact layout they lead to KUBE-HAIRPIN, so they are written after the dispatch chains.
#[must_use]
pub fn leading_to_dispatch(config: &RenderConfig, is_compact: bool) -> [FixedChain; 2] {
    [postrouting(config, is_compact), forward(config, is_compact)]
}

fn postrouting(config: &RenderConfig, is_compact: bool) -> FixedChain {
    let mut rules = String::new();
    let mark = config.masquerade.mark();
    if is_compact {
        Line::append(&mut rules, POSTROUTING).add("-m conntrack --ctstate DNAT").jump(HAIRPIN);
    }
    if config.beside_ipvs {
        beside_ipvs::hairpin(Line::append(&mut rules, POSTROUTING), config.family);
    }
    Line::append(&mut rules, POSTROUTING).add(format_args!("-m mark ! --mark {mark:#x}/{mark:#x}")).jump("RETURN");
    Line::append(&mut rules, POSTROUTING).jump(format_args!("MARK --set-xmark {mark:#x}/0x0"));
    Line::append(&mut rules, POSTROUTING)
        .comment("kubernetes service traffic requiring SNAT")
        .jump("MASQUERADE --random-fully");
    FixedChain { table: Table::Nat, name: POSTROUTING, rules }
}

/// Packets that conntrack calls INVALID would reach a pod with their addresses untranslated, and its reset would end a good connection
/// (kubernetes#74839): they are dropped, unless conntrack was told to be liberal. IPVS translates by its own table, and kube-proxy leaves them alone there.
///
/// Connections that are to be masqueraded are let through whatever the host's firewall forwards. In the compact layout those of endpoints to themselves have
/// no mark yet.
fn forward(config: &RenderConfig, is_compact: bool) -> FixedChain {
    let mut rules = String::new();
    let mark = config.masquerade.mark();
    if !config.conntrack_tcp_be_liberal && !config.beside_ipvs {
        let line = Line::append(&mut rules, FORWARD).add("-m conntrack --ctstate INVALID");
        let line = if config.counts_packets { line.counted_by(INVALID_COUNTER) } else { line };
        line.jump("DROP");
    }
    Line::append(&mut rules, FORWARD)
        .comment("kubernetes forwarding rules")
        .add(format_args!("-m mark --mark {mark:#x}/{mark:#x}"))
        .jump("ACCEPT");
    Line::append(&mut rules, FORWARD)
        .comment("kubernetes forwarding conntrack rule")
        .add("-m conntrack --ctstate RELATED,ESTABLISHED")
        .jump("ACCEPT");
    if is_compact {
        Line::append(&mut rules, FORWARD).add("-m conntrack --ctstate DNAT").jump(HAIRPIN);
    }
    FixedChain { table: Table::Filter, name: FORWARD, rules }
}

/// With `route_localnet` on, neighbours could reach services bound to 127.0.0.1 (CVE-2020-8558); only translated connections may.
fn localnet_guard() -> FixedChain {
    let mut rules = String::new();
    Line::append(&mut rules, LOCALNET_GUARD)
        .add("! -s 127.0.0.0/8 -d 127.0.0.0/8")
        .comment("block incoming localnet connections")
        .add("-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT")
        .jump("DROP");
    FixedChain { table: Table::Filter, name: LOCALNET_GUARD, rules }
}
