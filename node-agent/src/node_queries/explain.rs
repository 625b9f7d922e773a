//! Answers what the node does with a packet to a Service.

use std::{net::SocketAddr, sync::Arc};

use headgate_core::{
    Protocol, ServiceKey, address_from_bytes,
    explain::{self, ExplainedEndpoint, Explanation, MAX_DESTINATIONS, NodeSettings, Source, To},
};
use headgate_proto::v1::{self, node_answer};
use tokio::sync::watch;

use crate::{
    dataplane::mode_of,
    node_inputs::NodeInputs,
    session::outbox::NodeAnswer,
    state::{AgentState, progress::Progress},
};

/// Maximum number of endpoints in an answer, and in one part.
const MAX_ENDPOINTS: usize = 4_000;
const ENDPOINTS_IN_PART: usize = 80;

/// What the agent needs to explain its decisions.
#[derive(Debug, Clone)]
pub(crate) struct Explainer {
    pub(crate) state: Arc<AgentState>,
    pub(crate) inputs: watch::Receiver<NodeInputs>,
    /// True if every connection to a ClusterIP is masqueraded.
    pub(crate) masquerade_all: bool,
    /// True if NodePorts also answer on 127.0.0.0/8.
    pub(crate) localhost_node_ports: bool,
}

impl Explainer {
    /// Answers a query. May wait for the lock of the state.
    pub(super) fn answer(&self, query: &v1::ExplainQuery, progress: &Progress) -> NodeAnswer {
        let (source, to) = packet(query)?;
        let key = query.service.as_ref().ok_or("ExplainQuery.service: must name a Service")?;
        let key = ServiceKey::new(&key.namespace, &key.name);
        if self.state.position().is_none() {
            return Err("the agent has not received a complete state yet; ask again".to_owned());
        }
        let settings = self.settings(&progress.status.backend)?;
        let explained =
            self.state.with_facts(|state, facts| explain::explain(state, &key, facts, &settings, source, to));
        let Some((explanations, left_out)) = explained else {
            return Err(format!(
                "agents do not serve {key}: it does not exist, or is headless, or another program serves it; `headgatectl services` lists the Services"
            ));
        };
        let mut remarks = self.remarks(&key, progress);
        if left_out > 0 {
            remarks.push(format!("Only the first {MAX_DESTINATIONS} destinations are explained, and {left_out} are not: choose one with --to."));
        }
        Ok(parts(explanations, remarks))
    }

    pub(super) fn settings(&self, backend: &str) -> Result<NodeSettings, String> {
        let mode = mode_of(backend).ok_or_else(|| format!("the agent cannot explain the backend {backend:?}"))?;
        let mut settings = self.inputs.borrow().settings(mode);
        settings.masquerade.all = self.masquerade_all;
        settings.localhost_node_ports = self.localhost_node_ports;
        Ok(settings)
    }

    /// Returns the reasons why the kernel may hold something else than the agent's state.
    fn remarks(&self, key: &ServiceKey, progress: &Progress) -> Vec<String> {
        let mut remarks = Vec::new();
        let resource = format!("Service {key}");
        for rejection in progress.rejections.iter().filter(|rejection| rejection.resource == resource) {
            remarks.push(format!(
                "The kernel rejects the rules of this Service, so its last good rules are in force: {}",
                rejection.reason
            ));
        }
        if let Some(failure) = &progress.failure {
            remarks.push(format!("The last sync failed, so the kernel may hold older rules: {}", failure.error));
        }
        let counts = self.state.backlog().counts();
        let waiting = counts.service_changes_pending + counts.endpoint_changes_pending;
        if self.state.is_unconfirmed() {
            remarks.push("The agent holds the state from its disk until the control plane has brought it up to date. The kernel has the rules of an earlier run.".to_owned());
        } else if waiting > 0 {
            remarks.push(format!("The kernel does not have the newest {waiting} changes yet."));
        }
        remarks
    }
}

fn packet(query: &v1::ExplainQuery) -> Result<(Source, Option<To>), String> {
    let address = |bytes: &[u8], field: &str| {
        address_from_bytes(bytes).ok_or_else(|| format!("ExplainQuery.{field}: must have 4 or 16 bytes"))
    };
    let is_local_pod = query.source_is_local_pod;
    let source = match &query.source[..] {
        [] => Source::Node,
        bytes => Source::Address { address: address(bytes, "source")?, is_local_pod },
    };
    if query.destination.is_empty() {
        return Ok((source, None));
    }
    let port = u16::try_from(query.port).map_err(|_| "ExplainQuery.port: must be at most 65535".to_owned())?;
    let protocol = Protocol::ALL.into_iter().find(|protocol| protocol.to_string() == query.protocol);
    if protocol.is_none() && !query.protocol.is_empty() {
        return Err(format!("ExplainQuery.protocol: {:?} is not TCP, UDP or SCTP", query.protocol));
    }
    let at = SocketAddr::new(address(&query.destination, "destination")?, port);
    if let Source::Address { address, .. } = source
        && address.is_ipv4() != at.is_ipv4()
    {
        return Err(format!("the source {address} and the destination {} are of different IP families", at.ip()));
    }
    Ok((source, Some(To { at, protocol })))
}

fn parts(explanations: Vec<Explanation>, mut remarks: Vec<String>) -> Vec<node_answer::Kind> {
    let mut parts = Vec::new();
    let mut room = MAX_ENDPOINTS;
    for Explanation { destination, steps, fate, mut endpoints } in explanations {
        let left_out = endpoints.len().saturating_sub(room);
        if left_out > 0 {
            endpoints.sort_by_key(|endpoint| endpoint.left_out.is_some());
            endpoints.truncate(room);
        }
        room -= endpoints.len();
        let mut chunks = endpoints.chunks(ENDPOINTS_IN_PART).map(|chunk| chunk.iter().map(endpoint).collect());
        parts.push(v1::Explanation {
            destination,
            fate: fate.as_str().to_owned(),
            steps,
            endpoints: chunks.next().unwrap_or_default(),
            endpoints_left_out: left_out as u64,
            remarks: std::mem::take(&mut remarks),
        });
        parts.extend(chunks.map(|endpoints| v1::Explanation { endpoints, ..v1::Explanation::default() }));
    }
    parts.into_iter().map(node_answer::Kind::Explanation).collect()
}

fn endpoint(explained: &ExplainedEndpoint) -> v1::ExplainedEndpoint {
    let ExplainedEndpoint { address, port, conditions, placement, left_out } = explained;
    v1::ExplainedEndpoint {
        address: address.to_string(),
        port: (*port).into(),
        ready: conditions.ready,
        serving: conditions.serving,
        terminating: conditions.terminating,
        node: placement.node.as_deref().unwrap_or_default().to_owned(),
        zone: placement.zone.as_deref().unwrap_or_default().to_owned(),
        weight: placement.weight.get(),
        is_chosen: left_out.is_none(),
        reason: left_out.map(|reason| reason.to_string()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::IpAddr;

    use headgate_core::{
        Conditions, Placement,
        explain::{LeftOut, PacketFate},
    };
    use prost::Message as _;

    use super::*;
    use crate::session::outbox::PART_BYTES;

    #[test]
    fn a_large_answer_has_small_parts_and_the_limit_keeps_the_chosen_endpoints() {
        let endpoint = |index: u32| ExplainedEndpoint {
            address: IpAddr::from((index + 10_000).to_be_bytes()),
            port: 8080,
            conditions: Conditions::READY,
            placement: Arc::new(Placement {
                zone: Some("zone-1".into()),
                ..Placement::on("node-with-a-long-name.example")
            }),
            left_out: (index < 5_000).then_some(LeftOut::FailsHealthCheck),
        };
        let explanation = |destination: &str, endpoints| Explanation {
            destination: destination.to_owned(),
            steps: vec!["a step".to_owned()],
            fate: PacketFate::Forwarded,
            endpoints,
        };
        let explanations =
            vec![explanation("first", (0..6_000).map(endpoint).collect()), explanation("second", vec![endpoint(1)])];
        let parts = parts(explanations, vec!["a remark".to_owned()]);
        assert!(parts.iter().all(|part| v1::NodeAnswer { kind: Some(part.clone()) }.encoded_len() <= PART_BYTES));
        let parts = parts.into_iter().map(|part| match part {
            node_answer::Kind::Explanation(part) => part,
            other => panic!("not an explanation: {other:?}"),
        });
        let (mut destinations, mut endpoints) = (Vec::new(), Vec::new());
        for part in parts {
            assert_eq!(part.remarks.is_empty(), !destinations.is_empty() || !endpoints.is_empty());
            if !part.steps.is_empty() {
                destinations.push((part.destination, part.endpoints_left_out));
            }
            endpoints.extend(part.endpoints);
        }
        assert_eq!(destinations, [("first".to_owned(), 2_000), ("second".to_owned(), 1)]);
        assert_eq!(endpoints.len(), MAX_ENDPOINTS);
        assert_eq!(endpoints.iter().filter(|endpoint| endpoint.is_chosen).count(), 1_000);
    }

    #[test]
    fn malformed_queries_are_refused_with_the_field() {
        let refusal = |query: v1::ExplainQuery| packet(&query).unwrap_err();
        let v4 = vec![10, 96, 0, 1];
        let to = v1::ExplainQuery { destination: v4.clone().into(), port: 80, ..v1::ExplainQuery::default() };
        assert!(packet(&to).is_ok());
        assert!(refusal(v1::ExplainQuery { source: vec![1, 2].into(), ..to.clone() }).contains("source"));
        assert!(refusal(v1::ExplainQuery { destination: vec![1].into(), ..to.clone() }).contains("destination"));
        assert!(refusal(v1::ExplainQuery { port: 65_536, ..to.clone() }).contains("port"));
        assert!(refusal(v1::ExplainQuery { protocol: "tcp".into(), ..to.clone() }).contains("protocol"));
        assert!(refusal(v1::ExplainQuery { source: vec![0; 16].into(), ..to }).contains("different IP families"));
    }
}
