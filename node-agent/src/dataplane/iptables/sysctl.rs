//! Kernel parameters that the rules depend on.

use std::{fs, path::Path};

use crate::sysctl::set;

const ROUTE_LOCALNET: &str = "/proc/sys/net/ipv4/conf/all/route_localnet";

/// Makes the kernel route packets to 127.0.0.0/8, which NodePorts on localhost need. Rules of the
/// agent drop packets that other hosts send to these addresses.
///
/// # Errors
/// The parameter cannot be written. The error is a sentence for the operator. Everything except
/// NodePorts on localhost works without the parameter.
pub(in super::super) fn route_localnet() -> Result<(), String> {
    let path = ROUTE_LOCALNET;
    set(Path::new(path), "1")
        .map_err(|error| format!("NodePorts do not answer on 127.0.0.1: cannot write 1 to {path}: {error}"))
}

/// True while the kernel routes packets to 127.0.0.0/8.
pub(super) fn is_localnet_routed() -> bool {
    fs::read_to_string(ROUTE_LOCALNET).is_ok_and(|value| value.trim() != "0")
}
