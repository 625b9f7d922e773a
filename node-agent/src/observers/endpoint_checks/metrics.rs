//! Metrics of active health checks.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};

use crate::metric_registry::{AGENT, Labels, MetricRegistry};

/// Metrics of endpoint checks.
#[derive(Debug, Clone, Default)]
pub struct EndpointCheckMetrics {
    checks: Family<Labels<1>, Counter>,
    checked: Gauge,
    /// Number of endpoints that fail.
    pub(super) failing: Gauge,
}

impl EndpointCheckMetrics {
    /// Registers all metrics of endpoint checks.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        let help = "Active health checks of endpoints";
        add.counter("endpoint_checks", "result (passed, failed, not_made)", help, self.checks.clone());
        let help = "Endpoints that are checked for services with the annotation headgate.io/health-check";
        add.gauge("endpoints_checked", "", help, self.checked.clone());
        let help = "Endpoints that fail their health checks. They get no new connections while other endpoints of their service pass";
        add.gauge("endpoints_failing", "", help, self.failing.clone());
    }

    /// Counts a check that has ended: the endpoint accepted a connection (`passed`), refused it or
    /// did not answer in time (`failed`), or this machine could not make the check (`not_made`).
    pub(crate) fn checked(&self, result: &'static str) {
        self.checks.get_or_create(&[("result", result)]).inc();
    }

    /// Sets the number of endpoints that are checked, and the number of endpoints that fail.
    pub(crate) fn counted(&self, checked: usize, failing: usize) {
        self.checked.set(i64::try_from(checked).unwrap_or(i64::MAX));
        self.failing.set(i64::try_from(failing).unwrap_or(i64::MAX));
    }
}
