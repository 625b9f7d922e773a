//! Rules of services with Local policy, for pods of this node and for the node itself.
//!
//! A virtual server of an address with Local policy has this node's endpoints alone. Local pods and
//! the node reach all endpoints, so iptables translates their packets before IPVS sees them.

use crate::{
    behaviours::view::ServicePortView,
    dataplane::rules::{
        RenderConfig,
        service::{PortRules, ServiceRules},
    },
    model::Service,
};

/// Renders a service from the views of its ports.
pub(super) fn render(
    config: &RenderConfig,
    is_compact: bool,
    _service: &Service,
    views: &[ServicePortView],
) -> ServiceRules {
    ServiceRules::of_ports(config, is_compact, views, render_port)
}

fn render_port(port: &PortRules<'_>, rules: &mut ServiceRules) {
    let view = port.view;
    let has_short_ways = view.external_traffic_policy.is_local() && view.is_externally_accessible();
    if !has_short_ways || view.cluster_endpoints.is_empty() {
        return;
    }
    port.endpoint_rules(&view.cluster_endpoints.iter().copied().collect(), rules);
    rules.chains.push(port.policy_chain(port.cluster_policy, &view.cluster_endpoints, false));
    rules.chains.push(port.external_chain());
    if port.uses_firewall {
        rules.chains.push(port.firewall_chain());
    }
    port.external_jumps(rules);
}
