//! Health-check node ports: a load balancer outside asks each node at such a port whether it has endpoints of its own for a service.
//!
//! What is to be answered, [`headgate_core::health_check_port`] decides. Ports open, close and move with the services, after the rules are in
//! place; a port that cannot be bound is tried again, and stands in nobody's way.

mod page;
mod server;

pub use page::IsHealthy;
pub use server::Server;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use headgate_core::{
    ServiceKey, State,
    health_check_port::{HealthCheckPort, health_check_port},
    view::NodeFacts,
};
use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use tokio::sync::Notify;

use crate::companion::{Companion, NodePorts, Scope};

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

/// Services whose health-check node port, or what is behind it, changed; `None` where there is none any more.
type Changes = BTreeMap<Arc<ServiceKey>, Option<HealthCheckPort>>;

/// The companion that tells the server which ports there are.
#[derive(Debug)]
pub struct HealthCheckPorts {
    // What the server was told.
    told: HashMap<Arc<ServiceKey>, HealthCheckPort>,
    planned: Changes,
    server: Arc<Mailbox>,
}

/// What the server has not taken up yet: each service once, at its newest.
#[derive(Debug, Default)]
struct Mailbox {
    changes: Mutex<Changes>,
    arrived: Notify,
}

impl Mailbox {
    fn put(&self, changes: Changes) {
        self.lock().extend(changes);
        self.arrived.notify_one();
    }

    /// Waits until there is something, and takes it.
    async fn take(&self) -> Changes {
        loop {
            let changes = std::mem::take(&mut *self.lock());
            if !changes.is_empty() {
                return changes;
            }
            self.arrived.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The companion, and the server to be run on the async runtime.
///
/// `is_healthy` says whether the proxy as a whole works: when it does not, every port answers 503.
#[must_use]
pub fn new(metrics: HealthCheckMetrics, node_ports: NodePorts, is_healthy: IsHealthy) -> (HealthCheckPorts, Server) {
    let mailbox = Arc::new(Mailbox::default());
    let ports = HealthCheckPorts { told: HashMap::new(), planned: Changes::new(), server: Arc::clone(&mailbox) };
    (ports, Server::new(mailbox, metrics, node_ports, is_healthy))
}

impl HealthCheckPorts {
    fn plan_service(&mut self, state: &State, key: &Arc<ServiceKey>, node: &NodeFacts) {
        let found = health_check_port(state, key, node);
        if found.as_ref() != self.told.get(key) {
            self.planned.insert(Arc::clone(key), found);
        }
    }
}

impl Companion for HealthCheckPorts {
    fn plan(&mut self, state: &State, node: &NodeFacts, scope: Scope<'_>) {
        self.planned.clear();
        match scope {
            Scope::Services(services) => services.iter().for_each(|key| self.plan_service(state, key, node)),
            Scope::All => {
                let gone: Vec<_> = self.told.keys().filter(|key| state.entry(key).is_none()).cloned().collect();
                state.entries().map(|(key, _)| key).chain(&gone).for_each(|key| self.plan_service(state, key, node));
            }
        }
    }

    fn applied(&mut self) {
        if self.planned.is_empty() {
            return;
        }
        let changes = std::mem::take(&mut self.planned);
        for (key, port) in &changes {
            match port {
                Some(port) => drop(self.told.insert(Arc::clone(key), *port)),
                None => drop(self.told.remove(key)),
            }
        }
        self.server.put(changes);
    }

    /// A node that restarts while the control plane is away must not drop out of load balancers.
    fn restored(&mut self, state: &State, node: &NodeFacts) {
        self.plan(state, node, Scope::All);
        self.applied();
    }
}

#[cfg(test)]
mod tests;
