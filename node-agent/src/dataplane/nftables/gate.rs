//! The gate of mode userspace: while the set `gate` of a family contains TCP, the rules send TCP
//! connections to the proxy. The element has a timeout, so the gate opens by itself if nobody
//! renews the element.

use headgate_core::Family;
use nftables_netlink::{Kernel as _, Nftables, NftablesError, Transaction};

use super::{
    elements::{gate_of_tcp, names},
    layout::table_name,
};

/// A connection that changes only the gate. The connection belongs to one network namespace.
#[derive(Debug)]
pub(in super::super) struct Gate {
    nftables: Nftables,
}

impl Gate {
    /// Connects in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The kernel creates no socket.
    pub(in super::super) fn connect() -> Result<Self, NftablesError> {
        Ok(Self { nftables: Nftables::open()? })
    }

    /// Closes the gate, or keeps it closed. The element is replaced, because kernels before 6.12
    /// cannot renew its timeout.
    ///
    /// # Errors
    /// The kernel has no gate, or does not answer. Try again after the next full sync.
    pub(in super::super) fn close(&mut self, family: Family) -> Result<(), NftablesError> {
        let table = table_name(family);
        let mut renewal = deletion(family);
        renewal.add_elements(&table, names::GATE, [gate_of_tcp()]);
        match self.nftables.commit(&renewal) {
            // The element has expired, or did not exist.
            Err(NftablesError::Refused(_)) => {
                let mut addition = Transaction::new();
                addition.add_elements(&table, names::GATE, [gate_of_tcp()]);
                self.nftables.commit(&addition)
            }
            result => result,
        }
    }

    /// Opens the gate: new connections go to endpoints.
    ///
    /// # Errors
    /// The kernel does not answer. The gate opens by itself.
    pub(in super::super) fn open(&mut self, family: Family) -> Result<(), NftablesError> {
        match self.nftables.commit(&deletion(family)) {
            // The gate is open.
            Err(NftablesError::Refused(_)) => Ok(()),
            result => result,
        }
    }
}

fn deletion(family: Family) -> Transaction {
    let mut transaction = Transaction::new();
    transaction.delete_elements(&table_name(family), names::GATE, [gate_of_tcp()]);
    transaction
}
