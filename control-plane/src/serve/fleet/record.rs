//! The last reports of an agent, cut to a bounded size.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{ServiceKey, node_state::Reported};
use headgate_proto::v1;

use super::rejections::{Rejections, clip};

/// The maximum number of stored items of each list that an agent sent.
const MAX_LISTED: usize = 64;

/// The maximum number of stored differences.
const MAX_DRIFT: usize = 5;

/// The longest age of a programmed version that is accepted from an ACK. Older entries are ignored.
const MAX_AGO: Duration = Duration::from_secs(3_600);

/// The last reports of an agent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    pub(crate) backend: String,
    pub(crate) degraded: Vec<String>,
    /// The last verification that the agent reported.
    reported: Option<Verified>,
    /// The last verification that a client has asked for. The replica may have seen differences
    /// that the agent does not see.
    requested: Option<Verified>,
    pub(crate) programmed_version: u64,
    has_acknowledged: bool,
    pub(crate) apply_microseconds: u64,
    pub(crate) services_planned: u32,
    pub(crate) objects_written: u32,
    pub(crate) last_error: String,
    /// The version of the last failed attempt.
    failed_version: u64,
    /// The current rejections. The counts of the fleet share this list.
    pub(crate) rejections: Arc<Rejections>,
    /// Nothing is left of the patience with the node until this time or a later one.
    pub(super) stalled_until: Option<Instant>,
}

/// The result of a verification (discovery.proto, section 19).
#[derive(Debug, Clone)]
pub(crate) struct Verified {
    pub(crate) at: Instant,
    pub(crate) drift_count: u64,
    pub(crate) drift: Vec<v1::Drift>,
}

impl Verified {
    fn of(wire: &v1::Verified) -> Self {
        let drift = |v1::Drift { service, difference }: &v1::Drift| v1::Drift {
            service: clip(service).to_owned(),
            difference: clip(difference).to_owned(),
        };
        let now = Instant::now();
        Self {
            at: now.checked_sub(Duration::from_millis(wire.ago_ms)).unwrap_or(now),
            drift_count: wire.drift_count,
            drift: wire.drift.iter().take(MAX_DRIFT).map(drift).collect(),
        }
    }
}

impl Record {
    /// Returns the version that the kernel has, as far as the replica knows. The version is 0 if an
    /// attempt to program an acknowledged version again has failed. An agent makes such an attempt,
    /// for example, after another program has changed rules in the kernel. After the failure, it is
    /// unknown which rules the kernel holds.
    pub(crate) fn kernel_version(&self) -> u64 {
        if self.is_lost() { 0 } else { self.programmed_version }
    }

    /// Returns true if the agent has acknowledged a state on this stream and its kernel has not
    /// lost that state.
    pub(crate) fn has_state(&self) -> bool {
        self.has_acknowledged && !self.is_lost()
    }

    fn is_lost(&self) -> bool {
        !self.last_error.is_empty() && self.failed_version <= self.programmed_version
    }

    /// Returns the reports that decide the node's state. The replica has known the versions up to
    /// `settled` for more than a second.
    pub(crate) fn reported(&self, settled: u64) -> Reported {
        let is_settled = self.kernel_version() >= settled;
        Reported { has_state: self.has_state(), is_failing: self.is_failing(), is_settled }
    }

    /// Returns true if the agent's last attempt to program its kernel failed, or the agent rejects
    /// a resource.
    pub(crate) fn is_failing(&self) -> bool {
        !self.last_error.is_empty() || !self.rejections.is_empty()
    }

    /// Notes that nothing is left of the patience with the node until a time.
    pub(crate) fn stall(&mut self, until: Instant) {
        self.stalled_until = Some(until);
    }

    /// Returns true if the node has held up questions for too long (discovery.proto, section 16).
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled_until.is_some()
    }

    /// Returns the verification to show: the last one. Differences that a request found stay until
    /// a later request finds none.
    pub(crate) fn verified(&self) -> Option<&Verified> {
        let replaces = |reported: &&Verified| {
            self.requested.as_ref().is_none_or(|requested| {
                reported.at > requested.at && (requested.drift_count == 0 || reported.drift_count > 0)
            })
        };
        self.reported.as_ref().filter(replaces).or(self.requested.as_ref())
    }

    /// Returns true if the verification to show found differences.
    pub(crate) fn has_drift(&self) -> bool {
        self.verified().is_some_and(|verified| verified.drift_count > 0)
    }

    /// Returns true if the kernel has `version`, and no rejection concerns the services.
    pub(crate) fn confirms(&self, version: u64, services: &BTreeSet<ServiceKey>) -> bool {
        self.has_programmed(version) && !services.iter().any(|key| self.rejections.concern(key))
    }

    /// Returns true if the kernel has `version`, except what the agent rejects.
    pub(crate) fn has_programmed(&self, version: u64) -> bool {
        self.has_state() && self.kernel_version() >= version
    }

    /// Ends a stall whose time is over.
    pub(crate) fn end_stall(&mut self) {
        self.stalled_until.take_if(|until| *until <= Instant::now());
    }

    pub(crate) fn status(&mut self, status: &v1::AgentStatus) {
        self.backend = clip(&status.backend).to_owned();
        self.degraded = status.degraded.iter().take(MAX_LISTED).map(|text| clip(text).to_owned()).collect();
        // An agent that cannot read its kernel at the moment reports no verification.
        if let Some(verified) = &status.verified {
            self.reported = Some(Verified::of(verified));
        }
    }

    /// Applies a verification that a client has asked for, with a result other than `unverified`.
    /// Repaired differences do not count.
    pub(crate) fn verified_on_request(&mut self, verification: &v1::NodeVerification) {
        let is_repaired = verification.is_repaired;
        let drift = if is_repaired { &[][..] } else { &verification.drift };
        self.requested = Some(Verified {
            at: Instant::now(),
            drift_count: if is_repaired { 0 } else { verification.drift_count },
            drift: drift.iter().take(MAX_DRIFT).cloned().collect(),
        });
    }

    pub(crate) fn ack(&mut self, ack: &v1::Ack) {
        self.end_stall();
        self.programmed_version = self.programmed_version.max(ack.version);
        self.has_acknowledged = true;
        self.apply_microseconds = ack.apply_microseconds;
        self.services_planned = ack.services_planned;
        self.objects_written = ack.objects_written;
        // A newer version may have failed while this ACK was delayed.
        if ack.version >= self.failed_version {
            self.last_error.clear();
        }
    }

    pub(crate) fn failed(&mut self, failed: &v1::ApplyFailed) {
        self.failed_version = failed.version;
        self.last_error = format!("version {}, attempt {}: {}", failed.version, failed.attempts, clip(&failed.error));
    }

    /// Applies rejections and withdrawals.
    pub(crate) fn nack(&mut self, nack: &v1::Nack) {
        Arc::make_mut(&mut self.rejections).nack(nack);
    }
}

/// Returns the versions that an ACK names, in ascending order, and when the kernel had them.
/// Impossible entries are left out: entries that are out of order, newer than the ACK, or older
/// than [`MAX_AGO`].
pub(crate) fn programmed(ack: &v1::Ack, now: Instant) -> Vec<(u64, Instant)> {
    let earlier = ack.earlier.iter().take(MAX_LISTED).map(|earlier| (earlier.version, earlier.ago_microseconds));
    let mut found: Vec<(u64, Instant)> = Vec::with_capacity(ack.earlier.len().min(MAX_LISTED) + 1);
    for (version, ago) in earlier.chain([(ack.version, ack.programmed_ago_microseconds)]) {
        let is_next = version <= ack.version && found.last().is_none_or(|(last, _)| version > *last);
        let ago = Duration::from_micros(ago);
        if is_next
            && ago <= MAX_AGO
            && let Some(at) = now.checked_sub(ago)
        {
            found.push((version, at));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ack_says_when_the_kernel_had_each_version() {
        let now = Instant::now() + Duration::from_secs(1);
        let earlier = |version, ago_microseconds| v1::ProgrammedVersion { version, ago_microseconds };
        let ack = v1::Ack {
            version: 9,
            programmed_ago_microseconds: 10,
            // Version 6 is out of order, 10 is ahead of the ACK, and the age of 8 is impossible.
            earlier: vec![earlier(5, 300), earlier(7, 200), earlier(6, 100), earlier(10, 50), earlier(8, u64::MAX)],
            ..v1::Ack::default()
        };
        let ago = |(version, at): (u64, Instant)| (version, (now - at).as_micros());
        let found: Vec<_> = programmed(&ack, now).into_iter().map(ago).collect();
        assert_eq!(found, [(5, 300), (7, 200), (9, 10)]);
    }

    #[test]
    fn a_difference_that_a_request_found_stays_until_a_later_request_finds_none() {
        let reported = |drift_count, ago_ms| v1::AgentStatus {
            verified: Some(v1::Verified { ago_ms, drift_count, ..v1::Verified::default() }),
            ..v1::AgentStatus::default()
        };
        let requested = |drift_count, is_repaired| v1::NodeVerification {
            drift_count,
            is_repaired,
            ..v1::NodeVerification::default()
        };
        let shown = |record: &Record| record.verified().map(|verified| verified.drift_count);
        let mut record = Record::default();
        record.status(&reported(2, 60_000));
        assert_eq!(shown(&record), Some(2));
        record.verified_on_request(&requested(0, false));
        assert_eq!(shown(&record), Some(0), "the request is newer than the report");
        record.verified_on_request(&requested(1, false));
        record.status(&reported(0, 0));
        assert!(record.has_drift(), "the agent does not see what the replica sees");
        record.verified_on_request(&requested(1, true));
        assert!(!record.has_drift());
    }
}
