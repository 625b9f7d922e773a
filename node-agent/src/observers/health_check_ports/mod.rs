//! Health-check node ports: a load balancer outside asks each node at such a port whether it has
//! endpoints of its own for a service.
//!
//! What is to be answered, [`headgate_core::health_check_port`] decides. Ports open, close and move
//! with the services, after the rules are in place; a port that cannot be bound is tried again, and
//! stands in nobody's way.

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

/// What is counted.
#[derive(Debug, Clone, Default)]
pub struct HealthCheckMetrics {
    /// Sockets that listen.
    pub listening: Gauge,
    /// Attempts to listen that failed.
    pub bind_failures: Counter,
}

impl HealthCheckMetrics {
    /// Registers both.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        let help = "Sockets that listen at health-check node ports";
        add.gauge("health_check_listeners", "", help, self.listening.clone());
        let help = "Attempts to listen at a health-check node port that failed";
        add.counter("health_check_bind_failures", "", help, self.bind_failures.clone());
    }
}

/// The observer that tells the server which ports there are.
pub type HealthCheckPorts = Follower<HealthCheckPort>;

/// The observer, and the server to be run on the async runtime.
///
/// `is_healthy` says whether the proxy as a whole works: when it does not, every port answers 503.
#[must_use]
pub fn new(metrics: HealthCheckMetrics, node_ports: NodePorts, is_healthy: IsHealthy) -> (HealthCheckPorts, Server) {
    let (ports, mailbox) = Follower::new(|state, key, node| health_check_port(state, key, node));
    (ports, Server::new(mailbox, metrics, node_ports, is_healthy))
}

#[cfg(test)]
mod tests;
