//! iptables rules for services with external Local policy, which apply to traffic from pods of this
//! node and from the node itself.
//!
//! The virtual server of an address with Local policy has only endpoints on this node. Local pods
//! and the node itself may use all endpoints, so iptables translates their packets before IPVS sees
//! them.

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
    let is_external_local = view.external_traffic_policy.is_local() && view.is_externally_accessible();
    if !is_external_local || view.cluster_endpoints.is_empty() {
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
