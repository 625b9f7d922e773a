//! Memory and processor time of a program together with the programs that it runs.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use crate::bench::memory::{children_mb, status_mb};

/// The time between two samples of the memory.
const BETWEEN_SAMPLES: Duration = Duration::from_millis(20);
/// The unit of processor time in `/proc`, which is the same on all architectures of Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// What a program and its children used during a phase.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Usage {
    /// The peak memory, in megabytes of 1,000,000 bytes.
    pub(super) peak_mb: f64,
    /// The processor time, in percent of one core. Children count when they have ended.
    pub(super) cpu_percent: f64,
}

/// Measures a running program until [`Self::finish`].
pub(super) struct Meter {
    process: u32,
    started: Instant,
    cpu_seconds: f64,
    is_over: Arc<AtomicBool>,
    sampler: JoinHandle<f64>,
}

impl Meter {
    /// Begins to measure the process with this id.
    ///
    /// # Errors
    /// The process has ended.
    pub(super) fn start(process: u32) -> Result<Self> {
        let path = format!("/proc/{process}/clear_refs");
        fs::write(&path, "5").with_context(|| format!("resetting the peak of the memory with {path}"))?;
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let sampler = std::thread::spawn(move || {
            let mut peak: f64 = 0.0;
            while !ends.load(Ordering::Relaxed) {
                // A program that has ended fails the phase elsewhere.
                peak = peak.max(status_mb(process, "VmRSS").unwrap_or_default() + children_mb(process));
                std::thread::sleep(BETWEEN_SAMPLES);
            }
            peak
        });
        Ok(Self { process, started: Instant::now(), cpu_seconds: cpu_seconds(process)?, is_over, sampler })
    }

    /// Ends the measurement.
    ///
    /// # Errors
    /// The process has ended.
    pub(super) fn finish(self) -> Result<Usage> {
        let seconds = self.started.elapsed().as_secs_f64();
        let cpu_percent = (cpu_seconds(self.process)? - self.cpu_seconds) / seconds * 100.0;
        self.is_over.store(true, Ordering::Relaxed);
        let sampled = self.sampler.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // The kernel's own peak has no gaps, but does not include children.
        Ok(Usage { peak_mb: sampled.max(status_mb(self.process, "VmHWM")?), cpu_percent })
    }
}

/// The processor time of a process and of its children that have ended, in seconds.
fn cpu_seconds(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    // The name is in parentheses and may contain any text. The third field follows the name. utime,
    // stime, cutime and cstime are the fields 14 to 17 (proc_pid_stat(5)).
    let after = text.rsplit_once(')').with_context(|| format!("{path} has no name"))?.1;
    let ticks: f64 = after.split_whitespace().skip(11).take(4).filter_map(|field| field.parse::<f64>().ok()).sum();
    Ok(ticks / TICKS_PER_SECOND)
}
