//! Measures the CPU time to add thousands of addresses to a dummy device, to list them and to
//! remove them. A service proxy adds them to make Service addresses local to the node.
//!
//! Run `address_cost COUNT` in a network namespace of its own, because it creates and removes a
//! device. It prints the CPU time of this thread, which includes the kernel's work.
#![allow(unsafe_code)]

use headgate_netlink::{
    NetlinkError,
    route::{Change, Prefix, Routing},
};

fn cpu_us() -> i64 {
    // SAFETY: `timespec` consists of plain numbers, and the pointer refers to this local variable.
    unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time);
        time.tv_sec * 1_000_000 + time.tv_nsec / 1000
    }
}

fn measured(name: &str, count: usize, work: impl FnOnce() -> Result<(), NetlinkError>) -> Result<(), NetlinkError> {
    let before = cpu_us();
    work()?;
    let spent = cpu_us() - before;
    let each = spent * 1000 / i64::try_from(count).unwrap_or(i64::MAX).max(1);
    println!("{name}: {spent} us, {}.{:03} us each of {count}", each / 1000, each % 1000);
    Ok(())
}

fn main() -> Result<(), NetlinkError> {
    let count: u16 = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(10_000);
    let mut routing = Routing::open()?;
    routing.add_dummy("cost0")?;
    let link = routing.link("cost0")?.map_or(0, |link| link.index);
    routing.set_up(link, true)?;
    for family in ["v4", "v6"] {
        let addresses: Vec<Prefix> = (1..=count).map(|i| Prefix::host(address(family, i))).collect();
        let all: Vec<_> = addresses.iter().map(|address| Change::AddAddress { link, address: *address }).collect();
        let mut refused = 0;
        let thousand = all.len().saturating_sub(1000);
        measured(&format!("{family} addresses, all but the last thousand"), thousand, || {
            routing.change(&all[..thousand], |_, _| refused += 1)
        })?;
        measured(&format!("{family} addresses, the last thousand"), all.len() - thousand, || {
            routing.change(&all[thousand..], |_, _| refused += 1)
        })?;
        measured(&format!("{family} list"), all.len(), || routing.addresses(link).map(drop))?;
        let gone: Vec<_> = addresses.iter().map(|address| Change::RemoveAddress { link, address: *address }).collect();
        measured(&format!("{family} removal"), gone.len(), || routing.change(&gone, |_, _| refused += 1))?;
        println!("{family}: {refused} refused");
    }
    routing.remove_link(link)
}

fn address(family: &str, i: u16) -> std::net::IpAddr {
    let [high, low] = i.to_be_bytes();
    if family == "v4" { [10, 96, high, low].into() } else { [0xfd00, 0x96, 0, 0, 0, 0, 0, i].into() }
}
