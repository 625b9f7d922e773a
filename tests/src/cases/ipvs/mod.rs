//! Cases of mode ipvs: virtual servers, sets and the device in the kernel, and how the agent
//! handles changes that other programs make to these objects.

mod device;
mod meddling;
mod modules;
mod refused;
mod takeover;

pub use device::{a_device_that_is_up_is_replaced, rules_of_others_for_host_ports_do_not_get_service_traffic};
pub use meddling::{
    a_change_restores_objects_that_were_removed, changes_of_other_programs_are_reverted,
    ipv6_is_turned_on_for_the_device,
};
pub use modules::{
    a_missing_scheduler_is_replaced_until_its_module_loads, falls_back_to_iptables,
    kernel_parameters_can_be_set_by_init_only, rules_for_sctp_are_left_out_if_iptables_cannot_match_sctp,
};
pub use refused::a_rejected_destination_affects_no_other;
pub use takeover::kube_proxys_state_is_taken_over;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Protocol, Socket, Type};

use super::case::{SourceAddress, ask};
use super::changes::{eventually, within};
use super::run::run;
use crate::testbed::client::HeldConnection;
use crate::testbed::iptables::{self, Variant};
use crate::testbed::manifests::{MARKER_ADDRESS, Service, Via};
use crate::testbed::{AgentInfo, AgentSetup, Backend, Family, Namespace, Outcome, Request, Testbed, Transport, page};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, NodePort};

/// A pause that is longer than the agent's interval between two checks of draining destinations.
const DRAIN_LOOK: Duration = Duration::from_secs(7);

/// The state of mode ipvs in a node's kernel, as the kernel's tools print it: virtual servers,
/// sets, the device and rules.
fn kernel(bed: &Testbed, node: &str) -> Result<Vec<String>> {
    let machine = bed.machines().machine(node)?;
    let mut lines: Vec<String> =
        machine.tool("ipvsadm", &["-Sn"])?.lines().map(|line| format!("server {line}")).collect();
    // The kernel chooses the number of buckets, so the comparison ignores this number.
    let without_buckets = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let at = words.iter().position(|word| *word == "hashsize" || *word == "bucketsize");
        match at {
            Some(at) => [&words[..at], words.get(at + 2..).unwrap_or_default()].concat().join(" "),
            None => line.to_owned(),
        }
    };
    lines.extend(machine.tool("ipset", &["save"])?.lines().map(without_buckets));
    let addresses = machine.tool("ip", &["-brief", "address", "show"])?;
    let device = addresses.lines().filter(|line| line.starts_with("kube-ipvs0"));
    let is_own = |word: &&str| !word.starts_with("fe80:");
    lines.extend(device.flat_map(str::split_whitespace).filter(is_own).map(|word| format!("device {word}")));
    lines.sort();
    let lock = bed.machines().xtables_lock(node);
    for family in Family::BOTH {
        let saved = iptables::save(machine, Variant::Legacy, family, &lock)?;
        let mut rules: Vec<String> = saved.lines().map(|line| format!("{family} {line}")).collect();
        rules.sort();
        lines.extend(rules);
    }
    Ok(lines)
}

/// Removes lines about the testbed's marker Service, whose port changes with each change of the
/// manifests.
fn without_marker(lines: Vec<String>) -> Vec<String> {
    let marker = MARKER_ADDRESS.to_string();
    lines.into_iter().filter(|line| !line.contains(&marker)).collect()
}

fn difference(one: &[String], other: &[String]) -> Vec<String> {
    let gone = one.iter().filter(|line| !other.contains(line)).map(|line| format!("- {line}"));
    gone.chain(other.iter().filter(|line| !one.contains(line)).map(|line| format!("+ {line}"))).collect()
}

/// Longest wait until the agent has found a change that another program made. The agent finds some
/// changes only with its full comparison. The agent chooses the interval of full comparisons so
/// that they take one percent of a core. On a machine under load, a comparison may take seconds.
const CHANGED_BY_HAND: Duration = Duration::from_secs(300);

/// Waits until the state of a node's kernel equals `before`.
fn returns_to(bed: &Testbed, node: &str, before: &[String]) -> Result<()> {
    within(CHANGED_BY_HAND, || {
        let different = difference(before, &kernel(bed, node)?);
        ensure!(different.is_empty(), "different:\n{}", different.join("\n"));
        Ok(())
    })
}

fn agent(bed: &Testbed, node: &str) -> Result<AgentInfo> {
    bed.agents()?.into_iter().find(|agent| agent.node == node).with_context(|| format!("no agent of {node}"))
}

/// Kills the agent of node-a, starts it again, and waits until it has reported to the control plane
/// that everything is programmed.
pub(super) fn restart(bed: &Testbed, setup: &AgentSetup) -> Result<AgentInfo> {
    replace(bed, setup, Testbed::kill_agent)
}

/// Like [`restart`], but the agent ends by itself, as in an upgrade.
pub(super) fn upgrade(bed: &Testbed, setup: &AgentSetup) -> Result<AgentInfo> {
    replace(bed, setup, Testbed::stop_agent)
}

fn replace(bed: &Testbed, setup: &AgentSetup, end: fn(&Testbed, &str) -> Result<()>) -> Result<AgentInfo> {
    let before = agent(bed, "node-a")?.connected_unix_ms;
    end(bed, "node-a")?;
    bed.start_agent_with("node-a", setup)?;
    eventually(|| {
        let now = agent(bed, "node-a")?;
        let is_new = now.connected_unix_ms > before && now.programmed_version == now.head_version;
        ensure!(is_new && now.head_version > 0, "the restarted agent is not up to date: {now:?}");
        Ok(())
    })?;
    agent(bed, "node-a")
}

/// A change writes only the objects that it changes. When the change is undone, the kernel's state
/// is as before. A warm restart writes nothing.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn a_change_writes_only_changed_objects(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &AgentSetup::default())?;
    let before = kernel(bed, "node-a")?;
    bed.set_endpoints("steady", &["a1", "b2"])?;
    let after = kernel(bed, "node-a")?;
    let (changed, written) = (difference(&before, &after), agent(bed, "node-a")?.objects_written);
    ensure!(!changed.is_empty() && written > 0, "nothing was written");
    // Each written object adds, removes or replaces a line. A drained destination is written twice.
    ensure!(
        written as usize <= 2 * changed.len(),
        "{written} objects were written for these changes:\n{}",
        changed.join("\n")
    );
    // The case uses UDP, because a TCP connection would keep its destination for two minutes.
    run(bed, &[ask("a3", "steady", ClusterIp).ports(&["udp"]).answered(&["a1", "b2"], Kept)])?;
    bed.set_endpoints("steady", &["a1", "b1"])?;
    eventually(|| {
        let different = difference(&without_marker(before.clone()), &without_marker(kernel(bed, "node-a")?));
        ensure!(different.is_empty(), "different after the change was undone:\n{}", different.join("\n"));
        Ok(())
    })?;
    let settled = kernel(bed, "node-a")?;
    let written = restart(bed, &AgentSetup::default())?.objects_written;
    ensure!(written == 0, "{written} objects were written by a warm restart");
    returns_to(bed, "node-a", &settled)
}

/// Another program flushes virtual servers, sets, addresses or rules, or removes the device. The
/// agent restores everything.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn flushed_state_is_restored(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &AgentSetup::with(&["--ipvs-sync-period", "1s"]))?;
    let before = kernel(bed, "node-a")?;
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    let flush = |arguments: &[&str]| {
        Family::BOTH.into_iter().try_for_each(|family| iptables::run(node, Variant::Legacy, family, &lock, arguments))
    };
    let one_destination = || -> Result<()> {
        let server = bed.address("steady", ClusterIp, Family::V4, "tcp")?.to_string();
        let listed = node.tool("ipvsadm", &["-Sn"])?;
        let added =
            listed.lines().find(|line| line.starts_with(&format!("-a -t {server} "))).context("no destination")?;
        let destination = added.split(' ').nth(4).context("a destination without an address")?;
        node.tool("ipvsadm", &["-d", "-t", &server, "-r", destination]).map(drop)
    };
    let up_and_down = || node.ip_batch("link set kube-ipvs0 up\nlink set kube-ipvs0 down\n");
    let steps: [(&str, &dyn Fn() -> Result<()>); 9] = [
        ("virtual servers were flushed", &|| node.tool("ipvsadm", &["-C"]).map(drop)),
        ("one destination was removed", &one_destination),
        ("sets were flushed", &|| node.tool("ipset", &["flush"]).map(drop)),
        ("addresses were flushed", &|| node.ip_batch("addr flush dev kube-ipvs0\n")),
        ("the device was removed", &|| node.ip_batch("link del kube-ipvs0\n")),
        ("the device was brought up", &|| node.ip_batch("link set kube-ipvs0 up\n")),
        // When the device goes down again, the kernel removes its IPv6 addresses. A verification
        // repairs the same loss once in ten minutes, so the check has to find the second one.
        ("the device was brought up and down again", &up_and_down),
        ("the device was brought up and down twice", &up_and_down),
        ("rules were flushed", &|| flush(&["-t", "nat", "-F"]).and_then(|()| flush(&["-F", "KUBE-IPVS-FILTER"]))),
    ];
    for (what, step) in steps {
        step().with_context(|| what.to_owned())?;
        returns_to(bed, "node-a", &before).with_context(|| format!("after {what}"))?;
        run(bed, &[ask("a3", "steady", ClusterIp).answered(&["a1", "b1"], Kept)])
            .with_context(|| format!("after {what}"))?;
    }
    Ok(())
}

/// The agent does not change virtual servers, sets, rules and addresses of other programs. After
/// `--cleanup` everything is as it was before the agent started.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn foreign_state_and_cleanup(bed: &Testbed) -> Result<()> {
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    let own = crate::testbed::plan::address("node-a").context("the plan has no address for node-a")?;
    let servers = [
        format!("-A -t {}:22222 -s wlc", own.v4),
        format!("-a -t {}:22222 -r 198.18.5.1:80 -g -w 3", own.v4),
        "-A -u 198.18.5.9:53 -s sh -p 99".to_owned(),
        "-A -t [2001:db8:5::9]:80 -s rr".to_owned(),
        "-A -f 77 -s rr".to_owned(),
    ];
    for server in &servers {
        node.tool("ipvsadm", &server.split(' ').collect::<Vec<_>>())?;
    }
    node.tool("ipset", &["create", "FOREIGN", "hash:ip"])?;
    node.tool("ipset", &["add", "FOREIGN", "198.18.5.1"])?;
    let rule = "-A FORWARD -m set --match-set FOREIGN src -j ACCEPT";
    iptables::run(node, Variant::Legacy, Family::V4, &lock, &rule.split(' ').collect::<Vec<_>>())?;
    let before = kernel(bed, "node-a")?;
    let expect_foreign = |when: &str| -> Result<()> {
        let lost: Vec<String> = difference(&before, &kernel(bed, "node-a")?);
        let lost: Vec<&String> = lost.iter().filter(|line| line.starts_with('-')).collect();
        ensure!(lost.is_empty(), "{when}, foreign objects are missing: {lost:#?}");
        Ok(())
    };

    bed.start_control_plane()?;
    let exclude = AgentSetup::with(&["--ipvs-exclude-cidrs", "198.18.7.0/24"]);
    bed.start_programmed("node-a", &exclude)?;
    expect_foreign("after the start")?;
    // Virtual servers on the agent's device belong to the agent, except in excluded networks.
    node.ip_batch("addr add 198.18.7.1/32 dev kube-ipvs0\naddr add 198.18.8.1/32 dev kube-ipvs0\n")?;
    for address in ["198.18.7.1:80", "198.18.8.1:80"] {
        node.tool("ipvsadm", &["-A", "-t", address, "-s", "rr"])?;
    }
    restart(bed, &exclude)?;
    bed.set_endpoints("steady", &["a2"])?;
    let listed = node.tool("ipvsadm", &["-Sn"])?;
    ensure!(listed.contains("198.18.7.1:80"), "an excluded virtual server is gone:\n{listed}");
    ensure!(!listed.contains("198.18.8.1:80"), "a stale virtual server still exists:\n{listed}");
    expect_foreign("after a restart")?;
    run(bed, &[ask("a3", "steady", ClusterIp).answered(&["a2"], Kept)])?;

    bed.stop_agent("node-a")?;
    ensure!(kernel(bed, "node-a")?.len() > before.len() + 50, "the stopped agent removed its objects");
    for attempt in ["--cleanup", "a second --cleanup"] {
        bed.clean_up_with("node-a", &exclude)?;
        let after = kernel(bed, "node-a")?;
        let excluded = |line: &String| line.contains("198.18.7.1:80");
        ensure!(after.iter().any(excluded), "{attempt} removed an excluded virtual server");
        let after: Vec<String> = after.into_iter().filter(|line| !excluded(line)).collect();
        let different = difference(&before, &after);
        ensure!(different.is_empty(), "different after {attempt}:\n{}", different.join("\n"));
    }
    Ok(())
}

/// The node switches from iptables to IPVS and back. The agent removes the state of the other mode,
/// and services answer after each switch. Open connections of IPVS survive until the limit.
///
/// Needs machines with [`super::lifecycle::some_services`] and no running programs.
pub fn modes_switch(bed: &Testbed) -> Result<()> {
    bed.start_control_plane()?;
    let by_iptables = AgentSetup { backend: Some(Backend::IptablesLegacy), ..AgentSetup::default() };
    let answers = || run(bed, &[ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept)]);
    bed.start_programmed("node-a", &by_iptables)?;
    let of_iptables = kernel(bed, "node-a")?;
    ensure!(of_iptables.iter().any(|line| line.contains("KUBE-SEP-")), "no rules of iptables: {of_iptables:#?}");
    answers()?;
    ensure!(restart(bed, &AgentSetup::default())?.backend == "ipvs", "the backend is not ipvs");
    eventually(|| {
        let left: Vec<String> = kernel(bed, "node-a")?.into_iter().filter(|line| line.contains("KUBE-SEP-")).collect();
        ensure!(left.is_empty(), "rules of mode iptables still exist: {left:#?}");
        Ok(())
    })?;
    answers()?;
    // A set cannot be removed while a foreign rule refers to it.
    let node = bed.machines().machine("node-a")?;
    let lock = bed.machines().xtables_lock("node-a");
    let foreign = |what: &str| -> Result<()> {
        let rule = "-m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT";
        let arguments: Vec<&str> = [what, "INPUT"].into_iter().chain(rule.split(' ')).collect();
        iptables::run(node, Variant::Legacy, Family::V4, &lock, &arguments)
    };
    foreign("-A")?;
    // The kernel finds an open connection in IPVS's own table, so its virtual server stays.
    let mut held = Vec::new();
    for family in Family::BOTH {
        let to = bed.address("steady", ClusterIp, family, "tcp")?;
        held.push((to, HeldConnection::open(bed.machines().machine("a3")?, to)?));
    }
    restart(bed, &AgentSetup { arguments: vec!["--takeover-limit=60s".to_owned()], ..by_iptables.clone() })?;
    let servers = node.tool("ipvsadm", &["-Sn"])?;
    for (to, held) in &mut held {
        held.check()?;
        ensure!(servers.contains(&format!("-t {to} ")), "the virtual server of an open connection is gone:\n{servers}");
    }
    ensure!(!servers.contains("-a -u"), "a virtual server of UDP still exists:\n{servers}");
    ensure!(!servers.contains("-w 1"), "a virtual server accepts new connections:\n{servers}");
    let status = page::of_agent(node, "/status")?;
    ensure!(status.contains("objects of mode ipvs with"), "the page /status says {status}");
    answers()?;
    eventually(|| {
        let sets = node.tool("ipset", &["list", "-n"])?;
        ensure!(sets.trim() == "KUBE-CLUSTER-IP", "expected only the set KUBE-CLUSTER-IP, found {sets}");
        Ok(())
    })?;
    answers()?;
    foreign("-D")?;
    returns_to(bed, "node-a", &of_iptables)?;
    answers()
}

/// A TCP destination that is removed stays at weight 0 until its connections have ended, even if
/// the agent restarts or the whole service is deleted. A UDP destination is removed at once.
///
/// Needs a running cluster with [`super::lifecycle::some_services`].
pub fn destinations_drain(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    let to = bed.address("steady", ClusterIp, Family::V4, "tcp")?;
    let client = bed.machines().machine("a3")?;
    let mut held = HeldConnection::open(client, to)?;
    let server = crate::testbed::plan::address(&held.answer.server).context("the server has no address")?.v4;
    let destination = |transport: &str| -> Result<Option<String>> {
        let start = format!("-a -{transport} {}:", to.ip());
        let listed = node.tool("ipvsadm", &["-Sn"])?;
        let is_it = |line: &&str| line.starts_with(&start) && line.contains(&format!("-r {server}:"));
        let found = listed.lines().filter(is_it).find(|line| transport == "u" || line.contains(&format!(" {to} ")));
        Ok(found.map(str::to_owned))
    };
    let rest: Vec<&str> = ["a1", "b1"].into_iter().filter(|pod| *pod != held.answer.server).collect();
    ensure!(destination("u")?.is_some(), "the UDP virtual server has no destination on {server}");
    bed.set_endpoints("steady", &rest)?;
    ensure!(destination("u")?.is_none(), "the UDP destination still exists");
    let drains = || -> Result<()> {
        let line = destination("t")?.context("the destination is gone although it has a connection")?;
        ensure!(line.ends_with("-w 0"), "the destination still accepts connections: {line}");
        Ok(())
    };
    drains()?;
    std::thread::sleep(DRAIN_LOOK);
    drains()?;
    held.check()?;
    // The case ends this connection with a reset, so that IPVS does not keep it in TIME_WAIT.
    let other = HeldConnection::open(client, to)?;
    let server = &other.answer.server;
    ensure!(rest.contains(&server.as_str()), "{server} answers a new connection, expected one of {rest:?}");
    other.reset()?;

    restart(bed, &AgentSetup::default())?;
    bed.update(|manifests| manifests.remove("steady").map(drop))?;
    std::thread::sleep(DRAIN_LOOK);
    drains().context("after a restart, and the service's deletion")?;
    held.check().context("after the service was deleted")?;
    held.reset()?;
    let is_gone = || -> Result<()> {
        let listed = node.tool("ipvsadm", &["-Sn"])?;
        ensure!(!listed.contains(&to.to_string()), "the virtual server still exists:\n{listed}");
        let addresses = node.tool("ip", &["-brief", "address", "show", "dev", "kube-ipvs0"])?;
        ensure!(!addresses.contains(&format!("{}/", to.ip())), "the address still exists: {addresses}");
        Ok(())
    };
    // IPVS forgets a connection ten seconds after its reset.
    within(Duration::from_secs(150), is_gone).context("after the last connection was reset")
}

/// A service's address answers pings and refuses other ports. An address that another interface
/// holds is served, but not added to the device.
///
/// Needs machines without services and without running programs.
pub fn addresses(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    bed.write(|manifests| manifests.add(Service::new("web", &["a1", "b1"])))?;
    let external = Family::BOTH.map(|family| bed.address("web", ExternalIp, family, "tcp"));
    for address in external {
        let address = address?.ip();
        // The kernel never chooses these addresses as a source.
        let rest = if address.is_ipv4() { "32 dev lo scope host" } else { "128 dev lo preferred_lft 0" };
        node.ip_batch(&format!("addr add {address}/{rest}\n"))?;
    }
    bed.start_programs("node-a", &AgentSetup::with(&["--ipvs-strict-arp", "--ipvs-tcp-timeout", "17m"]))?;
    let bound = node.tool("ip", &["-brief", "address", "show", "dev", "kube-ipvs0"])?;
    for family in Family::BOTH {
        let cluster = bed.address("web", ClusterIp, family, "tcp")?;
        let external = bed.address("web", ExternalIp, family, "tcp")?;
        ensure!(bound.contains(&format!("{}/", cluster.ip())), "{cluster} is not on the device: {bound}");
        ensure!(
            !bound.contains(&format!("{}/", external.ip())),
            "{external} of another interface is on the device: {bound}"
        );
        for from in ["a3", "outside-1"] {
            let machine = bed.machines().machine(from)?;
            ping(machine, cluster.ip()).with_context(|| format!("{from} pings {}", cluster.ip()))?;
            let undefined = SocketAddr::new(cluster.ip(), 4);
            let outcome = bed.machines().ask(from, &Request::new(Transport::Tcp, undefined))?;
            ensure!(outcome == Outcome::Refused, "{from} asks {undefined}: {outcome}, expected: refused");
        }
    }
    run(
        bed,
        &[
            ask("outside-1", "web", ExternalIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Masqueraded("node-a")),
            ask("outside-1", "web", NodePort("node-a")).answered(&["a1", "b1"], Masqueraded("node-a")),
        ],
    )?;
    let parameters = node.run(|| {
        let read = |path: &str| std::fs::read_to_string(format!("/proc/sys/net/ipv4/{path}"));
        let all = ["conf/all/arp_ignore", "conf/all/arp_announce", "vs/conntrack", "vs/expire_nodest_conn"];
        Ok(all.map(|path| read(path).map(|value| value.trim().to_owned()).unwrap_or_default()))
    })?;
    ensure!(parameters == ["1", "2", "1", "1"], "kernel parameters are {parameters:?}");
    let timeouts = node.tool("ipvsadm", &["-L", "--timeout"])?;
    ensure!(timeouts.contains("1020"), "the time-outs are {timeouts}");
    Ok(())
}

/// Sends a ping and waits for its answer.
fn ping(from: &Namespace, to: IpAddr) -> Result<()> {
    const ID: [u8; 2] = [0x4e, 0x47];
    let is_v4 = to.is_ipv4();
    let (kind, answer) = if is_v4 { (8, 0) } else { (128, 129) };
    let mut request = vec![kind, 0, 0, 0, ID[0], ID[1], 0, 1];
    if is_v4 {
        // The checksum of the words above. The kernel computes the checksum of ICMPv6.
        let checksum = !(0x0800_u16 + 0x4e47 + 1);
        request[2..4].copy_from_slice(&checksum.to_be_bytes());
    }
    let protocol = if is_v4 { Protocol::ICMPV4 } else { Protocol::ICMPV6 };
    from.run(|| {
        let socket = Socket::new(Domain::for_address(SocketAddr::new(to, 0)), Type::RAW, Some(protocol))?;
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        let socket = UdpSocket::from(socket);
        socket.send_to(&request, SocketAddr::new(to, 0)).context("sending a ping")?;
        let mut buffer = [0; 512];
        loop {
            let length = socket.recv(&mut buffer).context("the ping got no answer")?;
            let packet = buffer.get(if is_v4 { 20 } else { 0 }..length).unwrap_or_default();
            if packet.first() == Some(&answer) && packet.get(4..6) == Some(&ID) {
                return Ok(());
            }
        }
    })
}
