//! Commands of replicas and agents with the certificates that `headgatectl certs` has written to
//! the folder `certs`.

use std::{path::Path, process::Command};

use anyhow::Result;
use headgate_tests::testbed::process::program;

/// A replica at an address, without a source.
pub(crate) fn replica(folder: &Path, name: &str, address: &str) -> Result<Command> {
    let mut command = Command::new(program("headgate-control-plane")?);
    command.arg(format!("--replica-name={name}")).arg("--heartbeat-seconds=1");
    command.arg(format!("--listen={address}:7443")).arg(format!("--metrics-listen={address}:7480"));
    for (option, file) in [
        ("--tls-cert", "control-plane/tls.crt"),
        ("--tls-key", "control-plane/tls.key"),
        ("--tls-client-ca", "ca.crt"),
        ("--tls-node-ca", "node-ca.crt"),
    ] {
        command.arg(format!("{option}={}", folder.join("certs").join(file).display()));
    }
    Ok(command)
}

/// The agent of a node in mode nftables, without a control plane.
pub(crate) fn agent(folder: &Path, node: &str) -> Result<Command> {
    let mut command = Command::new(program("headgate-node-agent")?);
    command.args([&format!("--node-name={node}"), "--proxy-mode=nftables"]);
    command.arg(format!("--state-dir={}", folder.join(format!("state-{node}")).display()));
    for (option, file) in [("ca", "ca.crt"), ("cert", &*format!("{node}.crt")), ("key", &*format!("{node}.key"))] {
        command.arg(format!("--tls-{option}={}", folder.join("certs/nodes").join(file).display()));
    }
    Ok(command)
}
