//! The rules of one service in iptables mode.

use crate::{
    behaviours::view::Outcome,
    dataplane::rules::{
        line::Line,
        names::DispatchChain,
        service::{DispatchLine, PortRules, Selector, ServiceChain, ServiceRules},
    },
};

/// Renders a service port.
pub(super) fn render_port(port: &PortRules<'_>, rules: &mut ServiceRules) {
    if port.is_refused() {
        return render_refusals(port, rules);
    }
    let view = port.view;
    let is_internal_local = view.internal_traffic_policy.is_local();
    let is_external_local = view.external_traffic_policy.is_local();
    let external = view.outcome(view.external_traffic_policy);
    port.endpoint_rules(&view.reachable_endpoints(), rules);
    if !view.cluster_endpoints.is_empty() && view.uses_cluster_endpoints() {
        rules.chains.push(port.policy_chain(port.cluster_policy, &view.cluster_endpoints, !is_internal_local));
    }
    if !view.local_endpoints.is_empty() && view.uses_local_endpoints() {
        rules.chains.push(port.policy_chain(port.local_policy, &view.local_endpoints, is_internal_local));
    }
    if view.has_any_endpoint && view.is_externally_accessible() {
        let ServiceChain { name, rules: mut text } = port.external_chain();
        if matches!(external, Outcome::Forwarded(_)) {
            let target = if is_external_local { port.local_policy } else { port.cluster_policy };
            Line::append(&mut text, name).jump(target);
        }
        rules.chains.push(ServiceChain { name, rules: text });
    }
    if port.uses_firewall {
        rules.chains.push(port.firewall_chain());
    }

    if let Some(address) = view.cluster_ip {
        let selector = Selector::ClusterIp(address);
        let target = if is_internal_local { port.local_policy } else { port.cluster_policy };
        let internal = view.outcome(view.internal_traffic_policy);
        if matches!(internal, Outcome::Forwarded(_)) {
            rules.dispatch.push(port.dispatch_jump(DispatchChain::NatServices, selector, "cluster IP", target));
        }
        rules.dispatch.extend(reject_or_drop(port, DispatchChain::FilterServices, selector, internal));
    }
    if view.has_any_endpoint {
        port.external_jumps(rules);
    }
    let refused = |selector| reject_or_drop(port, DispatchChain::FilterExternalServices, selector, external);
    rules.dispatch.extend(port.external_selectors().into_iter().filter_map(refused));
    if port.uses_firewall {
        let addresses = view.load_balancer_ips.iter().map(|address| Selector::Address(*address));
        rules.dispatch.extend(addresses.map(|selector| drop_not_admitted(port, selector)));
    }
}

/// Renders the rules that refuse all connections to a port that the proxy of mode userspace cannot
/// carry.
fn render_refusals(port: &PortRules<'_>, rules: &mut ServiceRules) {
    let cluster_ip = port.view.cluster_ip.map(Selector::ClusterIp);
    let cluster_ip = cluster_ip.into_iter().map(|selector| (DispatchChain::FilterServices, selector));
    let external = port.external_selectors().into_iter();
    let external = external.map(|selector| (DispatchChain::FilterExternalServices, selector));
    let refused = cluster_ip.chain(external);
    let refused = refused.filter_map(|(chain, selector)| reject_or_drop(port, chain, selector, Outcome::Rejected));
    rules.dispatch.extend(refused);
}

/// Renders the rule that refuses connections. Returns `None` if connections are forwarded. If only
/// a proxy can carry the connections, the rule refuses those that are left.
fn reject_or_drop(
    port: &PortRules<'_>,
    chain: DispatchChain,
    selector: Selector,
    outcome: Outcome<'_>,
) -> Option<DispatchLine> {
    let comment = match outcome {
        Outcome::Forwarded(_) if port.is_proxy_only() => "needs the proxy",
        Outcome::Forwarded(_) => return None,
        Outcome::Rejected if port.is_refused() => "cannot be carried by the proxy",
        Outcome::Rejected => "has no endpoints",
        Outcome::Dropped => "has no local endpoints",
    };
    let mut rule = String::new();
    let mut line = port.dispatch_line(&mut rule, chain.table(), selector, comment);
    if matches!(selector, Selector::NodePort(..)) {
        line = line.destination_is_node();
    }
    if outcome == Outcome::Dropped {
        line.jump("DROP");
    } else {
        line.reject(port.view.family);
    }
    Some(DispatchLine { chain, selector, rule })
}

fn drop_not_admitted(port: &PortRules<'_>, selector: Selector) -> DispatchLine {
    let chain = DispatchChain::FilterProxyFirewall;
    let comment = format!("traffic not accepted by {}", port.firewall);
    let mut rule = String::new();
    port.dispatch_line(&mut rule, chain.table(), selector, &comment).jump("DROP");
    DispatchLine { chain, selector, rule }
}
