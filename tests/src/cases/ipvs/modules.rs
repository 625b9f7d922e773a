//! Modules that the kernel lacks: what the agent does without them, and whom it tells.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::super::case::{Source, ask};
use super::super::run::run;
use super::{agent, tool};
use crate::testbed::manifests::Via;
use crate::testbed::{AgentSetup, Testbed};

use Source::Kept;
use Via::ClusterIp;

/// The kernel lacks what mode ipvs needs: iptables does the work, and everybody is told what is missing.
///
/// On machines with [`super::super::lifecycle::some_services`] on which nothing runs yet.
pub fn falls_back_to_iptables(bed: &Testbed) -> Result<()> {
    // What iptables needs and IPVS does not: nothing can be loaded from here on.
    let needed = [
        "xt_nat",
        "xt_sctp",
        "xt_tcpudp",
        "xt_statistic",
        "xt_recent",
        "xt_conntrack",
        "xt_comment",
        "xt_mark",
        "xt_addrtype",
        "ipt_REJECT",
        "ip6t_REJECT",
    ];
    let status =
        Command::new("modprobe").arg("-a").args(needed).status().context("running modprobe (Debian package kmod)")?;
    ensure!(status.success(), "modprobe -a {needed:?}: {status}");
    let _modules = WithoutModules::new(&["ip_vs_wrr", "dummy"])?;
    bed.start_control_plane()?;
    bed.start_agent_with("node-a", &AgentSetup::with(&["--ipvs-scheduler", "wrr"]))?;
    bed.wait_programmed()?;
    let info = agent(bed, "node-a")?;
    ensure!(info.backend == "iptables-legacy", "the backend is {}", info.backend);
    let told = info.degraded.join("\n");
    for part in ["mode ipvs was asked for", "modprobe ip_vs_wrr", "modprobe dummy"] {
        ensure!(told.contains(part), "{part:?} is not among what is degraded: {told:?}");
    }
    run(bed, &[ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept)])?;
    expect_page(bed, "/proxyMode", "iptables")?;
    expect_page(bed, "/metrics", "headgate_agent_degraded_modes 1")?;
    expect_page(bed, "/status", "modprobe dummy")
}

/// A page of the metrics port of node-a has this in it.
fn expect_page(bed: &Testbed, page: &str, expected: &str) -> Result<()> {
    let url = format!("http://127.0.0.1:10249{page}");
    let body = tool(bed.machines().machine("node-a")?, "curl", &["-sS", "--max-time", "10", &url])?;
    ensure!(body.contains(expected), "{expected:?} is not in {page}:\n{body}");
    Ok(())
}

/// A kernel without some modules, which cannot load any, until dropped.
struct WithoutModules<'a> {
    modules: &'a [&'a str],
    loader: String,
}

const LOADER: &str = "/proc/sys/kernel/modprobe";

impl<'a> WithoutModules<'a> {
    fn new(modules: &'a [&'a str]) -> Result<Self> {
        let loader = std::fs::read_to_string(LOADER)?.trim().to_owned();
        let without = Self { modules, loader };
        for module in modules {
            let status = Command::new("rmmod").arg(module).status().context("running rmmod (Debian package kmod)")?;
            ensure!(status.success(), "rmmod {module}: {status}");
        }
        std::fs::write(LOADER, "/bin/false").context("turning the loading of modules off")?;
        Ok(without)
    }
}

impl Drop for WithoutModules<'_> {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(LOADER, &self.loader) {
            eprintln!("warning: {LOADER} stays turned off: {error}");
        }
        let loaded = Command::new(&self.loader).arg("-a").args(self.modules).status();
        if !loaded.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("warning: {:?} stay away: {loaded:?}", self.modules);
        }
    }
}
