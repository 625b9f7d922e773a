//! `headgatectl agents`: the agents of all replicas, the worst first. If some replicas do not
//! answer, the command still shows the agents of the other replicas, because operators need this
//! command most during failures.

use std::io::Write;

use headgate_proto::v1::{AgentInfo, FleetInfo, GetStatusRequest, ListAgentsRequest};
use tokio::task::JoinSet;

use crate::answer::{Failure, collect, now_unix_ms, of_status, write_json};
use crate::args::{AgentsArgs, Args, Output, TlsArgs};
use crate::client;
use crate::render::{self, Style};

pub(crate) async fn run(args: &Args, wanted: &AgentsArgs, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let mut found = ask_all(args, wanted.node().unwrap_or_default()).await?;
    if found.asked.is_empty() && found.failures.len() == 1 {
        return Err(found.failures.swap_remove(0));
    }
    if let (Some(node), [], []) = (wanted.node(), &found.agents[..], &found.failures[..]) {
        let asked = found.asked.join(", ");
        let text = format!("no agent of node {node} is connected to {asked}: ask the other replicas too");
        return Err(Failure::NotFound(text));
    }
    let shown = if found.asked.is_empty() { Ok(()) } else { found.show(args, wanted, style, out) };
    if found.failures.is_empty() {
        return shown;
    }
    match shown {
        Err(failure) if !failure.is_closed_pipe() => Err(failure),
        // If the reader closed the pipe early, the error about missing replicas is still reported.
        _ => Err(Failure::Missing { replicas: found.replicas(), failures: found.failures }),
    }
}

/// Returns the first connected node by name, among the agents of all replicas that answer.
pub(crate) async fn first_node(args: &Args) -> Result<String, Failure> {
    let mut found = ask_all(args, "").await?;
    match found.agents.into_iter().map(|agent| agent.node).min() {
        Some(node) => Ok(node),
        None if found.failures.is_empty() => {
            Err(Failure::NotFound(format!("no agent is connected to {}", found.asked.join(", "))))
        }
        None if found.failures.len() == 1 => Err(found.failures.swap_remove(0)),
        None => Err(Failure::Missing { replicas: found.asked.len() + found.failures.len(), failures: found.failures }),
    }
}

/// The answers of the replicas.
#[derive(Default)]
struct Found {
    agents: Vec<AgentInfo>,
    fleets: Vec<FleetInfo>,
    /// The URLs of the replicas that answered.
    asked: Vec<String>,
    /// The errors of the replicas that did not answer.
    failures: Vec<Failure>,
}

/// Queries all replicas concurrently, so that several hanging replicas delay the result by only one
/// timeout.
async fn ask_all(args: &Args, node: &str) -> Result<Found, Failure> {
    let (replicas, failures) = client::resolvable_replicas(&args.server, &args.tls).await.map_err(Failure::Connect)?;
    let mut found = Found { failures: failures.into_iter().map(Failure::Connect).collect(), ..Found::default() };
    let mut asked = JoinSet::new();
    for (index, (server, tls)) in replicas.into_iter().enumerate() {
        let node = node.to_owned();
        asked.spawn(async move { (index, ask(&server, &tls, node).await, server) });
    }
    let mut answers = asked.join_all().await;
    answers.sort_unstable_by_key(|(index, ..)| *index);
    for (_, answer, server) in answers {
        match answer {
            Ok((agents, fleet)) => {
                found.agents.extend(agents);
                found.fleets.extend(fleet);
                found.asked.push(server);
            }
            Err(failure) => found.failures.push(failure),
        }
    }
    Ok(found)
}

async fn ask(server: &str, tls: &TlsArgs, node: String) -> Result<(Vec<AgentInfo>, Option<FleetInfo>), Failure> {
    let mut client = client::connect(server, tls).await.map_err(Failure::Connect)?;
    let answer = client.list_agents(ListAgentsRequest { node }).await;
    let agents = collect(server, answer).await?;
    let status = client.get_status(GetStatusRequest {}).await.map_err(|status| of_status(server, &status))?;
    Ok((agents, status.into_inner().fleet))
}

impl Found {
    fn replicas(&self) -> usize {
        self.asked.len() + self.failures.len()
    }

    fn show(&mut self, args: &Args, wanted: &AgentsArgs, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
        let all = self.agents.len();
        let agents = &mut self.agents;
        agents.retain(|agent| {
            let (is_behind, is_failing) = (!is_up_to_date(agent), is_failing(agent));
            (!wanted.behind || is_behind) && (!wanted.failing || is_failing)
        });
        agents.sort_by(|a, b| badness(b).cmp(&badness(a)).then_with(|| a.node.cmp(&b.node)));
        if args.output == Output::Json {
            return write_json(out, agents);
        }
        if all == 0 {
            let place = match (self.asked.len(), self.failures.len()) {
                (1, 0) => "this replica".to_owned(),
                (_, 0) => "these replicas".to_owned(),
                _ => self.asked.join(", "),
            };
            let what = wanted.node().map_or("No agents are".to_owned(), |node| format!("No agent of node {node} is"));
            return Ok(writeln!(out, "{what} connected to {place}.")?);
        }
        if !agents.is_empty() {
            let shown = if wanted.limit == 0 { &agents[..] } else { &agents[..agents.len().min(wanted.limit)] };
            let is_wide = args.output == Output::Wide;
            out.write_all(render::agents(shown, now_unix_ms(), is_wide, style).as_bytes())?;
            if shown.len() < agents.len() {
                writeln!(
                    out,
                    "... and {} more: --limit 0 shows all",
                    render::thousands((agents.len() - shown.len()) as u64)
                )?;
            }
        } else {
            writeln!(out, "None of {} agents matches.", render::thousands(all as u64))?;
        }
        if wanted.node().is_none() {
            write!(out, "{}", render::fleet(&together(&self.fleets)))?;
            if !self.failures.is_empty() {
                write!(out, "; at {} of {} replicas", self.asked.len(), self.replicas())?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

/// Returns whether the agent has programmed all changes older than a second and its replica follows
/// its source.
fn is_up_to_date(agent: &AgentInfo) -> bool {
    !is_waiting_or_cut_off(agent) && !render::is_behind(agent)
}

/// Returns whether the state of the agent is `waiting` or `cut_off`.
fn is_waiting_or_cut_off(agent: &AgentInfo) -> bool {
    matches!(agent.state.as_str(), "waiting" | "cut_off")
}

/// Returns whether the agent's last attempt to program its kernel failed, the agent rejects
/// resources, or its last verification found differences.
fn is_failing(agent: &AgentInfo) -> bool {
    !agent.last_error.is_empty() || !agent.rejections.is_empty() || agent.drift_count > 0
}

/// The sort key of an agent. A larger key means a worse state. Errors count most, then rejections
/// and differences, agents that wait or are cut off, lag, and degraded agents.
fn badness(agent: &AgentInfo) -> (bool, bool, bool, u64, bool) {
    let lag = if render::is_behind(agent) { agent.lag_ms } else { 0 };
    let is_rejecting = !agent.rejections.is_empty() || agent.drift_count > 0;
    (!agent.last_error.is_empty(), is_rejecting, is_waiting_or_cut_off(agent), lag, !agent.degraded.is_empty())
}

/// Combines the summaries of several replicas. Each replica measures only its own agents. The time
/// until all nodes have programmed a change is therefore the longest of the replicas' times.
fn together(fleets: &[FleetInfo]) -> FleetInfo {
    fleets.iter().fold(FleetInfo::default(), |sum, fleet| FleetInfo {
        up_to_date: sum.up_to_date + fleet.up_to_date,
        behind: sum.behind + fleet.behind,
        failing: sum.failing + fleet.failing,
        waiting: sum.waiting + fleet.waiting,
        cut_off: sum.cut_off + fleet.cut_off,
        measured_commits: sum.measured_commits.max(fleet.measured_commits),
        everywhere_p50_ms: sum.everywhere_p50_ms.max(fleet.everywhere_p50_ms),
        everywhere_p99_ms: sum.everywhere_p99_ms.max(fleet.everywhere_p99_ms),
        everywhere_max_ms: sum.everywhere_max_ms.max(fleet.everywhere_max_ms),
    })
}
