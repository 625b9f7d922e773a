//! Rules in the kernel: which rules a change writes, and how the agent restores rules that other
//! programs change.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;

use super::case::{SourceAddress, ask};
use super::changes::eventually;
use super::ipvs::restart;
use super::live::expect_servers;
use super::run::run;
use super::write_log::WriteLog;
use crate::testbed::iptables::{self, Variant};
use crate::testbed::manifests::{Service, Via};
use crate::testbed::plan::NODES;
use crate::testbed::{AgentSetup, Backend, Family, Testbed};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, NodePort};

/// The prefixes by which kube-proxy recognises its chains of services.
const OF_SERVICES: [&str; 5] = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-"];

/// Whether a chain belongs to one service. Chains of dispatch groups have a further dash in their
/// names.
fn is_of_one_service(chain: &str) -> bool {
    let hash = OF_SERVICES.iter().find_map(|prefix| chain.strip_prefix(prefix));
    hash.is_some_and(|hash| !hash.contains('-'))
}

/// The rules of node-a in the backend's variant and both families. Chains are sorted, and the rules
/// of each chain are in their order.
fn rules(bed: &Testbed) -> Result<Vec<String>> {
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    let mut all = Vec::new();
    for family in Family::BOTH {
        let saved = iptables::save(node, bed.backend().variant(), family, &lock)?;
        let mut table = "";
        for line in saved.lines() {
            table = if line.starts_with('*') { line } else { table };
            all.push(format!("{family} {table} {line}"));
        }
    }
    let chain = |line: &String| line.split_whitespace().take(4).collect::<Vec<_>>().join(" ");
    all.sort_by_key(chain);
    Ok(all)
}

/// The chains of a service. Rules for the service's addresses jump to these chains, directly or
/// through other chains. The search uses no comments of rules, because rules of the compact layout
/// have no comments that name the service.
fn chains_of<'a>(rules: &'a [String], service: &Service) -> BTreeSet<&'a str> {
    let mut roots = Vec::new();
    for family in Family::BOTH {
        let addresses = [service.cluster_ip(family), service.external_ip(family), service.load_balancer_ip(family)];
        roots.extend(addresses.map(|address| IpNet::from(address).to_string()));
    }
    let mut chains = BTreeSet::new();
    loop {
        let is_about =
            |rule: &&String| rule.split(' ').any(|word| chains.contains(word) || roots.iter().any(|root| root == word));
        let words = rules.iter().filter(is_about).flat_map(|rule| rule.split(' '));
        let found: BTreeSet<&str> = words.filter(|word| is_of_one_service(word)).collect();
        if found.len() == chains.len() {
            return chains;
        }
        chains = found;
    }
}

/// The chains that scripts write or delete.
fn written(scripts: &str) -> BTreeSet<&str> {
    scripts
        .lines()
        .filter_map(|line| match line.split_once(' ') {
            Some(("-A" | "-X" | "-F" | "-I" | "-D", rest)) => rest.split_whitespace().next(),
            Some((declared, _)) => declared.strip_prefix(':'),
            None => None,
        })
        .collect()
}

/// A change of one service writes only chains of that service. When the change is undone, the rules
/// are as before.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn a_change_writes_only_chains_of_its_service(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    let log = WriteLog::create(bed.machines().folder())?;
    let setup = AgentSetup { tools: Some(log.tools.clone()), ..AgentSetup::default() };
    bed.start_programmed("node-a", &setup)?;
    let (before, earlier) = (rules(bed)?, log.scripts()?.len());
    ensure!(earlier > 0, "the log of kernel writes is empty although the agent has started");
    let set_endpoints = |endpoints: &[&str]| bed.set_endpoints("steady", endpoints);
    set_endpoints(&["a1", "b2"])?;
    let (after, scripts) = (rules(bed)?, log.scripts()?);
    let written = written(&scripts[earlier..]);
    let steady = bed.service("steady")?;
    let mut own = chains_of(&before, &steady);
    ensure!(!own.is_empty(), "no chain of the service was found");
    own.extend(chains_of(&after, &steady));
    // Chains that several services share may also be written. These shared chains contain rules of
    // the testbed's marker Service, whose port changes with each change of the manifests.
    let others: Vec<&&str> =
        written.iter().filter(|chain| is_of_one_service(chain) && !own.contains(**chain)).collect();
    ensure!(others.is_empty(), "chains of other services were written: {others:?}; the service has {own:?}");
    ensure!(written.iter().any(|chain| own.contains(chain)), "no chain of the service was written: {written:?}");
    ensure!(after != before, "the rules have not changed");
    expect_from_node_a(bed, &["a1", "b2"])?;

    set_endpoints(&["a1", "b1"])?;
    let again = rules(bed)?;
    let without_marker = |rules: &[String]| -> Vec<String> {
        rules.iter().filter(|rule| !rule.contains("testbed/marker")).cloned().collect()
    };
    let (before, again) = (without_marker(&before), without_marker(&again));
    ensure!(before == again, "before:\n{}\nafter the change was undone:\n{}", before.join("\n"), again.join("\n"));
    expect_from_node_a(bed, &["a1", "b1"])
}

fn expect_from_node_a(bed: &Testbed, servers: &'static [&'static str]) -> Result<()> {
    let cases = [
        ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(servers, Kept),
        ask("outside-1", "steady", NodePort("node-a")).answered(servers, Masqueraded("node-a")),
    ];
    run(bed, &cases)
}

/// Another program flushes all tables, one table, or only jumps to Headgate's chains. The agents
/// restore the rules.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn flushed_rules_are_restored(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    for node in &NODES {
        bed.start_agent_with(node.name, &AgentSetup::with(&["--sync-period", "1s"]))?;
    }
    bed.wait_programmed()?;
    let before = rules(bed)?;
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    let flush = |arguments: &[&str]| {
        Family::BOTH
            .into_iter()
            .try_for_each(|family| iptables::run(node, bed.backend().variant(), family, &lock, arguments))
    };
    let tables = |tables: &[&str]| -> Result<()> {
        // If the agent restores rules between the two commands, the second command fails, because
        // iptables cannot remove chains that rules jump to.
        tables.iter().try_for_each(|table| {
            eventually(|| {
                flush(&["-t", table, "-F"])?;
                flush(&["-t", table, "-X"])
            })
        })
    };
    let steps: [(&str, &dyn Fn() -> Result<()>); 6] = [
        ("all tables were flushed", &|| tables(&["mangle", "nat", "filter"])),
        // In this case the canary in table mangle stays. The agent checks this canary first.
        ("table nat was flushed", &|| tables(&["nat"])),
        ("table filter was flushed", &|| tables(&["filter"])),
        ("one chain was flushed", &|| flush(&["-t", "nat", "-F", "KUBE-MARK-MASQ"])),
        ("the jumps in PREROUTING were flushed", &|| flush(&["-t", "nat", "-F", "PREROUTING"])),
        ("the jumps in OUTPUT were flushed", &|| flush(&["-F", "OUTPUT"])),
    ];
    for (what, step) in steps {
        step().with_context(|| what.to_owned())?;
        eventually(|| {
            let now = rules(bed)?;
            ensure!(now == before, "before:\n{}\nnow:\n{}", before.join("\n"), now.join("\n"));
            Ok(())
        })
        .with_context(|| format!("after {what}"))?;
        expect_servers(bed, "steady", &["a1", "b1"]).with_context(|| format!("after {what}"))?;
    }
    Ok(())
}

/// In a range with host bits, such as 10.244.1.5/16, the agent clears the host bits. The rules then
/// equal the rules that the kernel prints, and a restart writes nothing.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn host_bits_of_ranges_are_cleared(bed: &Testbed) -> Result<()> {
    let ranges = ["--cluster-cidr=10.244.1.5/16,fd00:10:244:1::5/48", "--nodeport-addresses=192.0.2.77/24"];
    let setup = AgentSetup { cannot_tell_pods: true, ..AgentSetup::with(&ranges) };
    bed.start_programs("node-a", &setup)?;
    let written = restart(bed, &setup)?.objects_written;
    ensure!(written == 0, "a restart wrote {written} objects; the rules are:\n{}", rules(bed)?.join("\n"));
    expect_from_node_a(bed, &["a1", "b1"])
}

/// An earlier agent used the other variant of iptables. The present agent removes all rules of the
/// other variant.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn rules_of_the_other_variant_are_removed(bed: &Testbed) -> Result<()> {
    let (other, other_variant) = match bed.backend() {
        Backend::IptablesLegacy | Backend::Ipvs | Backend::UserspaceIptables => (Backend::IptablesNft, Variant::Nft),
        Backend::IptablesNft | Backend::IptablesNftCompact | Backend::Nftables | Backend::Userspace => {
            (Backend::IptablesLegacy, Variant::Legacy)
        }
    };
    bed.start_control_plane()?;
    for node in &NODES {
        bed.start_agent_with(node.name, &AgentSetup { backend: Some(other), ..AgentSetup::default() })?;
    }
    bed.wait_programmed()?;
    expect_servers(bed, "steady", &["a1", "b1"])?;
    for node in &NODES {
        bed.stop_agent(node.name)?;
        bed.start_agent(node.name)?;
    }
    bed.set_endpoints("steady", &["a2", "c1"])?;
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    eventually(|| {
        for family in Family::BOTH {
            let left = iptables::save(node, other_variant, family, &lock)?;
            let ours = left.lines().filter(|line| line.contains("KUBE-"));
            ensure!(!left.contains("KUBE-"), "{} lines of the other variant still exist", ours.count());
        }
        Ok(())
    })?;
    expect_servers(bed, "steady", &["a2", "c1"])
}

/// kube-proxy replaces the agent on a node, and then the agent replaces kube-proxy. In one
/// transaction, a sync of kube-proxy rewrites kube-proxy's own chains and removes all service
/// chains that are not in kube-proxy's ruleset. In this test kube-proxy's ruleset contains no
/// service chain. If a rule still jumped to a removed chain, each sync would fail.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn kube_proxy_takes_over_again(bed: &Testbed) -> Result<()> {
    const REWRITTEN: [&str; 4] = ["KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ"];
    bed.start_control_plane()?;
    for node in &NODES {
        bed.start_agent(node.name)?;
    }
    bed.wait_programmed()?;
    let before = rules(bed)?;
    bed.stop_agent("node-a")?;
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    for family in Family::BOTH {
        let saved = iptables::save(node, bed.backend().variant(), family, &lock)?;
        let (_, nat) = saved.split_once("*nat\n").context("no table nat")?;
        let (nat, _) = nat.split_once("COMMIT\n").context("no end of table nat")?;
        let chains = nat.lines().filter_map(|line| line.strip_prefix(':')?.split(' ').next());
        let unknown: Vec<&str> =
            chains.filter(|chain| OF_SERVICES.iter().any(|prefix| chain.starts_with(prefix))).collect();
        ensure!(!unknown.is_empty(), "no chain of a service:\n{nat}");
        let flushed = REWRITTEN.iter().chain(&unknown).map(|chain| format!(":{chain} - [0:0]\n"));
        let removed = unknown.iter().map(|chain| format!("-X {chain}\n"));
        let script = bed.machines().folder().join("as-kube-proxy");
        let text: String = flushed.chain(removed).collect();
        std::fs::write(&script, format!("*nat\n{text}COMMIT\n")).context("writing a script")?;
        iptables::restore(node, bed.backend().variant(), family, &lock, &script)
            .with_context(|| format!("kube-proxy's sync fails over {family}"))?;
    }
    bed.start_agent("node-a")?;
    eventually(|| {
        let now = rules(bed)?;
        ensure!(now == before, "before:\n{}\nnow:\n{}", before.join("\n"), now.join("\n"));
        Ok(())
    })?;
    expect_servers(bed, "steady", &["a1", "b1"])
}

/// The agent programs Services with SCTP ports without opening an SCTP socket, so the kernel does
/// not load its SCTP module.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn no_sctp_sockets(bed: &Testbed) -> Result<()> {
    let before = sctp_sockets()?;
    bed.start_programs("node-a", &AgentSetup::default())?;
    run(bed, &[ask("a3", "steady", ClusterIp).ports(&["sctp"]).answered(&["a1", "b1"], Kept)])?;
    let after = sctp_sockets()?;
    ensure!(after == before, "SCTP sockets in the kernel: {before:?} before, {after:?} now");
    Ok(())
}

/// The SCTP protocols of the kernel with their numbers of sockets. The list is empty if the SCTP
/// module is not loaded. Raw sockets are not counted.
fn sctp_sockets() -> Result<Vec<String>> {
    let protocols = std::fs::read_to_string("/proc/net/protocols").context("reading /proc/net/protocols")?;
    ensure!(
        protocols.lines().any(|line| line.starts_with("TCP ")),
        "/proc/net/protocols has an unknown format:\n{protocols}"
    );
    let columns = |line: &str| line.split_whitespace().take(3).map(str::to_owned).collect::<Vec<_>>().join(" ");
    Ok(protocols.lines().filter(|line| line.starts_with("SCTP")).map(columns).collect())
}
