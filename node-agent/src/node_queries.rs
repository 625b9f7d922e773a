//! Answers queries about this node, which clients of the control plane's `Inspect.QueryNode` ask
//! (`discovery.proto`, rule 17).

mod explain;
mod probe;
mod verify;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use futures::{FutureExt as _, future::BoxFuture};
use headgate_core::{ServiceKey, exposition, frontends::Frontend, node_state::SourceState};
use headgate_proto::v1::{self, node_answer, node_query};
use headgate_userspace::{ConnectionInfo, ConnectionList};

use crate::{
    dataplane::{nftables::Counts, standby},
    http::Pages,
    session::outbox::{NodeAnswer, NodeKnowledge, PART_BYTES},
};

/// Maximum number of quarantined Services that a status lists.
const MAX_QUARANTINED: usize = 100;
/// Maximum number of Services or frontends in one part.
const COUNTERS_IN_PART: usize = 200;
/// Maximum number of connections in an answer, and in one part.
const MAX_CONNECTIONS: usize = 2_000;
const CONNECTIONS_IN_PART: usize = 100;
/// The answer to a query for counters if the kernel counts nothing.
const NO_COUNTERS: &str = "the kernel does not count Services on this node; start the agent in mode nftables, with --nftables-service-counters";

pub(crate) use explain::Explainer;
use verify::Verifier;

#[derive(Debug)]
pub(crate) struct Knowledge {
    node: Arc<str>,
    pages: Pages,
    explainer: Explainer,
    verifier: Verifier,
}

impl Knowledge {
    /// Answers from the data that the agent's pages show, and from its state.
    pub(crate) fn new(node: Arc<str>, pages: Pages, explainer: Explainer) -> Self {
        let verifier = Verifier::new(explainer.clone(), pages.progress.clone());
        Self { node, pages, explainer, verifier }
    }

    fn status(&self) -> v1::NodeStatus {
        let Pages { metrics, progress, backlog, .. } = &self.pages;
        let (progress, counts) = (progress.borrow().clone(), backlog.counts());
        let mut degraded = progress.status.degraded;
        degraded.extend(metrics.session.tls.problem.borrow().clone());
        let programmed = progress.programmed.filter(|_| progress.status.backend != standby::NAME);
        let unix_ms = |at: SystemTime| at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        v1::NodeStatus {
            node: self.node.to_string(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel_release: rustix::system::uname().release().to_string_lossy().into_owned(),
            backend: progress.status.backend,
            degraded,
            received_version: metrics.session.version_received.get(),
            programmed_version: programmed.map_or(0, |programmed| programmed.target.version),
            waiting_changes: counts.service_changes_pending + counts.endpoint_changes_pending,
            synced_unix_ms: counts.synced_at.into_iter().flatten().max().map_or(0, unix_ms),
            last_error: progress.failure.map(|failure| failure.error).unwrap_or_default(),
            quarantined_count: progress.rejections.len() as u64,
            quarantined: progress.rejections.iter().take(MAX_QUARANTINED).cloned().collect(),
            source_state: metrics.session.source_state().map(SourceState::as_str).unwrap_or_default().to_owned(),
            source_age_ms: metrics.session.source_age().map_or(0, |age| age.as_millis() as u64),
            state_restored: metrics.saves.restored.get() != 0,
            resident_memory_bytes: metrics.resident_bytes(),
        }
    }
}

impl NodeKnowledge for Knowledge {
    fn answer(&self, query: node_query::Kind) -> BoxFuture<'static, NodeAnswer> {
        match query {
            node_query::Kind::Status(v1::NodeStatusQuery {}) => {
                let status = self.status();
                std::future::ready(Ok(vec![node_answer::Kind::Status(status)])).boxed()
            }
            node_query::Kind::Metrics(v1::MetricsQuery { prefix }) => {
                let pages = self.pages.clone();
                let encode = move || {
                    let (_, text) = exposition::page(std::iter::empty(), pages.encode_metrics());
                    Ok(metrics_parts(&text, &prefix))
                };
                blocking(encode)
            }
            node_query::Kind::Counters(v1::CountersQuery { service }) => {
                let Some(counters) = self.pages.service_counters.clone() else {
                    return std::future::ready(Err(NO_COUNTERS.to_owned())).boxed();
                };
                blocking(move || {
                    let counted =
                        counters.read().map_err(|error| format!("reading the counters: {error}; ask again"))?;
                    Ok(counters_parts(&counted, service.map(|key| ServiceKey::new(&key.namespace, &key.name)).as_ref()))
                })
            }
            node_query::Kind::Connections(v1::ConnectionsQuery { service, limit }) => {
                let Some(proxy) = self.pages.proxy.clone() else {
                    let backend = &self.pages.progress.borrow().status.backend;
                    return std::future::ready(Err(format!("no proxy carries connections on this node, because the agent runs {backend}: start the agent with --proxy-mode userspace"))).boxed();
                };
                let limit = usize::try_from(limit).map_or(MAX_CONNECTIONS, |limit| limit.min(MAX_CONNECTIONS));
                blocking(move || {
                    let service = service.map(|key| ServiceKey::new(&key.namespace, &key.name));
                    Ok(connections_parts(&proxy.connections(service.as_ref(), limit)))
                })
            }
            node_query::Kind::Explain(query) => {
                let (explainer, progress) = (self.explainer.clone(), self.pages.progress.borrow().clone());
                blocking(move || explainer.answer(&query, &progress))
            }
            node_query::Kind::Verify(query) => self.verifier.clone().answer(query).boxed(),
            node_query::Kind::Probe(v1::ProbeQuery {}) => {
                let targets = self.explainer.state.with_facts(|state, _| probe::targets(state));
                probe::answer(targets, self.pages.metrics.clone()).boxed()
            }
        }
    }
}

/// Calls `work` on a thread that may block.
fn blocking(work: impl FnOnce() -> NodeAnswer + Send + 'static) -> BoxFuture<'static, NodeAnswer> {
    let done = headgate_listener::blocking(work);
    done.map(|done| done.unwrap_or_else(|error| Err(error.to_string()))).boxed()
}

fn counters_parts(
    counted: &BTreeMap<ServiceKey, Vec<(Frontend, Counts)>>,
    service: Option<&ServiceKey>,
) -> Vec<node_answer::Kind> {
    let row = |key: &ServiceKey, frontend: String, counts: Counts| v1::ServiceCounters {
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
        frontend,
        connections: counts.connections,
        packets: counts.packets,
        bytes: counts.bytes,
    };
    let rows: Vec<v1::ServiceCounters> = match service {
        None => counted.iter().map(|(key, frontends)| row(key, String::new(), Counts::sum(frontends))).collect(),
        Some(key) => {
            let frontends = counted.get(key).into_iter().flatten();
            frontends.map(|(frontend, counts)| row(key, frontend.to_string(), *counts)).collect()
        }
    };
    let parts = rows.chunks(COUNTERS_IN_PART).map(|rows| v1::Counters { services: rows.to_vec() });
    parts.map(node_answer::Kind::Counters).collect()
}

fn connections_parts(list: &ConnectionList) -> Vec<node_answer::Kind> {
    let row = |connection: &ConnectionInfo| v1::OpenConnection {
        service: connection.service.to_string(),
        client: connection.client.to_string(),
        address: connection.destination.to_string(),
        endpoint: connection.endpoint.to_string(),
        state: connection.state.as_str().to_owned(),
        age_ms: connection.age_ms,
        idle_ms: connection.idle_ms,
        bytes_to_endpoint: connection.bytes_to_endpoint,
        bytes_to_client: connection.bytes_to_client,
        protocol: connection.protocol.to_string(),
        datagrams_to_endpoint: connection.datagrams_to_endpoint,
        datagrams_to_client: connection.datagrams_to_client,
    };
    let left_out = std::iter::once(list.left_out).chain(std::iter::repeat(0));
    let parts = list.connections.chunks(CONNECTIONS_IN_PART).zip(left_out).map(|(connections, left_out)| {
        let connections = connections.iter().map(row).collect();
        node_answer::Kind::Connections(v1::Connections { connections, left_out })
    });
    parts.collect()
}

/// Splits the lines of the metrics whose names begin with `prefix` into parts.
fn metrics_parts(text: &str, prefix: &str) -> Vec<node_answer::Kind> {
    let name = |line: &str| {
        let described = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
        described.unwrap_or(line).starts_with(prefix)
    };
    let mut parts: Vec<String> = Vec::new();
    for line in text.split_inclusive('\n').filter(|line| name(line)) {
        match parts.last_mut().filter(|part| part.len() + line.len() <= PART_BYTES) {
            Some(part) => part.push_str(line),
            None => parts.push(line.to_owned()),
        }
    }
    parts.into_iter().map(|text| node_answer::Kind::Metrics(v1::MetricsText { text })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_selected_by_name_and_split_at_lines() {
        let family = |name: &str| format!("# HELP {name} Text\n# TYPE {name} gauge\n{name}{{a=\"b\"}} 1\n");
        let text: String = (0..1_000).map(|i| family(&format!("wanted_{i}")) + &family("other")).collect();
        let parts = metrics_parts(&text, "wanted_");
        let texts: Vec<String> = parts
            .into_iter()
            .map(|part| match part {
                node_answer::Kind::Metrics(v1::MetricsText { text }) => text,
                other => panic!("not metrics: {other:?}"),
            })
            .collect();
        assert!(texts.len() > 3 && texts.iter().all(|part| part.len() <= PART_BYTES && part.ends_with('\n')));
        assert_eq!(texts.concat(), (0..1_000).map(|i| family(&format!("wanted_{i}"))).collect::<String>());
        assert!(metrics_parts(&text, "absent").is_empty());
    }
}
