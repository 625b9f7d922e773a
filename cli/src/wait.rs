//! `headgatectl wait`: one request, and one answer for all nodes.

use std::fmt::Write as _;
use std::time::Duration;

use headgate_proto::v1::{Laggard, WaitAnswer, WaitRequest};
use tokio::time::{Instant, timeout};

use crate::answer::{Failure, Session};
use crate::args::{Output, Selected, WaitArgs};
use crate::client;
use crate::render::{self, plain, thousands};
use crate::units;

/// The time after the timeout within which the answer must arrive.
const GRACE: Duration = Duration::from_secs(5);
/// The maximum number of nodes of each kind that the text output names.
const MAX_NAMED: usize = 20;

pub(crate) async fn run(session: &mut Session<'_>, wait: &WaitArgs, service: Selected) -> Result<(), Failure> {
    let started = Instant::now();
    let what = what(wait, &service);
    let request = WaitRequest {
        namespace: service.namespace,
        name: service.name,
        endpoint: wait.endpoint.map(|address| address.to_string()).unwrap_or_default(),
        gone: wait.gone,
        timeout_ms: units::milliseconds(wait.timeout),
        allow_absent: wait.allow_absent,
    };
    let limit = wait.timeout + GRACE;
    let asked = async {
        let answer = session.replica.client.wait(request).await;
        session.collect(answer).await
    };
    let answers = timeout(limit, asked).await;
    let answers = answers.map_err(|_| Failure::Connect(client::silent(&session.replica.server, limit)))??;
    let mut answer = answers.into_iter().next_back().unwrap_or_default();
    let took_ms = units::milliseconds(started.elapsed());
    let result = judge(&answer, wait, &what, took_ms);
    if session.output == Output::Json {
        answer.done = result.is_ok();
        let mut value = serde_json::to_value(answer).map_err(std::io::Error::from)?;
        value["took_ms"] = took_ms.into();
        session.write_json(&value)?;
        return result.map(drop);
    }
    session.write(&result?)
}

fn what(wait: &WaitArgs, Selected { namespace, name }: &Selected) -> String {
    let gone = if wait.gone { " gone" } else { "" };
    match wait.endpoint {
        Some(endpoint) => format!("endpoint {endpoint} of {namespace}/{name}{gone}"),
        None => format!("service {namespace}/{name}{gone}"),
    }
}

/// Returns the text for a wait that is done, or the failure with its exit code.
fn judge(answer: &WaitAnswer, wait: &WaitArgs, what: &str, took_ms: u64) -> Result<String, Failure> {
    let took = units::duration(took_ms);
    if answer.done && (answer.nodes > 0 || wait.allow_absent) {
        let (nodes, verb) = if answer.programmed == 1 { ("node", "has") } else { ("nodes", "have") };
        let mut text = format!("{what}: {} {nodes} {verb} programmed it, {took}", thousands(answer.programmed));
        add_standby(&mut text, answer);
        add_absent(&mut text, answer);
        return Ok(text + "\n");
    }
    let mut text = format!("{what}: not programmed on all nodes after {took}");
    let missing = match (answer.waiting_for.as_str(), wait.gone) {
        ("source", _) => {
            "the source of the replica is unlisted, cut off, or behind the source of another replica: `headgatectl status` shows its state"
        }
        ("service", false) => "the replica does not know the service",
        ("endpoint", false) => "the replica does not know the endpoint",
        ("service", true) => "the replica still has the service",
        ("endpoint", true) => "the replica still has the endpoint",
        _ => "",
    };
    if !missing.is_empty() {
        let _ = write!(text, "\n  {missing}");
    } else if answer.nodes == 0 {
        text.push_str("\n  no Node and no agent is known: with --allow-absent the command succeeds");
    } else {
        let _ = write!(
            text,
            "\n  {} of {} nodes have programmed it",
            thousands(answer.programmed),
            thousands(answer.nodes)
        );
    }
    for problem in &answer.problems {
        let _ = write!(text, "\n  {}", plain(problem));
    }
    for laggard in answer.laggards.iter().take(MAX_NAMED) {
        let _ = write!(text, "\n  {}", lagging(laggard));
    }
    add_more(&mut text, answer.laggards.len(), answer.laggard_count, "behind");
    add_standby(&mut text, answer);
    add_absent(&mut text, answer);
    let only_absent = missing.is_empty() && answer.laggard_count == 0 && (answer.absent_count > 0 || answer.nodes == 0);
    Err(if only_absent { Failure::Absent(text) } else { Failure::TimedOut(text) })
}

fn lagging(laggard: &Laggard) -> String {
    let Laggard { node, programmed_version, version, sent_version, lag_ms, reason, is_stalled, .. } = laggard;
    let reason = match reason.as_str() {
        "" if *is_stalled => "pods have waited too long for the node: look at the log of its agent",
        "" if sent_version >= version => "the version was sent, and there is no ACK yet",
        "" => "the version was not sent yet: the agent waits for its replica, or does not read its stream",
        reason => reason,
    };
    let lag = units::duration(*lag_ms);
    // The replica of the agent may not know a version with the state.
    let at = match version {
        0 => String::new(),
        version => format!("at version {programmed_version} of {version}, {lag} behind: "),
    };
    plain(&format!("{node}: {at}{reason}")).into_owned()
}

fn add_standby(text: &mut String, answer: &WaitAnswer) {
    if answer.standby_count > 0 {
        let _ = write!(text, "\n  not known on {} in standby", thousands(answer.standby_count));
    }
    for Laggard { node, standby, .. } in answer.standby.iter().take(MAX_NAMED) {
        let _ = write!(text, "\n  {}", plain(&format!("{node}: {standby} runs")));
    }
    add_more(text, answer.standby.len(), answer.standby_count, "standby");
}

fn add_absent(text: &mut String, answer: &WaitAnswer) {
    for Laggard { node, reason, .. } in answer.absent.iter().take(MAX_NAMED) {
        let _ = write!(text, "\n  {}", plain(&render::no_agent(node, reason)));
    }
    add_more(text, answer.absent.len(), answer.absent_count, "absent");
}

fn add_more(text: &mut String, listed: usize, count: u64, filter: &str) {
    let unnamed = count.saturating_sub(listed.min(MAX_NAMED) as u64);
    if unnamed > 0 {
        let _ = write!(text, "\n  and {} more: `headgatectl agents --{filter}` lists them", thousands(unnamed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn laggard(node: &str, reason: &str) -> Laggard {
        let (programmed_version, version, lag_ms) = (4, 5, 4_200);
        Laggard { node: node.into(), reason: reason.into(), programmed_version, version, lag_ms, ..Laggard::default() }
    }

    /// Returns the exit code and the text.
    fn judged(answer: &WaitAnswer, allow_absent: bool) -> (u8, String) {
        let wait = WaitArgs {
            service: String::new(),
            namespace: None,
            endpoint: None,
            gone: false,
            timeout: GRACE,
            allow_absent,
        };
        match judge(answer, &wait, "service prod/web", 120) {
            Ok(text) => (0, text),
            Err(failure) => (failure.exit_code(), failure.to_string()),
        }
    }

    #[test]
    fn agents_that_lag_are_named_and_the_exit_code_is_3() {
        let answer = WaitAnswer {
            waiting_for: "nodes".into(),
            version: 9,
            nodes: 30,
            programmed: 2,
            laggards: vec![laggard("node-b", ""), Laggard { sent_version: 5, ..laggard("node-d", "") }],
            laggard_count: 27,
            absent: vec![laggard("node-\u{7}", "lost its stream")],
            absent_count: 1,
            problems: vec!["replica cp-2 does not answer".into()],
            ..WaitAnswer::default()
        };
        let expected = "service prod/web: not programmed on all nodes after 120ms
  2 of 30 nodes have programmed it
  replica cp-2 does not answer
  node-b: at version 4 of 5, 4.2s behind: the version was not sent yet: the agent waits for its replica, or does not read its stream
  node-d: at version 4 of 5, 4.2s behind: the version was sent, and there is no ACK yet
  and 25 more: `headgatectl agents --behind` lists them
  node-\\u{7}: no agent: lost its stream";
        assert_eq!(judged(&answer, false), (3, expected.into()));
        let unknown =
            WaitAnswer { laggards: vec![Laggard { version: 0, ..laggard("b", "its source is behind") }], ..answer };
        assert!(judged(&unknown, false).1.contains("\n  b: its source is behind\n"));
        let other = Laggard { standby: "kube-proxy (iptables)".into(), ..laggard("c", "") };
        let standby = WaitAnswer {
            done: true,
            nodes: 3,
            programmed: 2,
            standby: vec![other],
            standby_count: 1,
            ..WaitAnswer::default()
        };
        let expected = "service prod/web: 2 nodes have programmed it, 120ms\n  not known on 1 in standby\n  c: kube-proxy (iptables) runs\n";
        assert_eq!(judged(&standby, false), (0, expected.into()));
    }
}
