//! Measures wall-clock and CPU time.

use std::time::{Duration, Instant};

/// The CPU time of the calling thread so far.
#[must_use]
pub fn thread_cpu() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// Runs `work`. Returns the wall-clock time in milliseconds, and the result of `work`.
pub fn wall_ms<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_secs_f64() * 1e3, result)
}
