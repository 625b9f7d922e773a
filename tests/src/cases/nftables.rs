//! Cases of mode nftables: the table in the kernel, and other programs that list or change the
//! table.

use anyhow::{Result, ensure};

use super::affinity;
use super::case::{SourceAddress, ask};
use super::changes::eventually;
use super::ipvs::{restart, tool};
use super::run::run;
use crate::testbed::client::HeldConnection;
use crate::testbed::iptables;
use crate::testbed::manifests::{Via, ready};
use crate::testbed::{AgentSetup, Backend, Family, Testbed};

use SourceAddress::Kept;
use Via::ClusterIp;

/// Runs `nft` on node-a and returns its output.
fn nft(bed: &Testbed, arguments: &[&str]) -> Result<String> {
    tool(bed.machines().machine("node-a")?, "nft", arguments)
}

fn answers(bed: &Testbed, servers: &'static [&'static str]) -> Result<()> {
    run(bed, &[ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(servers, Kept)])
}

/// The change of one endpoint writes at most 60 objects. A warm restart writes nothing. `nft` lists
/// the table. The kernel has no iptables rules of Headgate.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn a_change_writes_a_handful_of_elements(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    bed.start_agent("node-a")?;
    bed.wait_programmed()?;
    answers(bed, &["a1", "b1"])?;
    bed.update(|manifests| {
        manifests.service_mut("steady")?.endpoints = ready(&["a1", "b2"]);
        Ok(())
    })?;
    answers(bed, &["a1", "b2"])?;
    let agents = bed.agents()?;
    let written = agents.iter().map(|agent| agent.objects_written).max().unwrap_or_default();
    // In each family, the change replaces one endpoint slot of each port. The change also replaces
    // the port of the testbed's marker Service, because this port changes with each change of the
    // manifests.
    ensure!(0 < written && written <= 60, "{written} objects were written");
    let listed = nft(bed, &["list", "table", "ip", "headgate"])?;
    for expected in ["map services", "map endpoints", "chain nat-prerouting", "masquerade"] {
        ensure!(listed.contains(expected), "the list does not contain {expected}:\n{listed}");
    }
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    for family in Family::BOTH {
        let rules = iptables::save(node, iptables::Variant::Legacy, family, &lock)?;
        ensure!(!rules.contains("KUBE-"), "rules of iptables exist:\n{rules}");
    }
    let agent = restart(bed, &AgentSetup::default())?;
    ensure!(agent.backend == "nftables", "the backend is {}", agent.backend);
    ensure!(agent.objects_written == 0, "{} objects were written by a warm restart", agent.objects_written);
    answers(bed, &["a1", "b2"])
}

/// `nft` lists the table and the records of clients, whatever the Services are.
///
/// Needs a running cluster with [`super::table::services`].
pub fn nft_lists_services_of_every_shape(bed: &Testbed) -> Result<()> {
    affinity::a_client_stays_with_its_server(bed)?;
    for family in Family::BOTH {
        let family = if family == Family::V4 { "ip" } else { "ip6" };
        let listed = nft(bed, &["list", "table", family, "headgate"])?;
        for expected in ["map affinity-endpoints", "map clients-", "a random endpoint of the group", "chain unserved"] {
            ensure!(listed.contains(expected), "the list does not contain {expected}:\n{listed}");
        }
    }
    Ok(())
}

/// The agent owns the table, so `nft flush ruleset` of another program does not remove the table.
/// If the table was changed while no agent ran, the next agent writes the table again.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn the_table_survives_a_flush_and_is_repaired_after_a_change(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    bed.start_agent("node-a")?;
    bed.wait_programmed()?;
    // The kernel skips tables that another program owns, or rejects the command. Both results are
    // correct.
    let _ = nft(bed, &["flush", "ruleset"]);
    answers(bed, &["a1", "b1"])?;
    ensure!(nft(bed, &["delete", "table", "ip", "headgate"]).is_err(), "another program deleted the table");
    answers(bed, &["a1", "b1"])?;

    bed.kill_agent("node-a")?;
    answers(bed, &["a1", "b1"])?;
    nft(bed, &["flush", "map", "ip", "headgate", "services"])?;
    nft(bed, &["flush", "chain", "ip", "headgate", "services"])?;
    nft(bed, &["add", "chain", "ip", "headgate", "foreign"])?;
    nft(bed, &["delete", "table", "ip6", "headgate"])?;
    nft(bed, &["add", "table", "ip", "another"])?;
    bed.start_agent("node-a")?;
    eventually(|| answers(bed, &["a1", "b1"]))?;
    let tables = nft(bed, &["list", "tables"])?;
    ensure!(tables.contains("table ip another"), "the table of another program is gone:\n{tables}");
    let listed = nft(bed, &["list", "table", "ip", "headgate"])?;
    ensure!(!listed.contains("chain foreign"), "a foreign chain is in the table:\n{listed}");
    bed.stop_agent("node-a")?;
    answers(bed, &["a1", "b1"])?;
    bed.clean_up("node-a")?;
    let tables = nft(bed, &["list", "tables"])?;
    ensure!(!tables.contains("headgate"), "--cleanup left a table:\n{tables}");
    ensure!(tables.contains("table ip another"), "--cleanup removed the table of another program:\n{tables}");
    Ok(())
}

/// The node switches from iptables to nftables and back. A TCP connection survives both switches,
/// and the agent removes the rules of the other mode.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn modes_switch_without_losing_connections(bed: &Testbed) -> Result<()> {
    let by_iptables = AgentSetup { backend: Some(Backend::IptablesNft), ..AgentSetup::default() };
    bed.start_control_plane()?;
    bed.start_agent_with("node-a", &by_iptables)?;
    bed.wait_programmed()?;
    let to = bed.address("steady", ClusterIp, Family::V4, "tcp")?;
    let mut held = HeldConnection::open(bed.machines().machine("a3")?, to)?;
    restart(bed, &AgentSetup::default())?;
    answers(bed, &["a1", "b1"])?;
    held.check()?;
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    eventually(|| {
        let rules = iptables::save(node, iptables::Variant::Nft, Family::V4, &lock)?;
        ensure!(!rules.contains("KUBE-"), "rules of mode iptables still exist:\n{rules}");
        Ok(())
    })?;
    restart(bed, &by_iptables)?;
    answers(bed, &["a1", "b1"])?;
    held.check()?;
    eventually(|| {
        let tables = nft(bed, &["list", "tables"])?;
        ensure!(!tables.contains("headgate"), "a table of mode nftables still exists:\n{tables}");
        Ok(())
    })
}
