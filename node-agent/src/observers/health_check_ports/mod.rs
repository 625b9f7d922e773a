//! Health-check node ports (`spec.healthCheckNodePort`): an external load balancer asks each
//! node at this port whether the node has local endpoints for a Service.
//!
//! [`headgate_core::health_check_port`] decides what a port answers. Ports open and close after the
//! rules are in place. If a port cannot be bound, the server retries and continues with the other
//! ports.

mod page;
mod server;

pub use server::PortServer;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use headgate_core::health_check_port::{HealthCheckPort, health_check_port};
use headgate_listener::HttpConnections;
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use tokio::sync::watch;

use crate::{
    metric_registry::{AGENT, MetricRegistry},
    node_inputs::NodeInputs,
    observers::Follower,
    state::backlog::Backlog,
};

/// Metrics of the health-check node ports.
#[derive(Debug, Clone, Default)]
pub struct HealthCheckMetrics {
    /// Number of listening sockets.
    pub listening: Gauge,
    /// Attempts to listen that failed.
    pub bind_failures: Counter,
}

impl HealthCheckMetrics {
    /// Registers both metrics.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        let help = "Sockets that listen at health-check node ports";
        add.gauge("health_check_listeners", "", help, self.listening.clone());
        let help = "Attempts to listen at a health-check node port that failed";
        add.counter("health_check_bind_failures", "", help, self.bind_failures.clone());
    }
}

/// The observer that sends the wanted ports to the server.
pub type HealthCheckPorts = Follower<HealthCheckPort>;

/// Returns the observer, and the server. The caller runs the server on the async runtime.
///
/// `inputs` provides the addresses that answer. If a change in `backlog` has waited for longer than
/// `patience`, the proxy as a whole does not work, and every port answers 503. The ports share the
/// limits of `connections`.
#[must_use]
pub fn new(
    metrics: HealthCheckMetrics,
    inputs: watch::Receiver<NodeInputs>,
    backlog: Arc<Backlog>,
    patience: Duration,
    connections: Arc<HttpConnections>,
) -> (HealthCheckPorts, PortServer) {
    let (ports, mailbox) = Follower::new(|state, key, node| health_check_port(state, key, node));
    let (wanted, open, failed) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    (ports, PortServer { mailbox, metrics, inputs, backlog, patience, connections, wanted, open, failed })
}

#[cfg(test)]
mod tests;
