//! Metrics of what happens in the kernel beside the syncs.

use headgate_core::Family as IpFamily;
use prometheus_client::metrics::{
    counter::Counter,
    family::Family,
    gauge::Gauge,
    histogram::{Histogram, exponential_buckets},
};

use crate::metric_registry::{AGENT, FAMILY_LABELS, metrics};

/// Labels of the map of an affinity timeout.
type MapLabels = [(&'static str, String); 2];

metrics! {
    /// Metrics of dataplanes. All clones share the values.
    pub struct DataplaneMetrics {}
    AGENT {
        pub foreign_changes: Counter = "foreign_changes",
            "Changes that other programs made to Headgate's tables of nftables, as the kernel notified the agent";
        pub notifications_lost: Counter = "notifications_lost",
            "Times that notifications about changes of nftables were lost, so that the agent verified its rules";
        pub drift: Counter = "drift", "Differences between the kernel and the state that verifications found";
        // From 50 µs to 1.6 s.
        pub transaction_duration: Histogram = "transaction_duration_seconds",
            "Time that the kernel took for a transaction of nftables",
            Histogram::new(exponential_buckets(0.000_05, 2.0, 16));
        affinity_clients: Family<MapLabels, Gauge> = "affinity_clients" ["ip_family, map"],
            "Clients with a recorded endpoint (ClientIP affinity in mode nftables), by the map of their timeout, when the agent last read its table";
        affinity_map_sizes: Family<MapLabels, Gauge> = "affinity_map_size" ["ip_family, map"],
            "Clients that a map of ClientIP affinity can hold. When the map is full, further clients get any endpoint";
    }
}

impl DataplaneMetrics {
    /// Records how many clients a map of ClientIP affinity holds.
    pub(crate) fn set_affinity(&self, family: IpFamily, map: &str, clients: u32, size: u32) {
        let [(name, value)] = FAMILY_LABELS[family as usize];
        let labels = [(name, value.to_owned()), ("map", map.to_owned())];
        self.affinity_clients.get_or_create(&labels).set(clients.into());
        self.affinity_map_sizes.get_or_create(&labels).set(size.into());
    }
}
