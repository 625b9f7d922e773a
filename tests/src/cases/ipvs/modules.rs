//! Missing kernel modules: how the agent works without them, and how it reports them.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::super::case::{SourceAddress, ask};
use super::super::changes::{eventually, within};
use super::super::live::{targets, while_asking};
use super::super::run::run;
use super::{CHANGED_BY_HAND, agent};
use crate::testbed::manifests::{Service, Via};
use crate::testbed::plan::{self, CONTROL, INSPECT_PORT};
use crate::testbed::process::program;
use crate::testbed::{AgentSetup, Backend, Family, Outcome, Request, Testbed, Transport, page};
use crate::uml::modules::WithoutModules;

use SourceAddress::Kept;
use Via::{ClusterIp, LoadBalancerIp};

/// The kernel lacks modules of mode ipvs. The agent uses iptables, and reports the missing modules
/// in its status, its metrics and to the control plane.
///
/// Needs machines with [`super::super::lifecycle::some_services`] and no running programs.
pub fn falls_back_to_iptables(bed: &Testbed) -> Result<()> {
    // Load the modules that iptables needs, because `WithoutModules` prevents the kernel from
    // loading them later.
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
    bed.start_programs("node-a", &AgentSetup::with(&["--ipvs-scheduler", "wrr"]))?;
    let info = agent(bed, "node-a")?;
    ensure!(info.backend == "iptables-legacy", "the backend is {}", info.backend);
    let reasons = info.degraded.join("\n");
    for part in ["mode ipvs was asked for", "modprobe ip_vs_wrr", "modprobe dummy"] {
        ensure!(reasons.contains(part), "{part:?} is not in the reasons of degradation: {reasons:?}");
    }
    run(bed, &[ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept)])?;
    expect_page(bed, "/proxyMode", "iptables")?;
    expect_page(bed, "/metrics", "headgate_agent_degraded_modes 1")?;
    expect_page(bed, "/status", "modprobe dummy")
}

/// An agent that cannot set kernel parameters, as in a container that is not privileged, uses
/// iptables and reports the reason. If a run of the agent's program with `--init-only` has set the
/// parameters before, the agent uses IPVS.
///
/// Needs machines with [`super::super::lifecycle::some_services`] and no running programs.
pub fn kernel_parameters_can_be_set_by_init_only(bed: &Testbed) -> Result<()> {
    let arguments = AgentSetup::with(&["--ipvs-strict-arp"]);
    let restricted = AgentSetup { read_only_parameters: true, ..arguments.clone() };
    let answers = || run(bed, &[ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept)]);
    bed.start_programs("node-a", &restricted)?;
    let info = agent(bed, "node-a")?;
    let reasons = info.degraded.join("\n");
    ensure!(info.backend == "iptables-legacy", "the backend is {}: {reasons}", info.backend);
    for part in ["mode ipvs was asked for", "/proc/sys/net/ipv4/vs/conntrack", "--init-only"] {
        ensure!(reasons.contains(part), "{part:?} is not in the reasons of degradation: {reasons:?}");
    }
    answers()?;

    bed.stop_agent("node-a")?;
    bed.set_parameters("node-a", &arguments)?;
    bed.start_agent_with("node-a", &restricted)?;
    eventually(|| {
        let info = agent(bed, "node-a")?;
        let reasons = info.degraded.join("\n");
        ensure!(
            info.backend == "ipvs" && !reasons.contains("/proc/sys/net/ipv4/"),
            "{} is degraded: {reasons}",
            info.backend
        );
        Ok(())
    })?;
    bed.wait_programmed()?;
    answers()
}

/// Checks that a page of node-a's metrics port contains `expected`.
fn expect_page(bed: &Testbed, page: &str, expected: &str) -> Result<()> {
    let body = page::of_agent(bed.machines().machine("node-a")?, page)?;
    ensure!(body.contains(expected), "{expected:?} is not in {page}:\n{body}");
    Ok(())
}

fn asking_for(scheduler: &str) -> Value {
    json!({"metadata": {"annotations": {"headgate.io/scheduler": scheduler}}})
}

/// The scheduler of a service in the kernel of node-a, and its number of destinations.
fn scheduler(bed: &Testbed, service: &str) -> Result<(String, usize)> {
    let server = bed.address(service, ClusterIp, Family::V4, "tcp")?;
    let listed = bed.machines().machine("node-a")?.tool("ipvsadm", &["-Sn"])?;
    let made = listed.lines().find_map(|line| line.strip_prefix(&format!("-A -t {server} -s ")));
    let made = made.with_context(|| format!("no virtual server {server}:\n{listed}"))?;
    let destinations = listed.lines().filter(|line| line.starts_with(&format!("-a -t {server} "))).count();
    Ok((made.split(' ').next().unwrap_or_default().to_owned(), destinations))
}

/// Services ask for a scheduler whose module is missing. These Services get the cluster's
/// scheduler, and the agent reports the missing module. When the module can be loaded again, the
/// Services get the scheduler that they ask for.
///
/// Needs a running cluster with [`super::super::lifecycle::some_services`].
pub fn a_missing_scheduler_is_replaced_until_its_module_loads(bed: &Testbed) -> Result<()> {
    let answers = || {
        run(
            bed,
            &[
                ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept),
                ask("a3", "hashed", ClusterIp).ports(&["tcp", "udp"]).answered(&["a2", "b2"], Kept),
            ],
        )
    };
    bed.update_service("steady", |service| service.patch = Some(|_| asking_for("wrr")))?;
    ensure!(scheduler(bed, "steady")? == ("wrr".to_owned(), 2), "steady has {:?}", scheduler(bed, "steady")?);

    let modules = WithoutModules::new(&["ip_vs_mh"])?;
    while_asking(bed, &targets(bed, "steady")?, || {
        bed.update(|manifests| {
            manifests.service_mut("steady")?.patch = Some(|_| asking_for("mh"));
            let mut hashed = Service::new("hashed", &["a2", "b2"]);
            hashed.patch = Some(|_| asking_for("mh"));
            manifests.add(hashed)
        })?;
        for service in ["steady", "hashed"] {
            let found = scheduler(bed, service)?;
            ensure!(found == ("rr".to_owned(), 2), "{service} has {found:?}");
        }
        answers()
    })?;
    let reasons = || -> Result<String> { Ok(agent(bed, "node-a")?.degraded.join("\n")) };
    eventually(|| {
        let reasons = reasons()?;
        for part in ["modprobe ip_vs_mh", "get rr: testbed/hashed, testbed/steady"] {
            ensure!(reasons.contains(part), "{part:?} is not in the reasons of degradation: {reasons:?}");
        }
        Ok(())
    })?;
    ensure!(agent(bed, "node-a")?.rejections.is_empty(), "the agent rejects a service");
    expect_page(bed, "/metrics", "headgate_agent_degraded_modes 1")?;
    expect_page(bed, "/status", "modprobe ip_vs_mh")?;
    let replica = format!(
        "http://{}:{INSPECT_PORT}",
        plan::address(CONTROL).context("the plan has no address for the control plane")?.v4
    );
    let headgatectl = program("headgatectl")?;
    let headgatectl = headgatectl.to_str().context("the program's path is not UTF-8")?;
    let shown = bed.machines().machine(CONTROL)?.tool(headgatectl, &["--server", &replica, "agents"])?;
    ensure!(shown.contains("modprobe ip_vs_mh"), "headgatectl does not show the missing module:\n{shown}");

    drop(modules);
    within(CHANGED_BY_HAND, || {
        for service in ["steady", "hashed"] {
            let found = scheduler(bed, service)?;
            ensure!(found == ("mh".to_owned(), 2), "{service} has {found:?}");
        }
        let reasons = reasons()?;
        ensure!(reasons.is_empty(), "the agent still reports: {reasons}");
        Ok(())
    })?;
    answers()
}

/// iptables cannot match SCTP. In both modes the agent leaves out rules that match SCTP, and
/// reports the missing module. All other rules work. When the module can be loaded again, SCTP
/// works.
///
/// Needs machines with [`super::super::lifecycle::some_services`] and no running programs.
pub fn rules_for_sctp_are_left_out_if_iptables_cannot_match_sctp(bed: &Testbed) -> Result<()> {
    bed.write(|manifests| {
        let mut elsewhere = Service::new("elsewhere", &["b1"]);
        elsewhere.external_local = true;
        manifests.add(elsewhere)
    })?;
    let expect_degraded = |expected: &[&str]| {
        eventually(|| {
            let agent = agent(bed, "node-a")?;
            let reasons = agent.degraded.join("\n");
            ensure!(
                expected.iter().all(|part| reasons.contains(part)),
                "{expected:?} is not in the reasons of degradation: {reasons:?}"
            );
            ensure!(reasons.is_empty() == expected.is_empty(), "the agent still reports: {reasons:?}");
            ensure!(agent.rejections.is_empty(), "the agent rejects services: {:?}", agent.rejections);
            Ok(())
        })
    };
    let others = [
        ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept),
        // The node has no endpoint, but a pod reaches all endpoints.
        ask("a3", "elsewhere", LoadBalancerIp).ports(&["tcp", "udp"]).answered(&["b1"], Kept),
    ];
    let of_sctp = [
        ask("a3", "steady", ClusterIp).ports(&["sctp"]).answered(&["a1", "b1"], Kept),
        ask("a3", "elsewhere", LoadBalancerIp).ports(&["sctp"]).answered(&["b1"], Kept),
    ];

    let modules = WithoutModules::new(&["xt_sctp"])?;
    bed.start_programs("node-a", &AgentSetup::default())?;
    expect_degraded(&["modprobe xt_sctp", "externalTrafficPolicy Local"])?;
    run(bed, &others)?;
    // Virtual servers do not need iptables to match SCTP.
    run(bed, &of_sctp[..1])?;

    // The agent would report the closed connections of IPVS until their timeouts.
    let at_once = AgentSetup::with(&["--takeover-limit=0s"]);
    super::restart(bed, &AgentSetup { backend: Some(Backend::IptablesLegacy), ..at_once })?;
    expect_degraded(&["modprobe xt_sctp", "ports of SCTP do not work"])?;
    // The agent reports the missing module before it has programmed everything.
    let without = bed.address("steady", ClusterIp, Family::V4, "sctp")?;
    eventually(|| {
        let outcome = bed.machines().ask("a3", &Request::new(Transport::Sctp, without).expecting_silence())?;
        ensure!(!matches!(outcome, Outcome::Answered(_)), "SCTP is {outcome}, although no rule can match it");
        Ok(())
    })?;
    run(bed, &others)?;

    drop(modules);
    within(CHANGED_BY_HAND, || expect_degraded(&[]))?;
    // The agent stops reporting the module before it has programmed everything.
    eventually(|| run(bed, &of_sctp))?;
    run(bed, &others)
}
