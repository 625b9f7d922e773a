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

    /// When to call [`Self::log`]. `None` if there is nothing to say.
    pub(super) fn due_at(&self) -> Option<Instant> {
        (self.syncs > 0).then(|| self.last_line.map_or_else(Instant::now, |at| at + PERIOD))
    }

    /// Writes the line, if it is due. Returns true if it was due.
    pub(super) fn log(&mut self, now: Instant) -> bool {
        let is_due = self.due_at().is_some_and(|due| due <= now);
        if is_due {
            let Self { version, syncs, services, objects, took, .. } = *self;
            info!(version, syncs, services, objects, took_ms = took.as_millis(), "programmed");
            *self = Self { last_line: Some(now), ..Self::default() };
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_change_is_logged_at_once_and_further_ones_are_summed_up() {
        let (mut summary, took) = (Summary::default(), Duration::from_millis(3));
        let report = |objects_written| Report { services_planned: 1, objects_written, warnings: Vec::new() };
        summary.add(1, &report(0), took);
        assert!(!summary.log(Instant::now()), "nothing was written");
        summary.add(2, &report(5), took);
        let now = Instant::now() + Duration::from_millis(1);
        assert!(summary.log(now) && summary.due_at().is_none());
        summary.add(3, &report(5), took);
        summary.add(4, &report(6), took);
        assert!(!summary.log(now + PERIOD / 2));
        assert_eq!(summary.due_at(), Some(now + PERIOD));
        assert_eq!((summary.version, summary.syncs, summary.services, summary.objects), (4, 2, 2, 11));
        assert!(summary.log(now + PERIOD) && summary.due_at().is_none());
    }
}
