//! `headgatectl agents`: the whole fleet, over all replicas, the worst first.

use std::io::Write;

use headgate_proto::v1::{AgentInfo, FleetInfo, GetStatusRequest, ListAgentsRequest};
use serde_json::Value;

use crate::args::{AgentsArgs, Args, Output};
use crate::client;
use crate::json;
use crate::render::{self, Style};
use crate::run::{Failure, collect, now_unix_ms, refused, write_json};

pub(crate) async fn run(args: &Args, wanted: &AgentsArgs, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let node = wanted.node.as_ref().or(wanted.node_flag.as_ref()).map_or("", String::as_str);
    let (mut agents, mut fleets) = (Vec::new(), Vec::new());
    let replicas = client::replicas(&args.server, &args.tls).await.map_err(Failure::Connect)?;
    for (server, tls) in &replicas {
        let mut client = client::connect(server, tls).await.map_err(Failure::Connect)?;
        let answer = client.list_agents(ListAgentsRequest { node: node.to_owned() }).await;
        agents.extend(collect(server, answer).await?);
        let status = client.get_status(GetStatusRequest {}).await.map_err(|status| refused(server, &status))?;
        fleets.extend(status.into_inner().fleet);
    }
    if !node.is_empty() && agents.is_empty() {
        let asked: Vec<&str> = replicas.iter().map(|(server, _)| server.as_str()).collect();
        let text = format!("no agent of node {node} is connected to {}: ask the other replicas too", asked.join(", "));
        return Err(Failure::NotFound(text));
    }
    let all = agents.len();
    agents.retain(|agent| {
        let (is_behind, is_failing) = (is_behind(agent), is_failing(agent));
        (!wanted.behind || is_behind) && (!wanted.failing || is_failing)
    });
    agents.sort_by(|a, b| badness(b).cmp(&badness(a)).then_with(|| a.node.cmp(&b.node)));
    if args.output == Output::Json {
        return write_json(out, &Value::Array(agents.iter().map(json::agent).collect()));
    }
    if all == 0 {
        let place = if replicas.len() == 1 { "this replica" } else { "these replicas" };
        return Ok(writeln!(out, "No agents are connected to {place}.")?);
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
        writeln!(out, "None of {} agents is meant.", render::thousands(all as u64))?;
    }
    if node.is_empty() {
        writeln!(out, "{}", render::fleet(&together(&fleets)))?;
    }
    Ok(())
}

/// It has not programmed all that is older than a second.
fn is_behind(agent: &AgentInfo) -> bool {
    agent.lag_ms >= render::SETTLED_MS
}

/// The last attempt failed, or it rejects something.
fn is_failing(agent: &AgentInfo) -> bool {
    !agent.last_error.is_empty() || !agent.rejections.is_empty()
}

/// Worse is more: errors, then rejections, then lag, then what is degraded.
fn badness(agent: &AgentInfo) -> (bool, bool, u64, bool) {
    let lag = if is_behind(agent) { agent.lag_ms } else { 0 };
    (!agent.last_error.is_empty(), !agent.rejections.is_empty(), lag, !agent.degraded.is_empty())
}

/// Replicas' fleets as one. Each measures its own agents, and of several times the longest is when the change was everywhere.
fn together(fleets: &[FleetInfo]) -> FleetInfo {
    fleets.iter().fold(FleetInfo::default(), |sum, fleet| FleetInfo {
        up_to_date: sum.up_to_date + fleet.up_to_date,
        behind: sum.behind + fleet.behind,
        failing: sum.failing + fleet.failing,
        measured_commits: sum.measured_commits.max(fleet.measured_commits),
        everywhere_p50_ms: sum.everywhere_p50_ms.max(fleet.everywhere_p50_ms),
        everywhere_p99_ms: sum.everywhere_p99_ms.max(fleet.everywhere_p99_ms),
        everywhere_max_ms: sum.everywhere_max_ms.max(fleet.everywhere_max_ms),
    })
}
