//! Says in the log what was programmed, without a line for each change.

use std::time::{Duration, Instant};

use tracing::info;

use crate::dataplane::Report;

/// The shortest time between two lines.
const PERIOD: Duration = Duration::from_secs(10);

/// What syncs have written since the last line.
#[derive(Debug, Default)]
pub(super) struct Summary {
    version: u64,
    syncs: u64,
    services: u64,
    objects: u64,
    took: Duration,
    last_line: Option<Instant>,
}

impl Summary {
    /// Adds a sync that succeeded, if it wrote something.
    pub(super) fn add(&mut self, version: u64, report: &Report, took: Duration) {
        if report.objects_written > 0 {
            self.version = version;
            self.syncs += 1;
            self.services += u64::from(report.services_planned);
            self.objects += u64::from(report.objects_written);
            self.took += took;
        }
    }

    /// When the next line is due. `None` if there is nothing to say, or no line was written yet:
    /// the loop calls [`Self::log`] after each sync, which writes the first line at once.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.last_line.filter(|_| self.syncs > 0).map(|at| at + PERIOD)
    }

    /// Writes the line, if it is due. Afterwards, [`Self::due_at`] is later than `now`, so that the
    /// loop can wait.
    pub(super) fn log(&mut self, now: Instant) {
        let Self { version, syncs, services, objects, took, last_line } = *self;
        if syncs > 0 && last_line.is_none_or(|at| at + PERIOD <= now) {
            info!(version, syncs, services, objects, took_ms = took.as_millis(), "programmed");
            *self = Self { last_line: Some(now), ..Self::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_change_is_logged_at_once_and_further_ones_are_summed_up() {
        let (mut summary, took) = (Summary::default(), Duration::from_millis(3));
        let report = |objects_written| Report { services_planned: 1, objects_written, ..Report::default() };
        let now = Instant::now();
        summary.add(1, &report(0), took);
        summary.log(now);
        assert_eq!(summary.last_line, None, "nothing was written");
        summary.add(2, &report(5), took);
        // The loop does not wait for the first line.
        assert_eq!(summary.due_at(), None);
        summary.log(now);
        assert_eq!((summary.last_line, summary.syncs, summary.due_at()), (Some(now), 0, None));
        summary.add(3, &report(5), took);
        summary.add(4, &report(6), took);
        summary.log(now + PERIOD / 2);
        assert_eq!((summary.last_line, summary.due_at()), (Some(now), Some(now + PERIOD)));
        assert_eq!((summary.version, summary.syncs, summary.services, summary.objects), (4, 2, 2, 11));
        summary.log(now + PERIOD);
        assert_eq!((summary.last_line, summary.syncs, summary.due_at()), (Some(now + PERIOD), 0, None));
        // After a quiet time, the next change is logged at once again.
        summary.add(5, &report(1), took);
        summary.log(now + PERIOD * 3);
        assert_eq!((summary.last_line, summary.syncs), (Some(now + PERIOD * 3), 0));
    }
}
