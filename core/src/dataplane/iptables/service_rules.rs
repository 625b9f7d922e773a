//! The rules of one service in iptables mode.

use crate::{
    behaviours::view::ServicePortView,
    dataplane::rules::{
        line::Line,
        names::DispatchChain,
        service::{Chain, DispatchLine, PortRules, Selector, ServiceRules},
    },
};

/// What happens to packets for which the policy has no endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// REJECT: the service port has no endpoint on any node.
    Reject,
    /// DROP: the policy is Local, and all endpoints are on other nodes.
    Drop,
}

impl Verdict {
    /// Returns the verdict for a policy, or `None` if the policy has endpoints.
    fn of(view: &ServicePortView, is_local: bool) -> Option<Self> {
        match (view.has_any_endpoint, is_local && view.local_endpoints.is_empty()) {
            (false, _) => Some(Self::Reject),
            (true, true) => Some(Self::Drop),
            (true, false) => None,
        }
    }
}

/// Renders a service port.
pub(super) fn render_port(port: &PortRules<'_>, rules: &mut ServiceRules) {
    let view = port.view;
    let is_internal_local = view.internal_traffic_policy.is_local();
    let is_external_local = view.external_traffic_policy.is_local();
    let external_verdict = Verdict::of(view, is_external_local);
    port.endpoint_rules(&view.reachable_endpoints(), rules);
    if !view.cluster_endpoints.is_empty() && view.uses_cluster_endpoints() {
        rules.chains.push(port.policy_chain(port.cluster_policy, &view.cluster_endpoints, !is_internal_local));
    }
    if !view.local_endpoints.is_empty() && view.uses_local_endpoints() {
        rules.chains.push(port.policy_chain(port.local_policy, &view.local_endpoints, is_internal_local));
    }
    if view.has_any_endpoint && view.is_externally_accessible() {
        let Chain { name, rules: mut text } = port.external_chain();
        if external_verdict.is_none() {
            let target = if is_external_local { port.local_policy } else { port.cluster_policy };
            Line::append(&mut text, name).jump(target);
        }
        rules.chains.push(Chain { name, rules: text });
    }
    if port.uses_firewall {
        rules.chains.push(port.firewall_chain());
    }

    if let Some(address) = view.cluster_ip {
        let selector = Selector::ClusterIp(address);
        let target = if is_internal_local { port.local_policy } else { port.cluster_policy };
        rules.dispatch.push(match Verdict::of(view, is_internal_local) {
            Some(verdict) => reject_or_drop(port, DispatchChain::FilterServices, selector, verdict),
            None => port.dispatch_jump(DispatchChain::NatServices, selector, "cluster IP", target),
        });
    }
    if view.has_any_endpoint {
        port.external_jumps(rules);
    }
    if let Some(verdict) = external_verdict {
        let line = |selector| reject_or_drop(port, DispatchChain::FilterExternalServices, selector, verdict);
        rules.dispatch.extend(port.external_selectors().into_iter().map(line));
    }
    if port.uses_firewall {
        let addresses = view.load_balancer_ips.iter().map(|address| Selector::Address(*address));
        rules.dispatch.extend(addresses.map(|selector| drop_not_admitted(port, selector)));
    }
}

fn reject_or_drop(port: &PortRules<'_>, chain: DispatchChain, selector: Selector, verdict: Verdict) -> DispatchLine {
    let comment = match verdict {
        Verdict::Reject => "has no endpoints",
        Verdict::Drop => "has no local endpoints",
    };
    let mut rule = String::new();
    let mut line = port.dispatch_line(&mut rule, chain.table(), selector, comment);
    if matches!(selector, Selector::NodePort(..)) {
        line = line.destination_is_node();
    }
    match verdict {
        Verdict::Reject => line.reject(port.view.family),
        Verdict::Drop => line.jump("DROP"),
    }
    DispatchLine { chain, selector, rule }
}

fn drop_not_admitted(port: &PortRules<'_>, selector: Selector) -> DispatchLine {
    let chain = DispatchChain::FilterProxyFirewall;
    let comment = format!("traffic not accepted by {}", port.firewall);
    let mut rule = String::new();
    port.dispatch_line(&mut rule, chain.table(), selector, &comment).jump("DROP");
    DispatchLine { chain, selector, rule }
}
