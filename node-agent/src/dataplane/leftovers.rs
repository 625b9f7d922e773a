//! What an earlier run may have left in the kernel, perhaps by another dataplane.
//!
//! A dataplane removes what is not its own once its rules are in place. What cannot be removed,
//! such as a set that somebody lists at that moment, is tried again. `--cleanup` removes
//! everything.

use std::time::Instant;

use tracing::{info, warn};

use super::{
    DataplaneError, ErrorKind,
    retries::{PAUSES_OF_MODULES, Retries},
};

/// Something that an earlier run may have left.
pub struct Leftover {
    /// What it is, such as "iptables-nft". Names are unique.
    pub name: &'static str,
    remove: Box<dyn Fn() -> Result<(), DataplaneError> + Send>,
}

impl Leftover {
    /// `remove` looks whether it is there and removes it; it makes the kernel load nothing.
    pub(super) fn new(name: &'static str, remove: impl Fn() -> Result<(), DataplaneError> + Send + 'static) -> Self {
        Self { name, remove: Box::new(remove) }
    }

    /// Removes it. Success also means that it was not there.
    ///
    /// # Errors
    /// Names what stays. [`ErrorKind::Unavailable`] means that this machine cannot have it.
    pub fn remove(&self) -> Result<(), DataplaneError> {
        (self.remove)()
    }
}

/// What is not removed yet.
pub(super) struct Leftovers {
    remaining: Vec<Leftover>,
    failures: Retries<()>,
}

impl Leftovers {
    pub(super) fn new(remaining: Vec<Leftover>) -> Self {
        Self { remaining, failures: Retries::new(PAUSES_OF_MODULES) }
    }

    /// Removes what there is. Returns a sentence for each thing that stays for now. Costs nothing
    /// once everything is gone.
    pub(super) fn remove(&mut self) -> Vec<String> {
        let mut sentences = Vec::new();
        self.remaining.retain(|leftover| match leftover.remove() {
            Err(error) if error.kind != ErrorKind::Unavailable => {
                let name = leftover.name;
                sentences
                    .push(format!("what an earlier run left of {name} cannot be removed, and is tried again: {error}"));
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

    /// When [`Self::retry`] has something to do.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.failures.next_due()
    }

    /// Tries once more, if it is time.
    pub(super) fn retry(&mut self, now: Instant) {
        if self.failures.due(now).is_empty() {
            return;
        }
        let before = self.failures.reason(&()).map(str::to_owned);
        let sentences = self.remove();
        if sentences.is_empty() {
            info!("what an earlier run left is removed");
        } else if Some(sentences.join("; ")) != before {
            sentences.iter().for_each(|sentence| warn!("{sentence}"));
        }
    }
}
