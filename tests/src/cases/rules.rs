//! Rules in the kernel: which of them a change writes, and what becomes of them when others
//! interfere.

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
use crate::testbed::manifests::{Service, Via, ready};
use crate::testbed::plan::NODES;
use crate::testbed::{AgentSetup, Backend, Family, Testbed};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, NodePort};

/// What names of chains begin with by which kube-proxy knows that they are of services, and its
/// own.
const OF_SERVICES: [&str; 5] = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-"];

/// True for a chain that belongs to one service. Dispatch groups are called in the same way, with a
/// dash more.
fn is_of_one_service(chain: &str) -> bool {
    let hash = OF_SERVICES.iter().find_map(|prefix| chain.strip_prefix(prefix));
    hash.is_some_and(|hash| !hash.contains('-'))
}

/// Rules of node-a in the backend's variant, both families, each chain's in order, chains sorted.
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

/// Chains that rules for a service's addresses lead to, and those that these lead to. Not every
/// layout has comments to know them by.
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

/// Chains that scripts write or delete.
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

/// A change of one service writes chains of that service and no others; taken back, it leaves
/// everything as it was.
///
/// On machines with [`super::lifecycle::some_services`] on which nothing runs yet.
pub fn a_change_writes_its_service(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    let log = WriteLog::create(bed.machines().folder())?;
    let setup = AgentSetup { tools: Some(log.tools.clone()), ..AgentSetup::default() };
    bed.start_agent_with("node-a", &setup)?;
    bed.wait_programmed()?;
    let (before, earlier) = (rules(bed)?, log.scripts()?.len());
    ensure!(earlier > 0, "the log does not see what the agent writes");
    let set_endpoints = |endpoints: &[&str]| {
        bed.update(|manifests| {
            manifests.service_mut("steady")?.endpoints = ready(endpoints);
            Ok(())
        })
    };
    set_endpoints(&["a1", "b2"])?;
    let (after, scripts) = (rules(bed)?, log.scripts()?);
    let written = written(&scripts[earlier..]);
    let steady = bed.service("steady")?;
    let mut own = chains_of(&before, &steady);
    ensure!(!own.is_empty(), "no chain of the service was found");
    own.extend(chains_of(&after, &steady));
    // The marker of the testbed changes its port with each version.
    let others: Vec<&&str> =
        written.iter().filter(|chain| is_of_one_service(chain) && !own.contains(**chain)).collect();
    ensure!(others.is_empty(), "chains of other services were written: {others:?}; its own are {own:?}");
    ensure!(written.iter().any(|chain| own.contains(chain)), "only {written:?} were written");
    ensure!(after != before, "the rules are still those of before");
    expect_from_node_a(bed, &["a1", "b2"])?;

    set_endpoints(&["a1", "b1"])?;
    let again = rules(bed)?;
    let without_marker = |rules: &[String]| -> Vec<String> {
        rules.iter().filter(|rule| !rule.contains("testbed/marker")).cloned().collect()
    };
    let (before, again) = (without_marker(&before), without_marker(&again));
    ensure!(before == again, "before:\n{}\nafter there and back:\n{}", before.join("\n"), again.join("\n"));
    expect_from_node_a(bed, &["a1", "b1"])
}

fn expect_from_node_a(bed: &Testbed, servers: &'static [&'static str]) -> Result<()> {
    let cases = [
        ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(servers, Kept),
        ask("outside-1", "steady", NodePort("node-a")).answered(servers, Masqueraded("node-a")),
    ];
    run(bed, &cases)
}

/// Somebody flushes all tables, one of them, or only what leads to our chains: everything comes
/// back by itself.
///
/// On machines with [`super::lifecycle::some_services`] on which nothing runs yet.
pub fn flushed_rules_come_back(bed: &Testbed) -> Result<()> {
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
        // The agent may be faster than the second of the two, and a chain that is used again is not
        // removed.
        tables.iter().try_for_each(|table| {
            eventually(|| {
                flush(&["-t", table, "-F"])?;
                flush(&["-t", table, "-X"])
            })
        })
    };
    let steps: [(&str, &dyn Fn() -> Result<()>); 6] = [
        ("all tables were flushed", &|| tables(&["mangle", "nat", "filter"])),
        // One alone: the canary in mangle, at which is looked first, stays.
        ("table nat was flushed", &|| tables(&["nat"])),
        ("table filter was flushed", &|| tables(&["filter"])),
        ("one chain was flushed", &|| flush(&["-t", "nat", "-F", "KUBE-MARK-MASQ"])),
        ("what leads to the chains was flushed", &|| flush(&["-t", "nat", "-F", "PREROUTING"])),
        ("the chain that refuses was cut off", &|| flush(&["-F", "OUTPUT"])),
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

/// A range with bits behind its prefix stands for its network, so that a restart finds every rule
/// as it is wanted, and writes none.
///
/// On machines with [`super::lifecycle::some_services`] on which nothing runs yet.
pub fn host_bits_of_ranges_are_cleared(bed: &Testbed) -> Result<()> {
    let ranges = ["--cluster-cidr=10.244.1.5/16,fd00:10:244:1::5/48", "--nodeport-addresses=192.0.2.77/24"];
    let setup = AgentSetup { cannot_tell_pods: true, ..AgentSetup::with(&ranges) };
    bed.start_control_plane()?;
    bed.start_agent_with("node-a", &setup)?;
    bed.wait_programmed()?;
    let written = restart(bed, &setup)?.objects_written;
    ensure!(written == 0, "a restart wrote {written} objects; the rules are:\n{}", rules(bed)?.join("\n"));
    expect_from_node_a(bed, &["a1", "b1"])
}

/// The agent used the other variant of iptables before: nothing of that stays.
///
/// On machines with [`super::lifecycle::some_services`] on which nothing runs yet.
pub fn the_other_variant_goes(bed: &Testbed) -> Result<()> {
    let (other, other_variant) = match bed.backend() {
        Backend::IptablesLegacy | Backend::IptablesLegacyCompact | Backend::Ipvs => {
            (Backend::IptablesNft, Variant::Nft)
        }
        Backend::IptablesNft | Backend::IptablesNftCompact => (Backend::IptablesLegacy, Variant::Legacy),
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
    bed.update(|manifests| {
        manifests.service_mut("steady")?.endpoints = ready(&["a2", "c1"]);
        Ok(())
    })?;
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    eventually(|| {
        for family in Family::BOTH {
            let left = iptables::save(node, other_variant, family, &lock)?;
            let ours = left.lines().filter(|line| line.contains("KUBE-"));
            ensure!(!left.contains("KUBE-"), "{} lines of the other variant are still there", ours.count());
        }
        Ok(())
    })?;
    expect_servers(bed, "steady", &["a2", "c1"])
}

/// kube-proxy comes back to the node. Its sync writes its own chains anew and removes, in the same
/// step, all chains of services that it does not know: here, all that there are. Were one of them
/// still led to, that and each later sync would fail. Then the agent comes back.
///
/// On machines with [`super::lifecycle::some_services`] on which nothing runs yet.
pub fn kube_proxy_comes_back(bed: &Testbed) -> Result<()> {
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

/// Services with SCTP ports are programmed, and neither has the kernel loaded what SCTP sockets
/// need, nor has anybody opened one.
///
/// On machines with [`super::lifecycle::some_services`] on which nothing runs yet.
pub fn no_sctp_sockets(bed: &Testbed) -> Result<()> {
    let before = sctp_sockets()?;
    bed.start_control_plane()?;
    bed.start_agent("node-a")?;
    bed.wait_programmed()?;
    run(bed, &[ask("a3", "steady", ClusterIp).ports(&["sctp"]).answered(&["a1", "b1"], Kept)])?;
    let after = sctp_sockets()?;
    ensure!(after == before, "SCTP sockets in the kernel: {before:?} before and {after:?} now");
    Ok(())
}

/// Number of SCTP sockets by protocol; nothing where the kernel has no SCTP loaded. Raw sockets are
/// none of them.
fn sctp_sockets() -> Result<Vec<String>> {
    let protocols = std::fs::read_to_string("/proc/net/protocols").context("reading /proc/net/protocols")?;
    ensure!(
        protocols.lines().any(|line| line.starts_with("TCP ")),
        "/proc/net/protocols is not what it was:\n{protocols}"
    );
    let columns = |line: &str| line.split_whitespace().take(3).map(str::to_owned).collect::<Vec<_>>().join(" ");
    Ok(protocols.lines().filter(|line| line.starts_with("SCTP")).map(columns).collect())
}
