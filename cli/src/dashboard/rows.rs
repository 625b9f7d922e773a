//! What the page gets of nodes, changes and Services: short rows, so that the stream stays small.

use headgate_proto::v1::{AgentInfo, ChangeTime, ServiceInfo};
use serde_json::{Map, Value, json};

use crate::render;

/// A node, with further facts only if it is not well.
pub(super) fn node(agent: &AgentInfo, now_unix_ms: u64) -> Value {
    let state = state(agent);
    let mut row = json!([
        agent.node,
        agent.zone,
        agent.pool,
        agent.backend,
        agent.agent_version,
        agent.replica,
        agent.verified_unix_ms,
        state
    ]);
    let departed = if agent.departed_ms > 0 { now_unix_ms.saturating_sub(agent.departed_ms) } else { 0 };
    let facts = [
        ("error", json!(agent.last_error)),
        ("reason", json!(agent.reason)),
        ("degraded", json!(agent.degraded)),
        ("rejected", json!(agent.rejected_count)),
        ("drift", json!(agent.drift_count)),
        ("lag", json!(agent.lag_ms)),
        ("departed", json!(departed)),
    ];
    let is_there = |(_, value): &(&str, Value)| ![json!(""), json!([]), json!(0)].contains(value);
    let more: Map<String, Value> =
        facts.into_iter().filter(is_there).map(|(name, value)| (name.to_owned(), value)).collect();
    if let (false, Value::Array(row)) = (more.is_empty(), &mut row) {
        row.push(Value::Object(more));
    }
    row
}

/// The worst of what is true of a node.
fn state(agent: &AgentInfo) -> &'static str {
    match agent.state.as_str() {
        "no_agent" => "no_agent",
        "waiting" => "waiting",
        "cut_off" => "cut_off",
        "standby" => "standby",
        _ if !agent.last_error.is_empty() => "failing",
        _ if agent.rejected_count > 0 => "rejecting",
        "failing" => "failing",
        _ if agent.drift_count > 0 => "drift",
        _ if render::is_behind(agent) => "behind",
        _ if !agent.degraded.is_empty() => "degraded",
        _ => "well",
    }
}

/// A change, and the time until the last node had it.
pub(super) fn change(of: &ChangeTime) -> Value {
    json!([
        of.version,
        of.unix_ms,
        of.service,
        of.endpoint,
        of.changed,
        of.trigger,
        of.everywhere_after_ms,
        of.nodes,
        of.missing,
        of.state,
        of.slowest,
        of.reason
    ])
}

/// A Service in the table.
pub(super) fn service(of: &ServiceInfo) -> Value {
    json!({
        "namespace": of.namespace,
        "name": of.name,
        "cluster_ips": of.cluster_ips,
        "ports": of.ports,
        "endpoints": of.endpoints,
        "ready_endpoints": of.ready_endpoints,
        "internal_traffic_policy": of.internal_traffic_policy,
        "external_traffic_policy": of.external_traffic_policy,
        "conflicts": of.conflicts.len(),
        "problems": of.problems.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_state_of_a_node_counts() {
        let well = AgentInfo { node: "a".into(), state: "up_to_date".into(), ..AgentInfo::default() };
        assert_eq!(node(&well, 0), json!(["a", "", "", "", "", "", 0, "well"]));
        let degraded = AgentInfo { degraded: vec!["no SCTP".into()], ..well.clone() };
        assert_eq!(state(&degraded), "degraded");
        let behind = AgentInfo { state: "behind".into(), lag_ms: 5000, ..degraded };
        assert_eq!(state(&behind), "behind");
        let drift = AgentInfo { drift_count: 2, ..behind };
        assert_eq!(state(&drift), "drift");
        let rejecting = AgentInfo { rejected_count: 1, state: "failing".into(), ..drift };
        assert_eq!(state(&rejecting), "rejecting");
        let failing = AgentInfo { last_error: "no".into(), ..rejecting };
        assert_eq!(state(&failing), "failing");
        let standby = AgentInfo { state: "standby".into(), rejected_count: 1, ..well.clone() };
        assert_eq!(state(&standby), "standby");
        let absent = AgentInfo { state: "no_agent".into(), departed_ms: 400, reason: "why".into(), ..well };
        let row = node(&absent, 1000);
        assert_eq!((&row[7], &row[8]), (&json!("no_agent"), &json!({ "reason": "why", "departed": 600 })));
    }
}
