//! The gate of mode userspace: while the set `gate` holds a protocol, the rules send it to the
//! proxy. The elements have a timeout, so the gate opens by itself.

use headgate_core::{Family, Protocol};
use nftables_netlink::{Nftables, NftablesError, Transaction};

use super::{
    elements::{gate_element, names},
    layout::table_name,
};

/// A connection that changes only the gate. The connection belongs to one network namespace.
#[derive(Debug)]
pub(in super::super) struct Gate {
    nftables: Nftables,
}

impl Gate {
    /// Connects in the network namespace of the calling thread.
    /// Errors: the kernel creates no socket.
    pub(in super::super) fn connect() -> Result<Self, NftablesError> {
        Ok(Self { nftables: Nftables::open()? })
    }

    /// Closes the gate for some protocols, or keeps it closed. The elements are replaced, because
    /// kernels before 6.12 cannot renew their timeouts.
    /// Errors: the kernel has no gate, or does not answer. Try again after the next full sync.
    pub(in super::super) fn close(&mut self, family: Family, protocols: &[Protocol]) -> Result<(), NftablesError> {
        let (table, elements) = (table_name(family), || protocols.iter().copied().map(gate_element));
        let mut addition = Transaction::new();
        addition.add_elements(&table, names::GATE, elements());
        let mut renewal = Transaction::new();
        renewal.delete_elements(&table, names::GATE, elements());
        renewal.add_elements(&table, names::GATE, elements());
        match self.nftables.commit(&renewal) {
            // An element has expired, or did not exist.
            Err(NftablesError::Refused(_)) => self.nftables.commit(&addition),
            result => result,
        }
    }

    /// Opens the gate: new connections and all datagrams go to endpoints.
    /// Errors: the kernel does not answer. The gate opens by itself.
    pub(in super::super) fn open(&mut self, family: Family) -> Result<(), NftablesError> {
        let mut transaction = Transaction::new();
        transaction.flush_set(&table_name(family), names::GATE);
        match self.nftables.commit(&transaction) {
            // The table does not exist.
            Err(NftablesError::Refused(_)) => Ok(()),
            result => result,
        }
    }
}
