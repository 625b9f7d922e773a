//! Ports of SCTP on a machine whose iptables cannot match them: the kernel lacks the module
//! xt_sctp, or the program its extension. They are left out, so that services have their other
//! ports.

use std::time::Instant;

use headgate_core::{Demand, iptables::Ledger};

use super::{
    super::{
        DataplaneError, Degradation, ErrorKind,
        retries::{PAUSES_OF_MODULES, Retries},
    },
    Rules,
    programs::Programs,
};

/// What is known of one family's programs.
#[derive(Debug)]
pub(in crate::dataplane) struct Sctp(Retries<()>);

impl Default for Sctp {
    fn default() -> Self {
        Self(Retries::new(PAUSES_OF_MODULES))
    }
}

impl Sctp {
    /// True as long as ports of SCTP have to be left out.
    pub(in crate::dataplane) fn is_missing(&self) -> bool {
        self.0.all().next().is_some()
    }

    /// When [`Rules::retry_sctp`] has something to do.
    pub(in crate::dataplane) fn retry_at(&self) -> Option<Instant> {
        self.0.next_due()
    }
}

impl Rules {
    /// The reason why a script failed. Where it was rejected because SCTP cannot be matched, the
    /// error says so, and everything is to be programmed anew without ports of SCTP.
    pub(in crate::dataplane) fn explain(&mut self, error: DataplaneError) -> DataplaneError {
        if error.kind != ErrorKind::Rejected || self.sctp.is_missing() {
            return error;
        }
        match can_match(&self.programs) {
            Ok(true) => error,
            Ok(false) => {
                self.sctp.0.note((), error.message, Instant::now());
                let message = "iptables cannot match SCTP here: everything is programmed anew, without ports of SCTP";
                DataplaneError::new(ErrorKind::NeedsFullSync, message)
            }
            // A trial that failed says nothing about the script.
            Err(trial) => {
                DataplaneError::new(ErrorKind::Retry, format_args!("{error}; looking for the reason: {trial}"))
            }
        }
    }

    /// Tries once more, if it is time.
    ///
    /// # Errors
    /// SCTP can be matched now, so that everything is to be programmed with it; or it cannot be
    /// found out.
    pub(in crate::dataplane) fn retry_sctp(&mut self, now: Instant) -> Result<(), DataplaneError> {
        if self.sctp.0.due(now).is_empty() {
            return Ok(());
        }
        if can_match(&self.programs)? {
            self.sctp.0.retain(|()| false);
            let message = "iptables can match SCTP by now: its ports get their rules";
            return Err(DataplaneError::new(ErrorKind::NeedsFullSync, message));
        }
        self.sctp.0.note((), String::new(), now);
        Ok(())
    }

    /// For the agent's status, where Services ask for SCTP; `until_then` says what does not work.
    pub(in crate::dataplane) fn missing_sctp(&self, demand: &Demand, until_then: &str) -> Option<Degradation> {
        let is_asked_for = demand.of(self.programs.family()).with_sctp > 0;
        let remedy = "load the module xt_sctp (modprobe xt_sctp)";
        (is_asked_for && self.sctp.is_missing())
            .then(|| format!("iptables cannot match SCTP here: {remedy}; until then {until_then}").into())
    }
}

fn can_match(programs: &Programs) -> Result<bool, DataplaneError> {
    Ok(programs.try_out(&Ledger::trial_of_sctp())?.is_none())
}
