//! iptables rules for traffic from pods of this node, and from the node itself, to services with
//! external Local policy.
//!
//! The virtual server of an address with Local policy has only endpoints on this node. Local pods
//! and the node itself may use all endpoints, so iptables translates packets of these clients
//! before IPVS receives the packets.

use crate::dataplane::rules::service::{PortRules, ServiceRules};

/// Renders a service port.
pub(super) fn render_port(port: &PortRules<'_>, rules: &mut ServiceRules) {
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
