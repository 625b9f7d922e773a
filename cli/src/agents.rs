//! `headgatectl agents`: all nodes, the worst first, also those without an agent.

use headgate_proto::v1::{AgentInfo, ListAgentsRequest, WatchAgentsRequest};

use crate::answer::{Failure, Session};
use crate::args::{AgentsArgs, Output};
use crate::list::List;
use crate::render::{self, counted};

/// The most rows of a table for people.
const LIMIT: usize = 50;

pub(crate) async fn run(session: &mut Session<'_>, wanted: &AgentsArgs) -> Result<(), Failure> {
    if wanted.rows.watch {
        return watch(session, wanted).await;
    }
    let mut agents = list(session, wanted.node.as_deref().unwrap_or_default()).await?;
    let all = agents.len();
    if let (Some(node), 0) = (&wanted.node, all) {
        return Err(Failure::NotFound(format!("no node {node}: `headgatectl agents` lists all nodes")));
    }
    agents.retain(|agent| matches(agent, wanted));
    let found = agents.len() as u64;
    print(session, agents, wanted, all)?;
    let is_table = matches!(session.output, Output::Table | Output::Wide) && !wanted.rows.no_headers;
    if is_table && all > 0 && wanted.node.is_none() {
        let status = session.status().await?;
        session.write(&(render::fleet(&status.fleet.unwrap_or_default()) + "\n"))?;
    }
    match found {
        1.. if wanted.exit_code => Err(Failure::Faulty(format!("{} in the list", counted(found, "node")))),
        _ => Ok(()),
    }
}

fn print(
    session: &mut Session<'_>,
    mut agents: Vec<AgentInfo>,
    wanted: &AgentsArgs,
    all: usize,
) -> Result<List<AgentInfo>, Failure> {
    agents.sort_by(|a, b| badness(b).cmp(&badness(a)).then_with(|| a.node.cmp(&b.node)));
    let empty = match all {
        0 => "No Node and no agent is known.".to_owned(),
        all => format!("No node of {} matches.", render::thousands(all as u64)),
    };
    let limit = wanted.limit.unwrap_or(if wanted.rows.no_headers { 0 } else { LIMIT });
    List::print(session, agents, wanted.rows, limit, &empty)
}

/// Follows the nodes. A node that no longer matches is printed once more.
async fn watch(session: &mut Session<'_>, wanted: &AgentsArgs) -> Result<(), Failure> {
    let answer = session.replica.client.watch_agents(WatchAgentsRequest::default()).await;
    let mut stream = session.stream(answer)?;
    let is_wanted = |agent: &AgentInfo| wanted.node.as_ref().is_none_or(|node| *node == agent.node);
    let mut agents = Vec::new();
    loop {
        let message = session.next(&mut stream).await?;
        agents.extend(message.agents.into_iter().filter(is_wanted));
        if message.is_complete {
            break;
        }
    }
    let all = agents.len();
    agents.retain(|agent| matches(agent, wanted));
    let mut list = print(session, agents, wanted, all)?;
    loop {
        let message = session.next(&mut stream).await?;
        for agent in message.agents.into_iter().filter(is_wanted) {
            if matches(&agent, wanted) || list.has(&agent) {
                list.change(session, &agent)?;
            }
        }
        for node in message.removed {
            list.remove(session, &node)?;
        }
    }
}

/// Returns the first node by name that has an agent.
pub(crate) async fn first_node(session: &mut Session<'_>) -> Result<String, Failure> {
    let agents = list(session, "").await?.into_iter().filter(|agent| !render::is_absent(agent));
    let none = || Failure::NotFound("no node has an agent: `headgatectl agents` lists all nodes".to_owned());
    agents.map(|agent| agent.node).min().ok_or_else(none)
}

pub(crate) async fn list(session: &mut Session<'_>, node: &str) -> Result<Vec<AgentInfo>, Failure> {
    let request = ListAgentsRequest { node: node.to_owned(), only_this_replica: false };
    let answer = session.replica.client.list_agents(request).await;
    session.collect(answer).await
}

/// Returns whether the options select the node.
fn matches(agent: &AgentInfo, wanted: &AgentsArgs) -> bool {
    (!wanted.behind || render::is_absent(agent) || is_waiting_or_cut_off(agent) || render::is_behind(agent))
        && (!wanted.failing || is_failing(agent))
        && (!wanted.absent || render::is_absent(agent))
}

/// Returns whether the state of the agent is `waiting` or `cut_off`.
fn is_waiting_or_cut_off(agent: &AgentInfo) -> bool {
    matches!(agent.state.as_str(), "waiting" | "cut_off")
}

/// Whether an agent failed, rejects resources, or differed at its last verification.
fn is_failing(agent: &AgentInfo) -> bool {
    !agent.last_error.is_empty() || render::is_rejecting(agent) || agent.drift_count > 0
}

/// The sort key of a node. A larger key means a worse state. Errors count most, then rejections and
/// differences, nodes without an agent, agents that wait or are cut off, lag, and degraded agents.
fn badness(agent: &AgentInfo) -> (bool, bool, bool, bool, u64, bool) {
    let lag = if render::is_behind(agent) { agent.lag_ms } else { 0 };
    let is_rejecting = render::is_rejecting(agent) || agent.drift_count > 0;
    let (is_absent, is_waiting) = (render::is_absent(agent), is_waiting_or_cut_off(agent));
    (!agent.last_error.is_empty(), is_rejecting, is_absent, is_waiting, lag, !agent.degraded.is_empty())
}
