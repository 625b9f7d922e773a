//! `headgatectl verify`: one request, and one answer for all nodes.

use headgate_proto::v1::{Laggard, NodeVerification, VerifyNodesRequest, VerifyNodesResponse};

use crate::answer::{Failure, Session};
use crate::args::VerifyArgs;
use crate::render::{self, counted, thousands};

/// The maximum number of nodes that an error names.
const MAX_NAMED: usize = 20;

pub(crate) async fn run(session: &mut Session<'_>, wanted: &VerifyArgs) -> Result<(), Failure> {
    let mut found = ask(session, wanted).await?;
    found.nodes.iter_mut().for_each(leave_out_other_proxies);
    if session.output.is_data() {
        session.write_data(&found.nodes)?;
    } else if !found.nodes.is_empty() {
        let (shown, more) = render::limited(&found.nodes, wanted.limit);
        let mut text = render::verifications(shown, session.style) + &more;
        if wanted.node.is_none() {
            text += &(found.summary() + "\n");
        }
        session.write(&text)?;
    }
    found.result(wanted)
}

/// Verifies the nodes.
pub(crate) async fn ask(session: &mut Session<'_>, wanted: &VerifyArgs) -> Result<Found, Failure> {
    let node = wanted.node.clone().unwrap_or_default();
    let answer = session.replica.client.verify_nodes(VerifyNodesRequest { node, only_this_replica: false }).await;
    Ok(Found::of(session.collect(answer).await?))
}

/// Another proxy programs a node in standby, so nothing about Headgate is verified there.
fn leave_out_other_proxies(node: &mut NodeVerification) {
    if let Some(shadow) = node.shadow.take() {
        node.result = "unverified".to_owned();
        node.drift.clear();
        node.drift_count = 0;
        node.unverified =
            vec![format!("{} programs the node: `headgatectl shadow {}` compares its rules", shadow.proxy, node.node)];
    }
}

/// The answer.
pub(crate) struct Found {
    /// The nodes, the worst first. The result of Nodes without an agent is "absent".
    pub(crate) nodes: Vec<NodeVerification>,
    /// The number of Nodes without an agent that the answer does not name.
    unnamed: u64,
}

impl Found {
    fn of(messages: Vec<VerifyNodesResponse>) -> Self {
        let mut found = Self { nodes: Vec::new(), unnamed: 0 };
        for VerifyNodesResponse { verification, absent, absent_count } in messages {
            found.nodes.extend(verification);
            found.unnamed += absent_count.saturating_sub(absent.len() as u64);
            found.nodes.extend(absent.into_iter().map(|Laggard { node, reason, .. }| NodeVerification {
                node,
                result: "absent".to_owned(),
                unverified: vec![reason],
                ..NodeVerification::default()
            }));
        }
        found.nodes.sort_by(|a, b| badness(b).cmp(&badness(a)).then_with(|| a.node.cmp(&b.node)));
        found
    }

    fn count(&self, result: &str) -> u64 {
        let named = self.nodes.iter().filter(|node| node.result == result).count() as u64;
        if result == "absent" { named + self.unnamed } else { named }
    }

    /// The number of all nodes.
    fn all(&self) -> u64 {
        self.nodes.len() as u64 + self.unnamed
    }

    fn summary(&self) -> String {
        let mut text = format!("{} of {} verified", thousands(self.count("verified")), counted(self.all(), "node"));
        for (result, state) in
            [("drift", "with differences"), ("unverified", "not verified"), ("absent", "without an agent")]
        {
            match self.count(result) {
                0 => {}
                count => text += &format!(", {} {state}", thousands(count)),
            }
        }
        text
    }

    /// Returns the failure, which has the exit code. Success means that all nodes are verified.
    fn result(&self, wanted: &VerifyArgs) -> Result<(), Failure> {
        let all = counted(self.all(), "node");
        if self.all() == 0 {
            return match &wanted.node {
                Some(node) => Err(Failure::NotFound(format!("no node {node}: `headgatectl agents` lists all nodes"))),
                None if wanted.allow_absent => Ok(()),
                None => Err(Failure::Absent(
                    "no Node and no agent is known: with --allow-absent the command succeeds".to_owned(),
                )),
            };
        }
        let mut problems = Vec::new();
        if self.count("drift") > 0 {
            problems.push(format!(
                "differences on {} of {all}: the agents have tried to repair them; find out what changed the kernel, and verify again",
                thousands(self.count("drift"))
            ));
        }
        if self.count("unverified") > 0 {
            problems
                .push(format!("{} of {all} not verified, for the reasons above", thousands(self.count("unverified"))));
        }
        let is_absent_only = problems.is_empty();
        let absent: Vec<&str> =
            self.nodes.iter().filter(|node| node.result == "absent").map(|node| node.node.as_str()).collect();
        if self.count("absent") > 0 && !wanted.allow_absent {
            let named = &absent[..absent.len().min(MAX_NAMED)];
            let more = match self.count("absent") - named.len() as u64 {
                0 => String::new(),
                more => format!(" and {} more", thousands(more)),
            };
            problems.push(format!(
                "these Nodes have no agent: {}{more}: start their agents, or accept it with --allow-absent",
                render::plain(&named.join(", "))
            ));
        }
        match problems.join("\n") {
            none if none.is_empty() => Ok(()),
            text if is_absent_only => Err(Failure::Absent(text)),
            text => Err(Failure::Faulty(text)),
        }
    }
}

/// The sort key of a node. A larger key means a worse result.
fn badness(node: &NodeVerification) -> (u8, u64) {
    let result = match node.result.as_str() {
        "verified" => 0,
        "absent" => 1,
        "drift" => 3,
        _ => 2,
    };
    (result, node.drift_count)
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

    fn absent(names: &[&str], absent_count: u64) -> VerifyNodesResponse {
        let reason = "it never had an agent";
        let absent =
            names.iter().map(|name| Laggard { node: (*name).into(), reason: reason.into(), ..Laggard::default() });
        VerifyNodesResponse { absent: absent.collect(), absent_count, verification: None }
    }

    /// Returns the exit code, the summary and the error.
    fn judged(messages: Vec<VerifyNodesResponse>, allow_absent: bool) -> (u8, String, String) {
        let found = Found::of(messages);
        let failure = found.result(&VerifyArgs { node: None, limit: 50, allow_absent }).err();
        let code = failure.as_ref().map_or(0, Failure::exit_code);
        (code, found.summary(), failure.map(|failure| failure.to_string()).unwrap_or_default())
    }

    #[test]
    fn differences_and_unverified_nodes_have_exit_code_1() {
        let messages = || vec![node("a", "verified"), node("b", "unverified"), node("c", "drift"), absent(&["d"], 1)];
        let (code, summary, error) = judged(messages(), true);
        assert_eq!(code, 1, "{error}");
        assert_eq!(summary, "1 of 4 nodes verified, 1 with differences, 1 not verified, 1 without an agent");
        assert!(error.starts_with("differences on 1 of 4 nodes: ") && !error.contains("no agent"), "{error}");
        assert!(
            judged(messages(), false).2.ends_with("no agent: d: start their agents, or accept it with --allow-absent")
        );
        let order: Vec<String> = Found::of(messages()).nodes.into_iter().map(|node| node.node).collect();
        assert_eq!(order, ["c", "b", "d", "a"]);
        let all_verified = judged(vec![node("a", "verified"), absent(&[], 0)], false);
        assert_eq!(all_verified, (0, "1 of 1 node verified".into(), String::new()));
    }
}
