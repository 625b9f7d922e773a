//! Measures transactions: the replacement of one map element and the load of a whole map, compared
//! with `nft -f` if it is installed. The program creates its own table in the current network
//! namespace and deletes the table at the end. Run the program in a separate namespace, for example
//! `ip netns exec NAME target/release/examples/cost`.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nftables_netlink::{
    DataType, Element, Family, Kernel as _, Nftables, NftablesError, Set, Table, TableName, Transaction, Value,
};

const LOADED: u32 = 100_000;
const SWAPS: u32 = 2_000;

fn main() -> Result<(), NftablesError> {
    let mut kernel = Nftables::open()?;
    let table = TableName::new(Family::Inet, "nftables-netlink-cost");
    for (name, size) in [("a hash that grows", None), ("fixed buckets", Some(2 * LOADED))] {
        let mut all = Transaction::new();
        all.add_table(&Table::new(table.clone()));
        let types = [DataType::Mark, DataType::Mark];
        let map = Set::map(&table, "endpoints", &types, &[DataType::Ipv4Address, DataType::Port]);
        all.add_set(&Set { size, ..map });
        kernel.commit(&all)?;

        let mut load = Transaction::new();
        let encoded = timed(|| load.add_elements(&table, "endpoints", (0..LOADED).map(|index| element(index, 1))));
        let start = Instant::now();
        kernel.commit(&load)?;
        println!(
            "{name}: {LOADED} elements in one transaction of {} KB: encoded in {encoded:?}, committed in {:?}",
            load.length_bytes() / 1024,
            start.elapsed()
        );

        let mut times = Vec::new();
        for swap in 0..SWAPS {
            let index = swap * (LOADED / SWAPS);
            let start = Instant::now();
            let mut change = Transaction::new();
            change.delete_elements(&table, "endpoints", [Element::new(key(index))]);
            change.add_elements(&table, "endpoints", [element(index, 2)]);
            kernel.commit(&change)?;
            times.push(start.elapsed());
        }
        times.sort();
        let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or_default();
        println!("{name}: one element swapped: p50 {:?}, p99 {:?}", at(50), at(99));
        let start = Instant::now();
        let listed = kernel.elements(&table, "endpoints")?.len();
        println!("{name}: {listed} elements listed in {:?}", start.elapsed());
        delete(&mut kernel, &table)?;
    }
    if let Some((load, swap)) = program(&table) {
        println!("nft -f: {LOADED} elements {load:?}, one element swapped {swap:?}");
        delete(&mut kernel, &table)?;
    }
    Ok(())
}

fn delete(kernel: &mut Nftables, table: &TableName) -> Result<(), NftablesError> {
    let mut all = Transaction::new();
    all.delete_table(table);
    kernel.commit(&all)
}

fn key(index: u32) -> Value {
    Value::concatenation(&[Value::host_u32(index), Value::host_u32(0)])
}

fn element(index: u32, port: u16) -> Element {
    let address = (0x0a00_0000 + index).to_be_bytes();
    Element::new(key(index)).with_value(Value::concatenation(&[Value(address.to_vec()), Value::port(port)]))
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// Measures equal changes with the `nft` program. Returns `None` if `nft` is not installed.
fn program(table: &TableName) -> Option<(Duration, Duration)> {
    let line = |index: u32, port: u16| {
        let address = std::net::Ipv4Addr::from(0x0a00_0000 + index);
        format!("{index} . 0 : {address} . {port}")
    };
    let all: Vec<_> = (0..LOADED).map(|index| line(index, 1)).collect();
    let load = format!(
        "table {table} {{ map endpoints {{ type mark . mark : ipv4_addr . inet_service; elements = {{ {} }}; }}; }}\n",
        all.join(", ")
    );
    let swap =
        format!("delete element {table} endpoints {{ 7 . 0 }}\nadd element {table} endpoints {{ {} }}\n", line(7, 2));
    let start = Instant::now();
    run(&load)?;
    let loaded = start.elapsed();
    let start = Instant::now();
    run(&swap)?;
    Some((loaded, start.elapsed()))
}

fn run(text: &str) -> Option<()> {
    let mut child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().ok()?;
    child.stdin.take()?.write_all(text.as_bytes()).ok()?;
    child.wait().ok().filter(std::process::ExitStatus::success).map(drop)
}
