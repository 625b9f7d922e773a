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

/// Calls `take` with a text for each object in the tables of kube-proxy's mode nftables, without
/// elements that packets add. Errors: the kernel cannot be read.
pub(crate) fn kube_proxys_objects(take: &mut dyn FnMut(&str)) -> Result<(), DataplaneError> {
    if !NF_TABLES.is_present() {
        return Ok(());
    }
    let mut read = || -> Result<(), NftablesError> {
        let mut kernel = Nftables::open()?;
        for name in Family::BOTH.map(kube_proxys_table) {
            if kernel.table(&name)?.is_none() {
                continue;
            }
            // The kernel never reuses a handle, and a rule is never changed.
            kernel.chains(&name)?.iter().for_each(|chain| take(&chain.object.name));
            kernel.rules(&name, None)?.iter().for_each(|rule| take(&format!("{} {}", rule.object.chain, rule.handle)));
            for set in kernel.sets(&name)?.into_iter().map(|set| set.object) {
                if !set.flags.dynamic && !set.flags.timeout {
                    let elements = kernel.elements(&name, &set.name)?.into_iter();
                    elements.for_each(|element| take(&format!("{} {:?} {:?}", set.name, element.key, element.data)));
                }
            }
        }
        Ok(())
    };
    read().map_err(|error| failure("reading the tables of kube-proxy's mode nftables", &error))
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
