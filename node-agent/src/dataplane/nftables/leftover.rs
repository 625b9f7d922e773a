//! The removal of tables: this dataplane's tables, and the tables of kube-proxy's mode nftables.

use headgate_core::Family;
use nftables_netlink::{Nftables, NftablesError, TableName, Transaction};

use super::{
    super::{DataplaneError, Leftover, kernel_modules::NF_TABLES},
    failure,
    layout::table_name,
};

pub(crate) fn tables() -> Leftover {
    tables_of("nftables", table_name)
}

/// The tables of kube-proxy's mode nftables in both families, as a leftover.
pub(crate) fn kube_proxys_tables() -> Leftover {
    tables_of("kube-proxy's mode nftables", kube_proxys_table)
}

/// The name of the table of kube-proxy's mode nftables in a family.
pub(crate) fn kube_proxys_table(family: Family) -> TableName {
    TableName { name: "kube-proxy".into(), ..table_name(family) }
}

fn tables_of(owner: &'static str, table: fn(Family) -> TableName) -> Leftover {
    Leftover::new(owner, move || {
        if !NF_TABLES.is_present() {
            return Ok(());
        }
        let result = remove(Family::BOTH.map(table));
        match result.map_err(|error| failure(&format!("removing the tables of {owner}"), &error)) {
            Err(DataplaneError { kind: super::ErrorKind::Unavailable, .. }) => Ok(()),
            result => result,
        }
    })
}

fn remove(tables: [TableName; 2]) -> Result<(), NftablesError> {
    let mut nftables = Nftables::open()?;
    let mut transaction = Transaction::new();
    for name in tables {
        if nftables.table(&name)?.is_some() {
            transaction.delete_table(&name);
        }
    }
    if transaction.message_count() == 0 { Ok(()) } else { nftables.commit(&transaction) }
}
