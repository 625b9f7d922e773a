//! The nodes, with and without an agent.

use std::fmt::Write as _;

use comfy_table::Cell;
use headgate_proto::v1::{AgentInfo, FleetInfo};

use super::{Column, Style, Tone, cell, difference, note, sentence, table, thousands, toned};
use crate::units;

/// The lag in milliseconds at which an agent counts as behind, if its state does not show whether
/// it is behind.
const SETTLED_MS: u64 = 1000;

/// Formats nodes, one per row, in the given order. The table has a column SEEN if some nodes have
/// no agent. Lines below explain why a node lags, is degraded or has no agent.
pub fn agents(agents: &[AgentInfo], now_unix_ms: u64, is_wide: bool, style: Style) -> String {
    // A node without an agent has only a programmed version, and only if it had an agent. One in
    // standby has programmed nothing.
    let number = |of: &AgentInfo, value: u64| match (is_absent(of) || is_standby(of)) && value == 0 {
        true => cell(""),
        false => cell(value.to_string()),
    };
    let state = |of: &AgentInfo| {
        let (state, tone) = agent_state(of);
        toned(state, tone)
    };
    let connected = |of: &AgentInfo| match of.connected_unix_ms {
        0 => cell(""),
        at => cell(units::duration(now_unix_ms.saturating_sub(at))),
    };
    // Agents before 0.2 report no verification.
    let some_verified = agents.iter().any(|of| of.verified_unix_ms != 0);
    let columns: &[Column<'_, AgentInfo>] = &[
        ("NODE", true, &|of| cell(&of.node)),
        ("STATE", true, &state),
        (">PROGRAMMED", true, &|of| number(of, of.programmed_version)),
        (">SENT", true, &|of| number(of, of.sent_version)),
        (">LAG", true, &|of| cell(if is_absent(of) || is_standby(of) { String::new() } else { lag(of) })),
        ("BACKEND", true, &|of| cell(&of.backend)),
        (">SEEN", agents.iter().any(is_absent), &|of| cell(seen(of))),
        (">VERIFIED", some_verified, &|of| verified(of, now_unix_ms)),
        (">APPLY", is_wide, &|of| cell(units::microseconds(of.apply_microseconds))),
        (">PLANNED", is_wide, &|of| number(of, of.services_planned.into())),
        (">WRITTEN", is_wide, &|of| number(of, of.objects_written.into())),
        ("RESUMED", is_wide, &|of| cell(resume(of))),
        (">CONNECTED", is_wide, &connected),
        ("ADDRESS", is_wide, &|of| cell(&of.address)),
        ("AGENT", is_wide, &|of| cell(&of.agent_version)),
        ("REPLICA", is_wide, &|of| cell(&of.replica)),
    ];
    let mut output = table(columns, agents, style);
    for agent in agents {
        let node = &agent.node;
        if !agent.last_error.is_empty() {
            note(&mut output, &format!("{node}: error: {}", agent.last_error), Tone::Bad, style);
        }
        if !agent.reason.is_empty() {
            note(&mut output, &format!("{node}: {}: {}", agent_state(agent).0, agent.reason), Tone::Attention, style);
        }
        for drift in &agent.drift {
            let text = format!("{node}: differed at the last verification: {}", difference(drift));
            note(&mut output, &text, Tone::Bad, style);
        }
        for reason in &agent.degraded {
            note(&mut output, &format!("{node}: degraded: {reason}"), Tone::Attention, style);
        }
        for rejection in &agent.rejections {
            note(&mut output, &format!("{node}: rejected {}", sentence(rejection)), Tone::Attention, style);
        }
    }
    output
}

/// Formats when the node had an agent: `now`, `4m12s ago` or `never`.
fn seen(agent: &AgentInfo) -> String {
    match agent.departed_ms {
        _ if !is_absent(agent) => "now".to_owned(),
        0 => "never".to_owned(),
        departed_ms => format!("{} ago", units::duration(departed_ms)),
    }
}

/// Returns whether the node has no agent.
pub fn is_absent(agent: &AgentInfo) -> bool {
    agent.state == "no_agent"
}

/// Returns whether another service proxy works on the node.
pub fn is_standby(agent: &AgentInfo) -> bool {
    agent.state == "standby"
}

/// Describes a node without an agent.
pub fn no_agent(node: &str, reason: &str) -> String {
    match reason {
        "" => format!("{node}: no agent"),
        reason => format!("{node}: no agent: {reason}"),
    }
}

/// Formats when the node was last verified: `12s ago`.
fn verified(agent: &AgentInfo, now_unix_ms: u64) -> Cell {
    let text = match agent.verified_unix_ms {
        0 => return cell(""),
        at => format!("{} ago", units::duration(now_unix_ms.saturating_sub(at))),
    };
    match agent.drift_count {
        0 => cell(text),
        count => toned(format!("{text}, {} differ", thousands(count)), Tone::Bad),
    }
}

/// Formats the lag as versions and time: `3 (4.2s)`.
fn lag(agent: &AgentInfo) -> String {
    match agent.head_version.saturating_sub(agent.programmed_version) {
        0 => "0".to_owned(),
        versions => format!("{versions} ({})", units::duration(agent.lag_ms)),
    }
}

fn agent_state(agent: &AgentInfo) -> (&'static str, Tone) {
    match agent.state.as_str() {
        "no_agent" => ("no agent", Tone::Bad),
        "standby" => ("standby", Tone::Attention),
        "waiting" => ("waiting", Tone::Attention),
        "cut_off" => ("cut off", Tone::Attention),
        _ if !agent.last_error.is_empty() => ("failing", Tone::Bad),
        _ if !agent.rejections.is_empty() => ("rejecting", Tone::Bad),
        _ if is_behind(agent) => ("behind", Tone::Attention),
        _ if !agent.degraded.is_empty() => ("degraded", Tone::Attention),
        _ => ("up to date", Tone::Good),
    }
}

/// Returns whether the agent lacks a change that its replica has known for more than a second.
pub fn is_behind(agent: &AgentInfo) -> bool {
    match agent.state.as_str() {
        "up_to_date" => false,
        "behind" => true,
        // In all other states, only the lag shows whether the agent is behind.
        _ => agent.lag_ms >= SETTLED_MS,
    }
}

/// Summarizes all nodes in one line.
pub fn fleet(fleet: &FleetInfo) -> String {
    let others = [
        (fleet.behind, "behind"),
        (fleet.failing, "failing"),
        (fleet.waiting, "waiting"),
        (fleet.cut_off, "at a replica that is cut off"),
        (fleet.standby, "in standby"),
        (fleet.no_agent, "without an agent"),
    ];
    let all = fleet.up_to_date + others.iter().map(|(count, _)| count).sum::<u64>();
    let mut text = format!("fleet: {} of {} nodes up to date", thousands(fleet.up_to_date), thousands(all));
    for (count, state) in others {
        if count > 0 {
            let _ = write!(text, ", {} {state}", thousands(count));
        }
    }
    if fleet.measured_commits > 0 {
        let shown = [fleet.everywhere_p50_ms, fleet.everywhere_p99_ms, fleet.everywhere_max_ms].map(units::duration);
        let _ =
            write!(text, "; time until all nodes have a change: p50 {}, p99 {}, max {}", shown[0], shown[1], shown[2]);
    }
    text
}

fn resume(agent: &AgentInfo) -> String {
    if agent.resume.is_empty() { String::new() } else { format!("{} ({})", agent.resume, agent.resumed_resources) }
}
