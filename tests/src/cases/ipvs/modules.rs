//! Modules that the kernel lacks: what the agent does without them, and whom it tells.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::super::case::{SourceAddress, ask};
use super::super::changes::{eventually, within};
use super::super::live::{targets, while_asking};
use super::super::run::run;
use super::{CHANGED_BY_HAND, agent, tool};
use crate::testbed::manifests::{Service, Via};
use crate::testbed::plan::{self, CONTROL, CONTROL_PORT};
use crate::testbed::process::program;
use crate::testbed::{AgentSetup, Backend, Family, Outcome, Request, Testbed, Transport};
use crate::uml::modules::WithoutModules;

use SourceAddress::Kept;
use Via::{ClusterIp, LoadBalancerIp};

/// The kernel lacks what mode ipvs needs: iptables does the work, and everybody is told what is
/// missing.
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

/// An agent that may not set kernel parameters, as in a container that is not privileged, runs
/// iptables and says why, unless they have been set before by the same program with `--init-only`.
///
/// On machines with [`super::super::lifecycle::some_services`] on which nothing runs yet.
pub fn parameters_may_be_set_beforehand(bed: &Testbed) -> Result<()> {
    let arguments = AgentSetup::with(&["--ipvs-strict-arp"]);
    let restricted = AgentSetup { read_only_parameters: true, ..arguments.clone() };
    let answers = || run(bed, &[ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept)]);
    bed.start_control_plane()?;
    bed.start_agent_with("node-a", &restricted)?;
    bed.wait_programmed()?;
    let info = agent(bed, "node-a")?;
    let told = info.degraded.join("\n");
    ensure!(info.backend == "iptables-legacy", "the backend is {}: {told}", info.backend);
    for part in ["mode ipvs was asked for", "/proc/sys/net/ipv4/vs/conntrack", "--init-only"] {
        ensure!(told.contains(part), "{part:?} is not among what is degraded: {told:?}");
    }
    answers()?;

    bed.stop_agent("node-a")?;
    bed.set_parameters("node-a", &arguments)?;
    bed.start_agent_with("node-a", &restricted)?;
    eventually(|| {
        let info = agent(bed, "node-a")?;
        let told = info.degraded.join("\n");
        ensure!(
            info.backend == "ipvs" && !told.contains("/proc/sys/net/ipv4/"),
            "{} is degraded: {told}",
            info.backend
        );
        Ok(())
    })?;
    bed.wait_programmed()?;
    answers()
}

/// A page of the metrics port of node-a has this in it.
fn expect_page(bed: &Testbed, page: &str, expected: &str) -> Result<()> {
    let url = format!("http://127.0.0.1:10249{page}");
    let body = tool(bed.machines().machine("node-a")?, "curl", &["-sS", "--max-time", "10", &url])?;
    ensure!(body.contains(expected), "{expected:?} is not in {page}:\n{body}");
    Ok(())
}

fn asking_for(scheduler: &str) -> Value {
    json!({"metadata": {"annotations": {"headgate.io/scheduler": scheduler}}})
}

/// The scheduler that the kernel of node-a has for a service, and the number of destinations.
fn scheduler(bed: &Testbed, service: &str) -> Result<(String, usize)> {
    let server = bed.address(service, ClusterIp, Family::V4, "tcp")?;
    let listed = tool(bed.machines().machine("node-a")?, "ipvsadm", &["-Sn"])?;
    let made = listed.lines().find_map(|line| line.strip_prefix(&format!("-A -t {server} -s ")));
    let made = made.with_context(|| format!("no virtual server {server}:\n{listed}"))?;
    let destinations = listed.lines().filter(|line| line.starts_with(&format!("-a -t {server} "))).count();
    Ok((made.split(' ').next().unwrap_or_default().to_owned(), destinations))
}

/// Services ask for a scheduler that the kernel has not got any more. They are served as a whole
/// nevertheless, new ones by the cluster's, and everybody is told; when the module can be loaded
/// again, they get what they asked for.
///
/// On a running cluster with [`super::super::lifecycle::some_services`].
pub fn a_missing_scheduler_is_made_up_for(bed: &Testbed) -> Result<()> {
    let answers = || {
        run(
            bed,
            &[
                ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept),
                ask("a3", "hashed", ClusterIp).ports(&["tcp", "udp"]).answered(&["a2", "b2"], Kept),
            ],
        )
    };
    bed.update(|manifests| {
        manifests.service_mut("steady")?.patch = Some(|_| asking_for("wrr"));
        Ok(())
    })?;
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
    let told = || -> Result<String> { Ok(agent(bed, "node-a")?.degraded.join("\n")) };
    eventually(|| {
        let told = told()?;
        for part in ["modprobe ip_vs_mh", "get rr: testbed/hashed, testbed/steady"] {
            ensure!(told.contains(part), "{part:?} is not among what is degraded: {told:?}");
        }
        Ok(())
    })?;
    ensure!(agent(bed, "node-a")?.rejections.is_empty(), "a service is told to be refused");
    expect_page(bed, "/metrics", "headgate_agent_degraded_modes 1")?;
    expect_page(bed, "/status", "modprobe ip_vs_mh")?;
    let replica = format!("http://{}:{CONTROL_PORT}", plan::address(CONTROL).context("no control plane")?.v4);
    let headgatectl = program("headgatectl")?;
    let headgatectl = headgatectl.to_str().context("the program's path is not UTF-8")?;
    let shown = tool(bed.machines().machine(CONTROL)?, headgatectl, &["--server", &replica, "agents"])?;
    ensure!(shown.contains("modprobe ip_vs_mh"), "headgatectl does not show it:\n{shown}");

    drop(modules);
    within(CHANGED_BY_HAND, || {
        for service in ["steady", "hashed"] {
            let found = scheduler(bed, service)?;
            ensure!(found == ("mh".to_owned(), 2), "{service} has {found:?}");
        }
        let told = told()?;
        ensure!(told.is_empty(), "still told: {told}");
        Ok(())
    })?;
    answers()
}

/// iptables cannot match SCTP: what needs it is left out and told, and everything else works, in
/// either mode. When the module can be loaded again, it works as well.
///
/// On machines with [`super::super::lifecycle::some_services`] on which nothing runs yet.
pub fn sctp_that_cannot_be_matched_is_left_out(bed: &Testbed) -> Result<()> {
    bed.write(|manifests| {
        let mut elsewhere = Service::new("elsewhere", &["b1"]);
        elsewhere.external_local = true;
        manifests.add(elsewhere)
    })?;
    let told = |expected: &[&str]| {
        eventually(|| {
            let agent = agent(bed, "node-a")?;
            let told = agent.degraded.join("\n");
            ensure!(expected.iter().all(|part| told.contains(part)), "{expected:?} is not what is degraded: {told:?}");
            ensure!(told.is_empty() == expected.is_empty(), "still told: {told:?}");
            ensure!(agent.rejections.is_empty(), "services are refused: {:?}", agent.rejections);
            Ok(())
        })
    };
    let others = [
        ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept),
        // By the short way, since no endpoint is here.
        ask("a3", "elsewhere", LoadBalancerIp).ports(&["tcp", "udp"]).answered(&["b1"], Kept),
    ];
    let of_sctp = [
        ask("a3", "steady", ClusterIp).ports(&["sctp"]).answered(&["a1", "b1"], Kept),
        ask("a3", "elsewhere", LoadBalancerIp).ports(&["sctp"]).answered(&["b1"], Kept),
    ];

    let modules = WithoutModules::new(&["xt_sctp"])?;
    bed.start_control_plane()?;
    bed.start_agent("node-a")?;
    bed.wait_programmed()?;
    told(&["modprobe xt_sctp", "externalTrafficPolicy Local"])?;
    run(bed, &others)?;
    // Virtual servers need no match.
    run(bed, &of_sctp[..1])?;

    super::restart(bed, &AgentSetup { backend: Some(Backend::IptablesLegacy), ..AgentSetup::default() })?;
    told(&["modprobe xt_sctp", "ports of SCTP do not work"])?;
    // It has told that before everything is programmed without.
    let without = bed.address("steady", ClusterIp, Family::V4, "sctp")?;
    eventually(|| {
        let outcome = bed.machines().ask("a3", &Request::new(Transport::Sctp, without).expecting_silence())?;
        ensure!(!matches!(outcome, Outcome::Answered(_)), "SCTP is {outcome}, though nothing can match it");
        Ok(())
    })?;
    run(bed, &others)?;

    drop(modules);
    within(CHANGED_BY_HAND, || told(&[]))?;
    // That it is there is known before everything is programmed with it.
    eventually(|| run(bed, &of_sctp))?;
    run(bed, &others)
}
