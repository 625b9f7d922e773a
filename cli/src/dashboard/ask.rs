//! Questions of the page: the same commands as in a terminal, and the card of a node or a Service.

use std::collections::BTreeMap;

use headgate_proto::v1::{ListEndpointsRequest, WaitRequest};
use serde_json::{Value, json};

use crate::agents;
use crate::answer::{Failure, Session};
use crate::args::{self, Output, Selected};
use crate::client::Replica;

/// The most endpoints of a Service that a page shows.
const MAX_ENDPOINTS: usize = 500;

/// A command that the page may run: its name, the name of its argument, its options and its flags.
type Allowed = (&'static str, &'static str, &'static [&'static str], &'static [&'static str]);

const ALLOWED: [Allowed; 5] = [
    ("explain", "service", &["from", "source", "to"], &[]),
    ("verify", "node", &[], &["allow_absent"]),
    ("wait", "service", &["endpoint", "timeout"], &["gone", "allow_absent"]),
    ("drain", "pod", &["timeout"], &[]),
    ("node", "node", &[], &[]),
];

/// The command line of a question; `None` if the page asks for another command.
fn command_line(command: &str, fields: &BTreeMap<String, Value>) -> Option<Vec<String>> {
    let (name, argument, options, flags) = ALLOWED.iter().find(|(name, ..)| *name == command)?;
    let text = |field: &str| fields.get(field).and_then(Value::as_str).filter(|text| !text.is_empty());
    let mut line = vec!["headgatectl".to_owned(), (*name).to_owned()];
    line.extend(options.iter().filter_map(|option| Some(format!("--{option}={}", text(option)?))));
    let is_set = |flag: &&&str| fields.get(**flag) == Some(&Value::Bool(true));
    line.extend(flags.iter().filter(is_set).map(|flag| format!("--{}", flag.replace('_', "-"))));
    // After "--", nothing is an option.
    line.extend(text(argument).into_iter().flat_map(|value| ["--".to_owned(), value.to_owned()]));
    Some(line)
}

/// Runs a command. The answer has the text that the command prints, and its exit code.
pub(super) async fn run(replica: Replica, command: &str, fields: &BTreeMap<String, Value>) -> Option<Value> {
    let line = command_line(command, fields)?;
    let mut out = Vec::new();
    let result = match args::parse(line) {
        // The first paragraph names the fault.
        Err(error) => Err(Failure::Usage(error.to_string().split("\n\n").next().unwrap_or_default().to_owned())),
        Ok(args) => {
            let mut session = Session::new(replica, Output::Table, &mut out);
            match args.command.selected() {
                Ok(selected) => session.answer(&args.command, &selected).await,
                Err(usage) => Err(Failure::Usage(usage)),
            }
        }
    };
    let mut text = String::from_utf8_lossy(&out).into_owned();
    let code = result.map_or_else(
        |failure| {
            text += &failure.to_string();
            failure.exit_code()
        },
        |()| 0,
    );
    Some(json!({ "text": text, "code": code }))
}

/// The card of a node.
pub(super) async fn card(session: &mut Session<'_>, node: &str) -> Result<Value, Failure> {
    let agent = agents::list(session, node).await?.pop();
    let agent = agent.ok_or_else(|| Failure::NotFound(format!("no node {node}")))?;
    Ok(json!({ "agent": agent }))
}

/// One Service, its endpoints, and which nodes have its present state.
pub(super) async fn service(session: &mut Session<'_>, namespace: &str, name: &str) -> Result<Value, Failure> {
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    let of = Selected { namespace: namespace.clone(), name: name.clone() };
    let service = session.services(&of).await?.pop();
    let service =
        service.ok_or_else(|| Failure::NotFound(format!("there is no Service {namespace}/{name} any more")))?;
    let request = ListEndpointsRequest { namespace: namespace.clone(), name: name.clone() };
    let answer = session.replica.client.list_endpoints(request).await;
    let mut endpoints = session.collect(answer).await?;
    let endpoint_count = endpoints.len();
    endpoints.truncate(MAX_ENDPOINTS);
    // The answer comes at once, whether or not all nodes have the Service.
    let request = WaitRequest { namespace, name, timeout_ms: 1, ..WaitRequest::default() };
    let answer = session.replica.client.wait(request).await;
    let wait = session.collect(answer).await?.pop().unwrap_or_default();
    Ok(json!({ "service": service, "endpoints": endpoints, "endpoint_count": endpoint_count, "wait": wait }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(command: &str, fields: Value) -> Option<String> {
        let fields = serde_json::from_value(fields).unwrap();
        command_line(command, &fields).map(|line| line.join(" "))
    }

    #[test]
    fn questions_become_command_lines_without_options_of_their_own() {
        let explain = line("explain", json!({ "service": "shop/web", "from": "--server=x", "command": "explain" }));
        assert_eq!(explain.as_deref(), Some("headgatectl explain --from=--server=x -- shop/web"));
        let wait = line("wait", json!({ "service": "--server", "gone": true, "allow_absent": false, "timeout": "5s" }));
        assert_eq!(wait.as_deref(), Some("headgatectl wait --timeout=5s --gone -- --server"));
        assert_eq!(line("verify", json!({ "node": "" })).as_deref(), Some("headgatectl verify"));
        assert_eq!(line("drain", json!({ "pod": "a/b", "server": "x" })).as_deref(), Some("headgatectl drain -- a/b"));
        assert_eq!(line("certs", json!({})), None);
    }

    #[test]
    fn every_allowed_command_is_a_command_with_these_options() {
        for (name, argument, options, flags) in ALLOWED {
            let value = |option: &&str| match *option {
                "source" | "endpoint" => "10.0.0.1",
                "to" => "10.0.0.1:80",
                "timeout" => "5s",
                _ => "node-a",
            };
            let mut fields: BTreeMap<String, Value> =
                options.iter().map(|option| ((*option).to_owned(), value(option).into())).collect();
            fields.extend(flags.iter().map(|flag| ((*flag).to_owned(), true.into())));
            fields.insert(argument.to_owned(), "a/b".into());
            args::parse(command_line(name, &fields).unwrap()).unwrap();
        }
    }
}
