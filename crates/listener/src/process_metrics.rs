//! Metrics of the process, with the names of all Kubernetes components, read when a client asks.
//! Child processes are not included.

use std::{
    fs,
    sync::atomic::AtomicU64,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use rustix::process::{Resource, getrlimit};
use tracing::debug;

/// The length of the time units of `/proc/self/stat`, which is the same on all architectures.
const TICK_SECONDS: f64 = 0.01;

/// Metrics of the process. Their names begin with `process_`.
#[derive(Debug)]
pub struct ProcessMetrics {
    /// `cpu_seconds_total`: processor time, without child processes.
    pub cpu_seconds: Counter<f64, AtomicU64>,
    /// `resident_memory_bytes`, without child processes.
    pub resident_bytes: Gauge<u64, AtomicU64>,
    /// `virtual_memory_bytes`, without child processes.
    pub virtual_bytes: Gauge<u64, AtomicU64>,
    /// `start_time_seconds`: when the process started, in seconds since the Unix epoch.
    pub started: Gauge<f64, AtomicU64>,
    /// `open_fds`.
    pub open_fds: Gauge<u64, AtomicU64>,
    /// `max_fds`.
    pub max_fds: Gauge<u64, AtomicU64>,
}

impl Default for ProcessMetrics {
    /// The time of this call counts as the start of the process.
    fn default() -> Self {
        let started = Gauge::<f64, AtomicU64>::default();
        started.set(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
        Self {
            cpu_seconds: Counter::default(),
            resident_bytes: Gauge::default(),
            virtual_bytes: Gauge::default(),
            started,
            open_fds: Gauge::default(),
            max_fds: Gauge::default(),
        }
    }
}

impl ProcessMetrics {
    /// Reads the values from the operating system. Call this function before the metrics are
    /// encoded. If a value cannot be read, the metric keeps its last value.
    pub fn refresh(&self) {
        match fs::read_to_string("/proc/self/stat") {
            Ok(stat) => {
                let spent = cpu_seconds(&stat).unwrap_or_default();
                self.cpu_seconds.inc_by((spent - self.cpu_seconds.get()).max(0.0));
            }
            Err(error) => debug!(%error, "the processor time of the process cannot be read"),
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

/// Returns the time in user mode and in the kernel from `/proc/self/stat`. The name of the program,
/// in parentheses, may contain spaces.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut times = fields.split(' ').skip(11).map(|ticks| ticks.parse::<u32>().ok());
    Some((f64::from(times.next()??) + f64::from(times.next()??)) * TICK_SECONDS)
}

/// Returns a size from `/proc/self/status` in bytes. The file states sizes in KiB.
fn bytes_of(status: &str, field: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(field))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_metrics_have_plausible_values() {
        let metrics = ProcessMetrics::default();
        while metrics.cpu_seconds.get() < 0.05 {
            metrics.refresh();
        }
        let (cpu, resident) = (metrics.cpu_seconds.get(), metrics.resident_bytes.get());
        assert!(cpu < 60.0 && resident > 1 << 20 && metrics.virtual_bytes.get() > resident, "{metrics:?}");
        // At least standard input, output and error are open.
        assert!(metrics.open_fds.get() >= 3 && metrics.max_fds.get() >= metrics.open_fds.get(), "{metrics:?}");
        metrics.refresh();
        assert!(metrics.cpu_seconds.get() >= cpu, "the CPU time never decreases");
        assert_eq!(bytes_of("VmPeak:\t 9 kB\nVmRSS:\t    12 kB\n", "VmRSS:"), Some(12 << 10));
        assert_eq!(bytes_of("VmRSS:\t12\n", "VmRSS:"), None);
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 150 50 9 9 20 0 1 0 100 1000 10";
        assert_eq!(cpu_seconds(stat), Some(2.0));
    }
}
