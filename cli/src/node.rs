//! Queries about one node, and `headgatectl node`. The replica that has the stream of the node's
//! agent forwards the query. So a command asks all replicas, and one of them answers.

use std::io::Write;

use headgate_proto::v1::{
    Connections, ConnectionsQuery, CountersQuery, MetricsQuery, NodeAnswer, NodeQuery, NodeStatusQuery,
    QueryNodeRequest, ServiceKey, node_answer::Kind as Part, node_query::Kind as Query,
};
use tokio::task::JoinSet;
use tonic::Code;

use crate::answer::{Failure, collect, now_unix_ms, write_json};
use crate::args::{Args, ConnectionsArgs, CountersArgs, NodeArgs, Output, Selected, TlsArgs};
use crate::client;
use crate::render::{self, Style};

pub(crate) async fn run(args: &Args, wanted: &NodeArgs, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let query = match &wanted.metrics {
        Some(prefix) => Query::Metrics(MetricsQuery { prefix: prefix.clone() }),
        None => Query::Status(NodeStatusQuery {}),
    };
    for part in ask(args, &wanted.node, query).await? {
        match part {
            Part::Metrics(metrics) => {
                for line in metrics.text.lines() {
                    writeln!(out, "{}", render::plain(line))?;
                }
            }
            // This command asks for nothing else.
            Part::Counters(_) | Part::Connections(_) | Part::Explanation(_) | Part::Verification(_) => {}
            Part::Status(status) if args.output == Output::Json => write_json(out, &status)?,
            Part::Status(status) => out.write_all(render::node(&status, now_unix_ms(), style).as_bytes())?,
        }
    }
    Ok(())
}

/// Runs `headgatectl counters`.
pub(crate) async fn counters(
    args: &Args,
    wanted: &CountersArgs,
    selected: Option<Selected>,
    style: Style,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let service = selected.map(|Selected { namespace, name }| ServiceKey { namespace, name });
    let is_one = service.is_some();
    let mut rows = Vec::new();
    for part in ask(args, &wanted.node, Query::Counters(CountersQuery { service })).await? {
        if let Part::Counters(counters) = part {
            rows.extend(counters.services);
        }
    }
    if args.output == Output::Json {
        return write_json(out, &rows);
    }
    if !is_one {
        rows.retain(|row| row.packets > 0);
        rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name))));
    }
    if rows.is_empty() {
        let what = if is_one { "the Service has no frontend on" } else { "no Service was used on" };
        return Ok(writeln!(out, "Nothing is counted: {what} node {}.", wanted.node)?);
    }
    Ok(out.write_all(render::counters(&rows, style).as_bytes())?)
}

/// Runs `headgatectl connections`.
pub(crate) async fn connections(
    args: &Args,
    wanted: &ConnectionsArgs,
    selected: Option<Selected>,
    style: Style,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let ConnectionsArgs { of: CountersArgs { node, .. }, limit } = wanted;
    let service = selected.map(|Selected { namespace, name }| ServiceKey { namespace, name });
    let mut all = Connections::default();
    for part in ask(args, node, Query::Connections(ConnectionsQuery { service, limit: *limit })).await? {
        if let Part::Connections(part) = part {
            all.connections.extend(part.connections);
            all.left_out += part.left_out;
        }
    }
    if args.output == Output::Json {
        return write_json(out, &all);
    }
    if all.connections.is_empty() {
        return Ok(writeln!(out, "Node {node} carries no such connection.")?);
    }
    Ok(out.write_all(render::connections(&all, style).as_bytes())?)
}

/// Asks the agent of a node, by way of all replicas at the same time. Returns the parts of the
/// answer. If the agent has moved to another replica meanwhile, the first complete answer counts.
pub(crate) async fn ask(args: &Args, node: &str, query: Query) -> Result<Vec<Part>, Failure> {
    let (servers, failures) = client::resolvable_replicas(&args.server, &args.tls).await.map_err(Failure::Connect)?;
    let mut failures: Vec<Failure> = failures.into_iter().map(Failure::Connect).collect();
    let mut asked = JoinSet::new();
    let names = servers.iter().map(|(server, _)| server.as_str()).collect::<Vec<_>>().join(", ");
    for (server, tls) in servers {
        let request = QueryNodeRequest { node: node.to_owned(), query: Some(NodeQuery { kind: Some(query.clone()) }) };
        asked.spawn(async move { ask_replica(&server, &tls, request).await });
    }
    let mut replicas = failures.len();
    while let Some(answer) = asked.join_next().await {
        replicas += 1;
        match answer {
            Ok(Ok(parts)) => return Ok(parts.into_iter().filter_map(|part| part.kind).collect()),
            Ok(Err(Failure::Server { code: Code::NotFound, .. })) => {}
            Ok(Err(failure)) => failures.push(failure),
            Err(error) => failures.push(Failure::Output(std::io::Error::other(error))),
        }
    }
    match failures.len() {
        0 => Err(Failure::NotFound(format!(
            "no agent of node {node} is connected to {names}: check the name of the node, ask the other replicas too (--server), and look at the log \
             of the node's agent"
        ))),
        1 if replicas == 1 => Err(failures.swap_remove(0)),
        // The replica that has the stream of the node answered with an error.
        _ => match failures.iter().position(|failure| matches!(failure, Failure::Server { .. })) {
            Some(index) => Err(failures.swap_remove(index)),
            None => Err(Failure::Missing { replicas, failures }),
        },
    }
}

async fn ask_replica(server: &str, tls: &TlsArgs, request: QueryNodeRequest) -> Result<Vec<NodeAnswer>, Failure> {
    let mut client = client::connect(server, tls).await.map_err(Failure::Connect)?;
    let answer = client.query_node(request).await;
    collect(server, answer).await
}
