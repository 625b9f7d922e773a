//! Prints commands that the user can try while the demo runs, and removes leftover namespaces at
//! the end of the demo.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use headgate_tests::testbed::manifests::{NAMESPACE, Via};
use headgate_tests::testbed::plan::{self, CONTROL, INSPECT_PORT};
use headgate_tests::testbed::process::program;
use headgate_tests::testbed::{Backend, Family, Testbed};

use crate::screen::Screen;
use crate::story::{CLIENT, SERVICE, url};

/// Prints commands that the user can copy. The commands work in any folder while the demo runs.
pub(crate) fn print_commands(bed: &Testbed, screen: &Screen) -> Result<()> {
    let name = |machine: &str| -> Result<String> { Ok(bed.machines().machine(machine)?.name().to_owned()) };
    let control = plan::address(CONTROL).context("the plan has no address for the control plane")?.v4;
    let inside = format!("ip netns exec {}", name(CONTROL)?);
    let on_node = format!("ip netns exec {}", name("node-a")?);
    let headgatectl =
        format!("{inside} {} --server http://{control}:{INSPECT_PORT}", program("headgatectl")?.display());
    let grpcurl = format!("{inside} {} -plaintext", grpcurl());
    let save = match bed.backend() {
        Backend::IptablesLegacy | Backend::Ipvs | Backend::UserspaceIptables => "iptables-legacy-save",
        Backend::IptablesNft | Backend::IptablesNftCompact => "iptables-nft-save",
        Backend::Nftables | Backend::Userspace => "nft list ruleset",
    };
    let cluster = bed.address(SERVICE, Via::ClusterIp, Family::V4, "http")?;
    let node_port = bed.address(SERVICE, Via::NodePort("node-b"), Family::V4, "http")?;
    let manifests = bed.machines().folder().join("manifests/cluster.yaml");

    screen.step("The demo keeps running; try these commands as root in another terminal");
    let groups = [
        (
            "What the nodes have programmed",
            vec![
                format!("{headgatectl} agents"),
                format!("{headgatectl} services"),
                format!("{headgatectl} endpoints {NAMESPACE}/{SERVICE}"),
                format!("{headgatectl} watch"),
            ],
        ),
        (
            "The same information over gRPC",
            vec![
                format!("{grpcurl} {control}:{INSPECT_PORT} list"),
                format!("{grpcurl} {control}:{INSPECT_PORT} headgate.v1.Inspect/ListAgents"),
                format!(
                    "{grpcurl} -d '{{\"namespace\": \"{NAMESPACE}\", \"name\": \"{SERVICE}\"}}' \
                     {control}:{INSPECT_PORT} headgate.v1.Inspect/ListEndpoints"
                ),
            ],
        ),
        ("The rules of node-a", vec![format!("{on_node} {save} -t nat | grep {NAMESPACE}/{SERVICE}")]),
        (
            "Requests from a pod and from outside the cluster",
            vec![
                format!("ip netns exec {} curl -s {}", name(CLIENT)?, url(cluster)),
                format!("ip netns exec {} curl -s {}", name("outside-1")?, url(node_port)),
            ],
        ),
        ("Edit the manifests; the nodes program the change", vec![format!("${{EDITOR:-vi}} {}", manifests.display())]),
    ];
    for (purpose, commands) in groups {
        screen.plain("");
        screen.note(purpose);
        for command in commands {
            screen.plain(&format!("    {command}"));
        }
    }
    screen.plain("");
    screen.note("Ctrl-C ends the demo and removes everything.");
    Ok(())
}

/// The command for grpcurl: the path of `target/tools/grpcurl`, which `make demo KEEP=1` installs.
/// If this file does not exist, the command is `grpcurl`, which the shell finds on `PATH`.
fn grpcurl() -> String {
    let own = std::env::current_exe().ok();
    let fetched = own.as_deref().and_then(|own| own.parent()?.parent()).map(|target| target.join("tools/grpcurl"));
    match fetched {
        Some(path) if path.is_file() => path.display().to_string(),
        _ => "grpcurl".to_owned(),
    }
}

/// Removes remaining namespaces of this process. A second Ctrl-C may have interrupted an earlier
/// removal. `ip` runs in its own process group here, so Ctrl-C does not reach it.
pub(crate) fn remove_leftovers() -> Result<()> {
    let folder = Path::new("/run/netns");
    if !folder.exists() {
        return Ok(());
    }
    let prefix = format!("hg{}-", std::process::id());
    for entry in fs::read_dir(folder).context("listing namespaces")? {
        let name = entry.context("listing namespaces")?.file_name().to_string_lossy().into_owned();
        if !name.starts_with(&prefix) {
            continue;
        }
        let mut command = Command::new("ip");
        command.args(["netns", "del", &name]).stdin(Stdio::null()).process_group(0);
        let status = command.status().context("running `ip`")?;
        if !status.success() && folder.join(&name).exists() {
            bail!("the namespace {name} cannot be removed; run `make clean-namespaces`");
        }
    }
    Ok(())
}
