//! Metrics of endpoint checks.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};

use crate::metric_registry::{AGENT, MetricRegistry, ResultLabel};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckResult {
    /// The endpoint accepted a connection.
    Passed,
    /// It refused, or did not answer in time.
    Failed,
    /// This machine lacked the means, such as file descriptors.
    NotMade,
}

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct EndpointCheckMetrics {
    checks: Family<ResultLabel, Counter>,
    checked: Gauge,
    failing: Gauge,
}

impl EndpointCheckMetrics {
    /// Registers all of them.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        let help = "Active health checks of endpoints that were made";
        add.counter("endpoint_checks", "result (passed, failed, not_made)", help, self.checks.clone());
        let help = "Endpoints that are checked for services with the annotation headgate.io/health-check";
        add.gauge("endpoints_checked", "", help, self.checked.clone());
        let help = "Endpoints that fail their health checks: new connections are kept off them";
        add.gauge("endpoints_failing", "", help, self.failing.clone());
    }

    /// A check has ended.
    pub(crate) fn checked(&self, result: CheckResult) {
        let result = match result {
            CheckResult::Passed => "passed",
            CheckResult::Failed => "failed",
            CheckResult::NotMade => "not_made",
        };
        self.checks.get_or_create(&ResultLabel { result }).inc();
    }

    /// So many endpoints are checked, and so many of them fail.
    pub(crate) fn counted(&self, checked: usize, failing: usize) {
        self.checked.set(i64::try_from(checked).unwrap_or(i64::MAX));
        self.failing.set(i64::try_from(failing).unwrap_or(i64::MAX));
    }

    /// Endpoints that fail.
    #[must_use]
    pub fn failing(&self) -> i64 {
        self.failing.get()
    }
}
