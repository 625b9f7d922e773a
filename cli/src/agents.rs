//! `headgatectl agents`: all nodes, the worst first, also those without an agent.

use headgate_proto::v1::{AgentInfo, GetStatusRequest, ListAgentsRequest};

use crate::answer::{Failure, Session, now_unix_ms};
use crate::args::{AgentsArgs, Output};
use crate::render;

pub(crate) async fn run(session: &mut Session<'_>, wanted: &AgentsArgs) -> Result<(), Failure> {
    let mut agents = list(session, wanted.node().unwrap_or_default()).await?;
    let all = agents.len();
    if let (Some(node), 0) = (wanted.node(), all) {
        return Err(Failure::NotFound(format!("no node {node}: `headgatectl agents` lists all nodes")));
    }
    agents.retain(|agent| {
        (!wanted.behind || render::is_absent(agent) || is_waiting_or_cut_off(agent) || render::is_behind(agent))
            && (!wanted.failing || is_failing(agent))
            && (!wanted.absent || render::is_absent(agent))
            && (!wanted.standby || render::is_standby(agent))
    });
    agents.sort_by(|a, b| badness(b).cmp(&badness(a)).then_with(|| a.node.cmp(&b.node)));
    if session.output == Output::Json {
        return session.write_json(&agents);
    }
    if all == 0 {
        return session.write("No Node and no agent is known.\n");
    }
    let (shown, more) = render::limited(&agents, wanted.limit);
    let mut text = match shown {
        [] => format!("None of {} nodes matches.\n", render::thousands(all as u64)),
        shown => render::agents(shown, now_unix_ms(), session.output == Output::Wide, session.style),
    };
    text += &more;
    if wanted.node().is_none() {
        let answer = session.replica.client.get_status(GetStatusRequest::default()).await;
        let status = answer.map_err(|status| session.refused(&status))?.into_inner();
        text += &(render::fleet(&status.fleet.unwrap_or_default()) + "\n");
    }
    session.write(&text)
}

/// Returns the first node by name that has an agent.
pub(crate) async fn first_node(session: &mut Session<'_>) -> Result<String, Failure> {
    let agents = list(session, "").await?.into_iter().filter(|agent| !render::is_absent(agent));
    let none = || Failure::NotFound("no node has an agent: `headgatectl agents` lists all nodes".to_owned());
    agents.map(|agent| agent.node).min().ok_or_else(none)
}

async fn list(session: &mut Session<'_>, node: &str) -> Result<Vec<AgentInfo>, Failure> {
    let request = ListAgentsRequest { node: node.to_owned(), only_this_replica: false };
    let answer = session.replica.client.list_agents(request).await;
    session.collect(answer).await
}

/// Returns whether the state of the agent is `waiting` or `cut_off`.
fn is_waiting_or_cut_off(agent: &AgentInfo) -> bool {
    matches!(agent.state.as_str(), "waiting" | "cut_off")
}

/// Whether an agent failed, rejects resources, or differed at its last verification.
fn is_failing(agent: &AgentInfo) -> bool {
    !agent.last_error.is_empty() || !agent.rejections.is_empty() || agent.drift_count > 0
}

/// The sort key of a node. A larger key means a worse state. Errors count most, then rejections and
/// differences, nodes without an agent, agents that wait or are cut off, lag, and degraded agents.
fn badness(agent: &AgentInfo) -> (bool, bool, bool, bool, u64, bool) {
    let lag = if render::is_behind(agent) { agent.lag_ms } else { 0 };
    let is_rejecting = !agent.rejections.is_empty() || agent.drift_count > 0;
    let (is_absent, is_waiting) = (render::is_absent(agent), is_waiting_or_cut_off(agent));
    (!agent.last_error.is_empty(), is_rejecting, is_absent, is_waiting, lag, !agent.degraded.is_empty())
}
