//! Health-check node ports: a load balancer outside asks each node at such a port whether it has endpoints of its own for a service.
//!
//! What is to be answered, [`headgate_core::health_check_port`] decides. Ports open, close and move with the services, after the rules are in
//! place; a port that cannot be bound is tried again, and stands in nobody's way.

mod page;
mod server;

pub use page::IsHealthy;
pub use server::Server;

use headgate_core::health_check_port::{HealthCheckPort, health_check_port};
use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};

use crate::companion::{Follower, NodePorts};

/// What is counted.
#[derive(Debug, Clone, Default)]
pub struct HealthCheckMetrics {
    /// Sockets that listen.
    pub listening: Gauge,
    /// Attempts to listen that failed.
    pub bind_failures: Counter,
}

impl HealthCheckMetrics {
    /// Name as it is shown, kind and description of each, for documentation.
    pub const DESCRIPTIONS: [(&'static str, &'static str, &'static str); 2] = [
        ("health_check_listeners", "gauge", "Sockets that listen at health-check node ports"),
        ("health_check_bind_failures_total", "counter", "Attempts to listen at a health-check node port that failed"),
    ];

    /// Registers everything; the registry's prefix is `headgate_agent`.
    pub fn register(&self, registry: &mut Registry) {
        let [(_, _, listeners), (_, _, failures)] = Self::DESCRIPTIONS;
        registry.register("health_check_listeners", listeners, self.listening.clone());
        registry.register("health_check_bind_failures", failures, self.bind_failures.clone());
    }
}

/// The companion that tells the server which ports there are.
pub type HealthCheckPorts = Follower<HealthCheckPort>;

/// The companion, and the server to be run on the async runtime.
///
/// `is_healthy` says whether the proxy as a whole works: when it does not, every port answers 503.
#[must_use]
pub fn new(metrics: HealthCheckMetrics, node_ports: NodePorts, is_healthy: IsHealthy) -> (HealthCheckPorts, Server) {
    let (ports, mailbox) = Follower::new(|state, key, node| health_check_port(state, key, node));
    (ports, Server::new(mailbox, metrics, node_ports, is_healthy))
}

#[cfg(test)]
mod tests;
