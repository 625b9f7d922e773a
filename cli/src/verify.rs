//! `headgatectl verify`: verifies the nodes of all replicas. Each replica verifies the nodes that
//! have a stream to it.

use std::{collections::BTreeSet, io::Write};

use headgate_proto::v1::{NodeVerification, VerifyNodesRequest, VerifyNodesResponse};
use tokio::task::JoinSet;
use tonic::Code;

use crate::answer::{Failure, collect, write_json};
use crate::args::{Args, Output, TlsArgs, VerifyArgs};
use crate::client;
use crate::render::{self, Style};

/// The maximum number of nodes that an error names.
const MAX_NAMED: usize = 20;

/// Why a Node without a stream is not verified, in JSON.
const NO_STREAM: &str = "the Node has no stream to any replica that was asked: start its agent, or ask all replicas";

pub(crate) async fn run(args: &Args, wanted: &VerifyArgs, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let (servers, failures) = client::resolvable_replicas(&args.server, &args.tls).await.map_err(Failure::Connect)?;
    let mut found = Found { failures: failures.into_iter().map(Failure::Connect).collect(), ..Found::default() };
    let mut asked = JoinSet::new();
    for (server, tls) in servers {
        let node = wanted.node.clone().unwrap_or_default();
        asked.spawn(async move { (ask(&server, &tls, node).await, server) });
    }
    for (answer, server) in asked.join_all().await {
        found.add(server, answer);
    }
    if found.replicas.is_empty() && found.failures.len() == 1 {
        return Err(found.failures.swap_remove(0));
    }
    found.join_moved();
    found.nodes.sort_by(|a, b| badness(b).cmp(&badness(a)).then_with(|| a.node.cmp(&b.node)));
    if args.output == Output::Json {
        let missing = found.missing().into_iter().map(|name| NodeVerification {
            node: name.to_owned(),
            result: "unverified".to_owned(),
            unverified: vec![NO_STREAM.to_owned()],
            ..NodeVerification::default()
        });
        write_json(out, &found.nodes.iter().cloned().chain(missing).collect::<Vec<_>>())?;
    } else if !found.nodes.is_empty() {
        let all = &found.nodes[..];
        let shown = if wanted.limit == 0 { all } else { &all[..all.len().min(wanted.limit)] };
        out.write_all(render::verifications(shown, style).as_bytes())?;
        if shown.len() < all.len() {
            let more = render::thousands((all.len() - shown.len()) as u64);
            writeln!(out, "... and {more} more: --limit 0 shows all")?;
        }
        if wanted.node.is_none() {
            writeln!(out, "{}", found.summary())?;
        }
    }
    found.result(wanted)
}

/// The answers of the replicas.
#[derive(Default)]
struct Found {
    nodes: Vec<NodeVerification>,
    /// The Nodes without a stream, for each replica that named them.
    without_stream: Vec<BTreeSet<String>>,
    /// The highest number of Nodes without a stream that a replica did not name.
    unnamed: u64,
    /// The URLs of the replicas that answered.
    replicas: Vec<String>,
    failures: Vec<Failure>,
}

impl Found {
    fn add(&mut self, server: String, answer: Result<Vec<VerifyNodesResponse>, Failure>) {
        match answer {
            Ok(messages) => {
                for VerifyNodesResponse { verification, without_stream, without_stream_count } in messages {
                    match verification {
                        Some(verification) => self.nodes.push(verification),
                        None => {
                            let unnamed = without_stream_count.saturating_sub(without_stream.len() as u64);
                            self.unnamed = self.unnamed.max(unnamed);
                            self.without_stream.push(without_stream.into_iter().collect());
                        }
                    }
                }
                self.replicas.push(server);
            }
            // Another replica has the stream of the node.
            Err(Failure::Server { code: Code::NotFound, .. }) => self.replicas.push(server),
            Err(failure) => self.failures.push(failure),
        }
    }

    /// Keeps one result of a node that moved to another replica meanwhile: the one with
    /// differences, or else the one that verified the node.
    fn join_moved(&mut self) {
        let weight = |node: &NodeVerification| match node.result.as_str() {
            "drift" => 0,
            "verified" => 1,
            _ => 2,
        };
        self.nodes.sort_by(|a, b| a.node.cmp(&b.node).then_with(|| weight(a).cmp(&weight(b))));
        self.nodes.dedup_by(|later, first| later.node == first.node);
    }

    /// The Nodes that have no stream to any replica that answered.
    fn missing(&self) -> Vec<&str> {
        let verified: BTreeSet<&str> = self.nodes.iter().map(|node| node.node.as_str()).collect();
        let Some((first, others)) = self.without_stream.split_first() else { return Vec::new() };
        let everywhere = first.iter().filter(|name| others.iter().all(|other| other.contains(*name)));
        everywhere.map(String::as_str).filter(|name| !verified.contains(name)).collect()
    }

    fn count(&self, result: &str) -> u64 {
        self.nodes.iter().filter(|node| node.result == result).count() as u64
    }

    fn summary(&self) -> String {
        let all = self.nodes.len() + self.missing().len();
        let mut text = format!(
            "{} of {} nodes verified",
            render::thousands(self.count("verified")),
            render::thousands(all as u64 + self.unnamed)
        );
        let others = [
            (self.count("drift"), "with differences"),
            (self.count("unverified"), "not verified"),
            (self.missing().len() as u64 + self.unnamed, "without a stream"),
        ];
        for (count, state) in others.into_iter().filter(|(count, _)| *count > 0) {
            text += &format!(", {} {state}", render::thousands(count));
        }
        text
    }

    fn result(self, wanted: &VerifyArgs) -> Result<(), Failure> {
        if !self.failures.is_empty() {
            let replicas = self.replicas.len() + self.failures.len();
            return Err(Failure::Missing { replicas, failures: self.failures });
        }
        if self.nodes.is_empty()
            && let Some(node) = &wanted.node
        {
            let asked = self.replicas.join(", ");
            return Err(Failure::NotFound(format!(
                "no agent of node {node} is connected to {asked}: check the name of the node, ask the other replicas too (--server), and look at the \
                 log of the node's agent"
            )));
        }
        let missing = self.missing();
        let mut problems = Vec::new();
        if self.nodes.is_empty() && missing.is_empty() && self.unnamed == 0 {
            problems.push(format!(
                "no agent is connected to {}: start agents, or ask other replicas (--server)",
                self.replicas.join(", ")
            ));
        }
        if self.count("drift") > 0 {
            problems.push(format!(
                "differences on {} of {} nodes: the agents have tried to repair them; find out what changed the kernel, and verify again",
                self.count("drift"),
                self.nodes.len()
            ));
        }
        if self.count("unverified") > 0 {
            problems.push(format!(
                "{} of {} nodes not verified, for the reasons above",
                self.count("unverified"),
                self.nodes.len()
            ));
        }
        if !missing.is_empty() {
            let named = missing[..missing.len().min(MAX_NAMED)].join(", ");
            let more = (missing.len() - missing.len().min(MAX_NAMED)) as u64 + self.unnamed;
            let more = if more > 0 { format!(" and {} more", render::thousands(more)) } else { String::new() };
            problems.push(format!("these Nodes have no stream to any replica that was asked: {named}{more}: start their agents, or ask all replicas (--server)"));
        }
        if problems.is_empty() { Ok(()) } else { Err(Failure::Unverified(problems.join("\n"))) }
    }
}

/// The sort key of a node. A larger key means a worse result.
fn badness(node: &NodeVerification) -> (u8, u64) {
    let result = match node.result.as_str() {
        "verified" => 0,
        "drift" => 2,
        _ => 1,
    };
    (result, node.drift_count)
}

async fn ask(server: &str, tls: &TlsArgs, node: String) -> Result<Vec<VerifyNodesResponse>, Failure> {
    let mut client = client::connect(server, tls).await.map_err(Failure::Connect)?;
    let answer = client.verify_nodes(VerifyNodesRequest { node }).await;
    collect(server, answer).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, result: &str) -> VerifyNodesResponse {
        let verification = NodeVerification {
            node: name.into(),
            result: result.into(),
            drift_count: u64::from(result == "drift"),
            ..NodeVerification::default()
        };
        VerifyNodesResponse { verification: Some(verification), ..VerifyNodesResponse::default() }
    }

    fn others(names: &[&str]) -> VerifyNodesResponse {
        let without_stream = names.iter().map(|name| (*name).to_owned()).collect();
        VerifyNodesResponse { without_stream_count: names.len() as u64, without_stream, verification: None }
    }

    #[test]
    fn nodes_of_all_replicas_are_joined() {
        let mut found = Found::default();
        let first = vec![node("a", "verified"), node("moved", "unverified"), node("bad", "drift"), others(&["b", "c"])];
        found.add("one".into(), Ok(first));
        let second = vec![node("b", "verified"), node("moved", "verified"), others(&["a", "bad", "c"])];
        found.add("two".into(), Ok(second));
        found.join_moved();
        assert_eq!(found.missing(), ["c"]);
        assert_eq!(found.summary(), "3 of 5 nodes verified, 1 with differences, 1 without a stream");
        let wanted = VerifyArgs { node: None, limit: 50 };
        let failure = found.result(&wanted).unwrap_err();
        assert_eq!(failure.exit_code(), 1);
        assert!(failure.to_string().contains("asked: c: start their agents"), "{failure}");
    }

    #[test]
    fn a_replica_that_does_not_answer_leaves_the_result_open() {
        let mut found = Found::default();
        found.add("one".into(), Ok(vec![node("a", "verified"), others(&[])]));
        found.add("two".into(), Err(Failure::NotFound("silent".into())));
        let failure = found.result(&VerifyArgs { node: None, limit: 50 }).unwrap_err();
        assert!(matches!(failure, Failure::Missing { replicas: 2, .. }), "{failure}");
        let nobody = Found { replicas: vec!["one".into()], ..Found::default() };
        let failure = nobody.result(&VerifyArgs { node: Some("x".into()), limit: 50 }).unwrap_err();
        assert!(matches!(failure, Failure::NotFound(_)), "{failure}");
    }
}
