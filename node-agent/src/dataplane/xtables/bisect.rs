//! Searches for services whose rules iptables or the kernel rejects.

use std::{collections::BTreeSet, sync::Arc};

use headgate_core::{Family, ServiceKey, StateSource, iptables::RulesLedger};

use super::{
    super::{DataplaneError, ErrorKind, Fault},
    programs::Programs,
};
use crate::bisect;

/// Most attempts in one search. Finding one faulty service among 10,000 takes at most 28 attempts.
const MAX_ATTEMPTS: u32 = 256;

/// Bisects `suspects`, or all services that are not quarantined, by trying their rules.
/// [`RulesLedger::trial`] writes these rules to chains that receive no packets.
pub(in crate::dataplane) fn find_faults(
    programs: &Programs,
    ledger: &RulesLedger,
    source: &dyn StateSource,
    suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
) -> Result<Vec<Fault>, DataplaneError> {
    let services = match suspects {
        Some(suspects) => suspects.iter().cloned().collect(),
        None => all_services(ledger, source),
    };
    let attempt = |services: &[Arc<ServiceKey>]| {
        let mut trial = None;
        source.look(&mut |state, node, _| trial = Some(ledger.trial(state, node, services)));
        let Some(trial) = trial else { return Ok(None) };
        match programs.restore(&trial) {
            Ok(()) => Ok(None),
            Err(error) if error.kind == ErrorKind::Rejected => Ok(Some(error.message)),
            Err(error) => Err(error),
        }
    };
    let found = bisect::find_faults(&services, "", MAX_ATTEMPTS, attempt);
    programs.restore(&RulesLedger::end_of_trials())?;
    Ok(found?.into_iter().flat_map(|group| faults(programs.family(), group)).collect())
}

fn all_services(ledger: &RulesLedger, source: &dyn StateSource) -> Vec<Arc<ServiceKey>> {
    let mut services = Vec::new();
    source.look(&mut |state, _, _| {
        services = state.entries().map(|(key, _)| Arc::clone(key)).filter(|key| !ledger.is_quarantined(key)).collect();
    });
    services.sort_unstable();
    services
}

fn faults(family: Family, group: bisect::FaultyItems<Arc<ServiceKey>>) -> impl Iterator<Item = Fault> {
    let count = group.items.len();
    let reason = match count {
        1 => group.reason,
        _ => format!(
            "at least one of {count} services is rejected; the search ended before finding which: {}",
            group.reason
        ),
    };
    group.items.into_iter().map(move |service| Fault { service, family, reason: reason.clone() })
}
