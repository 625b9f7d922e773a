//! The two forms of mode userspace: behind rules of nftables, and behind rules of iptables.

use anyhow::{Result, ensure};

use super::changes::eventually;
use super::from_kube_proxy::targets;
use super::ipvs::restart;
use super::live::while_asking;
use super::run::shares;
use super::userspace::until_carried;
use crate::testbed::iptables::{self, Variant};
use crate::testbed::{AgentSetup, Backend, Family, Testbed, page};

/// Waits until the kernel of node-a has what `backend` needs, and nothing of another backend.
fn expect_kernel(bed: &Testbed, backend: Option<Backend>) -> Result<()> {
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    let (has_rules, has_gate) = match backend {
        Some(Backend::UserspaceIptables) => (true, true),
        Some(backend) => (!backend.uses_nftables(), false),
        None => (false, false),
    };
    let has_route = backend.is_some_and(Backend::carries_tcp);
    let has_table = backend.is_some_and(Backend::uses_nftables);
    eventually(|| {
        let rules = iptables::save_all(node, &lock)?;
        ensure!(rules.contains("KUBE-") == has_rules, "the rules of iptables are\n{rules}");
        ensure!(rules.contains("KUBE-GATE-") == has_gate, "the rules of iptables are\n{rules}");
        let sets = node.tool("ipset", &["list", "-n"])?;
        ensure!(sets.contains("-GATE") == has_gate, "the sets are\n{sets}");
        for (family, address) in [("-4", "169.254.77.1"), ("-6", "fd68:6561:6467::1")] {
            let routes = node.tool("ip", &[family, "route", "show", "table", "local"])?;
            ensure!(routes.contains(address) == has_route, "the local routes are\n{routes}");
        }
        let tables = node.tool("nft", &["list", "tables"])?;
        ensure!(tables.contains(" headgate") == has_table, "the tables are\n{tables}");
        Ok(())
    })
}

/// Makes a firewall of node-a drop new connections to the node.
fn deny_input(bed: &Testbed) -> Result<()> {
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    for family in Family::BOTH {
        let rule = |arguments: &[&str]| iptables::run(node, Variant::Legacy, family, &lock, arguments);
        rule(&["-A", "INPUT", "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"])?;
        rule(&["-A", "INPUT", "-i", "lo", "-j", "ACCEPT"])?;
        if family == Family::V6 {
            rule(&["-A", "INPUT", "-p", "ipv6-icmp", "-j", "ACCEPT"])?;
        }
        rule(&["-P", "INPUT", "DROP"])?;
    }
    Ok(())
}

/// node-a switches between both forms and mode iptables, and at last a clean-up removes everything.
/// No new connection fails, and no form leaves anything.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn forms_switch_without_losing_connections(bed: &Testbed) -> Result<()> {
    let setup = |backend| AgentSetup { backend: Some(backend), ..AgentSetup::with(&["--userspace-drain-limit=1s"]) };
    let start = |backend: Backend| -> Result<()> {
        bed.start_programmed("node-a", &setup(backend))?;
        expect_kernel(bed, Some(backend))?;
        if backend.carries_tcp() { until_carried(bed) } else { Ok(()) }
    };
    bed.start_control_plane()?;
    start(Backend::UserspaceIptables)?;
    let written = restart(bed, &setup(Backend::UserspaceIptables))?.objects_written;
    ensure!(written == 0, "a restart wrote {written} objects, as if other rules were wanted");
    let asked = while_asking(bed, &targets(bed, false)?, || {
        let backends =
            [Backend::Userspace, Backend::UserspaceIptables, Backend::IptablesLegacy, Backend::UserspaceIptables];
        backends.into_iter().try_for_each(|backend| {
            bed.stop_agent("node-a")?;
            start(backend)
        })
    })?;
    ensure!(shares(&asked).len() == 2, "{:?} answered", shares(&asked));
    deny_input(bed)?;
    until_carried(bed)?;
    bed.stop_agent("node-a")?;
    bed.clean_up("node-a")?;
    expect_kernel(bed, None)?;
    // A second clean-up has nothing to remove.
    bed.clean_up("node-a")?;
    expect_kernel(bed, None)
}

/// On a kernel without nftables, mode userspace uses rules of iptables, and the page `/status` says
/// why.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs, and a kernel
/// without nftables.
pub fn iptables_where_nftables_is_missing(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &AgentSetup::with(&["--proxy-mode=userspace"]))?;
    until_carried(bed)?;
    let node = bed.machines().machine("node-a")?;
    let status = page::of_agent(node, "/status")?;
    for part in ["userspace-iptables-legacy", "mode userspace uses rules of iptables on this node"] {
        ensure!(status.contains(part), "the page /status does not contain {part:?}: {status}");
    }
    Ok(())
}
