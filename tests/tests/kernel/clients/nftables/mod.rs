//! Compares Headgate's client of nftables with the `nft` program.

mod interrupted;
mod listing;
mod specimen;
mod transactions;

use anyhow::Result;
use headgate_tests::testbed::Namespace;
use nftables_netlink::{Family, TableName};

/// Runs `work` in a new network namespace.
fn in_namespace<T: Send>(name: &str, work: impl FnOnce() -> Result<T> + Send) -> T {
    Namespace::for_test(&format!("nft-{name}")).unwrap().run(work).unwrap()
}

fn table_name() -> TableName {
    TableName::new(Family::Inet, "shop")
}
