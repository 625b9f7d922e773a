//! The last reports of an agent, cut to a bounded size, with its rejections.

use std::{
    collections::BTreeSet,
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use headgate_core::{ServiceKey, node_state::Reported};
use headgate_proto::v1;

/// The maximum number of stored items of each list that an agent sent.
const MAX_LISTED: usize = 64;

/// The maximum number of stored differences.
const MAX_DRIFT: usize = 5;

/// The longest age of a programmed version that is accepted from an ACK. Older entries are ignored.
const MAX_AGO: Duration = Duration::from_secs(3_600);

/// The last reports of an agent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    /// Grows with each report that people look at. ACKs of an agent without problems do not count.
    pub(crate) revision: u64,
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
    pub(crate) stalled_until: Option<Instant>,
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
        self.revision += u64::from(!self.last_error.is_empty() || self.is_stalled() || !self.has_acknowledged);
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

// The rejections of one agent (discovery.proto, section 7).

/// The maximum stored length of a text that an agent sent, in bytes.
const MAX_TEXT_BYTES: usize = 512;

/// The maximum number of rejections that people see.
const MAX_SHOWN: usize = 64;

/// The maximum number of remembered rejections, 16 bytes each. A Service with many endpoints is one
/// rejection for each endpoint.
const MAX_REMEMBERED: usize = 4_096;

/// The key of the hashes. It is random, so that nobody can choose names with equal hashes.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The rejections that are in force, as far as this replica remembers them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Rejections {
    /// The last rejections, in full.
    shown: Vec<v1::Rejection>,
    /// The hashes of all rejections: of the Service, and of the resource.
    remembered: BTreeSet<(u64, u64)>,
    /// How many rejections the agent says are in force.
    in_force: u64,
}

impl Rejections {
    /// How many rejections are in force, as far as this replica knows.
    pub(crate) fn count(&self) -> u64 {
        self.in_force.max(self.remembered.len() as u64)
    }

    /// The last rejections, at most 64.
    pub(crate) fn shown(&self) -> &[v1::Rejection] {
        &self.shown
    }

    /// True if the agent rejects nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_force == 0 && self.remembered.is_empty()
    }

    /// True if the agent rejects the Service, one of its endpoints or all its endpoints, or if this
    /// replica has forgotten some of the rejections, which may be any.
    pub(crate) fn concern(&self, key: &ServiceKey) -> bool {
        let has = |hash: u64| self.remembered.range((hash, 0)..=(hash, u64::MAX)).next().is_some();
        let is_complete = self.remembered.len() as u64 >= self.in_force;
        !is_complete || has(hash(&key.to_string())) || has(hash(&key.name))
    }

    /// The rejection to show for a Service that rejections [concern](Self::concern).
    pub(crate) fn reason(&self, key: &ServiceKey) -> String {
        let service = hash(&key.to_string());
        let own = |rejection: &&v1::Rejection| service_of(&rejection.resource) == service;
        match self.shown.iter().find(own) {
            Some(v1::Rejection { resource, field, reason }) => format!("rejected {resource}, {field}: {reason}"),
            None => format!(
                "rejects {} resources, and this replica remembers the names of {}",
                self.count(),
                self.remembered.len()
            ),
        }
    }

    /// Applies rejections and withdrawals. A resource that was rejected before is listed once, with
    /// the newer reason.
    pub(super) fn nack(&mut self, nack: &v1::Nack) {
        if !nack.withdrawn.is_empty() && !self.remembered.is_empty() {
            let withdrawn: BTreeSet<&str> = nack.withdrawn.iter().map(|resource| clip(resource)).collect();
            self.shown.retain(|old| !withdrawn.contains(old.resource.as_str()));
            for resource in &nack.withdrawn {
                self.remembered.remove(&(service_of(resource), hash(resource)));
            }
        }
        for v1::Rejection { resource, .. } in &nack.rejections {
            if self.remembered.len() < MAX_REMEMBERED {
                self.remembered.insert((service_of(resource), hash(resource)));
            }
        }
        // A peer can send any number of rejections. Only the last ones are shown, so earlier ones
        // are skipped to save time.
        for rejection in &nack.rejections[nack.rejections.len().saturating_sub(MAX_SHOWN)..] {
            let rejection = v1::Rejection {
                resource: clip(&rejection.resource).to_owned(),
                field: clip(&rejection.field).to_owned(),
                reason: clip(&rejection.reason).to_owned(),
            };
            self.shown.retain(|old| old.resource != rejection.resource);
            self.shown.push(rejection);
        }
        self.shown.drain(..self.shown.len().saturating_sub(MAX_SHOWN));
        self.in_force = nack.in_force;
    }
}

fn hash(text: &str) -> u64 {
    HASHER.hash_one(text)
}

/// The hash of the Service to which a rejected resource belongs: of NAMESPACE/NAME, or of the name
/// alone if the resource names only this.
fn service_of(resource: &str) -> u64 {
    match resource.split_once(' ') {
        Some(("Service", key)) => hash(key),
        Some(("Endpoint", endpoint)) => hash(endpoint.split(' ').next().unwrap_or_default()),
        _ => hash(resource.strip_prefix("endpoints of service ").unwrap_or(resource)),
    }
}

/// Cuts a text of a peer to a bounded length, at the boundary of a character.
pub(crate) fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
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

#[cfg(test)]
mod rejections_tests {
    use super::*;

    fn nack(rejections: &[String], withdrawn: &[String], in_force: u64) -> v1::Nack {
        let rejection = |resource: &String| v1::Rejection { resource: resource.clone(), ..v1::Rejection::default() };
        let rejections = rejections.iter().map(rejection).collect();
        v1::Nack { rejections, withdrawn: withdrawn.to_vec(), in_force, ..v1::Nack::default() }
    }

    fn services(numbers: std::ops::Range<usize>) -> Vec<String> {
        numbers.map(|number| format!("Service prod/web-{number}")).collect()
    }

    #[test]
    fn rejections_concern_their_services_beyond_the_number_that_is_shown() {
        let mut rejections = Rejections::default();
        rejections.nack(&nack(&services(0..80), &[], 80));
        let web = |number: usize| ServiceKey::new("prod", &format!("web-{number}"));
        assert_eq!(rejections.shown().len(), MAX_SHOWN);
        assert!(rejections.concern(&web(3)), "it is not shown, but known");
        rejections.nack(&nack(&[], &services(79..80), 79));
        assert!(rejections.concern(&web(3)) && !rejections.concern(&web(79)) && !rejections.concern(&web(80)));
        let others = ["Endpoint prod/api 10.0.0.1", "endpoints of service dns"].map(str::to_owned);
        rejections.nack(&nack(&others, &services(0..79), 2));
        assert!(
            rejections.concern(&ServiceKey::new("prod", "api")) && rejections.concern(&ServiceKey::new("x", "dns"))
        );
        assert!(!rejections.concern(&web(3)));
        assert!(rejections.reason(&ServiceKey::new("prod", "api")).starts_with("rejected Endpoint prod/api 10.0.0.1"));
    }

    #[test]
    fn forgotten_rejections_concern_every_service_until_they_are_withdrawn() {
        let mut rejections = Rejections::default();
        let (all, kept) = (services(0..MAX_REMEMBERED + 10), MAX_REMEMBERED as u64);
        rejections.nack(&nack(&all, &[], all.len() as u64));
        let other = ServiceKey::new("test", "other");
        assert!(rejections.concern(&other));
        rejections.nack(&nack(&[], &all[..10], kept));
        assert!(rejections.concern(&other), "ten rejections are unknown");
        rejections.nack(&nack(&[], &all[MAX_REMEMBERED..], kept - 10));
        assert!(!rejections.concern(&other) && !rejections.is_empty());
        rejections.nack(&nack(&[], &all, 0));
        assert!(rejections.is_empty() && rejections.shown().is_empty());
    }

    #[test]
    fn a_rejection_that_never_arrived_counts() {
        let mut rejections = Rejections::default();
        rejections.nack(&nack(&services(0..1), &[], 2));
        assert!(rejections.concern(&ServiceKey::new("test", "other")));
    }

    #[test]
    fn texts_from_a_peer_are_cut_between_characters() {
        let text = "ä".repeat(MAX_TEXT_BYTES);
        assert_eq!(clip(&text).len(), MAX_TEXT_BYTES);
        assert_eq!(clip(&format!("a{text}")).len(), MAX_TEXT_BYTES - 1);
        assert_eq!(clip("short"), "short");
    }
}
