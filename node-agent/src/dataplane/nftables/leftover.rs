//! The removal of this dataplane's tables.

use std::fs;

use headgate_core::Family;
use nftables_netlink::{Kernel as _, Nftables, NftablesError, Transaction};

use super::{
    super::{DataplaneError, Leftover},
    failure,
    layout::table_name,
};

/// The tables of this dataplane in both families, as a leftover.
pub(crate) fn tables() -> Leftover {
    Leftover::new("nftables", || {
        if !has_nftables() {
            return Ok(());
        }
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

/// Returns whether the kernel has nftables now. Sends no netlink request, because a request makes
/// the kernel load the module.
fn has_nftables() -> bool {
    let has_symbol = |symbols: Vec<u8>| symbols.windows(SYMBOL.len()).any(|window| window == SYMBOL);
    fs::exists("/sys/module/nf_tables").unwrap_or(true) || fs::read("/proc/kallsyms").is_ok_and(has_symbol)
}

/// A function of nftables. `/proc/kallsyms` also lists it if nftables is built into the kernel.
const SYMBOL: &[u8] = b" nft_do_chain";
