//! Health-check node ports (`spec.healthCheckNodePort`): an external load balancer asks each node
//! at this port whether the node has local endpoints for a Service.
//!
//! [`headgate_core::health_check_port`] decides what a port answers. Ports open and close after the
//! rules are in place. If a port cannot be bound, the server retries and continues with the other
//! ports.

mod page;
mod server;

pub use page::IsHealthy;
pub use server::Server;

use headgate_core::health_check_port::{HealthCheckPort, health_check_port};
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};

use crate::{
    metric_registry::{AGENT, MetricRegistry},
    observers::{Follower, NodePorts},
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
/// `is_healthy` tests whether the proxy as a whole works. If the proxy does not work, every port
/// answers 503.
#[must_use]
pub fn new(metrics: HealthCheckMetrics, node_ports: NodePorts, is_healthy: IsHealthy) -> (HealthCheckPorts, Server) {
    let (ports, mailbox) = Follower::new(|state, key, node| health_check_port(state, key, node));
    (ports, Server::new(mailbox, metrics, node_ports, is_healthy))
}

#[cfg(test)]
mod tests;
