//! Clocks.

use std::time::{Duration, Instant};

/// CPU time of the calling thread so far.
#[must_use]
pub fn thread_cpu() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// Milliseconds that `work` took, and what it returned.
pub fn wall_ms<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_secs_f64() * 1e3, result)
}

/// Microseconds of CPU that `work` took on this thread, and what it returned.
pub fn cpu_us<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = thread_cpu();
    let result = work();
    ((thread_cpu().saturating_sub(start)).as_secs_f64() * 1e6, result)
}
