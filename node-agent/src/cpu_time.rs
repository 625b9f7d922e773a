//! Processor time that the agent has used.
#![allow(unsafe_code)]

use std::time::Duration;

/// The processor time of the calling thread and of all child processes that have ended. `None` if
/// the operating system does not tell it. No other thread may wait for a child between two calls.
pub(crate) fn of_thread_and_children() -> Option<Duration> {
    Some(usage(libc::RUSAGE_THREAD)? + usage(libc::RUSAGE_CHILDREN)?)
}

/// The time in user mode and in the kernel (getrusage(2)).
fn usage(of: libc::c_int) -> Option<Duration> {
    // SAFETY: all bytes of this struct may be 0.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one struct.
    let result = unsafe { libc::getrusage(of, &raw mut usage) };
    let seconds = u64::try_from(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec).ok()?;
    let micros = u64::try_from(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec).ok()?;
    (result == 0).then(|| Duration::from_secs(seconds) + Duration::from_micros(micros))
}
