//! Takeover between modes and from kube-proxy: connections survive, and the old rules go away.

use anyhow::{Context, Result, ensure};

use super::case::{SourceAddress, ask};
use super::changes::eventually;
use super::from_kube_proxy::end_of_carried;
use super::ipvs::{restart, upgrade};
use super::recorded;
use super::run::run;
use crate::testbed::client::HeldConnection;
use crate::testbed::iptables::{self, Variant};
use crate::testbed::manifests::Via;
use crate::testbed::{AgentSetup, Backend, Family, Testbed, page};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, NodePort};

/// Clients whose connections pass through node-a. The node masquerades connections of the node
/// itself and of `outside-1`.
pub(super) const CLIENTS: [&str; 3] = ["a3", "node-a", "outside-1"];

/// Opens a connection of each client over each family.
pub(super) fn open(bed: &Testbed) -> Result<Vec<HeldConnection>> {
    let mut held = Vec::new();
    for family in Family::BOTH {
        let to = bed.address("steady", ClusterIp, family, "tcp")?;
        for client in CLIENTS {
            held.push(HeldConnection::open(bed.machines().machine(client)?, to)?);
        }
    }
    let to = bed.address("steady", NodePort("node-a"), Family::V4, "tcp")?;
    held.push(HeldConnection::open(bed.machines().machine("outside-1")?, to)?);
    Ok(held)
}

pub(super) fn answers(bed: &Testbed) -> Result<()> {
    run(
        bed,
        &[
            ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept),
            ask("outside-1", "steady", ClusterIp).answered(&["a1", "b1"], Masqueraded("node-a")),
        ],
    )
}

/// Waits until the tables of nftables on node-a include `ours` only if `has_ours`, and no table of
/// kube-proxy.
fn check_tables(bed: &Testbed, has_ours: bool) -> Result<()> {
    eventually(|| {
        let tables = bed.machines().machine("node-a")?.tool("nft", &["list", "tables"])?;
        let count = |name: &str| tables.lines().filter(|line| line.ends_with(name)).count();
        ensure!(count(" headgate") == if has_ours { 2 } else { 0 }, "the tables are\n{tables}");
        ensure!(count(" kube-proxy") == 0, "tables of kube-proxy still exist:\n{tables}");
        Ok(())
    })
}

fn check_no_rules_of_iptables(bed: &Testbed) -> Result<()> {
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    eventually(|| {
        let rules = iptables::save_all(node, &lock)?;
        ensure!(!rules.contains("KUBE-"), "rules of mode iptables still exist:\n{rules}");
        Ok(())
    })
}

pub(super) fn check(held: &mut [HeldConnection]) -> Result<()> {
    held.iter_mut().try_for_each(HeldConnection::check)
}

/// A node that runs kube-proxy in mode nftables switches to `setup`. The connections that
/// kube-proxy's rules established survive, and the agent removes kube-proxy's tables.
fn from_kube_proxy(bed: &Testbed, setup: &AgentSetup, has_ours: bool) -> Result<Vec<HeldConnection>> {
    recorded::load_nftables(bed)?;
    let mut held = open(bed).context("through the rules of kube-proxy")?;
    bed.start_programmed("node-a", setup)?;
    check_tables(bed, has_ours)?;
    check(&mut held).context("after the takeover from kube-proxy")?;
    answers(bed)?;
    Ok(held)
}

/// The node switches from kube-proxy's mode nftables to mode nftables, between this mode and the
/// modes iptables and userspace, and at last from kube-proxy to mode iptables. Connections survive
/// all switches, except those that mode userspace carries, and the agent removes the rules of the
/// other mode.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn modes_switch_without_losing_connections(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    let by_nftables = AgentSetup::default();
    let by = |backend| AgentSetup { backend: Some(backend), ..AgentSetup::default() };
    let mut held = from_kube_proxy(bed, &by_nftables, true)?;
    for backend in [Backend::IptablesNft, Backend::IptablesLegacy] {
        held.extend(open(bed)?);
        restart(bed, &by(backend))?;
        check_tables(bed, false)?;
        check(&mut held).with_context(|| format!("after the switch to {backend}"))?;
        answers(bed)?;

        held.extend(open(bed)?);
        restart(bed, &by_nftables)?;
        check_no_rules_of_iptables(bed)?;
        check_tables(bed, true)?;
        check(&mut held).with_context(|| format!("after the switch from {backend}"))?;
        answers(bed)?;
    }
    // The agent of mode userspace carries connections itself. They end with the agent, and all
    // other connections survive.
    for backend in [Backend::Nftables, Backend::IptablesNft] {
        restart(bed, &by(Backend::Userspace))?;
        check(&mut held).context("after the switch to userspace")?;
        let mut carried = open(bed)?;
        restart(bed, &by(backend))?;
        check_tables(bed, backend == Backend::Nftables)?;
        check(&mut held).with_context(|| format!("after the switch from userspace to {backend}"))?;
        answers(bed)?;
        end_of_carried(Backend::Userspace, &mut carried)?;
        held.extend(open(bed)?);
    }
    restart(bed, &by(Backend::IptablesLegacy))?;
    check(&mut held).context("after the switch between the variants of iptables")?;
    answers(bed)?;
    bed.stop_agent("node-a")?;
    bed.clean_up("node-a")?;
    let mut held = from_kube_proxy(bed, &by(Backend::IptablesNft), false)?;
    check(&mut held)
}

/// The node switches from the mode `from` to mode ipvs and back. Connections of both modes survive,
/// except those that mode userspace carries.
///
/// Needs machines with [`super::lifecycle::some_services`] for the backend [`Backend::Ipvs`], a
/// kernel with IPVS and with what `from` needs, and no running programs.
pub fn to_ipvs_and_back(bed: &Testbed, from: Backend) -> Result<()> {
    let arguments = ["--takeover-limit=600s", "--userspace-drain-limit=3s"];
    let by = |backend| AgentSetup { backend: Some(backend), ..AgentSetup::with(&arguments) };
    let switch = |to: Backend| -> Result<()> {
        let running = upgrade(bed, &by(to))?.backend;
        ensure!((running == "ipvs") == (to == Backend::Ipvs), "the agent runs mode {running}");
        if from.uses_nftables() {
            check_tables(bed, to == from)?;
        }
        Ok(())
    };
    bed.start_programs("node-a", &by(from))?;
    let mut of_first_mode = open(bed)?;
    switch(Backend::Ipvs)?;
    end_of_carried(from, &mut of_first_mode)?;
    check(&mut of_first_mode).context("after the switch to ipvs")?;
    answers(bed)?;
    let mut of_ipvs = open(bed)?;
    switch(from)?;
    check(&mut of_ipvs).with_context(|| format!("of ipvs, after the switch to {from}"))?;
    check(&mut of_first_mode).with_context(|| format!("after the switch to {from}"))?;
    check(&mut open(bed)?)
}

/// Mode `auto` chooses nftables, and chooses iptables where a chain drops packets that no rule
/// accepts. The page `/status` gives the reason.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn auto_chooses_a_mode_that_changes_no_outcome(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    let setup = AgentSetup::with(&["--proxy-mode=auto"]);
    let chooses = |backend: &str, reason: &str| -> Result<()> {
        ensure!(restart(bed, &setup)?.backend == backend, "the backend is not {backend}");
        let status = page::of_agent(node, "/status")?;
        ensure!(status.contains(reason), "the page /status does not contain {reason:?}: {status}");
        answers(bed)
    };
    let lock = bed.machines().xtables_lock("node-a");
    let rule = |family, arguments: &[&str]| iptables::run(node, Variant::Legacy, family, &lock, arguments);
    bed.start_programs("node-a", &setup)?;
    chooses("nftables", "all expressions that mode nftables needs")?;
    let mut held = open(bed)?;
    node.tool("nft", &["add table inet firewall"])?;
    let chain = "add chain inet firewall forward { type filter hook forward priority 0 ; policy drop ; }";
    node.tool("nft", &[chain])?;
    node.tool("nft", &["add rule inet firewall forward accept"])?;
    chooses("iptables-nft", "the chain forward of table inet firewall drops packets")?;
    node.tool("nft", &["delete table inet firewall"])?;
    for family in Family::BOTH {
        rule(family, &["-P", "FORWARD", "DROP"])?;
        rule(family, &["-A", "FORWARD", "-j", "ACCEPT"])?;
    }
    chooses("iptables-nft", "the chain FORWARD of table filter (IPv4) drops packets")?;
    for family in Family::BOTH {
        rule(family, &["-P", "FORWARD", "ACCEPT"])?;
    }
    chooses("nftables", "no firewall needs accept rules")?;
    check(&mut held)
}
