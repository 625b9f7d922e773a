//! A minimal iptables ruleset for the workload, as an expert would write it by hand: one chain with
//! DNAT rules for each Service, and a dispatch on two levels. The ruleset omits everything else
//! that a proxy needs (hairpins, external addresses, NodePorts, policies). The ruleset therefore
//! shows the kernel's cost of the Services alone.

use std::{collections::BTreeSet, fmt::Write as _, net::IpAddr};

use super::workload;

/// The prefix length of a group of the first dispatch level. A group has up to 256 Services.
const GROUP_PREFIX: u8 = 24;

/// The complete ruleset, with the jumps from built-in chains.
#[must_use]
pub fn full(services: u32, endpoints: u32) -> String {
    let groups: BTreeSet<IpAddr> = (0..services).map(|service| group(workload::cluster_ip(service))).collect();
    let mut script = String::from("*nat\n");
    // iptables-nft searches a sorted list from its start to insert each new chain. Descending order
    // makes every search short.
    for service in (0..services).rev() {
        // Writing to a String cannot fail.
        let _ = writeln!(script, ":{} - [0:0]", service_chain(service));
    }
    for group in groups.iter().rev() {
        let _ = writeln!(script, ":{} - [0:0]", group_chain(*group));
    }
    script.push_str(":BENCH-DISPATCH - [0:0]\n:BENCH-A-MASQ - [0:0]\n-A BENCH-A-MASQ -j MARK --or-mark 0x4000\n");
    for service in 0..services {
        rules(&mut script, service, endpoints);
    }
    for service in 0..services {
        let (ip, chain) = (workload::cluster_ip(service), service_chain(service));
        let group = group_chain(group(ip));
        let _ = writeln!(script, "-A {group} -d {ip} -p tcp -m tcp --dport 80 -j {chain}");
    }
    for group in &groups {
        let _ = writeln!(script, "-A BENCH-DISPATCH -d {group}/{GROUP_PREFIX} -j {}", group_chain(*group));
    }
    script.push_str("-A PREROUTING -j BENCH-DISPATCH\n-A OUTPUT -j BENCH-DISPATCH\nCOMMIT\n");
    script
}

/// A script that replaces one Service's chain with a chain for `endpoints` endpoints.
#[must_use]
pub fn change(service: u32, endpoints: u32) -> String {
    let mut script = format!("*nat\n:{} - [0:0]\n", service_chain(service));
    rules(&mut script, service, endpoints);
    script.push_str("COMMIT\n");
    script
}

fn rules(script: &mut String, service: u32, endpoints: u32) {
    let chain = service_chain(service);
    let _ = writeln!(script, "-A {chain} ! -s 11.0.0.0/8 -j BENCH-A-MASQ");
    for endpoint in 0..endpoints {
        let (ip, port) =
            (workload::endpoint_ip(service, endpoint), workload::endpoint(service, endpoint).ports[0].port);
        let remaining = endpoints - endpoint;
        let draw = if remaining > 1 {
            format!("-m statistic --mode random --probability {:.10} ", 1.0 / f64::from(remaining))
        } else {
            String::new()
        };
        let _ = writeln!(script, "-A {chain} -p tcp {draw}-j DNAT --to-destination {ip}:{port}");
    }
}

fn group(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let [first, second, third, _] = address.octets();
            IpAddr::from([first, second, third, 0])
        }
        IpAddr::V6(_) => unreachable!("the workload is IPv4"),
    }
}

fn group_chain(group: IpAddr) -> String {
    format!("BENCH-GROUP-{group}")
}

fn service_chain(service: u32) -> String {
    format!("BENCH-SVC-{service:05}")
}
