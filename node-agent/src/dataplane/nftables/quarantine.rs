//! Finds the services whose elements the kernel rejects. It names them.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use headgate_core::{Family, ServiceKey, StateSource, nftables::Element};
use nftables_netlink::{NftablesError, Transaction};

use super::{
    super::{DataplaneError, ErrorKind, Fault},
    Connection, NftablesFamily, elements, failure,
    layout::{Layout, table_name},
};

/// Elements that the kernel rejects, with the reasons.
pub(super) type Rejected = HashMap<Element, String>;

/// The elements of services among the faults of a transaction.
pub(super) fn rejected(family: Family, transaction: &Transaction, faults: &[nftables_netlink::Fault]) -> Rejected {
    let of = |fault: &nftables_netlink::Fault| {
        let (_, set, element) = transaction.added_element(fault)?;
        Some((elements::decode(family, &set, &element)?, fault.to_string()))
    };
    faults.iter().filter_map(of).collect()
}

impl NftablesFamily {
    /// The error of a transaction. Only in a full sync (`is_full`), elements show a faulty service.
    pub(super) fn explain(
        &mut self,
        transaction: &Transaction,
        is_full: bool,
        error: &NftablesError,
    ) -> DataplaneError {
        let failed = failure("writing the table of this agent", error);
        let NftablesError::Refused(faults) = error else { return failed };
        self.rejected =
            if is_full { rejected(self.layout_config.family, transaction, faults) } else { Rejected::new() };
        if self.rejected.is_empty() { failed } else { DataplaneError { kind: ErrorKind::Rejected, ..failed } }
    }

    fn faults(&self, rejected: &Rejected) -> Vec<Fault> {
        let mut faults = Vec::new();
        for (element, reason) in rejected {
            for service in self.ledger.services_of(&HashSet::from([*element])) {
                faults.push(Fault { service, family: self.layout_config.family, reason: reason.clone() });
            }
        }
        faults
    }

    /// See [`Dataplane::find_faults`](super::super::Dataplane::find_faults).
    pub(super) fn search(
        &mut self,
        kernel: &mut Connection,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError> {
        let rejected = std::mem::take(&mut self.rejected);
        if !rejected.is_empty() {
            let faults = self.faults(&rejected);
            faults.iter().for_each(|fault| self.ledger.forget_last_good(&fault.service));
            return Ok(faults);
        }
        let mut faults = Vec::new();
        for service in suspects.into_iter().flatten() {
            let mut plan = None;
            source.look(&mut |state, node, _| {
                plan = Some(self.ledger.trial(state, node, &BTreeSet::from([Arc::clone(service)])));
            });
            let Some(plan) = plan else { continue };
            let table = table_name(self.layout_config.family);
            let mut transaction = Transaction::new();
            if let Some(shape) = &plan.shape {
                self.layout.change_to(&Layout::new(&self.layout_config, shape), &table, &mut transaction);
            }
            elements::write(&plan.delete, plan.added(&self.ledger), &table, &mut transaction);
            let found = kernel.refusals(&transaction).map_err(|error| failure("trying a service again", &error))?;
            if let Some(fault) = found.first() {
                let service = Arc::clone(service);
                faults.push(Fault { service, family: self.layout_config.family, reason: fault.to_string() });
            }
        }
        Ok(faults)
    }
}
