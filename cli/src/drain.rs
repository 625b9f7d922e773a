//! `headgatectl drain`: asks one replica, which asks all other replicas.

use std::io::Write;
use std::time::Duration;

use headgate_proto::v1::{DrainPodRequest, barrier_answer::Result as Outcome};
use serde_json::json;

use crate::answer::{Failure, collect, write_json};
use crate::args::{Args, DrainArgs, Output};
use crate::client;
use crate::render::plain;

pub(crate) async fn run(args: &Args, wanted: &DrainArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let (namespace, name) = wanted.pod.split_once('/').unwrap_or(("default", &wanted.pod));
    let milliseconds = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).max(1);
    let request = DrainPodRequest {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        timeout_ms: milliseconds(wanted.timeout),
        silent_ms: milliseconds(wanted.silent),
    };
    let server = args.server.first().map_or("", String::as_str);
    let mut client = client::connect(server, &args.tls).await.map_err(Failure::Connect)?;
    let answer = client.drain_pod(request).await;
    let answer = collect(server, answer).await?.pop().unwrap_or_default();
    let result = match answer.result() {
        Outcome::Refused => return Err(Failure::NotFound(plain(&answer.reason).into_owned())),
        Outcome::Drained => "drained",
        Outcome::Last => "last",
        Outcome::Incomplete => "incomplete",
    };
    if args.output == Output::Json {
        let answer = json!({
            "result": result,
            "reason": answer.reason,
            "unconfirmed": answer.unconfirmed,
            "unconfirmed_count": answer.unconfirmed_count,
            "not_covered": answer.not_covered,
            "not_covered_count": answer.not_covered_count,
        });
        write_json(out, &answer)?;
    } else {
        writeln!(out, "{result}")?;
        if !answer.reason.is_empty() {
            writeln!(out, "{}", plain(&answer.reason))?;
        }
        for (what, names) in [("unconfirmed", &answer.unconfirmed), ("not covered", &answer.not_covered)] {
            if !names.is_empty() {
                writeln!(out, "{what}: {}", plain(&names.join(" ")))?;
            }
        }
    }
    if answer.result() == Outcome::Incomplete {
        let count = answer.unconfirmed_count;
        return Err(Failure::TimedOut(format!(
            "{count} nodes may still send new connections to pod {namespace}/{name}"
        )));
    }
    Ok(())
}
