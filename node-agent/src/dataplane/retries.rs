//! Schedules further attempts at objects that the kernel rejected.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use crate::backoff::{Backoff, Jitter};

/// The first and the longest pause before another attempt. The first pause is short, because at
/// boot the kernel rejects each IPVS destination for a moment: until an interface is up, the kernel
/// considers every address a broadcast address.
pub(in crate::dataplane) const PAUSES: Backoff =
    Backoff::new(Duration::from_secs(5), Duration::from_secs(3600), Jitter::None);

/// The first and the longest pause for features that need a kernel module. The longest pause is
/// short, because an operator who loads the missing module waits for the result.
pub(in crate::dataplane) const PAUSES_OF_MODULES: Backoff =
    Backoff::new(Duration::from_secs(5), Duration::from_secs(30), Jitter::None);

/// The rejected objects. Each has a reason and the time of the next attempt. Pauses double from the
/// first to the longest. Objects that the kernel first rejected at the same time are due at the
/// same time.
#[derive(Debug)]
pub(in crate::dataplane) struct Retries<K> {
    pauses: Backoff,
    entries: BTreeMap<K, RejectedObject>,
    due: BTreeSet<(Instant, K)>,
}

#[derive(Debug)]
struct RejectedObject {
    reason: String,
    backoff: Backoff,
    retry_at: Instant,
}

impl<K: Ord + Copy> Retries<K> {
    /// Creates an empty collection whose pauses follow `pauses`.
    pub(in crate::dataplane) fn new(pauses: Backoff) -> Self {
        Self { pauses, entries: BTreeMap::new(), due: BTreeSet::new() }
    }

    /// Records that the kernel rejected `what` at `now`.
    pub(in crate::dataplane) fn note(&mut self, what: K, reason: String, now: Instant) {
        let mut backoff = self.remove(what).map_or_else(|| self.pauses.clone(), |entry| entry.backoff);
        let retry_at = now + backoff.next_pause();
        self.entries.insert(what, RejectedObject { reason, backoff, retry_at });
        self.due.insert((retry_at, what));
    }

    fn remove(&mut self, what: K) -> Option<RejectedObject> {
        let entry = self.entries.remove(&what)?;
        self.due.remove(&(entry.retry_at, what));
        Some(entry)
    }

    /// Removes the objects for which `is_kept` returns false. The cost grows with the number of all
    /// objects.
    pub(in crate::dataplane) fn retain(&mut self, is_kept: impl Fn(&K) -> bool) {
        self.entries.retain(|what, _| is_kept(what));
        self.due.retain(|(_, what)| is_kept(what));
    }

    /// Why the kernel rejected `what`. `None` if `what` is not a rejected object.
    pub(in crate::dataplane) fn reason(&self, what: &K) -> Option<&str> {
        self.entries.get(what).map(|entry| entry.reason.as_str())
    }

    /// All rejected objects.
    pub(in crate::dataplane) fn all(&self) -> impl Iterator<Item = K> {
        self.entries.keys().copied()
    }

    /// The objects whose next attempt is due at `now`, the longest overdue first.
    pub(in crate::dataplane) fn due(&self, now: Instant) -> Vec<K> {
        self.due.iter().take_while(|(at, _)| *at <= now).map(|(_, what)| *what).collect()
    }

    /// When the next attempt is due. `None` if no object is rejected.
    pub(in crate::dataplane) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_again_after_a_success() {
        let (minute, began) = (Duration::from_secs(60), Instant::now());
        let mut entries = Retries::new(Backoff::new(minute, 60 * minute, Jitter::None));
        entries.note("other", String::new(), began + 1000 * minute);
        let (mut now, mut pauses) = (began, Vec::new());
        for _ in 0..9 {
            entries.note("web", format!("since {} s", now.duration_since(began).as_secs()), now);
            let due = entries.next_due().unwrap_or(began);
            assert_eq!(entries.due(due - Duration::from_millis(1)), [""; 0]);
            assert_eq!(entries.due(due), ["web"]);
            pauses.push(due.duration_since(now).as_secs() / 60);
            now = due;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(entries.reason(&"web"), Some("since 10980 s"));
        entries.retain(|what| *what == "other");
        assert_eq!((entries.reason(&"web"), entries.all().collect::<Vec<_>>()), (None, vec!["other"]));
        entries.note("web", String::new(), began);
        assert_eq!(entries.next_due(), Some(began + minute));
        assert_eq!(entries.due(began + 2000 * minute), ["web", "other"]);
    }
}
