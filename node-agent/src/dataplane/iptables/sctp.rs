//! Ports of SCTP, on a machine whose iptables cannot match them: the kernel has no module xt_sctp, or the program no extension for it. They are left out, so that
//! services have their other ports.

use std::time::Instant;

use headgate_core::iptables::Ledger;

use super::command::Programs;
use crate::dataplane::{
    DataplaneError, ErrorKind,
    retry::{PAUSES_OF_MODULES, Refusals},
};

/// What is known of one family's programs.
#[derive(Debug)]
pub(in crate::dataplane) struct Sctp(Refusals<()>);

impl Default for Sctp {
    fn default() -> Self {
        Self(Refusals::new(PAUSES_OF_MODULES))
    }
}

impl Sctp {
    /// True as long as ports of SCTP have to be left out.
    pub(in crate::dataplane) fn is_missing(&self) -> bool {
        self.0.all().next().is_some()
    }

    /// A script has failed. Where it was refused because SCTP cannot be matched, the error says so, and everything is to be programmed anew without its
    /// ports.
    pub(in crate::dataplane) fn judge(&mut self, programs: &Programs, error: DataplaneError) -> DataplaneError {
        if error.kind != ErrorKind::Refused || self.is_missing() {
            return error;
        }
        match can_match(programs) {
            Ok(true) => error,
            Ok(false) => {
                self.0.note((), error.message, Instant::now());
                let message = "iptables cannot match SCTP here: everything is programmed anew, without ports of SCTP";
                DataplaneError::new(ErrorKind::NeedsFullSync, message)
            }
            // That it could not be found out says nothing about the script.
            Err(trial) => {
                DataplaneError::new(ErrorKind::Retry, format_args!("{error}; looking for the reason: {trial}"))
            }
        }
    }

    /// When [`Self::look`] has something to do.
    pub(in crate::dataplane) fn look_at(&self) -> Option<Instant> {
        self.0.next_due()
    }

    /// Looks once more, if it is time. True when SCTP can be matched now, so that everything is to be programmed with it.
    ///
    /// # Errors
    /// It cannot be found out.
    pub(in crate::dataplane) fn look(&mut self, programs: &Programs, now: Instant) -> Result<bool, DataplaneError> {
        if self.0.due(now).is_empty() {
            return Ok(false);
        }
        let can_match = can_match(programs)?;
        if can_match {
            self.0.retain(|()| false);
        } else {
            self.0.note((), String::new(), now);
        }
        Ok(can_match)
    }

    /// For the agent's status; `until_then` says what does not work.
    pub(in crate::dataplane) fn lament(&self, until_then: &str) -> Option<String> {
        let remedy = "load the module xt_sctp (modprobe xt_sctp)";
        self.is_missing().then(|| format!("iptables cannot match SCTP here: {remedy}; until then {until_then}"))
    }
}

/// The error by which everything is programmed with SCTP again.
pub(in crate::dataplane) fn can_be_matched_again() -> DataplaneError {
    DataplaneError::new(ErrorKind::NeedsFullSync, "iptables can match SCTP by now: its ports get their rules")
}

fn can_match(programs: &Programs) -> Result<bool, DataplaneError> {
    let tried = programs.restore(&Ledger::trial_of_sctp());
    programs.restore(&Ledger::end_of_trials())?;
    match tried {
        Ok(()) => Ok(true),
        Err(error) if error.kind == ErrorKind::Refused => Ok(false),
        Err(error) => Err(error),
    }
}
