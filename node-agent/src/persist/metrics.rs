//! Metrics of the state file.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Unit,
};

use crate::metric_registry::{AGENT, MetricRegistry};

/// Metrics of the state on disk.
#[derive(Debug, Clone, Default)]
pub struct SaveMetrics {
    /// 1 if this run began with a state from disk, else 0.
    pub restored: Gauge,
    /// Number of failed attempts to save the state.
    pub errors: Counter,
    pub(super) saves: Counter,
    /// Size of the file.
    pub(super) bytes: Gauge<u64, AtomicU64>,
}

impl SaveMetrics {
    /// Registers all metrics of the state file.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        let help = "1 if this run of the agent began with a state from disk";
        add.gauge("state_restored", "", help, self.restored.clone());
        add.counter("state_saves", "", "Times that the state was saved to disk", self.saves.clone());
        let help = "Attempts to save the state to disk that failed";
        add.counter("state_save_errors", "", help, self.errors.clone());
        add.gauge_in(Unit::Bytes, "state", "", "Size of the saved state", self.bytes.clone());
    }
}
