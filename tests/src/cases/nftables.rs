//! Cases of mode nftables: the table in the kernel, and other programs that list or change the
//! table.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::affinity;
use super::case::{SourceAddress, ask};
use super::changes::{eventually, within};
use super::ipvs::restart;
use super::run::run;
use crate::testbed::client::outcome;
use crate::testbed::iptables;
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{AgentSetup, Family, Manifests, Outcome, Request, Testbed, Transport, page};

use SourceAddress::Kept;
use Via::ClusterIp;

/// Runs `nft` on node-a and returns its output.
fn nft(bed: &Testbed, arguments: &[&str]) -> Result<String> {
    bed.machines().machine("node-a")?.tool("nft", arguments)
}

fn answers(bed: &Testbed, servers: &'static [&'static str]) -> Result<()> {
    run(bed, &[ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(servers, Kept)])
}

/// The change of one endpoint writes at most 60 objects. A warm restart writes nothing. `nft` lists
/// the table. The kernel has no iptables rules of Headgate.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn a_change_writes_a_handful_of_elements(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &AgentSetup::default())?;
    answers(bed, &["a1", "b1"])?;
    bed.set_endpoints("steady", &["a1", "b2"])?;
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

/// Services whose connections the client's address distributes, with and without affinity.
pub fn hashed_services() -> Result<Manifests> {
    const PODS: [&str; 5] = ["a1", "a2", "b1", "b2", "c1"];
    let annotate: fn(&Service) -> Value =
        |_| json!({"metadata": {"annotations": {"headgate.io/load-balancing": "consistent-hash"}}});
    let mut manifests = Manifests::default();
    for (name, affinity_timeout_seconds) in [("hashed", None), ("recorded", Some(10_800))] {
        manifests.add(Service { affinity_timeout_seconds, patch: Some(annotate), ..Service::new(name, &PODS) })?;
    }
    Ok(manifests)
}

/// Further addresses of outside-1.
fn clients(family: Family) -> Vec<IpAddr> {
    let address = |last: u16| match family {
        Family::V4 => IpAddr::from([192, 0, 2, u8::try_from(last).unwrap_or_default()]),
        Family::V6 => IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 1, last]),
    };
    (120..220).map(address).collect()
}

/// The server of each client, which must be the same over node-a and over node-b.
fn servers_of_clients(bed: &Testbed, service: &str) -> Result<BTreeMap<IpAddr, String>> {
    let mut servers = BTreeMap::new();
    for family in Family::BOTH {
        for node in ["node-a", "node-b"] {
            let to = bed.address(service, Via::NodePort(node), family, "tcp")?;
            let ask =
                |from: &IpAddr| outcome(&Request { from_address: Some(*from), ..Request::new(Transport::Tcp, to) });
            let clients = clients(family);
            let outcomes: Vec<Outcome> =
                bed.machines().machine("outside-1")?.run(|| Ok(clients.iter().map(ask).collect()))?;
            for (client, outcome) in clients.into_iter().zip(outcomes) {
                let Outcome::Answered(answer) = outcome else { bail!("{client} over {node}: {outcome}") };
                let server = servers.entry(client).or_insert_with(|| answer.server.clone());
                ensure!(*server == answer.server, "{client} got {server} and, over {node}, {}", answer.server);
            }
        }
    }
    Ok(servers)
}

/// With consistent-hash, all nodes send a client to the same endpoint, also after the restart of an
/// agent, which writes nothing. When an endpoint leaves, the clients of other endpoints stay.
///
/// Needs machines with [`hashed_services`] and no running programs.
pub fn the_address_of_a_client_selects_its_endpoint(bed: &Testbed) -> Result<()> {
    let addresses = Family::BOTH.into_iter().flat_map(clients).map(|address| match address {
        IpAddr::V4(address) => format!("addr add {address}/24 dev eth0\n"),
        IpAddr::V6(address) => format!("addr add {address}/64 dev eth0 nodad preferred_lft 0\n"),
    });
    bed.machines().machine("outside-1")?.ip_batch(&addresses.collect::<String>())?;
    bed.start_control_plane()?;
    bed.start_agent("node-a")?;
    bed.start_programmed("node-b", &AgentSetup::default())?;
    let before = servers_of_clients(bed, "hashed")?;
    let shares = before.values().fold(BTreeMap::<&str, usize>::new(), |mut shares, server| {
        *shares.entry(server).or_default() += 1;
        shares
    });
    // Each of five endpoints gets 40 ± 6 of 200 clients.
    ensure!(shares.len() == 5 && shares.values().all(|share| (10..=70).contains(share)), "{shares:?}");
    ensure!(servers_of_clients(bed, "recorded")? == before, "a client's first endpoint depends on the Service");
    for (family, expected) in [("ip", "jhash ip saddr mod 2048"), ("ip6", "jhash ip6 saddr mod 2048")] {
        let listed = nft(bed, &["list", "table", family, "headgate"])?;
        ensure!(listed.contains(expected), "the list does not contain {expected}:\n{listed}");
    }
    let agent = restart(bed, &AgentSetup::default())?;
    ensure!(agent.objects_written == 0, "{} objects were written by a warm restart", agent.objects_written);
    ensure!(agent.degraded.is_empty(), "the agent is degraded: {:?}", agent.degraded);
    ensure!(servers_of_clients(bed, "hashed")? == before, "clients moved after a restart");

    bed.set_endpoints("hashed", &["a1", "a2", "b2", "c1"])?;
    let after = servers_of_clients(bed, "hashed")?;
    let moved = before.iter().filter(|(client, server)| *server != "b1" && after[client] != **server).count();
    ensure!(moved == 0, "{moved} clients of other endpoints moved");
    Ok(())
}

/// The agent owns the table, so `nft flush ruleset` of another program does not remove the table.
/// If the table was changed while no agent ran, the next agent writes the table again.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn the_table_survives_a_flush_and_is_repaired_after_a_change(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &AgentSetup::default())?;
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
    eventually(|| {
        let listed = nft(bed, &["list", "table", "ip", "headgate"])?;
        ensure!(!listed.contains("chain foreign"), "a foreign chain is in the table:\n{listed}");
        Ok(())
    })?;
    bed.stop_agent("node-a")?;
    answers(bed, &["a1", "b1"])?;
    bed.clean_up("node-a")?;
    let tables = nft(bed, &["list", "tables"])?;
    ensure!(!tables.contains("headgate"), "--cleanup left a table:\n{tables}");
    ensure!(tables.contains("table ip another"), "--cleanup removed the table of another program:\n{tables}");
    Ok(())
}

/// An agent that does not own its tables and checks them once in an hour.
fn without_owner(bed: &Testbed) -> Result<AgentSetup> {
    let file = bed.machines().folder().join("without-owner.yaml");
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n\
                nftables: {syncPeriod: 1h, minSyncPeriod: 0s}\n";
    fs::write(&file, text).with_context(|| file.display().to_string())?;
    let file = file.to_str().context("the folder has no UTF-8 name")?;
    Ok(AgentSetup { cannot_tell_pods: true, ..AgentSetup::with(&["--own-nftables-tables=false", "--config", file]) })
}

/// The value of a metric of the agent of node-a. `name` includes the labels, if any.
pub(super) fn metric(bed: &Testbed, name: &str) -> Result<u64> {
    metric_of(bed, "node-a", name)
}

/// The value of a metric of the agent of a node. `name` includes the labels, if any.
pub(super) fn metric_of(bed: &Testbed, node: &str, name: &str) -> Result<u64> {
    let page = page::of_agent(bed.machines().machine(node)?, "/metrics")?;
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = value.with_context(|| format!("the page has no metric {name}:\n{page}"))?;
    value.parse().with_context(|| format!("{name} is {value}"))
}

/// The contents of both tables, sorted, without the numbers of groups, which are arbitrary.
fn contents(bed: &Testbed) -> Result<Vec<String>> {
    let listed = nft(bed, &["--terse", "list", "ruleset"])?;
    let mut lines: Vec<String> = listed.lines().map(str::to_owned).collect();
    for family in ["ip", "ip6"] {
        let mut list = |map: &str, part_of: fn((&str, &str)) -> String| -> Result<()> {
            let listed = nft(bed, &["list", "map", family, "headgate", map])?;
            let elements = listed.split(['{', '}', ',', '\n']).filter_map(|element| element.split_once(" : "));
            lines.extend(elements.map(|element| format!("{family} {map} {}", part_of(element).trim())));
            Ok(())
        };
        list("services", |(frontend, _)| frontend.to_owned())?;
        list("endpoints", |(_, endpoint)| endpoint.to_owned())?;
    }
    lines.sort();
    Ok(lines)
}

/// Where the agent does not own its tables, notifications make it repair what other programs
/// change, long before the next check. A program that changes the tables in a loop makes the agent
/// write ever less often.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn changes_of_other_programs_are_repaired_at_once(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &without_owner(bed)?)?;
    ensure!(metric(bed, "headgate_agent_repairs_total")? == 0, "the agent repaired its own changes");
    ensure!(metric(bed, "headgate_agent_foreign_changes_total")? == 0, "the agent counts its own changes");
    nft(bed, &["flush", "ruleset"])?;
    eventually(|| answers(bed, &["a1", "b1"]))?;
    let before = contents(bed)?;
    let changes: [&[&str]; 6] = [
        &["delete", "table", "ip", "headgate"],
        &["flush", "ruleset"],
        &["flush", "map", "ip6", "headgate", "services"],
        &["add", "rule", "ip", "headgate", "nat-prerouting", "drop"],
        &["add", "element", "ip", "headgate", "cluster-ips", "{ 192.0.2.77 }"],
        &["flush", "chain", "ip", "headgate", "services"],
    ];
    for change in changes {
        nft(bed, change)?;
        // A pause follows every repair. The pauses double from 250 ms. The agent would compare its
        // tables only in an hour.
        within(Duration::from_secs(60), || {
            ensure!(contents(bed)? == before, "{change:?} was not repaired");
            Ok(())
        })?;
        answers(bed, &["a1", "b1"])?;
    }
    // Other programs may change their own tables without an effect on the agent.
    let repairs = metric(bed, "headgate_agent_repairs_total")?;
    let foreign = metric(bed, "headgate_agent_foreign_changes_total")?;
    nft(bed, &["add", "table", "ip", "another"])?;
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(10) {
        nft(bed, &["add", "chain", "ip", "another", "busy"])?;
        nft(bed, &["delete", "chain", "ip", "another", "busy"])?;
    }
    ensure!(metric(bed, "headgate_agent_foreign_changes_total")? == foreign, "changes of another table count");
    // After seven repairs, the pause between two repairs is at least 16 seconds.
    while started.elapsed() < Duration::from_secs(20) {
        nft(bed, &["add", "chain", "ip", "headgate", "foreign"])?;
    }
    let more = metric(bed, "headgate_agent_repairs_total")? - repairs;
    ensure!(more <= 2, "the agent made {more} repairs in 10 s");
    // On a busy machine, the first one may be late.
    eventually(|| {
        ensure!(metric(bed, "headgate_agent_repairs_total")? > repairs, "the agent made no repair");
        Ok(())
    })
}

/// When notifications are lost, the agent compares its tables with the kernel, and names what
/// differs.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn a_change_is_found_after_notifications_were_lost(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &without_owner(bed)?)?;
    let before = contents(bed)?;
    let agent = bed.take_agent("node-a")?;
    let process = Pid::from_raw(agent.id().try_into()?);
    kill(process, Signal::SIGSTOP)?;
    let elements: Vec<String> = (0..60_000).map(|mark| mark.to_string()).collect();
    let file = bed.machines().folder().join("flood.nft");
    let text = format!(
        "add table ip another\nadd set ip another marks {{ type mark; }}\nadd element ip another marks {{ {} }}\n",
        elements.join(", ")
    );
    fs::write(&file, text).with_context(|| file.display().to_string())?;
    nft(bed, &["-f", file.to_str().context("the folder has no UTF-8 name")?])?;
    nft(bed, &["delete", "table", "ip", "another"])?;
    // The receive buffer is full, so nothing tells the agent of this change.
    nft(bed, &["add", "element", "ip", "headgate", "cluster-ips", "{ 192.0.2.77 }"])?;
    kill(process, Signal::SIGCONT)?;
    within(Duration::from_secs(60), || {
        ensure!(metric(bed, "headgate_agent_drift_total")? == 1, "the comparison found no difference");
        let set = nft(bed, &["list", "set", "ip", "headgate", "cluster-ips"])?;
        ensure!(!set.contains("192.0.2.77"), "the foreign element is still there");
        Ok(())
    })?;
    ensure!(metric(bed, "headgate_agent_notifications_lost_total")? > 0, "no notification was lost");
    ensure!(metric(bed, "headgate_agent_foreign_changes_total")? == 0, "the agent saw the change");
    ensure!(contents(bed)? == before, "the tables differ");
    agent.terminate().map(drop)
}

/// A second agent waits until the first one ends, and opens no stream before. Then it takes the
/// tables over.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn a_new_agent_waits_for_the_old_one(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &AgentSetup::default())?;
    let connected = || -> Result<u64> {
        let agents = bed.agents()?;
        let agent = agents.iter().find(|agent| agent.node == "node-a").context("no agent of node-a")?;
        Ok(agent.connected_unix_ms)
    };
    let first = connected()?;
    let old = bed.take_agent("node-a")?;
    bed.start_agent("node-a")?;
    std::thread::sleep(Duration::from_secs(3));
    ensure!(connected()? == first, "the new agent opened its stream while the old one ran");
    old.kill()?;
    within(Duration::from_secs(120), || {
        ensure!(connected()? > first, "the new agent has not opened its stream");
        Ok(())
    })?;
    bed.wait_programmed()?;
    answers(bed, &["a1", "b1"])?;
    eventually(|| {
        ensure!(nft(bed, &["delete", "table", "ip", "headgate"]).is_err(), "the new agent does not own its table");
        Ok(())
    })
}
