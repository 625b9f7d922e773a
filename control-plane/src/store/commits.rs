//! How each of the newest versions came to be: when its changes arrived, and what triggered them.

use std::{
    net::IpAddr,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use headgate_core::ServiceKey;

use super::{Inner, Store, encode::LogKey};
use crate::objects::SourceKind;

/// The number of versions about which this is known.
pub(crate) const TIMED_COMMITS: usize = 4096;

/// An older trigger does not count.
const MAX_WAITED: Duration = Duration::from_secs(3_600);

/// What the time of a change begins with (discovery.proto, section 21).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Trigger {
    /// The annotation of the EndpointSlice.
    Annotation,
    /// The pod lacked only the readiness gate of Headgate.
    PodReady,
    /// The arrival at this replica.
    #[default]
    Arrival,
}

impl Trigger {
    /// The text in `ChangeTime.trigger`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Annotation => "trigger annotation",
            Self::PodReady => "pod ready",
            Self::Arrival => "arrival",
        }
    }
}

/// The changes of one version.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Commit {
    /// When the changes arrived from the source.
    pub(crate) received: Instant,
    pub(crate) trigger: Trigger,
    /// The time from the trigger to the arrival.
    pub(crate) waited: Duration,
    /// The Service, or its endpoint, with the oldest trigger; `None` for a ServiceCIDR.
    pub(crate) subject: Option<(ServiceKey, Option<IpAddr>)>,
    /// The number of changes.
    pub(crate) changed: usize,
    /// The comparable positions that the version reached, and whether they moved with it.
    pub(crate) positions: Box<[(SourceKind, u64, bool)]>,
}

impl Commit {
    /// The time from the trigger until `end`.
    pub(crate) fn time_until(&self, end: Instant) -> Duration {
        self.waited + end.saturating_duration_since(self.received)
    }
}

/// What [`Inner::apply`] has applied.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// The number of changes with an effect.
    pub(super) changed: usize,
    /// The change with the oldest trigger, and this trigger; 0 if it is not known.
    oldest: Option<(LogKey, u64)>,
}

impl Applied {
    /// Counts a change that had an effect.
    pub(super) fn add(&mut self, key: &LogKey, trigger_unix_ms: u64) {
        self.changed += 1;
        let is_older = |(_, oldest): &(LogKey, u64)| trigger_unix_ms > 0 && (*oldest == 0 || trigger_unix_ms < *oldest);
        if self.oldest.as_ref().is_none_or(is_older) {
            self.oldest = Some((key.clone(), trigger_unix_ms));
        }
    }
}

impl Inner {
    /// Publishes the applied changes, which arrived at `received`, as the next version. `is_gate`
    /// says that a pod with the readiness gate of Headgate caused them.
    pub(super) fn publish(&mut self, received: Instant, applied: Applied, is_gate: bool) {
        self.version += 1;
        // Events of several watches may arrive in another order.
        let received = self.commits.back().map_or(received, |last| received.max(last.received));
        let (key, trigger) = applied.oldest.unzip();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since = now.checked_sub(Duration::from_millis(trigger.unwrap_or_default()));
        let since = since.filter(|since| trigger.is_some_and(|at| at > 0) && *since <= MAX_WAITED);
        let trigger = match since {
            None => Trigger::Arrival,
            Some(_) if is_gate => Trigger::PodReady,
            Some(_) => Trigger::Annotation,
        };
        let subject = key.and_then(|key| match key {
            LogKey::Service(key) => Some(((*key).clone(), None)),
            LogKey::Endpoint(key, address) => Some(((*key).clone(), Some(address))),
            LogKey::Cidr(_) => None,
        });
        let comparable = self.shared_positions().filter(|(kind, _)| kind.is_comparable());
        let has_moved = |kind: &SourceKind| self.moved_at.get(kind) == Some(&self.version);
        self.commits.push_back(Commit {
            received,
            trigger,
            waited: since.map_or(Duration::ZERO, |since| since.saturating_sub(received.elapsed())),
            subject,
            changed: applied.changed,
            positions: comparable.map(|(kind, position)| (kind, position, has_moved(&kind))).collect(),
        });
        if self.commits.len() > TIMED_COMMITS {
            self.commits.pop_front();
        }
    }
}

impl Store {
    /// The versions above `after`, up to `upto`, with what is known about each. Versions about
    /// which nothing is known any more are left out.
    pub(crate) fn commits(&self, after: u64, upto: u64) -> Vec<(u64, Commit)> {
        let inner = self.read();
        // The version before the oldest version that is known.
        let floor = inner.version - inner.commits.len() as u64;
        let index = |version: u64| usize::try_from(version.clamp(floor, inner.version) - floor).unwrap_or_default();
        let (first, last) = (index(after), index(upto.max(after)));
        (floor + first as u64 + 1..).zip(inner.commits.range(first..last).cloned()).collect()
    }
}
