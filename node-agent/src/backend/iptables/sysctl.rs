//! Kernel settings that the rules depend on.

use std::{fs, io, path::Path};

/// Lets packets to 127.0.0.0/8 be routed, which NodePorts on localhost need. The rules guard those addresses against neighbours.
///
/// # Errors
/// A sentence for the operator; everything else works without it.
pub(super) fn route_localnet() -> Result<(), String> {
    let path = "/proc/sys/net/ipv4/conf/all/route_localnet";
    set(path, "1").map_err(|error| format!("NodePorts do not answer on 127.0.0.1: cannot write 1 to {path}: {error}"))
}

/// True when the node speaks IPv6.
pub(in crate::backend) fn has_ipv6() -> bool {
    Path::new("/proc/thread-self/net/if_inet6").exists()
}

fn set(path: &str, value: &str) -> io::Result<()> {
    if fs::read_to_string(path)?.trim() == value {
        return Ok(());
    }
    fs::write(path, value)
}
