//! Decides whether rules count packets: the kernel must have packet counters, and the programs must
//! support the match `nfacct`.

use headgate_core::iptables::{RenderConfig, RulesLedger, ruleset};

use super::{
    super::{DataplaneError, ErrorKind},
    IptablesFamily,
};
use crate::packet_counters;

impl IptablesFamily {
    /// Creates the counters that rules need. If that fails, rules do not count packets.
    pub(super) fn make_counters(&mut self) {
        if self.ledger.config().counts_packets
            && let Err(error) = packet_counters::make()
        {
            self.do_without_counters(&format!("cannot create packet counters (nfnetlink_acct): {error}"));
        }
    }

    /// Finds out whether a full sync failed with `error` because of rules that count packets. If
    /// so, switches counting off and returns true; the caller then makes the full sync again.
    /// Errors: the trial of rules that count packets failed for another reason than a rejection.
    pub(super) fn counters_are_rejected(&mut self, error: &DataplaneError) -> Result<bool, DataplaneError> {
        if self.has_counted || !self.ledger.config().counts_packets || error.kind != ErrorKind::Rejected {
            return Ok(false);
        }
        let rejected = self.rules.programs.try_out(&RulesLedger::trial_of_counters())?;
        self.has_counted = rejected.is_none();
        if let Some(error) = &rejected {
            self.do_without_counters(error);
        }
        Ok(rejected.is_some())
    }

    fn do_without_counters(&mut self, error: &str) {
        tracing::info!(family = %self.ledger.config().family, %error, "packets are not counted");
        let config = RenderConfig { counts_packets: false, ..self.ledger.config().clone() };
        self.ledger.set_ruleset(ruleset(config));
    }
}
