//! Rules that count packets, where the kernel has counters and the programs know the match for
//! them.

use headgate_core::iptables::{Ledger, RenderConfig};

use super::{
    super::{DataplaneError, ErrorKind},
    IptablesFamily,
};
use crate::packet_counters;

impl IptablesFamily {
    /// Makes the counters that rules need. Where that fails, rules do without them.
    pub(super) fn make_counters(&mut self) {
        if self.ledger.config().counts_packets
            && let Err(error) = packet_counters::make()
        {
            self.do_without_counters(&format!("making packet counters (nfnetlink_acct): {error}"));
        }
    }

    /// After a full sync failed: true when rules that count packets were the reason. The full sync
    /// is to be made again then, without them.
    ///
    /// # Errors
    /// It cannot be found out.
    pub(super) fn counters_are_rejected(&mut self, error: &DataplaneError) -> Result<bool, DataplaneError> {
        if self.has_counted || !self.ledger.config().counts_packets || error.kind != ErrorKind::Rejected {
            return Ok(false);
        }
        let rejected = self.rules.programs.try_out(&Ledger::trial_of_counters())?;
        self.has_counted = rejected.is_none();
        if let Some(error) = &rejected {
            self.do_without_counters(error);
        }
        Ok(rejected.is_some())
    }

    fn do_without_counters(&mut self, error: &str) {
        tracing::info!(family = %self.ledger.config().family, %error, "packets are not counted");
        self.set_config(RenderConfig { counts_packets: false, ..self.ledger.config().clone() });
    }
}
