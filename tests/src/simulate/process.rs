//! A simulated process: a runtime of its own with a clock of its own. A process that is killed
//! loses all its tasks, and one that is frozen runs none.

use std::{future::Future, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result};
use tokio::{runtime::Runtime, time::Instant};

use super::{LONGEST_TURN_MS, MILLISECOND, clock, net::Network};

/// A place where a process may run.
#[derive(Debug)]
pub struct Process {
    /// The address of its host.
    pub host: IpAddr,
    network: Network,
    running: Option<Running>,
    is_frozen: bool,
    /// What the calendar is ahead, in nanoseconds.
    pub calendar_step: i64,
    /// How much faster its clock is than that of the driver, in parts of a million.
    pub drift_ppm: i64,
}

#[derive(Debug)]
struct Running {
    runtime: Runtime,
    /// The driver's time of the last turn, and what its own clock has not run of the time before:
    /// the timers of a runtime count whole milliseconds.
    last: u64,
    left: u64,
    turns: u64,
}

impl Process {
    /// A place without a process.
    #[must_use]
    pub fn new(host: IpAddr, network: Network) -> Self {
        Self { host, network, running: None, is_frozen: false, calendar_step: 0, drift_ppm: 0 }
    }

    /// Whether a process exists, frozen or not.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.running.is_some()
    }

    /// Starts a process. `start` runs inside its runtime, and spawns its tasks.
    ///
    /// # Errors
    /// The runtime cannot be created.
    pub fn start<T>(&mut self, start: impl FnOnce() -> T) -> Result<T> {
        clock::set_calendar_step(self.calendar_step);
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_time().start_paused(true).build().context("creating a runtime")?;
        let entered = runtime.enter();
        let started = start();
        drop(entered);
        self.running = Some(Running { runtime, last: clock::now(), left: 0, turns: 0 });
        self.is_frozen = false;
        Ok(started)
    }

    /// Whether the process has not run for the longest turn.
    #[must_use]
    pub fn is_behind(&self, now: u64) -> bool {
        self.running.as_ref().is_some_and(|running| now >= running.last + LONGEST_TURN_MS * MILLISECOND)
    }

    /// How often the process has found something to do, besides the beginnings of its turns.
    #[must_use]
    pub fn wakeups(&self) -> u64 {
        let parked = |running: &Running| running.runtime.metrics().worker_park_count(0).saturating_sub(running.turns);
        self.running.as_ref().map_or(0, parked)
    }

    /// Lets the process run until the driver's time is `until`. Does nothing if it is frozen.
    pub fn run(&mut self, until: u64) {
        let Some(running) = self.running.as_mut().filter(|_| !self.is_frozen) else { return };
        clock::set_calendar_step(self.calendar_step);
        let passed = until.saturating_sub(running.last);
        let drift = i128::from(passed) * i128::from(self.drift_ppm) / 1_000_000;
        let due = running.left + passed.saturating_add_signed(drift as i64);
        let turn = due / MILLISECOND * MILLISECOND;
        (running.last, running.left) = (until, due - turn);
        running.turns += 1;
        running.runtime.block_on(async {
            // A process that was frozen finds all its timers due at once.
            if turn > LONGEST_TURN_MS * 2 * MILLISECOND {
                tokio::time::advance(Duration::from_nanos(turn)).await;
            } else {
                tokio::time::sleep_until(Instant::now() + Duration::from_nanos(turn)).await;
            }
        });
    }

    /// Spawns a task of the process.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(running) = &self.running {
            running.runtime.spawn(task);
        }
    }

    /// Ends the process as SIGKILL does. With `is_silent`, the whole machine stops, and its
    /// connections are not closed.
    pub fn kill(&mut self, is_silent: bool) {
        if let Some(running) = self.running.take() {
            self.network.leave(self.host, is_silent);
            clock::set_calendar_step(self.calendar_step);
            drop(running);
        }
        self.is_frozen = false;
    }

    /// Stops or continues the process, as SIGSTOP and SIGCONT do.
    pub fn freeze(&mut self, is_frozen: bool) {
        self.is_frozen = is_frozen && self.exists();
    }

    /// Whether the process exists and is frozen.
    pub fn is_frozen(&self) -> bool {
        self.is_frozen
    }
}
