//! The removal of this dataplane's tables.

use headgate_core::Family;
use nftables_netlink::{Kernel as _, Nftables, NftablesError, Transaction};

use super::{
    super::{DataplaneError, Leftover},
    failure,
    layout::table_name,
};

/// The tables of this dataplane.
pub(crate) fn tables() -> Leftover {
    Leftover::new("nftables", || {
        let result = remove().map_err(|error| failure("removing the tables of mode nftables", &error));
        match result {
            Err(DataplaneError { kind: super::ErrorKind::Unavailable, .. }) => Ok(()),
            result => result,
        }
    })
}

fn remove() -> Result<(), NftablesError> {
    let mut nftables = Nftables::open()?;
    let mut transaction = Transaction::new();
    for name in Family::BOTH.map(table_name) {
        if nftables.table(&name)?.is_some() {
            transaction.delete_table(&name);
        }
    }
    if transaction.message_count() == 0 { Ok(()) } else { nftables.commit(&transaction) }
}
