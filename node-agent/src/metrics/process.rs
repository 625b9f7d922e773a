//! Metrics of the process, with the names of all Kubernetes components, read when a client asks.
//! Child processes are not included.

use std::{
    fs,
    sync::atomic::AtomicU64,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Unit,
};
use rustix::process::{Resource, getrlimit};
use tracing::debug;

use crate::{cpu_time, metric_registry::MetricRegistry};

/// Metrics of the process.
#[derive(Debug, Default)]
pub struct ProcessMetrics {
    cpu_seconds: Counter<f64, AtomicU64>,
    resident_bytes: Gauge<u64, AtomicU64>,
    virtual_bytes: Gauge<u64, AtomicU64>,
    open_fds: Gauge<u64, AtomicU64>,
    max_fds: Gauge<u64, AtomicU64>,
}

impl ProcessMetrics {
    /// Registers all metrics of the process. The time of this call counts as the start of the
    /// process.
    pub(super) fn register(&self, registry: &mut MetricRegistry) {
        let started = Gauge::<f64, AtomicU64>::default();
        started.set(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
        let mut add = registry.adder("process");
        let help = "CPU time of the agent, without its child processes";
        add.counter("cpu_seconds", "", help, self.cpu_seconds.clone());
        let help = "Resident memory of the agent, without its child processes";
        add.gauge_in(Unit::Bytes, "resident_memory", "", help, self.resident_bytes.clone());
        let help = "Virtual memory of the agent, without its child processes";
        add.gauge_in(Unit::Bytes, "virtual_memory", "", help, self.virtual_bytes.clone());
        let help = "When the agent started, in seconds since the Unix epoch";
        add.gauge_in(Unit::Seconds, "start_time", "", help, started);
        add.gauge("open_fds", "", "Open file descriptors", self.open_fds.clone());
        add.gauge("max_fds", "", "Maximum number of open file descriptors", self.max_fds.clone());
    }

    pub(super) fn resident_bytes(&self) -> u64 {
        self.refresh();
        self.resident_bytes.get()
    }

    /// Reads the values from the operating system. Call this function before the registry is
    /// encoded. If a value cannot be read, the metric keeps its last value.
    pub(super) fn refresh(&self) {
        if let Some(spent) = cpu_time::of_process() {
            self.cpu_seconds.inc_by((spent.as_secs_f64() - self.cpu_seconds.get()).max(0.0));
        }
        match fs::read_to_string("/proc/self/status") {
            Ok(status) => {
                for (field, gauge) in [("VmRSS:", &self.resident_bytes), ("VmSize:", &self.virtual_bytes)] {
                    if let Some(bytes) = bytes_of(&status, field) {
                        gauge.set(bytes);
                    }
                }
            }
            Err(error) => debug!(%error, "the memory of the process cannot be read"),
        }
        match fs::read_dir("/proc/self/fd") {
            // `read_dir` itself uses one of the listed descriptors.
            Ok(open) => {
                self.open_fds.set((open.count() as u64).saturating_sub(1));
            }
            Err(error) => debug!(%error, "the file descriptors of the process cannot be listed"),
        }
        self.max_fds.set(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX));
    }
}

/// Returns a size from `/proc/self/status` in bytes. The file states sizes in KiB.
fn bytes_of(status: &str, field: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(field))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
