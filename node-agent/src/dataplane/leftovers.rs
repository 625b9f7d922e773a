//! Removes rules and objects that an earlier run may have left in the kernel. The earlier run may
//! have used another dataplane.
//!
//! A dataplane removes leftovers of other dataplanes once its own rules are in place. If the
//! dataplane cannot remove a leftover, it tries again later. For example, a set cannot be removed
//! while somebody lists it. `--cleanup` removes the leftovers of all dataplanes.

use std::time::Instant;

use tracing::{info, warn};

use super::{
    DataplaneError, ErrorKind,
    retries::{PAUSES_OF_MODULES, Retries},
};

/// Rules, sets or devices that an earlier run may have left.
pub struct Leftover {
    /// A unique name, such as "iptables-nft".
    pub name: &'static str,
    remove: Box<dyn Fn() -> Result<(), DataplaneError> + Send>,
}

impl Leftover {
    /// Creates a leftover that `remove` removes. `remove` must succeed if the leftover does not
    /// exist, and must not make the kernel load a module.
    pub(super) fn new(name: &'static str, remove: impl Fn() -> Result<(), DataplaneError> + Send + 'static) -> Self {
        Self { name, remove: Box::new(remove) }
    }

    /// Removes the leftover. Succeeds if the leftover does not exist.
    ///
    /// # Errors
    /// Something could not be removed; the message names it. [`ErrorKind::Unavailable`] means that
    /// the leftover cannot exist on this machine.
    pub fn remove(&self) -> Result<(), DataplaneError> {
        (self.remove)()
    }
}

/// The leftovers that are not removed yet.
pub(super) struct Leftovers {
    remaining: Vec<Leftover>,
    failures: Retries<()>,
}

impl Leftovers {
    pub(super) fn new(remaining: Vec<Leftover>) -> Self {
        Self { remaining, failures: Retries::new(PAUSES_OF_MODULES) }
    }

    /// Removes all remaining leftovers. Returns a sentence for each leftover that cannot be removed
    /// now.
    pub(super) fn remove(&mut self) -> Vec<String> {
        let mut sentences = Vec::new();
        self.remaining.retain(|leftover| match leftover.remove() {
            Err(error) if error.kind != ErrorKind::Unavailable => {
                let name = leftover.name;
                sentences
                    .push(format!("cannot remove what an earlier run left of {name}; trying again later: {error}"));
                true
            }
            _ => false,
        });
        if sentences.is_empty() {
            self.failures.retain(|()| false);
        } else {
            self.failures.note((), sentences.join("; "), Instant::now());
        }
        sentences
    }

    /// The time at which to call [`Self::retry`]. `None` if all removals succeeded.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.failures.next_due()
    }

    /// Tries to remove the leftovers again, if the retry is due. Logs the result if the result
    /// changed.
    pub(super) fn retry(&mut self, now: Instant) {
        if self.failures.due(now).is_empty() {
            return;
        }
        let before = self.failures.reason(&()).map(str::to_owned);
        let sentences = self.remove();
        if sentences.is_empty() {
            info!("removed what an earlier run left");
        } else if Some(sentences.join("; ")) != before {
            sentences.iter().for_each(|sentence| warn!("{sentence}"));
        }
    }
}
