//! Reports verifications on the stream: every change of their result at once, and otherwise few of
//! them (`discovery.proto`, rule 19).

use std::time::{Duration, Instant};

use headgate_oracle::Difference;
use headgate_proto::v1;

use crate::progress::Verification;

/// Maximum number of differences in a status.
const MAX_REPORTED: usize = 5;
/// Shortest time between two reports of the same result.
const INTERVAL: Duration = Duration::from_secs(60);

/// Converts a verification for a status; `None` if the kernel could not be read, or if no
/// difference was found and a part of the kernel was not understood: this must not hide a
/// difference that was found before.
pub(super) fn to_wire(verification: &Verification) -> Option<v1::Verified> {
    let Verification { at, comparison, error, .. } = verification;
    let is_result = comparison.total > 0 || comparison.not_understood.is_empty();
    (error.is_none() && is_result).then(|| v1::Verified {
        ago_ms: u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX),
        drift_count: comparison.total,
        drift: comparison.differences.iter().take(MAX_REPORTED).map(drift_to_wire).collect(),
    })
}

/// Converts a difference. The Service has a field of its own.
pub(crate) fn drift_to_wire(difference: &Difference) -> v1::Drift {
    match &difference.service {
        Some(service) => v1::Drift { service: service.to_string(), difference: difference.sentence.clone() },
        None => v1::Drift { service: String::new(), difference: difference.to_string() },
    }
}

/// Decides which verifications are reported. Times are the starts of verifications.
#[derive(Debug, Default)]
pub(super) struct Reported {
    at: Option<Instant>,
    drift: (u64, Vec<v1::Drift>),
}

impl Reported {
    /// What the status in `Hello` has reported.
    pub(super) fn in_hello(status: &v1::AgentStatus) -> Self {
        let Some(verified) = &status.verified else { return Self::default() };
        let at = Instant::now().checked_sub(Duration::from_millis(verified.ago_ms));
        Self { at, drift: (verified.drift_count, verified.drift.clone()) }
    }

    /// True if this verification, which began at `at`, must be reported. The next call assumes that
    /// it was reported.
    pub(super) fn is_news(&mut self, at: Instant, verified: &v1::Verified) -> bool {
        let is_due = self.at.is_none_or(|before| at.saturating_duration_since(before) >= INTERVAL);
        let has_changed = (verified.drift_count, &verified.drift) != (self.drift.0, &self.drift.1);
        let is_news = is_due || has_changed;
        if is_news {
            *self = Self { at: Some(at), drift: (verified.drift_count, verified.drift.clone()) };
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use headgate_core::NodeFacts;
    use headgate_oracle::Comparison;

    use super::*;
    use crate::progress::Target;

    #[test]
    fn a_verification_that_proves_nothing_is_not_reported() {
        let verification = |total, not_understood: &[&str], error: Option<&str>| Verification {
            at: Instant::now(),
            request: 0,
            target: Target { epoch: 1, version: 1, stream: 1, node_revision: 0 },
            comparison: Arc::new(Comparison {
                total,
                not_understood: not_understood.iter().map(ToString::to_string).collect(),
                ..Comparison::default()
            }),
            found: None,
            facts: Arc::new(NodeFacts::named("node-a")),
            cpu_time: None,
            error: error.map(ToOwned::to_owned),
        };
        let count = |verification: &Verification| to_wire(verification).map(|verified| verified.drift_count);
        assert_eq!(count(&verification(0, &[], None)), Some(0));
        assert_eq!(count(&verification(0, &[], Some("no permission"))), None);
        assert_eq!(count(&verification(0, &["cannot verify what chain X does"], None)), None);
        assert_eq!(count(&verification(2, &["cannot verify what chain X does"], None)), Some(2));
    }

    #[test]
    fn the_same_result_is_reported_once_a_minute_and_another_result_at_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let drift = |count| v1::Verified { drift_count: count, ..v1::Verified::default() };
        let mut reported = Reported::default();
        assert!(reported.is_news(at(0), &drift(0)));
        assert!(!reported.is_news(at(0), &drift(0)), "the same verification");
        assert!(!reported.is_news(at(59), &drift(0)) && reported.is_news(at(60), &drift(0)));
        assert!(reported.is_news(at(61), &drift(2)) && reported.is_news(at(62), &drift(0)));
    }
}
