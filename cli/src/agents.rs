//! `headgatectl agents`: all nodes, the worst first, also those without an agent.

use headgate_proto::v1::{AgentInfo, ListAgentsRequest};

use crate::answer::{Failure, Session, now_unix_ms};
use crate::args::{AgentsArgs, Output};
use crate::render::{self, counted};

/// The most rows of a table for people.
const LIMIT: usize = 50;

pub(crate) async fn run(session: &mut Session<'_>, wanted: &AgentsArgs) -> Result<(), Failure> {
    let mut agents = list(session, wanted.node.as_deref().unwrap_or_default()).await?;
    let all = agents.len();
    if let (Some(node), 0) = (&wanted.node, all) {
        return Err(Failure::NotFound(format!("no node {node}: `headgatectl agents` lists all nodes")));
    }
    agents.retain(|agent| {
        (!wanted.behind || render::is_absent(agent) || is_waiting_or_cut_off(agent) || render::is_behind(agent))
            && (!wanted.failing || !agent.last_error.is_empty() || is_faulty(agent))
            && (!wanted.absent || render::is_absent(agent))
            && (!wanted.standby || render::is_standby(agent))
    });
    agents.sort_by(|a, b| badness(b).cmp(&badness(a)).then_with(|| a.node.cmp(&b.node)));
    let is_bare = wanted.rows.no_headers;
    let (shown, more) = render::limited(&agents, wanted.limit.unwrap_or(if is_bare { 0 } else { LIMIT }));
    let mut table = render::agents(shown, now_unix_ms(), session.output == Output::Wide, session.style) + &more;
    let mut empty = match all {
        0 => "No Node and no agent is known.".to_owned(),
        all => format!("No node of {} matches.", render::thousands(all as u64)),
    };
    if all > 0 && wanted.node.is_none() && !session.output.is_data() {
        let fleet = render::fleet(&session.status(0).await?.fleet.unwrap_or_default());
        table += &format!("{fleet}\n");
        empty += &format!("\n{fleet}");
    }
    let rows = if matches!(session.output, Output::Table | Output::Wide) { shown } else { &agents[..] };
    session.list(rows, |agent| agent.node.clone(), is_bare, &table, &empty)?;
    match agents.len() as u64 {
        found @ 1.. if wanted.exit_code => Err(Failure::Faulty(format!("{} in the list", counted(found, "node")))),
        _ => Ok(()),
    }
}

/// Returns the first node by name that has an agent.
pub(crate) async fn first_node(session: &mut Session<'_>) -> Result<String, Failure> {
    let agents = list(session, "").await?.into_iter().filter(|agent| !render::is_absent(agent));
    let none = || Failure::NotFound("no node has an agent: `headgatectl agents` lists all nodes".to_owned());
    agents.map(|agent| agent.node).min().ok_or_else(none)
}

/// The rows of one node, or of all nodes if `node` is empty.
pub(crate) async fn list(session: &mut Session<'_>, node: &str) -> Result<Vec<AgentInfo>, Failure> {
    let request = ListAgentsRequest { node: node.to_owned(), only_this_replica: false };
    let answer = session.replica.client.list_agents(request).await;
    session.collect(answer).await
}

/// Returns whether the state of the agent is `waiting` or `cut_off`.
fn is_waiting_or_cut_off(agent: &AgentInfo) -> bool {
    matches!(agent.state.as_str(), "waiting" | "cut_off")
}

/// Whether an agent rejects resources, or differed at its last verification.
fn is_faulty(agent: &AgentInfo) -> bool {
    !agent.rejections.is_empty() || agent.drift_count > 0
}

/// The sort key of a node. A larger key means a worse state. Errors count most, then rejections and
/// differences, nodes without an agent, agents that wait or are cut off, lag, and degraded agents.
fn badness(agent: &AgentInfo) -> (bool, bool, bool, bool, u64, bool) {
    let lag = if render::is_behind(agent) { agent.lag_ms } else { 0 };
    let (is_absent, is_waiting) = (render::is_absent(agent), is_waiting_or_cut_off(agent));
    (!agent.last_error.is_empty(), is_faulty(agent), is_absent, is_waiting, lag, !agent.degraded.is_empty())
}
