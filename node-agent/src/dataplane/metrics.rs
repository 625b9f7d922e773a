//! Metrics of what happens in the kernel beside the syncs.

use headgate_core::Family as IpFamily;
use prometheus_client::metrics::{
    counter::Counter,
    family::Family,
    gauge::Gauge,
    histogram::{Histogram, exponential_buckets},
};

use crate::metric_registry::{AGENT, FAMILY_LABELS, MetricRegistry};

/// Labels of the map of an affinity timeout.
type MapLabels = [(&'static str, String); 2];

/// Metrics of dataplanes. All clones share the values.
#[derive(Debug, Clone)]
pub struct DataplaneMetrics {
    /// Changes that other programs made to Headgate's tables, as the kernel notified the agent.
    pub foreign_changes: Counter,
    /// Times that notifications about changes were lost.
    pub notifications_lost: Counter,
    /// Differences between kernel and state that verifications and background full syncs found.
    pub drift: Counter,
    /// How long the kernel took for a transaction of nftables.
    pub transaction_duration: Histogram,
    affinity_clients: Family<MapLabels, Gauge>,
    affinity_map_sizes: Family<MapLabels, Gauge>,
}

impl Default for DataplaneMetrics {
    fn default() -> Self {
        Self {
            foreign_changes: Counter::default(),
            notifications_lost: Counter::default(),
            drift: Counter::default(),
            // From 50 µs to 1.6 s.
            transaction_duration: Histogram::new(exponential_buckets(0.000_05, 2.0, 16)),
            affinity_clients: Family::default(),
            affinity_map_sizes: Family::default(),
        }
    }
}

impl DataplaneMetrics {
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        let help =
            "Changes that other programs made to Headgate's tables of nftables, as the kernel notified the agent";
        add.counter("foreign_changes", "", help, self.foreign_changes.clone());
        let help = "Times that notifications about changes of nftables were lost, so that the agent verified its rules";
        add.counter("notifications_lost", "", help, self.notifications_lost.clone());
        let help = "Differences between the kernel and the state that verifications found";
        add.counter("drift", "", help, self.drift.clone());
        let help = "Time that the kernel took for a transaction of nftables";
        add.histogram("transaction_duration_seconds", "", help, self.transaction_duration.clone());
        let labels = "ip_family, map";
        let help = "Clients with a recorded endpoint (ClientIP affinity in mode nftables), by the map of their timeout, when the agent last read its table";
        add.gauge("affinity_clients", labels, help, self.affinity_clients.clone());
        let help =
            "Clients that a map of ClientIP affinity can hold. When the map is full, further clients get any endpoint";
        add.gauge("affinity_map_size", labels, help, self.affinity_map_sizes.clone());
    }

    /// Records how many clients a map of ClientIP affinity holds.
    pub(crate) fn set_affinity(&self, family: IpFamily, map: &str, clients: u32, size: u32) {
        let [(name, value)] = FAMILY_LABELS[family as usize];
        let labels = [(name, value.to_owned()), ("map", map.to_owned())];
        self.affinity_clients.get_or_create(&labels).set(clients.into());
        self.affinity_map_sizes.get_or_create(&labels).set(size.into());
    }
}
