//! Processor time that the agent has used.
#![allow(unsafe_code)]

use std::time::Duration;

/// The processor time of the calling thread, plus the time of all child processes that have ended.
/// The difference of two calls is what the work between them cost, as long as no other thread
/// waits for a child process meanwhile. On a busy machine, this is less than the time that passed.
/// `None` if the operating system does not tell it.
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

#[cfg(test)]
mod tests {
    use std::{hint::black_box, process::Command, thread};

    use super::*;

    /// Uses a quarter of a second of processor time.
    fn work() {
        let before = usage(libc::RUSAGE_THREAD).unwrap();
        while usage(libc::RUSAGE_THREAD).unwrap() - before < Duration::from_millis(250) {
            black_box((0..10_000_u64).sum::<u64>());
        }
    }

    #[test]
    fn a_thread_counts_its_own_work_and_its_children_but_no_other_thread() {
        let before = of_thread_and_children().unwrap();
        thread::spawn(work).join().unwrap();
        assert!(of_thread_and_children().unwrap() - before < Duration::from_millis(100));
        work();
        let after_work = of_thread_and_children().unwrap();
        assert!(after_work - before >= Duration::from_millis(250));
        let counts = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        assert!(Command::new("sh").args(["-c", counts]).status().unwrap().success());
        assert!(of_thread_and_children().unwrap() - after_work > Duration::from_millis(10));
    }
}
