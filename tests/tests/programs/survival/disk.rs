//! Tests with a disk that fails. The agent warns and counts the failures in a metric, and
//! forwarding continues.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};
use headgate_tests::testbed::{
    AgentSetup, Testbed, plan,
    process::{self, Process},
};

use super::node::{
    NODE, agent_log, expect_servers, forget_rules, metrics, on_machines, state_file, wait_for_answers, wait_until,
    while_asking,
};

/// The agent ignores a damaged file, logs the reason, and replaces the file.
fn damaged_file(bed: &Testbed) -> Result<()> {
    bed.start_programs(NODE, &AgentSetup::default())?;
    bed.stop_agent(NODE)?;
    let path = state_file(bed);
    let mut bytes = fs::read(&path).context("reading the state file")?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(&path, &bytes).context("damaging the state file")?;
    bed.stop_control_plane()?;
    while_asking(bed, "steady", || {
        bed.start_agent(NODE)?;
        wait_until("the warning", || Ok(agent_log(bed)?.contains("the checksum does not match")))?;
        bed.start_control_plane()?;
        bed.wait_programmed()
    })?;
    ensure!(agent_log(bed)?.contains("Nothing else is lost"), "the log does not name the consequence");
    bed.stop_agent(NODE)?;
    bed.stop_control_plane()?;
    forget_rules(bed)?;
    bed.start_agent(NODE)?;
    wait_for_answers(bed, "steady").context("with the file that replaced the damaged one")
}

/// Although the agent cannot save its state, it forwards, follows changes, logs a warning and
/// counts the failures.
fn forwards_without_disk(bed: &Testbed) -> Result<()> {
    wait_until("the node to be programmed", || {
        let status = bed.agents().unwrap_or_default();
        let mut programmed = status.iter().filter(|agent| agent.programmed_version > 0);
        Ok(programmed.any(|agent| agent.node == NODE && agent.programmed_version == agent.head_version))
    })?;
    expect_servers(bed, "steady", &["a1", "b1"])?;
    wait_until("the metric", || {
        // The page may be served later.
        let Ok(metrics) = metrics(bed) else { return Ok(false) };
        let line = metrics.lines().find_map(|line| line.strip_prefix("headgate_agent_state_save_errors_total "));
        Ok(line.context("the metric is missing")?.parse::<u64>()? > 0)
    })?;
    // The list of replicas is saved earlier, and its failure counts as well.
    wait_until("the warning", || Ok(agent_log(bed)?.contains("the state cannot be saved")))?;
    while_asking(bed, "steady", || {
        bed.write_endpoints("other", &["a2"])?;
        wait_until("the change", || Ok(expect_servers(bed, "other", &["a2"]).is_ok()))
    })
}

fn unwritable_folder(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    // The parent of the state folder is a file, so the agent cannot create the folder.
    let folder = bed.machines().folder().join("in-the-way");
    fs::write(&folder, "").context("writing a file")?;
    let folder = folder.join("state").display().to_string();
    bed.start_agent_with(NODE, &AgentSetup::with(&["--state-dir", &folder]))?;
    forwards_without_disk(bed)
}

fn full_disk(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    let disk = bed.machines().folder().join("disk");
    fs::create_dir(&disk).context("creating a folder")?;
    // When the process exits, its mount namespace and the disk in it disappear.
    let process = start_on_small_disk(bed, &disk)?;
    // The positions of the rules are recorded also on a full disk.
    let path = format!("/proc/{}/root{}", process.id(), disk.join("run").display());
    let record = || fs::read_to_string(&path).context("reading the record of the run");
    let result = (|| {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("reading the boot")?;
        let names_positions = |record: String| record.starts_with(boot.trim_end()) && record.contains(':');
        wait_until("the first record", || Ok(record().is_ok_and(names_positions)))?;
        let before = record()?;
        forwards_without_disk(bed)?;
        wait_until("a record of the change", || Ok(record()? != before))
    })();
    ensure!(agent_log(bed)?.contains("No space left on device"), "the disk was not full");
    process.terminate().context("ending the agent")?;
    result
}

/// Starts the agent in its own mount namespace, with a disk of two pages: one for the role of the
/// node, and one for the record of the run.
fn start_on_small_disk(bed: &Testbed, disk: &Path) -> Result<Process> {
    let control = plan::address(plan::CONTROL).context("the plan has no address of the control plane")?.v4;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", "mount -t tmpfs -o size=8k none \"$0\" && exec \"$@\""])
        .arg(disk)
        .arg(process::program("headgate-node-agent")?)
        .args(["--node-name", NODE, "--cluster-cidr", plan::CLUSTER_CIDR, "--insecure-loopback"])
        .args(["--control-plane", &format!("http://{control}:{}", plan::CONTROL_PORT)])
        .args(bed.backend().agent_arguments())
        .args(["--state-save-period", "200ms", "--state-dir"])
        .arg(disk)
        .env("XTABLES_LOCKFILE", bed.machines().xtables_lock(NODE))
        .env("HEADGATE_LOG", "info");
    let log = bed.machines().folder().join(format!("agent-{NODE}.log"));
    Process::start("headgate-node-agent on a small disk", bed.machines().machine(NODE)?, command, &log)
}

on_machines! {
    // rows of iptables: 92
    a_damaged_file_is_ignored_and_replaced: IptablesNft, damaged_file;
    // rows of iptables: 92
    forwarding_continues_if_the_state_folder_cannot_be_written: IptablesLegacy, unwritable_folder;
    // rows of iptables: 92
    forwarding_continues_on_a_full_disk: IptablesNft, full_disk;
}
