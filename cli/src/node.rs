//! Queries about one node, and `headgatectl node`. The asked replica forwards a query to the
//! replica that has the stream of the node's agent.

use headgate_proto::v1::{
    Connections, ConnectionsQuery, CountersQuery, MetricsQuery, NodeAnswer, NodeQuery, NodeStatusQuery,
    QueryNodeRequest, ServiceKey, node_answer::Kind as Part, node_query::Kind as Query,
};

use crate::answer::{Failure, Session, now_unix_ms};
use crate::args::{ConnectionsArgs, CountersArgs, NodeArgs, Selected};
use crate::render;

pub(crate) async fn run(session: &mut Session<'_>, wanted: &NodeArgs) -> Result<(), Failure> {
    let query = match &wanted.metrics {
        Some(prefix) => Query::Metrics(MetricsQuery { prefix: prefix.clone() }),
        None => Query::Status(NodeStatusQuery {}),
    };
    for part in ask(session, &wanted.node, query).await? {
        match part {
            Part::Metrics(metrics) => {
                for line in metrics.text.lines() {
                    session.write(&format!("{}\n", render::plain(line)))?;
                }
            }
            // This command asks for nothing else.
            Part::Counters(_)
            | Part::Connections(_)
            | Part::Explanation(_)
            | Part::Verification(_)
            | Part::Probes(_) => {}
            Part::Status(status) => session.show(&status, |style| render::node(&status, now_unix_ms(), style))?,
        }
    }
    Ok(())
}

/// The key of the selected Service. `None` for all Services.
fn key(Selected { namespace, name }: &Selected) -> Option<ServiceKey> {
    (!name.is_empty()).then(|| ServiceKey { namespace: namespace.clone(), name: name.clone() })
}

/// Runs `headgatectl counters`.
pub(crate) async fn counters(session: &mut Session<'_>, wanted: &CountersArgs, of: &Selected) -> Result<(), Failure> {
    let service = key(of);
    let is_one = service.is_some();
    let mut rows = Vec::new();
    for part in ask(session, &wanted.node, Query::Counters(CountersQuery { service })).await? {
        if let Part::Counters(counters) = part {
            rows.extend(counters.services);
        }
    }
    if !is_one && !session.output.is_data() {
        rows.retain(|row| row.packets > 0);
        rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name))));
    }
    let what = if is_one { "the Service has no frontend on" } else { "no Service was used on" };
    session.show(&rows, |style| match rows.is_empty() {
        true => format!("Nothing is counted: {what} node {}.\n", wanted.node),
        false => render::counters(&rows, style),
    })
}

/// Runs `headgatectl connections`.
pub(crate) async fn connections(
    session: &mut Session<'_>,
    wanted: &ConnectionsArgs,
    selected: &Selected,
) -> Result<(), Failure> {
    let ConnectionsArgs { of: CountersArgs { node, .. }, limit } = wanted;
    let service = key(selected);
    let mut all = Connections::default();
    for part in ask(session, node, Query::Connections(ConnectionsQuery { service, limit: *limit })).await? {
        if let Part::Connections(part) = part {
            all.connections.extend(part.connections);
            all.left_out += part.left_out;
        }
    }
    session.show(&all, |style| match all.connections.is_empty() {
        true => format!("Node {node} carries no such connection.\n"),
        false => render::connections(&all, style),
    })
}

/// Asks the agent of a node, by way of a replica. Returns the parts of the answer.
pub(crate) async fn ask(session: &mut Session<'_>, node: &str, query: Query) -> Result<Vec<Part>, Failure> {
    let query = Some(NodeQuery { kind: Some(query) });
    let request = QueryNodeRequest { node: node.to_owned(), query, only_this_replica: false };
    let answer = session.replica.client.query_node(request).await;
    let parts: Vec<NodeAnswer> = session.collect(answer).await?;
    Ok(parts.into_iter().filter_map(|part| part.kind).collect())
}
