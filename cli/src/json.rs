//! Answers as JSON. Field names and units are the same as in `headgate.v1.Inspect`. Every field is
//! always present, so that programs can rely on it. Tests compare the fields with the protocol.

use headgate_proto::v1::{
    AgentInfo, EndpointInfo, FleetInfo, GetStatusResponse, Laggard, Problem, ServiceInfo, ServicePortInfo, SourceAge,
    SourcePosition, WaitProgress, WatchEvent,
};
use serde_json::{Value, json};

/// Converts a `ServiceInfo`.
pub fn service(info: &ServiceInfo) -> Value {
    json!({
        "namespace": info.namespace,
        "name": info.name,
        "cluster_ips": info.cluster_ips,
        "external_ips": info.external_ips,
        "load_balancer_ips": info.load_balancer_ips,
        "ports": info.ports.iter().map(port).collect::<Vec<_>>(),
        "internal_traffic_policy": info.internal_traffic_policy,
        "external_traffic_policy": info.external_traffic_policy,
        "session_affinity_timeout_seconds": info.session_affinity_timeout_seconds,
        "load_balancer_source_ranges": info.load_balancer_source_ranges,
        "health_check_node_port": info.health_check_node_port,
        "endpoints": info.endpoints,
        "ready_endpoints": info.ready_endpoints,
        "version": info.version,
        "conflicts": info.conflicts,
        "scheduler": info.scheduler,
        "health_check": info.health_check,
        "health_check_interval_ms": info.health_check_interval_ms,
        "problems": info.problems.iter().map(problem).collect::<Vec<_>>(),
    })
}

fn port(info: &ServicePortInfo) -> Value {
    json!({ "name": info.name, "protocol": info.protocol, "port": info.port, "node_port": info.node_port })
}

/// Converts an `EndpointInfo`.
pub fn endpoint(info: &EndpointInfo) -> Value {
    json!({
        "namespace": info.namespace,
        "name": info.name,
        "address": info.address,
        "ports": info.ports,
        "ready": info.ready,
        "serving": info.serving,
        "terminating": info.terminating,
        "node": info.node,
        "zone": info.zone,
        "hint_zones": info.hint_zones,
        "hint_nodes": info.hint_nodes,
        "version": info.version,
    })
}

/// Converts an `AgentInfo`.
pub fn agent(info: &AgentInfo) -> Value {
    json!({
        "node": info.node,
        "address": info.address,
        "agent_version": info.agent_version,
        "backend": info.backend,
        "degraded": info.degraded,
        "head_version": info.head_version,
        "sent_version": info.sent_version,
        "programmed_version": info.programmed_version,
        "lag_ms": info.lag_ms,
        "apply_microseconds": info.apply_microseconds,
        "services_planned": info.services_planned,
        "objects_written": info.objects_written,
        "resume": info.resume,
        "resumed_resources": info.resumed_resources,
        "connected_unix_ms": info.connected_unix_ms,
        "last_error": info.last_error,
        "rejections": info.rejections.iter().map(problem).collect::<Vec<_>>(),
        "state": info.state,
        "reason": info.reason,
    })
}

/// Converts a `GetStatusResponse`.
pub fn status(info: &GetStatusResponse) -> Value {
    json!({
        "replica": info.replica,
        "epoch": info.epoch,
        "version": info.version,
        "build": info.build,
        "source": info.source,
        "synced": info.synced,
        "source_age_ms": info.source_age_ms,
        "services": info.services,
        "endpoints": info.endpoints,
        "nodes": info.nodes,
        "agents": info.agents,
        "problems": info.problems.iter().map(problem).collect::<Vec<_>>(),
        "fleet": fleet(&info.fleet.unwrap_or_default()),
        "source_ages": info.source_ages.iter().map(source_age).collect::<Vec<_>>(),
        "positions": info.positions.iter().map(position).collect::<Vec<_>>(),
        "source_state": info.source_state,
        "source_problem": info.source_problem,
    })
}

fn fleet(info: &FleetInfo) -> Value {
    json!({
        "up_to_date": info.up_to_date,
        "behind": info.behind,
        "failing": info.failing,
        "measured_commits": info.measured_commits,
        "everywhere_p50_ms": info.everywhere_p50_ms,
        "everywhere_p99_ms": info.everywhere_p99_ms,
        "everywhere_max_ms": info.everywhere_max_ms,
        "waiting": info.waiting,
        "cut_off": info.cut_off,
    })
}

fn source_age(info: &SourceAge) -> Value {
    json!({ "kind": info.kind, "age_ms": info.age_ms })
}

fn position(info: &SourcePosition) -> Value {
    json!({ "kind": info.kind().as_str_name(), "position": info.position })
}

/// Converts a `WaitProgress`.
pub fn progress(info: &WaitProgress) -> Value {
    json!({
        "replica": info.replica,
        "waiting_for": info.waiting_for,
        "version": info.version,
        "agents": info.agents,
        "programmed": info.programmed,
        "timed_out": info.timed_out,
        "laggards": info.laggards.iter().map(laggard).collect::<Vec<_>>(),
        "disconnected": info.disconnected,
        "source_state": info.source_state,
    })
}

fn laggard(info: &Laggard) -> Value {
    json!({
        "node": info.node,
        "sent_version": info.sent_version,
        "programmed_version": info.programmed_version,
        "lag_ms": info.lag_ms,
        "reason": info.reason,
    })
}

fn problem(info: &Problem) -> Value {
    json!({ "object": info.object, "field": info.field, "message": info.message, "origin": info.origin })
}

/// Converts a `WatchEvent`. Either `service` or `endpoint` is null.
pub fn event(info: &WatchEvent) -> Value {
    json!({
        "version": info.version,
        "unix_ms": info.unix_ms,
        "action": info.action,
        "service": info.service.as_ref().map(service),
        "endpoint": info.endpoint.as_ref().map(endpoint),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The field names of a message in the compiled protocol.
    fn fields_of(message: &str) -> BTreeSet<String> {
        use prost::Message as _;
        let set = prost_types::FileDescriptorSet::decode(headgate_proto::FILE_DESCRIPTOR_SET).unwrap();
        let found = set.file.iter().flat_map(|file| &file.message_type).find(|found| found.name() == message);
        found.unwrap().field.iter().map(|field| field.name().to_owned()).collect()
    }

    fn keys(value: &Value) -> BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn json_contains_every_field_of_the_protocol_under_its_name() {
        assert_eq!(keys(&service(&ServiceInfo::default())), fields_of("ServiceInfo"));
        assert_eq!(keys(&port(&ServicePortInfo::default())), fields_of("ServicePortInfo"));
        assert_eq!(keys(&endpoint(&EndpointInfo::default())), fields_of("EndpointInfo"));
        assert_eq!(keys(&agent(&AgentInfo::default())), fields_of("AgentInfo"));
        assert_eq!(keys(&status(&GetStatusResponse::default())), fields_of("GetStatusResponse"));
        assert_eq!(keys(&problem(&Problem::default())), fields_of("Problem"));
        assert_eq!(keys(&fleet(&FleetInfo::default())), fields_of("FleetInfo"));
        assert_eq!(keys(&source_age(&SourceAge::default())), fields_of("SourceAge"));
        assert_eq!(keys(&position(&SourcePosition::default())), fields_of("SourcePosition"));
        assert_eq!(keys(&progress(&WaitProgress::default())), fields_of("WaitProgress"));
        assert_eq!(keys(&laggard(&Laggard::default())), fields_of("Laggard"));
        assert_eq!(keys(&event(&WatchEvent::default())), fields_of("WatchEvent"));
    }
}
