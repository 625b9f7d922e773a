//! `headgatectl drain`: when no node sends new connections to a pod any more.

use headgate_proto::v1::{DrainPodRequest, barrier_answer::Result as Outcome};
use serde_json::json;

use crate::answer::{Failure, Session};
use crate::args::{DrainArgs, Output};
use crate::render::{plain, thousands};
use crate::units::milliseconds;

pub(crate) async fn run(session: &mut Session<'_>, wanted: &DrainArgs) -> Result<(), Failure> {
    let (namespace, name) = wanted.pod.split_once('/').unwrap_or(("default", &wanted.pod));
    let request = DrainPodRequest {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        timeout_ms: milliseconds(wanted.timeout).max(1),
        silent_ms: milliseconds(wanted.silent).max(1),
        uid: wanted.uid.clone(),
    };
    let answer = session.replica.client.drain_pod(request).await;
    let answer = session.collect(answer).await?.pop().unwrap_or_default();
    let result = match answer.result() {
        Outcome::Refused => return Err(Failure::NotFound(plain(&answer.reason).into_owned())),
        Outcome::Drained => "drained",
        Outcome::Last => "last",
        Outcome::Incomplete => "incomplete",
    };
    if session.output == Output::Json {
        let answer = json!({
            "result": result,
            "reason": answer.reason,
            "unconfirmed": answer.unconfirmed,
            "unconfirmed_count": answer.unconfirmed_count,
            "not_covered": answer.not_covered,
            "not_covered_count": answer.not_covered_count,
            "confirmed_count": answer.confirmed_count,
            "standby": answer.standby,
            "standby_count": answer.standby_count,
        });
        session.write_json(&answer)?;
    } else {
        let mut text = format!("{result}\n");
        if answer.standby_count > 0 {
            let (nodes, standby) = (thousands(answer.confirmed_count), thousands(answer.standby_count));
            text = format!("{result} on {nodes} nodes, not known on {standby} in standby\n");
        }
        if !answer.reason.is_empty() {
            text += &format!("{}\n", plain(&answer.reason));
        }
        for (what, names) in
            [("unconfirmed", &answer.unconfirmed), ("not covered", &answer.not_covered), ("standby", &answer.standby)]
        {
            if !names.is_empty() {
                text += &format!("{what}: {}\n", plain(&names.join(" ")));
            }
        }
        session.write(&text)?;
    }
    if answer.result() == Outcome::Incomplete {
        let nodes = if answer.unconfirmed_count == 1 { "node" } else { "nodes" };
        let count = thousands(answer.unconfirmed_count);
        return Err(Failure::TimedOut(format!(
            "{count} {nodes} may still send new connections to pod {namespace}/{name}"
        )));
    }
    Ok(())
}
