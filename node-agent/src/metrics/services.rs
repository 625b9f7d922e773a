//! Metrics of single Services, from the counters in the kernel (mode nftables). The agent reads the
//! counters when a client requests the metrics.

use std::{collections::BTreeMap, sync::Arc};

use headgate_core::{ServiceKey, frontends::Frontend};
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tracing::warn;

use crate::{
    dataplane::nftables::{Counts, ServiceCounters},
    metric_registry::{AGENT, metrics},
};

/// The most Services with metrics. The first Services by namespace and name have metrics.
pub(super) const MAX_SERVICES: usize = 5_000;

pub(super) type ServiceLabels = [(&'static str, String); 2];

metrics! {
    pub(crate) struct ServiceMetrics {}
    AGENT {
        connections: Family<ServiceLabels, Counter> = "service_connections" ["namespace, service"],
            "Connections to a Service that this node sent to an endpoint, with --nftables-service-counters";
        packets: Family<ServiceLabels, Counter> = "service_packets" ["namespace, service"],
            "Packets of connections to a Service, in both directions, with --nftables-service-counters";
        bytes: Family<ServiceLabels, Counter> = "service_bytes" ["namespace, service"],
            "Bytes of connections to a Service, in both directions, with the IP header, with --nftables-service-counters";
        omitted: Gauge = "services_without_counters",
            "Services without metrics of their own, because the first 5,000 Services by name have metrics";
    }
}

impl ServiceMetrics {
    /// Reads all counters from the kernel. If they cannot be read, the metrics keep their values.
    pub(crate) fn refresh(&self, counters: &Arc<ServiceCounters>) {
        match counters.read() {
            Ok(services) => self.set(&services),
            Err(error) => warn!(%error, "the counters of Services cannot be read; the metrics show older counts"),
        }
    }

    fn set(&self, services: &BTreeMap<ServiceKey, Vec<(Frontend, Counts)>>) {
        let Self { connections, packets, bytes, omitted } = self;
        [connections, packets, bytes].into_iter().for_each(Family::clear);
        for (key, frontends) in services.iter().take(MAX_SERVICES) {
            let sum = Counts::sum(frontends);
            let labels = [("namespace", key.namespace.to_string()), ("service", key.name.to_string())];
            connections.get_or_create(&labels).inc_by(sum.connections);
            packets.get_or_create(&labels).inc_by(sum.packets);
            bytes.get_or_create(&labels).inc_by(sum.bytes);
        }
        omitted.set(i64::try_from(services.len().saturating_sub(MAX_SERVICES)).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::Protocol;

    use super::*;
    use crate::metric_registry::MetricRegistry;

    #[test]
    fn metrics_are_sums_over_frontends_and_limited_in_number() {
        let metrics = ServiceMetrics::default();
        let frontend = |port| Frontend::NodePort(headgate_core::Family::V4, Protocol::Tcp, port);
        let counts = |connections| Counts { connections, packets: 2, bytes: 3 };
        let services = (0..MAX_SERVICES + 7).map(|number| {
            let frontends = vec![(frontend(1), counts(10)), (frontend(2), counts(1))];
            (ServiceKey::new("ns", &format!("s{number:05}")), frontends)
        });
        let mut services: BTreeMap<_, _> = services.collect();
        metrics.set(&services);
        let mut registry = MetricRegistry::default();
        metrics.register(&mut registry);
        let text = registry.encode(false);
        assert!(text.contains("service_connections_total{namespace=\"ns\",service=\"s00000\"} 11\n"), "{text}");
        assert_eq!(text.matches("service_bytes_total{").count(), MAX_SERVICES);
        assert!(text.contains("headgate_agent_services_without_counters 7\n"));
        services.clear();
        metrics.set(&services);
        assert!(!registry.encode(false).contains("{namespace="), "metrics of removed Services disappear");
    }
}
