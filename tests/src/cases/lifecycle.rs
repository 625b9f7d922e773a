//! Programs that stop, crash and start again; rules of other programs; `--cleanup`.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::live::{self, expect_servers, targets, while_asking};
use super::run::shares;
use super::write_log::WriteLog;
use crate::testbed::client::HeldConnection;
use crate::testbed::iptables::{self, Variant};
use crate::testbed::manifests::{Service, ready};
use crate::testbed::plan::{self, NODES};
use crate::testbed::{AgentInfo, AgentSetup, Backend, Family, Manifests, Testbed, page};

/// Longest wait until agents reconnect. Agents usually reconnect after a back-off of some seconds.
const RETURN_TIMEOUT: Duration = Duration::from_secs(180);

/// The services of this module's scenarios.
pub fn some_services() -> Result<Manifests> {
    let mut manifests = Manifests::default();
    manifests.add(Service::new("steady", &["a1", "b1"]))?;
    manifests.add(Service::new("other", &["c1"]))?;
    manifests.add(Service::new("empty", &[]))?;
    Ok(manifests)
}

fn replace_steady(bed: &Testbed, endpoints: &[&str]) -> Result<()> {
    bed.set_endpoints("steady", endpoints)
}

/// The control plane stops, and forwarding continues. When the control plane starts again with
/// unchanged manifests, the agents resume: they receive no resource and write nothing to their
/// kernels. When the control plane starts again with changed manifests, the agents program the
/// change.
///
/// Needs machines with [`some_services`] and no running programs.
pub fn control_plane_outage(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    let writes = WriteLog::create(bed.machines().folder())?;
    for node in &NODES {
        bed.start_agent_with(node.name, &AgentSetup { tools: Some(writes.tools.clone()), ..AgentSetup::default() })?;
    }
    bed.wait_programmed()?;
    expect_servers(bed, "steady", &["a1", "b1"])?;
    let written = || written(bed, &writes);
    let before = written()?;
    ensure!(before > 0, "the log of kernel writes is empty although the agents have started");
    let mut held = live::hold_connections(bed, "steady")?;

    let answers = while_asking(bed, &targets(bed, "steady")?, || {
        bed.stop_control_plane()?;
        expect_servers(bed, "steady", &["a1", "b1"])?;
        bed.start_control_plane()?;
        let agents = wait_for_agents(bed)?;
        for agent in &agents {
            let AgentInfo { node, resume, resumed_resources, .. } = agent;
            ensure!(resume == "digests", "{node} resumed with {resume:?} after a restart of the control plane");
            ensure!(
                *resumed_resources == 0,
                "{node} was sent {resumed_resources} resources although nothing had changed"
            );
        }
        let after = written()?;
        ensure!(after == before, "agents wrote to the kernel {} times although nothing had changed", after - before);
        Ok(())
    })?;
    ensure!(shares(&answers).len() == 2, "{:?} answered during the outage", shares(&answers));

    bed.stop_control_plane()?;
    bed.write_endpoints("steady", &["a2", "c1"])?;
    expect_servers(bed, "steady", &["a1", "b1"])?;
    bed.start_control_plane()?;
    bed.wait_programmed()?;
    expect_servers(bed, "steady", &["a2", "c1"])?;
    ensure!(written()? > before, "a change reached the kernel, but the log has no write");
    held.iter_mut().try_for_each(HeldConnection::check).context("after outages of the control plane")
}

/// Agents are killed, and forwarding continues. A restarted agent programs the changes that it has
/// missed, and removes the rules of a removed Service.
///
/// Needs a running cluster with [`some_services`].
pub fn agent_crash(bed: &Testbed) -> Result<()> {
    let mut held = live::hold_connections(bed, "steady")?;
    let answers = while_asking(bed, &targets(bed, "steady")?, || {
        for node in &NODES {
            bed.kill_agent(node.name)?;
        }
        expect_servers(bed, "steady", &["a1", "b1"])?;
        for node in &NODES {
            bed.start_agent(node.name)?;
        }
        bed.wait_programmed()?;
        expect_servers(bed, "steady", &["a1", "b1"])?;
        bed.kill_agent("node-a")?;
        bed.update(|manifests| {
            manifests.service_mut("steady")?.endpoints = ready(&["a1", "b2"]);
            manifests.remove("other")?;
            manifests.add(Service::new("newcomer", &["b1"]))
        })?;
        bed.start_programmed("node-a", &AgentSetup::default())
    })?;
    ensure!(shares(&answers).contains_key("a1"), "{:?} answered while the agents were killed", shares(&answers));
    held.iter_mut().try_for_each(HeldConnection::check).context("after agents were killed")?;
    expect_servers(bed, "steady", &["a1", "b2"])?;
    expect_servers(bed, "newcomer", &["b1"])?;
    let rules = iptables::save_all(bed.machines().machine("node-a")?, &bed.machines().xtables_lock("node-a"))?;
    let gone = translation_to("c1")?;
    ensure!(!rules.contains(&gone), "the rule `{gone}` of a removed service still exists:\n{rules}");
    Ok(())
}

/// Established connections survive a stop and start of the agents, the removal of their endpoint,
/// and a start of the agents without the state on disk. They also survive the removal of another
/// endpoint while the agents are down. An agent of another version cannot read the state, so it
/// also starts without the state.
///
/// Needs a running cluster with [`some_services`].
pub fn connections_survive(bed: &Testbed) -> Result<()> {
    // The nodes that forward the connections.
    let restarted = ["node-a", "node-b"];
    let mut held = live::hold_connections(bed, "steady")?;
    let mut check = |after: &str| {
        held.iter_mut().try_for_each(HeldConnection::check).with_context(|| format!("a held connection, after {after}"))
    };
    for node in restarted {
        bed.stop_agent(node)?;
        bed.start_agent(node)?;
    }
    bed.wait_programmed()?;
    check("a stop and start of the agents")?;

    replace_steady(bed, &["a1"])?;
    check("the removal of an endpoint")?;
    expect_servers(bed, "steady", &["a1"])?;
    for node in restarted {
        bed.kill_agent(node)?;
    }
    bed.write_endpoints("steady", &["a2"])?;
    for node in restarted {
        bed.start_agent(node)?;
    }
    bed.wait_programmed()?;
    check("the removal of the other endpoint while the agents were down")?;
    expect_servers(bed, "steady", &["a2"])?;

    let empty = bed.machines().folder().join("state-of-another-version");
    for node in restarted {
        bed.stop_agent(node)?;
        let folder = empty.join(node);
        let folder = folder.to_str().context("the folder's name is not UTF-8")?;
        bed.start_agent_with(node, &AgentSetup::with(&["--state-dir", folder]))?;
    }
    bed.wait_programmed()?;
    check("a start of the agents without their state")?;
    expect_servers(bed, "steady", &["a2"])
}

/// The text that every IPv4 rule contains which translates a destination to the pod's address.
fn translation_to(pod: &str) -> Result<String> {
    let address = plan::address(pod).with_context(|| format!("no pod called {pod}"))?;
    Ok(format!("--to-destination {}:", address.v4))
}

/// The agent does not change or move rules and chains of other programs. After `--cleanup` all
/// rules are as they were before the agent started.
///
/// Needs machines with [`some_services`] and no running programs.
pub fn foreign_rules_and_cleanup(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    let lock = bed.machines().xtables_lock("node-a");
    for variant in Variant::BOTH {
        for family in Family::BOTH {
            for rule in foreign_rules(family) {
                iptables::run(node, variant, family, &lock, &rule.split_whitespace().collect::<Vec<_>>())?;
            }
        }
    }
    let before = iptables::save_all(node, &lock)?;
    ensure!(before.matches("FOREIGN").count() > 20, "foreign rules are missing:\n{before}");

    bed.start_programs("node-a", &AgentSetup::default())?;
    let programmed = iptables::save_all(node, &lock)?;
    ensure!(programmed.contains("KUBE-SERVICES"), "the agent's rules are missing:\n{programmed}");
    expect_foreign(&before, &programmed)?;
    replace_steady(bed, &["a2"])?;
    bed.update(|manifests| manifests.remove("other").map(drop))?;
    expect_foreign(&before, &iptables::save_all(node, &lock)?)?;
    bed.kill_agent("node-a")?;
    bed.start_programmed("node-a", &AgentSetup::default())?;
    replace_steady(bed, &["a1", "b1"])?;
    expect_foreign(&before, &iptables::save_all(node, &lock)?)?;

    bed.stop_agent("node-a")?;
    let stopped = iptables::save_all(node, &lock)?;
    ensure!(
        stopped.contains(&translation_to("a1")?),
        "the stopped agent removed rules, which only --cleanup may do:\n{stopped}"
    );
    bed.clean_up("node-a")?;
    let after = iptables::save_all(node, &lock)?;
    ensure!(after == before, "before the agent:\n{before}\nafter --cleanup:\n{after}");
    // A second clean-up has nothing to remove.
    bed.clean_up("node-a")?;
    let again = iptables::save_all(node, &lock)?;
    ensure!(again == before, "before the agent:\n{before}\nafter a second --cleanup:\n{again}");
    Ok(())
}

/// Rules of another program in every table, in built-in chains and in its own chains. The name of
/// one chain resembles Headgate's names.
fn foreign_rules(family: Family) -> Vec<String> {
    let network = if family == Family::V4 { "198.18.5.0/24" } else { "2001:db8:5::/64" };
    let mut rules = Vec::new();
    for (table, chain) in [
        ("filter", "INPUT"),
        ("filter", "FORWARD"),
        ("nat", "PREROUTING"),
        ("nat", "POSTROUTING"),
        ("mangle", "PREROUTING"),
    ] {
        let own = format!("FOREIGN-{chain}");
        rules.push(format!("-t {table} -N {own}"));
        rules.push(format!("-t {table} -A {own} -s {network} -m comment --comment keep-me -j RETURN"));
        rules.push(format!("-t {table} -A {chain} -s {network} -j {own}"));
    }
    rules.push("-t nat -N KUBERNETES-OF-SOMEBODY-ELSE".to_owned());
    rules.push(format!("-t nat -A KUBERNETES-OF-SOMEBODY-ELSE -d {network} -p tcp --dport 99 -j RETURN"));
    rules
}

/// Checks that the rules of other programs in `now` are equal to the rules in `before`, in the
/// original order.
fn expect_foreign(before: &str, now: &str) -> Result<()> {
    let is_foreign = |line: &&str| line.contains("FOREIGN") || line.contains("SOMEBODY-ELSE") || line.starts_with("==");
    let (expected, found): (Vec<&str>, Vec<&str>) =
        (before.lines().filter(is_foreign).collect(), now.lines().filter(is_foreign).collect());
    ensure!(expected == found, "foreign rules were\n{}\nand are now\n{}", expected.join("\n"), found.join("\n"));
    Ok(())
}

/// A number that grows with each write to a kernel: calls of `iptables-restore`, or the sum of a
/// metric for IPVS.
fn written(bed: &Testbed, writes: &WriteLog) -> Result<usize> {
    if !matches!(bed.backend(), Backend::Ipvs | Backend::Nftables | Backend::Userspace) {
        return writes.count();
    }
    let mut sum = 0;
    for node in &NODES {
        let page = page::of_agent(bed.machines().machine(node.name)?, "/metrics")?;
        let value = page.lines().find_map(|line| line.strip_prefix("headgate_agent_objects_written_total "));
        sum += value.context("the page has no such metric")?.parse::<usize>().context("reading the metric")?;
    }
    Ok(sum)
}

/// Waits until all agents are connected and up to date, and returns them.
fn wait_for_agents(bed: &Testbed) -> Result<Vec<AgentInfo>> {
    let deadline = Instant::now() + RETURN_TIMEOUT;
    loop {
        let agents = bed.agents();
        if let Ok(agents) = &agents
            && agents.len() == NODES.len()
            && agents.iter().all(|agent| agent.programmed_version == agent.head_version && agent.head_version > 0)
        {
            return Ok(agents.clone());
        }
        if Instant::now() >= deadline {
            bail!("not all agents are up to date with the restarted control plane: {agents:#?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
