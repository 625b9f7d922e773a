//! The rules of iptables mode.

use super::service_rules;
use crate::{
    dataplane::rules::{
        FixedChain, Jump, RenderConfig, RulesTable, Ruleset, Script,
        line::Line,
        names::{
            DispatchChain, EXTERNAL_SERVICES, FORWARD, GATE_INPUT, LOCALNET_GUARD, NODE_PORTS, POSTROUTING,
            PROXY_FIREWALL, SERVICES,
        },
        ruleset::{canaries, drop_invalid, forward, jump, mark_masq, node_ports_jumps, postrouting},
    },
    model::Protocol,
};

/// Returns the rules of iptables mode for one family.
#[must_use]
pub fn ruleset(config: RenderConfig) -> Ruleset {
    let mut chains = vec![mark_masq(&config)];
    chains.extend(gate_chains(&config));
    chains.extend(gate_input(&config));
    chains.extend(has_localnet_guard(&config).then(localnet_guard));
    chains.extend(canaries());
    let drop_invalid = if config.conntrack_tcp_be_liberal { String::new() } else { drop_invalid(&config) };
    Ruleset {
        chains,
        postrouting: keep_clients(&config) + &postrouting(&config),
        forward: drop_invalid + &forward(&config),
        dispatch: &DispatchChain::ALL,
        last_service_rules: node_ports_jumps(&config),
        jumps: jumps(&config),
        render_port: service_rules::render_port,
        config,
    }
}

/// True if NodePorts are served on addresses in 127.0.0.0/8. NodePorts on these addresses need the
/// sysctl `route_localnet` and the chain [`LOCALNET_GUARD`].
#[must_use]
pub fn has_localnet_guard(config: &RenderConfig) -> bool {
    config.node_port_addresses.include_localhost(config.family, config.localhost_node_ports)
}

/// Creates the chains that lead to the listeners of a proxy. The gate is a set with elements that
/// expire, which the proxy renews while it accepts connections.
fn gate_chains(config: &RenderConfig) -> impl Iterator<Item = FixedChain> {
    config.listeners.iter().map(|(chain, listener)| {
        let mut rules = String::new();
        Line::append(&mut rules, chain.as_str())
            .protocol(Protocol::Tcp)
            .comment("the proxy, while it accepts connections")
            .while_gate_is_closed(config.family)
            .jump(format_args!("DNAT --to-destination {listener}"));
        FixedChain { table: RulesTable::Nat, name: chain.as_str(), rules }
    })
}

/// Creates the chain that accepts connections that the rules sent to the proxy. Mode iptables
/// accepts them in KUBE-FORWARD, but here the node itself is their destination.
fn gate_input(config: &RenderConfig) -> Option<FixedChain> {
    let listener = config.listeners.values().next()?;
    let mut rules = String::new();
    Line::append(&mut rules, GATE_INPUT)
        .destination_host(listener.ip())
        .protocol(Protocol::Tcp)
        .add("-m conntrack --ctstate DNAT")
        .jump("ACCEPT");
    Some(FixedChain { table: RulesTable::Filter, name: GATE_INPUT, rules })
}

/// Renders the rule of KUBE-POSTROUTING that excludes connections to the proxy from masquerading,
/// because the proxy needs the addresses of its clients.
fn keep_clients(config: &RenderConfig) -> String {
    let mut rule = String::new();
    if let Some(listener) = config.listeners.values().next() {
        Line::append(&mut rule, POSTROUTING).destination_host(listener.ip()).jump("RETURN");
    }
    rule
}

fn jumps(config: &RenderConfig) -> Vec<Jump> {
    let portals = "kubernetes service portals";
    let visible = "kubernetes externally-visible service portals";
    let firewall = "kubernetes load balancer firewall";
    let (nat, filter) = (RulesTable::Nat, RulesTable::Filter);
    let mut jumps = Vec::new();
    // The guard comes first, because KUBE-NODEPORTS accepts packets to health-check node ports.
    // Packets that another host sends to 127.0.0.1 must not reach KUBE-NODEPORTS.
    if has_localnet_guard(config) {
        jumps.extend(localnet_guard_jumps());
    }
    jumps.extend([
        jump(nat, "PREROUTING", SERVICES, portals, false),
        jump(nat, "OUTPUT", SERVICES, portals, false),
        jump(nat, "POSTROUTING", POSTROUTING, "kubernetes postrouting rules", false),
    ]);
    for from in ["INPUT", "FORWARD", "OUTPUT"] {
        jumps.push(jump(filter, from, PROXY_FIREWALL, firewall, true));
    }
    if config.has_proxy() {
        jumps.push(jump(filter, "INPUT", GATE_INPUT, "connections to the proxy", false));
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

/// Creates the jump from OUTPUT to KUBE-EXTERNAL-SERVICES. kube-proxy has no such jump in iptables
/// mode. With kube-proxy, connections from the node to external addresses without endpoints
/// therefore time out.
///
/// The jump does not match packets to the node's own addresses, such as NodePorts. INPUT rejects
/// these packets. If OUTPUT rejected them, the sending system call would fail with EPERM instead of
/// ECONNREFUSED.
fn external_output_jump(comment: &str) -> Jump {
    let mut rule = String::new();
    Line::bare(&mut rule)
        .add("-m conntrack --ctstate NEW -m addrtype ! --dst-type LOCAL")
        .comment(comment)
        .jump(EXTERNAL_SERVICES);
    Jump { table: RulesTable::Filter, from: "OUTPUT", rule: rule.trim().to_owned() }
}

/// Returns a script that creates the chain [`LOCALNET_GUARD`] and its jumps, for a node without
/// this chain.
#[must_use]
pub fn localnet_guard_script() -> Script {
    let (guard, mut script) = (localnet_guard(), Script::default());
    script.write_chain(guard.table, &guard.name, &guard.rules);
    for jump in localnet_guard_jumps() {
        script.insert_first(jump.table, jump.from, &jump.rule);
    }
    script
}

fn localnet_guard_jumps() -> [Jump; 2] {
    ["INPUT", "OUTPUT"]
        .map(|from| jump(RulesTable::Filter, from, LOCALNET_GUARD, "block incoming localnet connections", false))
}

/// Creates the chain that protects 127.0.0.0/8. With `route_localnet`, other hosts could reach
/// programs that listen on 127.0.0.1 (CVE-2020-8558). From sources outside 127.0.0.0/8, the chain
/// admits only packets of translated, established or related connections.
fn localnet_guard() -> FixedChain {
    let mut rules = String::new();
    Line::append(&mut rules, LOCALNET_GUARD)
        .add("! -s 127.0.0.0/8 -d 127.0.0.0/8")
        .comment("block incoming localnet connections")
        .add("-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT")
        .jump("DROP");
    FixedChain { table: RulesTable::Filter, name: LOCALNET_GUARD, rules }
}
