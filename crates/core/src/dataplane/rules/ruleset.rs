//! The rules of a dataplane as data: the rules that do not depend on services, and a function that
//! renders the rules of a service.

use std::net::IpAddr;

use super::{
    RulesTable,
    config::{NodePortAddresses, RenderConfig},
    line::Line,
    names::{CANARY, DispatchChain, FORWARD, HAIRPIN, INVALID_COUNTER, MARK_MASQ, NODE_PORTS, POSTROUTING},
    service::RenderPort,
};
use crate::model::Family;

/// The rules of one family of a dataplane. The [`super::RulesLedger`] programs these rules.
#[derive(Debug, Clone)]
pub struct Ruleset {
    /// The configuration of the rules.
    pub config: RenderConfig,
    /// Chains with fixed rules. A chain comes before the chains that jump to it. Scripts write
    /// these chains before the dispatch chains.
    pub chains: Vec<FixedChain>,
    /// Rules of nat KUBE-POSTROUTING, besides the jump to KUBE-HAIRPIN.
    pub postrouting: String,
    /// Rules of filter KUBE-FORWARD, besides the jump to KUBE-HAIRPIN.
    pub forward: String,
    /// The dispatch chains without KUBE-HAIRPIN. They must include nat KUBE-SERVICES.
    pub dispatch: &'static [DispatchChain],
    /// The last rules of nat KUBE-SERVICES. Each rule has a leading space and a line end, and does
    /// not contain the name of the chain.
    pub last_service_rules: Vec<String>,
    /// Jumps from the built-in chains, in their order at the head of these chains.
    pub jumps: Vec<Jump>,
    /// Renders the rules of a service port.
    pub(in crate::dataplane) render_port: RenderPort,
}

impl Ruleset {
    /// Returns the dispatch chains of a layout. A chain comes before the chains that jump to it.
    pub fn dispatch_chains(&self, is_compact: bool) -> impl Iterator<Item = DispatchChain> + use<> {
        let dispatch = self.dispatch;
        let is_used =
            move |chain: &DispatchChain| if chain.is_hairpin() { is_compact } else { dispatch.contains(chain) };
        DispatchChain::ALL.into_iter().filter(is_used)
    }

    /// Returns KUBE-POSTROUTING and KUBE-FORWARD. In the compact layout they jump to KUBE-HAIRPIN,
    /// so scripts write them after the dispatch chains.
    #[must_use]
    pub fn leading_to_dispatch(&self, is_compact: bool) -> [FixedChain; 2] {
        let hairpin = |chain| {
            let mut rule = String::new();
            if is_compact {
                Line::append(&mut rule, chain).add("-m conntrack --ctstate DNAT").jump(HAIRPIN);
            }
            rule
        };
        [
            FixedChain { table: RulesTable::Nat, name: POSTROUTING, rules: hairpin(POSTROUTING) + &self.postrouting },
            FixedChain { table: RulesTable::Filter, name: FORWARD, rules: self.forward.clone() + &hairpin(FORWARD) },
        ]
    }
}

/// A jump from a built-in chain to a chain of Headgate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jump {
    /// Table.
    pub table: RulesTable,
    /// The built-in chain.
    pub from: &'static str,
    /// The rule without `-A FROM`, as `iptables-save` prints it.
    pub rule: String,
}

/// A chain with fixed rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FixedChain {
    /// Table.
    pub table: RulesTable,
    /// Name.
    pub name: &'static str,
    /// Complete rules, each a line `-A NAME …`.
    pub rules: String,
}

/// The canaries: one empty chain in each table. If a canary is missing, another program has flushed
/// the tables.
pub(in crate::dataplane) fn canaries() -> [FixedChain; 3] {
    RulesTable::ALL.map(|table| FixedChain { table, name: CANARY, rules: String::new() })
}

/// Creates a jump. With `new_only` it matches only packets that begin a connection.
pub(in crate::dataplane) fn jump(
    table: RulesTable,
    from: &'static str,
    target: &str,
    comment: &str,
    new_only: bool,
) -> Jump {
    let mut rule = String::new();
    let mut line = Line::bare(&mut rule);
    if new_only {
        line = line.add("-m conntrack --ctstate NEW");
    }
    line.comment(comment).jump(target);
    Jump { table, from, rule: rule.trim().to_owned() }
}

/// Renders the rules of nat KUBE-SERVICES that jump to KUBE-NODEPORTS, for the addresses on which
/// NodePorts are served.
pub(in crate::dataplane) fn node_ports_jumps(config: &RenderConfig) -> Vec<String> {
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

/// The chain nat KUBE-MARK-MASQ, which marks packets to be masqueraded.
pub(in crate::dataplane) fn mark_masq(config: &RenderConfig) -> FixedChain {
    let mut rules = String::new();
    let mark = config.masquerade.mark();
    Line::append(&mut rules, MARK_MASQ).jump(format_args!("MARK --set-xmark {mark:#x}/{mark:#x}"));
    FixedChain { table: RulesTable::Nat, name: MARK_MASQ, rules }
}

/// Renders the rules of KUBE-POSTROUTING that masquerade marked packets.
pub(in crate::dataplane) fn postrouting(config: &RenderConfig) -> String {
    let mut rules = String::new();
    let mark = config.masquerade.mark();
    Line::append(&mut rules, POSTROUTING).add(format_args!("-m mark ! --mark {mark:#x}/{mark:#x}")).jump("RETURN");
    Line::append(&mut rules, POSTROUTING).jump(format_args!("MARK --set-xmark {mark:#x}/0x0"));
    Line::append(&mut rules, POSTROUTING)
        .comment("kubernetes service traffic requiring SNAT")
        .jump("MASQUERADE --random-fully");
    rules
}

/// Renders the rule of KUBE-FORWARD that drops packets in the conntrack state INVALID. The kernel
/// does not translate the addresses of these packets. Without this rule, a client would receive a
/// packet from the pod's own address and would answer with a reset, which ends a working connection
/// (kubernetes/kubernetes#74839).
pub(in crate::dataplane) fn drop_invalid(config: &RenderConfig) -> String {
    let mut rules = String::new();
    let line = Line::append(&mut rules, FORWARD).add("-m conntrack --ctstate INVALID");
    let line = if config.counts_packets { line.counted_by(INVALID_COUNTER) } else { line };
    line.jump("DROP");
    rules
}

/// Renders the rules of KUBE-FORWARD that accept masqueraded connections and replies, even if the
/// host's firewall would drop them. In the compact layout these rules do not match hairpin
/// connections, because only nat POSTROUTING detects hairpin connections. KUBE-HAIRPIN accepts
/// these connections.
pub(in crate::dataplane) fn forward(config: &RenderConfig) -> String {
    let mut rules = String::new();
    let mark = config.masquerade.mark();
    Line::append(&mut rules, FORWARD)
        .comment("kubernetes forwarding rules")
        .add(format_args!("-m mark --mark {mark:#x}/{mark:#x}"))
        .jump("ACCEPT");
    Line::append(&mut rules, FORWARD)
        .comment("kubernetes forwarding conntrack rule")
        .add("-m conntrack --ctstate RELATED,ESTABLISHED")
        .jump("ACCEPT");
    rules
}
