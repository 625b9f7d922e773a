//! `headgatectl explain`: asks the agent of one node what it does with a new connection.

use std::net::IpAddr;

use bytes::Bytes;
use headgate_proto::{
    address_to_wire,
    v1::{
        ExplainQuery, Explanation, FindPodRequest, PodInfo, ServiceKey, node_answer::Kind as Part,
        node_query::Kind as Query,
    },
};
use serde_json::json;
use tonic::Code;

use crate::answer::{Failure, Session};
use crate::args::{ExplainArgs, Selected};
use crate::{agents, node, render};

/// Where the connection comes from.
struct From {
    /// The node that explains.
    node: String,
    /// The possible source addresses, at most one of each IP family. Empty for the node itself.
    sources: Vec<IpAddr>,
    is_pod: bool,
    /// The first words of the answer.
    title: String,
}

pub(crate) async fn run(session: &mut Session<'_>, wanted: &ExplainArgs, selected: &Selected) -> Result<(), Failure> {
    let from = find(session, wanted).await?;
    let Selected { namespace, name } = selected;
    let (destination, port, protocol) = match &wanted.to {
        Some(to) => (address_to_wire(to.at.ip()), to.at.port(), to.protocol.clone()),
        None => (Bytes::new(), 0, String::new()),
    };
    let is_possible = |source: &&IpAddr| wanted.to.as_ref().is_none_or(|to| to.at.is_ipv4() == source.is_ipv4());
    let mut sources: Vec<Bytes> = from.sources.iter().filter(is_possible).copied().map(address_to_wire).collect();
    if sources.is_empty() {
        if let (Some(source), Some(to)) = (from.sources.first(), &wanted.to) {
            let text = format!("the source {source} and the destination {} are of different IP families", to.at);
            return Err(Failure::Usage(text));
        }
        sources.push(Bytes::new());
    }
    let mut explained: Vec<Explanation> = Vec::new();
    for source in sources {
        let query = ExplainQuery {
            service: Some(ServiceKey { namespace: namespace.clone(), name: name.clone() }),
            source,
            source_is_local_pod: from.is_pod,
            destination: destination.clone(),
            port: port.into(),
            protocol: protocol.clone(),
        };
        for part in node::ask(session, &from.node, Query::Explain(query)).await? {
            let Part::Explanation(part) = part else { continue };
            match explained.last_mut() {
                // A part without steps continues the endpoints of the part before.
                Some(last) if part.steps.is_empty() => last.endpoints.extend(part.endpoints),
                _ => explained.push(part),
            }
        }
    }
    if session.output.is_data() {
        let sources: Vec<String> = from.sources.iter().map(IpAddr::to_string).collect();
        return session.write_data(&json!({ "node": from.node, "sources": sources, "explanations": explained }));
    }
    let mut text = format!("{} to Service {namespace}/{name}", render::plain(&from.title));
    for explanation in &explained {
        text += &format!("\n\n{}", render::explanation(explanation, session.style).trim_end_matches('\n'));
    }
    if explained.is_empty() {
        text += "\n\nThe Service has no address of this IP family.";
    }
    session.write(&(text + "\n"))
}

/// Finds the node that explains, and the source of the connection.
async fn find(session: &mut Session<'_>, wanted: &ExplainArgs) -> Result<From, Failure> {
    let (from, source) = (wanted.from.as_deref(), wanted.source);
    if let Some(from) = wanted.pod() {
        return pod(session, from).await;
    }
    let node = match from {
        Some(node) => node.to_owned(),
        None => agents::first_node(session).await?,
    };
    let title = match source {
        Some(source) => format!("From {source}, at node {node},"),
        None => format!("From node {node}"),
    };
    Ok(From { node, sources: source.into_iter().collect(), is_pod: false, title })
}

/// Finds a pod by its name or by one of its addresses.
async fn pod(session: &mut Session<'_>, from: &str) -> Result<From, Failure> {
    let (namespace, name) = from.split_once('/').unwrap_or_default();
    let address: Option<IpAddr> = from.parse().ok();
    let request = FindPodRequest {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        address: address.map(|address| address.to_string()).unwrap_or_default(),
    };
    let PodInfo { addresses, node } = match session.replica.client.find_pod(request).await {
        Ok(found) => found.into_inner(),
        Err(status) if matches!(status.code(), Code::NotFound | Code::FailedPrecondition) => {
            let text = format!(
                "pod {from}: {}; give the node of the pod as --from, and its address as --source",
                status.message()
            );
            return Err(Failure::NotFound(render::plain(&text).into_owned()));
        }
        Err(status) => return Err(session.refused(&status)),
    };
    if node.is_empty() {
        let text = format!(
            "pod {from}: its EndpointSlices name no node; give the node as --from, and the address as --source"
        );
        return Err(Failure::NotFound(text));
    }
    let mut sources: Vec<IpAddr> = match address {
        Some(address) => vec![address],
        None => addresses.iter().filter_map(|address| address.parse().ok()).collect(),
    };
    sources.dedup_by_key(|address| address.is_ipv4());
    let list = sources.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
    let title = match address {
        Some(_) => format!("From pod {from} on node {node}"),
        None => format!("From pod {from} ({list}) on node {node}"),
    };
    Ok(From { node, sources, is_pod: true, title })
}
