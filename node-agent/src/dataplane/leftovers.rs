//! Removes what an earlier run, perhaps with another dataplane, left in the kernel: once the new
//! rules are in place, again after failures (such as a set that somebody lists), and with
//! `--cleanup`.

use std::time::{Duration, Instant};

use headgate_settings::value::show_duration;
use tracing::{info, warn};

use super::{
    DataplaneError, ErrorKind,
    contract::{PAUSES_OF_MODULES, Retries},
};

/// The interval at which a leftover with open connections is looked at again.
const DRAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Rules, sets or devices that an earlier run may have left.
pub struct Leftover {
    /// A unique name, such as "iptables-nft".
    pub name: &'static str,
    remove: Box<Remove>,
}

/// Removes a leftover. With [`Busy::Stays`], leaves what open connections need, and returns the
/// number of these connections.
type Remove = dyn Fn(Busy) -> Result<u64, DataplaneError> + Send;

/// What to do with the part of a leftover that open connections need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Busy {
    /// Leave this part.
    Stays,
    /// Remove this part, too.
    Goes,
}

impl Leftover {
    /// Creates a leftover that `remove` removes. `remove` must succeed if the leftover does not
    /// exist, and must not make the kernel load a module.
    pub fn new(name: &'static str, remove: impl Fn() -> Result<(), DataplaneError> + Send + 'static) -> Self {
        Self::draining(name, move |_| remove().map(|()| 0))
    }

    /// Creates a leftover whose objects carry open connections. `remove` returns the number of the
    /// connections whose objects it left, which is 0 with [`Busy::Goes`].
    pub(super) fn draining(
        name: &'static str,
        remove: impl Fn(Busy) -> Result<u64, DataplaneError> + Send + 'static,
    ) -> Self {
        Self { name, remove: Box::new(remove) }
    }

    /// Removes the leftover. Succeeds if the leftover does not exist.
    /// Errors: something could not be removed; the message names it. [`ErrorKind::Unavailable`]
    /// means that the leftover cannot exist on this machine.
    pub fn remove(&self) -> Result<(), DataplaneError> {
        (self.remove)(Busy::Goes).map(drop)
    }
}

pub(super) struct Leftovers {
    remaining: Vec<Leftover>,
    failures: Retries<()>,
    /// How long leftovers stay for their open connections.
    limit: Duration,
    /// When the first call of [`Self::remove`] was.
    since: Option<Instant>,
    draining: Option<Draining>,
}

/// Leftovers that stay for their open connections.
struct Draining {
    names: Vec<&'static str>,
    connections: u64,
    look_at: Instant,
}

impl Leftovers {
    pub(super) fn new(remaining: Vec<Leftover>, limit: Duration) -> Self {
        Self { remaining, failures: Retries::new(PAUSES_OF_MODULES), limit, since: None, draining: None }
    }

    /// Removes all remaining leftovers, except what open connections need. After the limit, removes
    /// this part, too. Returns a sentence for each leftover that cannot be removed now.
    pub(super) fn remove(&mut self) -> Vec<String> {
        let now = Instant::now();
        let is_within_limit = now < *self.since.get_or_insert(now) + self.limit;
        let was_draining = self.draining.take();
        let busy = if is_within_limit { Busy::Stays } else { Busy::Goes };
        let (mut sentences, mut draining) = (Vec::new(), Draining::begin(now));
        self.remaining.retain(|leftover| match (leftover.remove)(busy) {
            Err(error) if error.kind != ErrorKind::Unavailable => {
                let name = leftover.name;
                sentences
                    .push(format!("cannot remove what an earlier run left of {name}; trying again later: {error}"));
                true
            }
            Ok(connections) if connections > 0 => {
                draining.names.push(leftover.name);
                draining.connections += connections;
                true
            }
            _ => false,
        });
        match (was_draining.filter(|_| sentences.is_empty()), draining.connections) {
            (Some(before), 0) if !is_within_limit => {
                let (limit, what) = (show_duration(self.limit), before.sentence());
                warn!("after {limit}, removed the rest of what an earlier run left: {what}");
            }
            (Some(before), 0) => {
                info!(modes = before.names.join(", "), "the connections of the earlier run have ended");
            }
            (_, 0) => {}
            _ => self.draining = Some(draining),
        }
        if sentences.is_empty() {
            self.failures.retain(|()| false);
        } else {
            self.failures.note((), sentences.join("; "), now);
        }
        sentences
    }

    /// True if nothing remains to be removed.
    pub(super) fn is_empty(&self) -> bool {
        self.remaining.is_empty()
    }

    /// A sentence about the leftovers that stay for their connections, if any.
    pub(super) fn draining(&self) -> Option<String> {
        let sentence = |draining: &Draining| {
            let (what, limit) = (draining.sentence(), show_duration(self.limit));
            format!(
                "an earlier run left {what}; this stays until the connections end, or {limit} after the first sync (--takeover-limit)"
            )
        };
        self.draining.as_ref().map(sentence)
    }

    /// The time at which to call [`Self::retry`]. `None` if all removals succeeded.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.failures.next_due().into_iter().chain(self.draining.as_ref().map(|draining| draining.look_at)).min()
    }

    /// Tries to remove the leftovers again, if this is due. Logs a result that changed.
    pub(super) fn retry(&mut self, now: Instant) {
        let is_look_due = self.draining.as_ref().is_some_and(|draining| draining.look_at <= now);
        let has_failed = !self.failures.due(now).is_empty();
        if !has_failed && !is_look_due {
            return;
        }
        let before = self.failures.reason(&()).map(str::to_owned);
        let sentences = self.remove();
        if sentences.is_empty() && has_failed {
            info!("removed what an earlier run left");
        } else if !sentences.is_empty() && Some(sentences.join("; ")) != before {
            sentences.iter().for_each(|sentence| warn!("{sentence}"));
        }
    }
}

impl Draining {
    fn begin(now: Instant) -> Self {
        Self { names: Vec::new(), connections: 0, look_at: now + DRAIN_INTERVAL }
    }

    fn sentence(&self) -> String {
        format!("objects of mode {} with {} open connections", self.names.join(", "), self.connections)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    };

    use super::*;

    fn with_connections(limit: Duration) -> (Arc<AtomicU64>, Leftovers) {
        let connections = Arc::new(AtomicU64::new(2));
        let open = Arc::clone(&connections);
        let leftover = Leftover::draining("ipvs", move |busy| match busy {
            Busy::Stays => Ok(open.load(Ordering::Relaxed)),
            Busy::Goes => Ok(0),
        });
        (connections, Leftovers::new(vec![leftover], limit))
    }

    #[test]
    fn a_leftover_stays_until_its_connections_end() {
        let (connections, mut leftovers) = with_connections(Duration::from_secs(3600));
        assert_eq!(leftovers.remove(), Vec::<String>::new());
        assert!(leftovers.draining().is_some_and(|sentence| sentence.contains("mode ipvs with 2 open connections")));
        let look_at = leftovers.retry_at();
        assert!(look_at.is_some_and(|at| at > Instant::now()));
        leftovers.retry(Instant::now());
        assert!(leftovers.draining().is_some(), "the leftover was looked at before its time");
        connections.store(0, Ordering::Relaxed);
        look_at.into_iter().for_each(|at| leftovers.retry(at));
        assert_eq!((leftovers.draining(), leftovers.retry_at(), leftovers.remaining.len()), (None, None, 0));
    }

    #[test]
    fn a_leftover_goes_after_the_limit() {
        let (_connections, mut leftovers) = with_connections(Duration::ZERO);
        assert_eq!(leftovers.remove(), Vec::<String>::new());
        assert_eq!((leftovers.draining(), leftovers.remaining.len()), (None, 0));
    }
}
