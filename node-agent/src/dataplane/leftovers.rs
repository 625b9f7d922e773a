//! What an earlier run may have left where this one programs nothing: rules in the variant of iptables that is not used, and what mode ipvs makes.
//!
//! It goes once our own rules are in place. What cannot be removed, such as a set that somebody lists just then, is tried again.

use std::time::Instant;

use ipnet::IpNet;
use tracing::{info, warn};

use super::{
    DataplaneError,
    iptables::command::Programs,
    ipvs,
    retry::{PAUSES_OF_MODULES, Refusals},
};

/// See the module. Each part until it is gone.
#[derive(Debug)]
pub(super) struct Leftovers {
    other_variant: Vec<Programs>,
    /// Addresses whose virtual servers are others'.
    ipvs: Option<Vec<IpNet>>,
    failures: Refusals<()>,
}

impl Leftovers {
    /// What these programs may find, and what mode ipvs may have made if there are `exclude_cidrs`: virtual servers on these are others'.
    pub(super) fn new(other_variant: Vec<Programs>, exclude_cidrs: Option<Vec<IpNet>>) -> Self {
        Self { other_variant, ipvs: exclude_cidrs, failures: Refusals::new(PAUSES_OF_MODULES) }
    }

    /// Removes what there is. Returns a sentence for each part of it that stays for now. Costs nothing once everything is gone.
    pub(super) fn remove(&mut self) -> Vec<String> {
        let mut sentences = Vec::new();
        let mut note = |what: &str, removed: Result<(), DataplaneError>| {
            let error = removed.err();
            let sentence = |error: &DataplaneError| format!("{what} cannot be removed, and is tried again: {error}");
            sentences.extend(error.as_ref().map(sentence));
            error.is_some()
        };
        self.other_variant.retain(|programs| {
            let removed = programs.cleanup().map_err(|error| error.of(programs.family()));
            note("what an earlier run left in the other variant of iptables", removed)
        });
        // Sets go after the rules that refer to them.
        self.ipvs = self
            .ipvs
            .take()
            .filter(|exclude_cidrs| note("what an earlier run in mode ipvs left", ipvs::remove_all(exclude_cidrs)));
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

    /// Removes what there is in the other variant, as far as it is not known to be gone.
    ///
    /// # Errors
    /// Names what stays.
    pub(super) fn clean_up_other_variant(&self) -> Result<(), DataplaneError> {
        let mut result = Ok(());
        for programs in &self.other_variant {
            result = DataplaneError::join(result, programs.cleanup());
        }
        result
    }
}
