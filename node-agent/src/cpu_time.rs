//! Processor time that the agent has used.

use std::time::Duration;

use nix::sys::resource::{Usage, UsageWho, getrusage};
use tracing::debug;

/// The processor time of the process, without its child processes. `None` if the operating system
/// does not tell it.
pub(crate) fn of_process() -> Option<Duration> {
    usage(UsageWho::RUSAGE_SELF)
}

/// The processor time of the calling thread, plus the time of all child processes that have ended.
/// The difference of two calls is what the work between them cost, as long as no other thread
/// waits for a child process meanwhile. On a busy machine, this is less than the time that passed.
/// `None` if the operating system does not tell it.
pub(crate) fn of_thread_and_children() -> Option<Duration> {
    Some(usage(UsageWho::RUSAGE_THREAD)? + usage(UsageWho::RUSAGE_CHILDREN)?)
}

fn usage(of: UsageWho) -> Option<Duration> {
    getrusage(of)
        .inspect_err(|error| debug!(%error, "the processor time cannot be read"))
        .ok()
        .map(|usage| spent(&usage))
}

fn spent(usage: &Usage) -> Duration {
    [usage.user_time(), usage.system_time()]
        .iter()
        .map(|time| {
            let whole_seconds = Duration::from_secs(u64::try_from(time.tv_sec()).unwrap_or(0));
            whole_seconds + Duration::from_micros(u64::try_from(time.tv_usec()).unwrap_or(0))
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use std::{hint::black_box, process::Command, thread};

    use super::*;

    /// Uses a quarter of a second of processor time.
    fn work() {
        let before = usage(UsageWho::RUSAGE_THREAD).unwrap();
        while usage(UsageWho::RUSAGE_THREAD).unwrap() - before < Duration::from_millis(250) {
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
        assert!(of_process().unwrap() >= Duration::from_millis(500));
    }
}
