//! Runs an agent with the rights of its container in `deploy/`, and no others.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

const MANIFEST: &str = include_str!("../../../deploy/kustomize/base/node-agent.yaml");

/// Capabilities that a manifest may name, with their numbers (`linux/capability.h`).
const NUMBERS: [(&str, u32); 4] = [("NET_ADMIN", 12), ("NET_RAW", 13), ("SYS_MODULE", 16), ("SYS_ADMIN", 21)];

/// A shell script that mounts `/proc/sys` read-only and then replaces itself with its arguments.
pub(super) const READ_ONLY_PARAMETERS: &str =
    r#"mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys; exec "$0" "$@""#;

/// A shell script that mounts everything read-only except its first argument, gives up all
/// capabilities except its second argument, and replaces itself with the other arguments. The root
/// file system is the machine's, or the folder that `HEADGATE_CHROOT` names (`make roots`).
const CONTAINER: &str = r#"folder=$0; kept=$1; shift; root=${HEADGATE_CHROOT:-/}
mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys
mount --bind "$folder" "$folder"
if [ "$root" != / ]; then
  mount --bind "$root" "$root"
  for inside in /proc /sys /dev /run "$folder" "$(dirname "$1")"; do
    mkdir -p "$root$inside"; mount --rbind "$inside" "$root$inside"
  done
fi
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --bounding-set="-all$kept" --inh-caps=-all --no-new-privs "$@""#;

/// The capabilities of the agent's container.
fn capabilities() -> Result<Vec<String>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(MANIFEST).context("reading the manifest of the agent")?;
    let container = &documents[0]["spec"]["template"]["spec"]["containers"][0];
    let added = container["securityContext"]["capabilities"]["add"].as_array();
    let added = added.context("the manifest of the agent adds no capabilities")?;
    added.iter().map(|name| name.as_str().map(str::to_owned).context("a capability is no text")).collect()
}

/// A command that runs `program` as in its container. The program can write only to `folder`.
pub(super) fn command(program: &Path, folder: &Path) -> Result<Command> {
    let kept: String = capabilities()?.iter().map(|name| format!(",+{}", name.to_lowercase())).collect();
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", CONTAINER]).arg(folder).arg(kept).arg(program);
    Ok(command)
}

/// Checks that a process has exactly the capabilities of the container, and can get no others.
///
/// # Errors
/// The process has other rights. The error includes them.
pub(super) fn check(process: u32) -> Result<()> {
    let mut mask = 0u64;
    for name in capabilities()? {
        let (_, number) =
            NUMBERS.iter().find(|(known, _)| *known == name).with_context(|| format!("unknown: {name}"))?;
        mask |= 1 << number;
    }
    let status =
        std::fs::read_to_string(format!("/proc/{process}/status")).context("reading the rights of an agent")?;
    for expected in ["CapPrm", "CapEff", "CapBnd"].map(|field| format!("{field}:\t{mask:016x}")) {
        ensure!(status.lines().any(|line| line == expected), "the agent has other rights than {expected}:\n{status}");
    }
    ensure!(status.contains("\nNoNewPrivs:\t1\n"), "the agent can get more privileges:\n{status}");
    Ok(())
}
