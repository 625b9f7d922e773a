//! Compares Headgate's client of nftables with the `nft` program.

mod interrupted;
mod listing;
mod specimen;
mod transactions;

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use headgate_tests::testbed::Namespace;
use nftables_netlink::{Element, Family, Nftables, TableName};

/// Runs `work` in a new network namespace.
fn in_namespace<T: Send>(name: &str, work: impl FnOnce() -> Result<T> + Send) -> T {
    Namespace::for_test(&format!("nft-{name}")).unwrap().run(work).unwrap()
}

/// Lists the elements of a large set. Until the kernel has grown the set's hash table, which may
/// last on a busy machine, the client may get no complete list in any of its attempts.
fn elements_of_grown(kernel: &mut Nftables, table: &TableName, set: &str) -> Result<Vec<Element>> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match kernel.elements(table, set) {
            Err(error) if error.refusal_code() == Some(libc::EINTR) && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            listed => return Ok(listed?),
        }
    }
}

fn table_name() -> TableName {
    TableName::new(Family::Inet, "shop")
}
