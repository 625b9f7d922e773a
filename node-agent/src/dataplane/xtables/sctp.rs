//! Leaves out SCTP ports if iptables cannot match SCTP here (no module xt_sctp, or no extension),
//! so that the other ports of services still work.

use std::time::Instant;

use headgate_core::{Demand, iptables::RulesLedger};

use super::{FamilyRules, programs::Programs};
use crate::dataplane::{
    DataplaneError, Degradation, ErrorKind,
    contract::{PAUSES_OF_MODULES, Retries},
};

/// Whether one family's programs can match SCTP; if not, the time of the next attempt.
#[derive(Debug)]
pub(in crate::dataplane) struct Sctp(Retries<()>);

impl Default for Sctp {
    fn default() -> Self {
        Self(Retries::new(PAUSES_OF_MODULES))
    }
}

impl Sctp {
    /// True while SCTP ports must be left out.
    pub(in crate::dataplane) fn is_missing(&self) -> bool {
        self.0.all().next().is_some()
    }

    /// The time at which to call [`FamilyRules::retry_sctp`]. `None` if SCTP can be matched.
    pub(in crate::dataplane) fn retry_at(&self) -> Option<Instant> {
        self.0.next_due()
    }
}

impl FamilyRules {
    /// Finds the reason why a script was rejected. If iptables cannot match SCTP, returns an error
    /// that asks for a full sync, which leaves out SCTP ports.
    pub(in crate::dataplane) fn explain(&mut self, error: DataplaneError) -> DataplaneError {
        if error.kind != ErrorKind::Rejected || self.sctp.is_missing() {
            return error;
        }
        match can_match(&self.programs) {
            Ok(true) => error,
            Ok(false) => {
                self.sctp.0.note((), error.message, Instant::now());
                let message = "iptables cannot match SCTP on this node: making a full sync without SCTP ports";
                DataplaneError::new(ErrorKind::NeedsFullSync, message)
            }
            // If the trial failed for another reason, the cause of the rejection is unknown.
            Err(trial) => DataplaneError::new(
                ErrorKind::Retry,
                format_args!("{error}; the search for the reason failed: {trial}"),
            ),
        }
    }

    /// Tries to match SCTP again, if the retry is due. Errors: [`ErrorKind::NeedsFullSync`] if SCTP
    /// can be matched now: the full sync adds SCTP ports. Other kinds mean that the trial failed.
    pub(in crate::dataplane) fn retry_sctp(&mut self, now: Instant) -> Result<(), DataplaneError> {
        if self.sctp.0.due(now).is_empty() {
            return Ok(());
        }
        if can_match(&self.programs)? {
            self.sctp.0.retain(|()| false);
            let message = "iptables can match SCTP now: making a full sync with SCTP ports";
            return Err(DataplaneError::new(ErrorKind::NeedsFullSync, message));
        }
        self.sctp.0.note((), String::new(), now);
        Ok(())
    }

    /// The degradation to report if Services have SCTP ports and SCTP cannot be matched.
    /// `until_then` is the part of the sentence that says what does not work until the module is
    /// loaded.
    pub(in crate::dataplane) fn missing_sctp(&self, demand: &Demand, until_then: &str) -> Option<Degradation> {
        let is_asked_for = demand.of(self.programs.family()).with_sctp > 0;
        let remedy = "load the module xt_sctp (modprobe xt_sctp)";
        (is_asked_for && self.sctp.is_missing())
            .then(|| format!("iptables cannot match SCTP on this node: {remedy}; until then {until_then}").into())
    }
}

fn can_match(programs: &Programs) -> Result<bool, DataplaneError> {
    Ok(programs.try_out(&RulesLedger::trial_of_sctp())?.is_none())
}
