//! A node on which kube-proxy ran in mode ipvs before.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::super::case::{SourceAddress, ask};
use super::super::changes::within;
use super::super::run::run;
use super::{CHANGED_BY_HAND, agent, kernel, returns_to};
use crate::testbed::iptables::{self, Variant};
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{AgentSetup, Family, Namespace, Testbed, plan};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, NodePort};

/// Sets with the names that kube-proxy uses. Some sets have other types or options. All entries are
/// stale.
const SETS: &str = "\
create KUBE-CLUSTER-IP hash:ip,port family inet hashsize 1024 maxelem 131072
add KUBE-CLUSTER-IP 10.96.200.1,tcp:80
create KUBE-6-CLUSTER-IP hash:ip,port family inet6 hashsize 1024 maxelem 131072 counters
add KUBE-6-CLUSTER-IP fd00:10:96::c8,tcp:80
create KUBE-LOOP-BACK hash:ip,port,ip family inet hashsize 1024 maxelem 131072 comment
add KUBE-LOOP-BACK 10.244.1.200,tcp:80,10.244.1.200 comment \"testbed/stale:tcp\"
create KUBE-EXTERNAL-IP hash:ip,port family inet hashsize 64 maxelem 16 timeout 600
add KUBE-EXTERNAL-IP 198.51.100.200,tcp:80
create KUBE-LOAD-BALANCER hash:ip,port family inet hashsize 1024 maxelem 1048576 forceadd
create KUBE-IPVS-IPS hash:ip family inet netmask 24 hashsize 1024 maxelem 1048576
add KUBE-IPVS-IPS 10.96.200.0
create KUBE-NODE-PORT-TCP bitmap:port range 30000-32767
add KUBE-NODE-PORT-TCP 30999
create KUBE-LOAD-BALANCER-SOURCE-CIDR hash:ip,port,net family inet hashsize 1024 maxelem 131072 skbinfo
create KUBE-HEALTH-CHECK-NODE-PORT hash:ip family inet
create KUBE-EXTERNAL-IP-LOCAL hash:ip,port family inet6 hashsize 1024 maxelem 131072
";

/// Rules that refer to some of these sets, so that these sets cannot be destroyed.
const RULES: &[&str] = &[
    "-t nat -N KUBE-SERVICES",
    "-t nat -A PREROUTING -m comment --comment kubernetes -j KUBE-SERVICES",
    "-t nat -A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT",
    "-t nat -A KUBE-SERVICES -m set --match-set KUBE-EXTERNAL-IP dst,dst -j ACCEPT",
    "-t nat -A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j ACCEPT",
    "-t nat -N KUBE-POSTROUTING",
    "-t nat -A POSTROUTING -j KUBE-POSTROUTING",
    "-t nat -A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE",
    "-t nat -N KUBE-NODE-PORT",
    "-t nat -A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-TCP dst -j ACCEPT",
    "-t filter -N KUBE-IPVS-FILTER",
    "-t filter -A KUBE-IPVS-FILTER -m set --match-set KUBE-IPVS-IPS dst -j REJECT",
];

fn restore_sets(node: &Namespace, lines: &str) -> Result<()> {
    node.run(|| {
        let mut ipset = Command::new("ipset").arg("restore").stdin(Stdio::piped()).spawn().context("running ipset")?;
        ipset.stdin.take().context("ipset has no standard input")?.write_all(lines.as_bytes())?;
        let status = ipset.wait()?;
        ensure!(status.success(), "ipset restore: {status}");
        Ok(())
    })
}

fn rule(bed: &Testbed, rule: &str) -> Result<()> {
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    iptables::run(node, Variant::Legacy, Family::V4, &lock, &rule.split(' ').collect::<Vec<_>>())
}

/// The agent takes over the state that kube-proxy left, including sets whose size, options or type
/// differ from the agent's own sets. In the end the kernel's state is as on a new node. The agent
/// cannot replace a set of another type while foreign rules refer to the set. The agent reports the
/// set, and replaces the set when the rules are removed.
///
/// Needs machines with [`super::super::lifecycle::some_services`] and no running programs.
pub fn kube_proxys_state_is_taken_over(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    let answers = || {
        run(
            bed,
            &[
                ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept),
                ask("outside-1", "steady", ExternalIp).answered(&["a1", "b1"], Masqueraded("node-a")),
                ask("outside-1", "steady", NodePort("node-a")).answered(&["a1", "b1"], Masqueraded("node-a")),
            ],
        )
    };
    bed.start_programs("node-a", &AgentSetup::default())?;
    let wanted = kernel(bed, "node-a")?;
    bed.stop_agent("node-a")?;
    bed.clean_up("node-a")?;
    ensure!(kernel(bed, "node-a")?.iter().all(|line| !line.contains("KUBE-")), "--cleanup has left rules or sets");

    restore_sets(node, SETS)?;
    RULES.iter().try_for_each(|line| rule(bed, line))?;
    node.ip_batch("link add kube-ipvs0 type dummy\naddr add 10.96.200.1/32 dev kube-ipvs0\n")?;
    let steady = bed.address("steady", ClusterIp, Family::V4, "tcp")?;
    node.ip_batch(&format!("addr add {}/32 dev kube-ipvs0\n", steady.ip()))?;
    let [first, second] = ["a1", "b2"].map(|pod| plan::address(pod).map(|address| address.v4.to_string()));
    let (first, second) =
        (first.context("the plan has no address for a1")?, second.context("the plan has no address for b2")?);
    for server in [
        "-A -t 10.96.200.1:80 -s rr".to_owned(),
        format!("-A -t {steady} -s wlc -p 300"),
        format!("-a -t {steady} -r {first}:8080 -m -w 1"),
        format!("-a -t {steady} -r {second}:8080 -m -w 1"),
    ] {
        node.tool("ipvsadm", &server.split(' ').collect::<Vec<_>>())?;
    }
    bed.start_programmed("node-a", &AgentSetup::default())?;
    answers()?;
    returns_to(bed, "node-a", &wanted).context("taking over kube-proxy's state")?;

    // A set of another type cannot be swapped. A foreign rule that refers to the set prevents the
    // removal of the set.
    bed.stop_agent("node-a")?;
    bed.clean_up("node-a")?;
    restore_sets(node, "create KUBE-EXTERNAL-IP-LOCAL hash:ip family inet\n")?;
    let refer = |change: &str| {
        rule(bed, &format!("-t filter {change} FORWARD -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst -j ACCEPT"))
    };
    refer("-A")?;
    bed.start_agent("node-a")?;
    within(CHANGED_BY_HAND, || {
        let error = agent(bed, "node-a")?.last_error;
        let parts = ["KUBE-EXTERNAL-IP-LOCAL has type hash:ip family inet", "hash:ip,port", "iptables-save | grep"];
        ensure!(parts.iter().all(|part| error.contains(part)), "the agent reports {error:?}");
        Ok(())
    })?;
    refer("-D")?;
    bed.wait_programmed()?;
    returns_to(bed, "node-a", &wanted)?;
    answers()?;
    full_sets_grow(bed)
}

/// A set that is full grows when a Service needs another element.
fn full_sets_grow(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    let saved = node.tool("ipset", &["save", "KUBE-CLUSTER-IP"])?;
    let elements: Vec<&str> = saved.lines().filter(|line| line.starts_with("add ")).collect();
    let mut full = format!("create full hash:ip,port family inet hashsize 64 maxelem {}\n", elements.len());
    elements.iter().for_each(|line| full += &(line.replace("KUBE-CLUSTER-IP", "full") + "\n"));
    restore_sets(node, &full)?;
    node.tool("ipset", &["swap", "full", "KUBE-CLUSTER-IP"])?;
    node.tool("ipset", &["destroy", "full"])?;
    bed.update(|manifests| manifests.add(Service::new("further", &["a1", "b1"])))?;
    let saved = node.tool("ipset", &["save", "KUBE-CLUSTER-IP"])?;
    let further = bed.address("further", ClusterIp, Family::V4, "tcp")?;
    for expected in [" maxelem 65536 ".to_owned(), format!(" {},tcp:{}", further.ip(), further.port())] {
        ensure!(saved.replace('\n', " ").contains(&expected), "KUBE-CLUSTER-IP has no {expected:?}:\n{saved}");
    }
    let steady = format!(" {},", bed.address("steady", ClusterIp, Family::V4, "tcp")?.ip());
    let mut kept = elements.iter().filter(|line| line.contains(&steady));
    ensure!(kept.all(|line| saved.contains(line)), "an element is lost:\n{saved}");
    run(bed, &[ask("outside-1", "further", ClusterIp).answered(&["a1", "b1"], Masqueraded("node-a"))])
}
