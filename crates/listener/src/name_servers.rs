//! The name servers of the machine, which no Service may get.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
};

use headgate_core::Protocol;

/// The files that name them. The second one has those that systemd-resolved asks, if the first one
/// names only systemd-resolved.
const RESOLVER_FILES: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];

/// The name servers in the files that the machine has.
pub fn name_servers() -> BTreeSet<(Protocol, SocketAddr)> {
    let texts = RESOLVER_FILES.iter().filter_map(|file| fs::read_to_string(file).ok()).collect::<String>();
    let servers = texts.lines().filter_map(|line| line.strip_prefix("nameserver")?.trim().parse::<IpAddr>().ok());
    servers.flat_map(|server| [Protocol::Udp, Protocol::Tcp].map(|by| (by, SocketAddr::new(server, 53)))).collect()
}
