//! Agents that speak TLS and pause briefly.

use std::{path::Path, time::Duration};

use headgate_core::{ServiceKey, State};
use headgate_node_agent::backoff::{Backoff, Jitter};
use headgate_tests::agent::Agent;
use headgate_tls::{Files, Side};

use super::certificates::{Certificates, Holder};

/// Starts the agent of a node, which may use any of these replicas.
pub(crate) fn start(node: &str, replicas: &[String], folder: &Path, certificates: &mut Certificates) -> Agent {
    let folder = folder.join(node);
    certificates.folder(&folder, Holder::Node(node.to_owned()));
    let [cert, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.join(name));
    Agent::start(node, replicas, Some(Files { side: Side::Client, cert, key, ca }), brief).unwrap()
}

/// The port of the only endpoint of the service that counts the steps of the run; `None` before the
/// agent knows it.
pub(crate) fn clock(agent: &Agent, key: &ServiceKey) -> Option<u16> {
    let port = |state: &State| Some(state.entry(key)?.endpoints().values().next()?.ports.first()?.port);
    agent.shared.with_state(port)
}

/// There are few agents, and much is to go wrong in little time.
fn brief() -> Backoff {
    Backoff::new(Duration::from_millis(20), Duration::from_millis(400), Jitter::Full)
}
