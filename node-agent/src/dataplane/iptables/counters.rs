//! Rules that count packets, where the kernel has counters and the programs know the match for them.

use headgate_core::iptables::{Ledger, ruleset};
use headgate_netlink::NetlinkError;

use super::FamilyDataplane;
use crate::{
    dataplane::{DataplaneError, ErrorKind},
    packet_counters,
};

impl FamilyDataplane {
    /// Makes the counters that rules are going to need. Without them, rules go without.
    pub(super) fn make_counters(&mut self) {
        if self.ledger.config().counts_packets
            && let Err(failed) = packet_counters::make()
        {
            self.go_without_counters(&error("making", &failed));
        }
    }

    /// After a full sync: true when it was refused because rules that count packets are. Then it is to be made again, without them.
    ///
    /// # Errors
    /// It cannot be found out.
    pub(super) fn counters_are_refused(&mut self, synced: &Result<(), DataplaneError>) -> Result<bool, DataplaneError> {
        if self.has_counted || !self.ledger.config().counts_packets {
            return Ok(false);
        }
        match synced {
            Ok(()) => self.has_counted = true,
            Err(refused) if refused.kind == ErrorKind::Refused => {
                let tried = self.programs.restore(&Ledger::trial_of_counters());
                self.programs.restore(&Ledger::end_of_trials())?;
                match tried {
                    Ok(()) => self.has_counted = true,
                    Err(error) if error.kind == ErrorKind::Refused => {
                        self.go_without_counters(&error);
                        return Ok(true);
                    }
                    Err(error) => return Err(error),
                }
            }
            Err(_) => {}
        }
        Ok(false)
    }

    fn go_without_counters(&mut self, error: &DataplaneError) {
        tracing::info!(family = %self.family, %error, "packets are not counted");
        let mut config = self.ledger.config().clone();
        config.counts_packets = false;
        self.ledger.set_ruleset(ruleset(config));
    }
}

/// What failed with the counters, for the log.
pub(super) fn error(doing: &str, error: &NetlinkError) -> DataplaneError {
    DataplaneError::new(ErrorKind::Fatal, format!("{doing} packet counters (nfnetlink_acct): {error}"))
}
