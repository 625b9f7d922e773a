//! Lists while another program changes its own tables all the time.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    thread,
};

use anyhow::{Result, ensure};
use nftables_netlink::{Chain, DataType, Element, Family, Nftables, Set, Table, TableName, Transaction, Value};

use super::{elements_of_grown, in_namespace, table_name};

const ELEMENTS: u32 = 20_000;
/// So many chains do not fit into one message.
const CHAINS: u32 = 2_000;

fn entry(key: u32) -> Element {
    Element::new(Value::host_u32(key)).with_value(Value::host_u32(key / 2))
}

/// Changes another table until `is_done`.
fn change(is_done: &AtomicBool, changes: &AtomicU32) -> Result<()> {
    let mut kernel = Nftables::open()?;
    let table = TableName::new(Family::Inet, "busy");
    let mut transaction = Transaction::new();
    transaction.add_table(&Table::new(table.clone()));
    kernel.commit(&transaction)?;
    while !is_done.load(Relaxed) {
        let name = format!("chain-{}", changes.fetch_add(1, Relaxed));
        let (mut add, mut delete) = (Transaction::new(), Transaction::new());
        add.add_chain(&Chain::regular(&table, &name));
        delete.delete_chain(&table, &name);
        kernel.commit(&add)?;
        kernel.commit(&delete)?;
    }
    Ok(())
}

#[test]
fn changes_of_other_tables_do_not_prevent_lists() {
    in_namespace("busy", || {
        let mut kernel = Nftables::open()?;
        let table = table_name();
        let set = Set::map(&table, "pairs", &[DataType::Mark], &[DataType::Mark]);
        let mut all = Transaction::new();
        all.add_table(&Table::new(table.clone()));
        for chain in 0..CHAINS {
            all.add_chain(&Chain::regular(&table, format!("kept-{chain}")));
        }
        all.add_set(&set);
        all.add_elements(&table, "pairs", (0..ELEMENTS).map(entry));
        kernel.commit(&all)?;
        elements_of_grown(&mut kernel, &table, "pairs")?;
        let (is_done, changes) = (AtomicBool::new(false), AtomicU32::new(0));
        thread::scope(|scope| {
            // A new thread is in the namespace of this thread.
            let other = scope.spawn(|| change(&is_done, &changes));
            let listed = lists_are_complete(&mut kernel, &table, &changes);
            is_done.store(true, Relaxed);
            other.join().unwrap()?;
            listed
        })
    });
}

fn lists_are_complete(kernel: &mut Nftables, table: &TableName, changes: &AtomicU32) -> Result<()> {
    for _ in 0..5 {
        let before = changes.load(Relaxed);
        let keys: BTreeSet<Value> = kernel.elements(table, "pairs")?.into_iter().map(|element| element.key).collect();
        ensure!(keys.len() == usize::try_from(ELEMENTS)?, "{} elements", keys.len());
        let chains: BTreeSet<String> = kernel.chains(table)?.into_iter().map(|chain| chain.object.name).collect();
        ensure!(chains == (0..CHAINS).map(|chain| format!("kept-{chain}")).collect(), "{chains:?}");
        ensure!(kernel.sets(table)?.len() == 1);
        while changes.load(Relaxed) == before {
            thread::yield_now();
        }
    }
    Ok(())
}
