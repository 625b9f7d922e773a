//! What the loop does next, as a function of the state's signals and the time.

use std::time::Instant;

use crate::state::Wake;

/// What the loop does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// End.
    Stop,
    /// Only publish what changed, and write the line of the log that is due.
    Publish,
    /// Resolve the node's inputs again.
    Inputs,
    /// Program changes.
    Sync,
    /// Find out whether the rules of an earlier run are in place.
    EarlierRun,
    /// Check the rules.
    Check,
    /// Verify what the kernel forwards.
    VerifyTable,
    /// The dataplane's work that is due.
    Maintain,
    /// Try quarantined services again.
    Retry,
}

/// When work is due that no signal announces.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) check: Instant,
    pub(super) maintain: Option<Instant>,
    pub(super) retry: Option<Instant>,
    pub(super) log: Option<Instant>,
}

impl Times {
    /// The earliest of these times.
    pub(super) fn first(&self) -> Instant {
        [self.maintain, self.retry, self.log].into_iter().flatten().fold(self.check, Instant::min)
    }
}

/// Decides what the loop does at `now` after `wake`. `is_unconfirmed` is true while the rules of an
/// earlier run must stay.
pub(super) fn due(wake: Wake, is_unconfirmed: bool, times: Times, now: Instant) -> Due {
    match wake {
        Wake::Stop => Due::Stop,
        Wake::Interfaces => Due::Inputs,
        Wake::Problems => Due::Publish,
        Wake::Work => Due::Sync,
        Wake::Requested => Due::VerifyTable,
        Wake::Rules | Wake::Verify if is_unconfirmed => Due::EarlierRun,
        Wake::Rules => Due::Check,
        Wake::Verify => {
            let times = [(times.maintain, Due::Maintain), (Some(times.check), Due::Check), (times.retry, Due::Retry)];
            let first = times.into_iter().find(|(at, _)| at.is_some_and(|at| at <= now));
            first.map_or(Due::Publish, |(_, due)| due)
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_due_depends_on_the_wake_and_the_times() {
        let now = Instant::now();
        let (past, future) = (now.checked_sub(Duration::from_secs(1)).unwrap(), now + Duration::from_secs(1));
        let times = |check, maintain, retry| Times { check, maintain, retry, log: Some(past) };
        let nothing = times(future, None, None);
        let all = times(past, Some(past), Some(past));
        for (wake, is_unconfirmed, times, expected) in [
            (Wake::Stop, true, all, Due::Stop),
            (Wake::Interfaces, true, all, Due::Inputs),
            (Wake::Problems, true, all, Due::Publish),
            (Wake::Work, false, all, Due::Sync),
            (Wake::Requested, false, all, Due::VerifyTable),
            (Wake::Rules, true, nothing, Due::EarlierRun),
            (Wake::Verify, true, nothing, Due::EarlierRun),
            (Wake::Rules, false, nothing, Due::Check),
            (Wake::Verify, false, nothing, Due::Publish),
            (Wake::Verify, false, all, Due::Maintain),
            (Wake::Verify, false, times(past, Some(future), Some(past)), Due::Check),
            (Wake::Verify, false, times(now, None, None), Due::Check),
            (Wake::Verify, false, times(future, Some(future), Some(past)), Due::Retry),
            (Wake::Verify, false, times(future, Some(now), Some(past)), Due::Maintain),
        ] {
            assert_eq!(due(wake, is_unconfirmed, times, now), expected, "{wake:?} {is_unconfirmed} {times:?}");
        }
        assert_eq!((nothing.first(), times(future, Some(now), None).first()), (past, past));
        assert_eq!(Times { log: None, ..times(future, Some(now), None) }.first(), now);
    }
}
