//! Agents with TLS and short pauses between attempts.

use std::{path::Path, time::Duration};

use headgate_core::{ServiceKey, State};
use headgate_node_agent::backoff::{Backoff, Jitter};
use headgate_tests::agent::Agent;
use headgate_tls::{Files, Side};

use super::certificates::{Certificates, Holder};

/// Starts the agent of a node. The agent may use all of `replicas`.
pub(crate) fn start(node: &str, replicas: &[String], folder: &Path, certificates: &mut Certificates) -> Agent {
    let folder = folder.join(node);
    certificates.folder(&folder, Holder::Node(node.to_owned()));
    let [cert, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.join(name));
    Agent::start(node, replicas, Some(Files { side: Side::Client, cert, key, ca }), short_backoff).unwrap()
}

/// The port of the clock Service's only endpoint. This port counts the steps of the run. Returns
/// `None` if the agent has not received the endpoint yet.
pub(crate) fn clock(agent: &Agent, key: &ServiceKey) -> Option<u16> {
    let port = |state: &State| Some(state.entry(key)?.endpoints().values().next()?.ports.first()?.port);
    agent.shared.with_state(port)
}

/// Short pauses between attempts, since a run contains many failures in little time.
fn short_backoff() -> Backoff {
    Backoff::new(Duration::from_millis(20), Duration::from_millis(400), Jitter::Full)
}
