//! Each client keeps one UDP socket open while Services change.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use headgate_core::Family as CoreFamily;
use headgate_tests::{
    testbed::{
        AgentSetup, Backend, Manifests, Outcome, Testbed,
        client::HeldConnection,
        flow::{Flow, open_all},
        iptables::Variant,
        manifests::{Endpoint, Port, Service, Via},
        page,
        plan::{self, Family, LINE_PORT, SECOND_LINE_PORT},
    },
    uml,
};

use super::table::entries;

/// Clients in pods, on nodes and outside, each with the kind of address that it uses.
const WAYS: [(&str, Via); 7] = [
    ("a3", Via::ClusterIp),
    ("node-a", Via::ClusterIp),
    ("a3", Via::NodePort("node-a")),
    ("outside-1", Via::NodePort("node-a")),
    ("outside-1", Via::LoadBalancerIp),
    ("outside-1", Via::ExternalIp),
    ("b3", Via::ExternalIp),
];

fn scenario(backend: Backend, manifests: Manifests, work: impl FnOnce(&Testbed) -> Result<()>) {
    let test = || {
        let bed = Testbed::start(backend, manifests).unwrap();
        if let Err(error) = work(&bed) {
            panic!("{error:#}");
        }
    };
    if backend.runs_in_uml() { uml::inside(test) } else { test() }
}

fn one_service(endpoints: &[&str]) -> Manifests {
    let mut manifests = Manifests::default();
    manifests.add(Service::new("dns", endpoints)).unwrap();
    manifests
}

fn udp_port(service: &mut Service) -> &mut Port {
    service.ports.iter_mut().find(|port| port.name == "udp").unwrap()
}

fn all_answered_by(flows: &[Flow], server: &str) -> Result<()> {
    flows.iter().try_for_each(|flow| flow.until_answered_by(server).map(drop))
}

/// The endpoint is replaced, removed and added again. Then the endpoint's port changes, the port of
/// the Service changes, and the Service is deleted.
fn follows_its_service(bed: &Testbed) -> Result<()> {
    let flows = open_all(bed, "dns", &WAYS)?;
    all_answered_by(&flows, "b1")?;
    bed.set_endpoints("dns", &["c1"])?;
    all_answered_by(&flows, "c1").context("after the endpoint was replaced")?;
    bed.set_endpoints("dns", &[])?;
    for flow in &flows {
        flow.until("refused", |outcome| *outcome == Outcome::Refused).context("after scaling to zero")?;
    }
    bed.set_endpoints("dns", &["a1"])?;
    all_answered_by(&flows, "a1").context("after scaling up again")?;
    bed.update_service("dns", |dns| udp_port(dns).target_port = SECOND_LINE_PORT)?;
    for flow in &flows {
        let on_second =
            |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if answer.port == SECOND_LINE_PORT);
        flow.until("answered at the second port", on_second).context("after targetPort changed")?;
    }
    // The port of the Service changes. Clients of the old port get no more answers.
    bed.update_service("dns", |dns| udp_port(dns).port = 81)?;
    for flow in open_all(bed, "dns", &WAYS)? {
        flow.until_answered_by("a1").context("at the new port")?;
    }
    let by_service_port = |way: &(&str, Via)| !matches!(way.1, Via::NodePort(_));
    let is_old = WAYS.iter().chain(&WAYS).map(by_service_port);
    for (flow, _) in flows.iter().zip(is_old).filter(|(_, is_old)| *is_old) {
        flow.until_unanswered().context("after the service's port changed")?;
    }
    let flows = open_all(bed, "dns", &WAYS)?;
    all_answered_by(&flows, "a1")?;
    bed.update(|manifests| manifests.remove("dns").map(drop))?;
    flows.iter().try_for_each(Flow::until_unanswered).context("after the service was deleted")?;
    if bed.backend() == Backend::Ipvs {
        // The agent may have deleted no entries: IPVS itself drops the entry of a flow to a removed
        // destination when the next packet of the flow arrives.
        return Ok(());
    }
    for family in ["IPv4", "IPv6"] {
        let name = format!("kubeproxy_conntrack_reconciler_deleted_entries_total{{ip_family=\"{family}\"}} ");
        let deleted = metrics(bed)?.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok());
        ensure!(
            deleted.is_some_and(|count| count > 0),
            "the metric {name}is {deleted:?}, which is not a positive number"
        );
    }
    Ok(())
}

/// The Service is deleted while no agent runs. The next agents know its flows from the state of the
/// last run, or, after a crash and without this state, from the rules.
fn forgets_what_was_removed_meanwhile(bed: &Testbed) -> Result<()> {
    let folder = bed.machines().folder().join("no-state");
    for case in ["agents stopped", "agents crashed", "agents have no state"] {
        let flows = open_all(bed, "dns", &WAYS)?;
        all_answered_by(&flows, "b1").context(case)?;
        for node in ["node-a", "node-b"] {
            if case == "agents crashed" { bed.kill_agent(node)? } else { bed.stop_agent(node)? }
        }
        bed.update(|manifests| manifests.remove("dns").map(drop))?;
        for node in ["node-a", "node-b"] {
            let state = folder.join(node);
            let state = state.to_str().context("the folder's name is not UTF-8")?;
            let has_no_state = case == "agents have no state";
            let setup = if has_no_state { AgentSetup::with(&["--state-dir", state]) } else { AgentSetup::default() };
            bed.start_agent_with(node, &setup)?;
        }
        bed.wait_programmed()?;
        flows.iter().try_for_each(Flow::until_unanswered).context(case)?;
        bed.update(|manifests| manifests.add(Service::new("dns", &["b1"])).map(drop))?;
    }
    Ok(())
}

/// The metrics of the agent on node-a.
fn metrics(bed: &Testbed) -> Result<String> {
    page::of_agent(bed.machines().machine("node-a")?, "/metrics")
}

/// Only endpoints on the client's node serve the Service. The test replaces these endpoints.
fn follows_local_endpoints(bed: &Testbed) -> Result<()> {
    let ways = [("a3", Via::ClusterIp), ("outside-1", Via::NodePort("node-a"))];
    let flows = open_all(bed, "dns", &ways)?;
    all_answered_by(&flows, "a1")?;
    bed.set_endpoints("dns", &["a2", "b1"])?;
    all_answered_by(&flows, "a2")
}

/// Clients send packets before the Service exists, and before the Service has an endpoint.
fn recovers_once_there_is_an_endpoint(bed: &Testbed) -> Result<()> {
    // The first Service gets number 1.
    let expected = Service { number: 1, ..Service::new("dns", &[]) };
    let mut flows = Vec::new();
    for family in Family::BOTH {
        for (from, via) in WAYS {
            let flow = Flow::open(bed, from, expected.socket_address(via, family, "udp")?)?;
            let early = flow.ask();
            ensure!(!matches!(early, Outcome::Answered(_)), "{from} by {via:?}: {early} before the Service exists");
            flows.push(flow);
        }
    }
    bed.update(|manifests| manifests.add(Service::new("dns", &[])))?;
    ensure!(bed.service("dns")?.number == expected.number, "the Service did not get the expected number");
    for flow in &flows {
        flow.until("refused", |outcome| *outcome == Outcome::Refused).context("without endpoints")?;
    }
    bed.update_service("dns", |service| service.endpoints = vec![Endpoint::not_ready("b1")])?;
    flows.iter().for_each(|flow| drop(flow.ask()));
    bed.set_endpoints("dns", &["b1"])?;
    all_answered_by(&flows, "b1")
}

/// Flows to endpoints that still serve stay, and flows to a removed endpoint move. TCP connections
/// stay. UDP flows that do not use the Service stay too.
fn keeps_other_flows(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    // The kernel must not forget the flows meanwhile, not even on a slow machine.
    node.set_sysctls(&[
        ("netfilter/nf_conntrack_udp_timeout", "600"),
        ("netfilter/nf_conntrack_udp_timeout_stream", "600"),
    ])?;
    let foreign = foreign_flows(bed)?;
    let held = bed.address("dns", Via::ClusterIp, Family::V4, "tcp")?;
    let client = bed.machines().machine("a3")?;
    let mut held: Vec<HeldConnection> = (0..6).map(|_| HeldConnection::open(client, held)).collect::<Result<_>>()?;
    // Open enough flows that every endpoint gets some.
    let mut flows = Vec::new();
    for _ in 0..20 {
        flows.extend(open_all(bed, "dns", &[("a3", Via::ClusterIp), ("outside-1", Via::NodePort("node-a"))])?);
    }
    let before: Vec<String> = flows.iter().map(Flow::server).collect::<Result<_>>()?;
    let moving = before.iter().filter(|server| *server == "c1").count();
    ensure!(moving > 0 && before.iter().any(|server| server == "b1"), "{before:?}");
    let tracked = foreign_entries(node, &foreign)?;
    ensure!(tracked == foreign.len(), "{tracked} of {} foreign flows are in the table", foreign.len());

    let left = vec![Endpoint::ready("a1"), Endpoint::terminating("b1"), Endpoint::published("b2")];
    bed.update_service("dns", |dns| dns.endpoints = left)?;
    for (flow, before) in flows.iter().zip(&before) {
        if before == "c1" {
            flow.until(
                "answered by another server than c1",
                |outcome| matches!(outcome, Outcome::Answered(answer) if answer.server != "c1"),
            )?;
        }
    }
    for (flow, before) in flows.iter().zip(&before).filter(|(_, before)| *before != "c1") {
        ensure!(flow.server()? == *before, "a flow moved from {before}, which still serves");
    }
    ensure!(foreign_entries(node, &foreign)? == tracked, "a foreign UDP entry was deleted");
    held.iter_mut()
        .try_for_each(HeldConnection::check)
        .context("a TCP connection, possibly to a removed endpoint, broke")
}

/// Opens UDP flows that only resemble flows of the Service: to the endpoint's own address, and to
/// the node port on another node.
fn foreign_flows(bed: &Testbed) -> Result<Vec<SocketAddr>> {
    let mut to = Vec::new();
    for family in Family::BOTH {
        to.push(SocketAddr::new(plan::address("c1").context("c1")?.of(family), LINE_PORT));
        to.push(bed.address("dns", Via::NodePort("node-c"), family, "udp")?);
    }
    for address in &to {
        // Packets from a3 pass node-a, which does not translate them.
        Flow::open(bed, "a3", *address)?.until("answered", |outcome| matches!(outcome, Outcome::Answered(_)))?;
    }
    Ok(to)
}

/// Counts the destinations in `to` for which the node's table has an untranslated flow.
fn foreign_entries(node: &headgate_tests::testbed::Namespace, to: &[SocketAddr]) -> Result<usize> {
    node.run(|| {
        let mut found = 0;
        for family in CoreFamily::BOTH {
            let all = entries(family)?;
            let listed = to.iter().filter(|to| all.iter().any(|flow| flow.to == **to && flow.answered_by == **to));
            found += listed.count();
        }
        Ok(found)
    })
}

/// The agent deletes entries only after it has written the rules. If it deleted them earlier, a
/// client that keeps sending would get a new entry by the old rules.
fn deletes_flows_after_the_rules_are_written(bed: &Testbed) -> Result<()> {
    let slow = SlowTools::create(bed.machines().folder(), bed.backend())?;
    bed.kill_agent("node-a")?;
    let setup = headgate_tests::testbed::AgentSetup { tools: Some(slow.folder.clone()), ..Default::default() };
    bed.start_programmed("node-a", &setup)?;
    let flows = open_all(bed, "dns", &[("a3", Via::ClusterIp), ("outside-1", Via::NodePort("node-a"))])?;
    all_answered_by(&flows, "b1")?;
    slow.hold()?;
    bed.write_endpoints("dns", &["c1"])?;
    slow.wait_until_held()?;
    for _ in 0..100 {
        for flow in &flows {
            ensure!(flow.server()? == "b1", "a flow moved before the rules changed");
        }
    }
    slow.release()?;
    all_answered_by(&flows, "c1")?;
    bed.wait_programmed()
}

/// Wrappers for the programs that write rules. Each wrapper waits while the file `held` exists.
struct SlowTools {
    folder: PathBuf,
    held: PathBuf,
    waiting: PathBuf,
}

impl SlowTools {
    fn create(folder: &Path, backend: Backend) -> Result<Self> {
        use std::os::unix::fs::PermissionsExt as _;
        let tools =
            Self { folder: folder.join("slow"), held: folder.join("slow-held"), waiting: folder.join("slow-waiting") };
        std::fs::create_dir(&tools.folder).context("creating a folder for the tools")?;
        let variant = if backend.variant() == Variant::Nft { "nft" } else { "legacy" };
        for family in ["iptables", "ip6tables"] {
            let name = format!("{family}-{variant}-restore");
            let path = std::env::var("PATH").context("PATH is not set")?;
            let script = format!(
                "#!/bin/sh\nwhile [ -e '{held}' ]; do : > '{waiting}'; sleep 0.02; done\nPATH='{path}' exec {name} \"$@\"\n",
                held = tools.held.display(),
                waiting = tools.waiting.display(),
            );
            let program = tools.folder.join(&name);
            std::fs::write(&program, script).with_context(|| format!("writing {}", program.display()))?;
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
        }
        Ok(tools)
    }

    fn hold(&self) -> Result<()> {
        std::fs::write(&self.held, "").context("holding the tools")
    }

    fn wait_until_held(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.waiting.exists() {
            if Instant::now() > deadline {
                bail!("the agent has not started to write rules");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn release(&self) -> Result<()> {
        std::fs::remove_file(&self.held).context("releasing the tools")
    }
}

macro_rules! service_tests {
    ($($module:ident: $backend:expr;)*) => { $(
        mod $module {
            use super::*;

            // rows: 79, 82
            #[test]
            fn udp_clients_follow_their_service() {
                scenario($backend, one_service(&["b1"]), follows_its_service);
            }

            // rows: 80
            #[test]
            fn udp_clients_follow_local_endpoints() {
                let mut manifests = Manifests::default();
                let local = Service { internal_local: true, external_local: true, ..Service::new("dns", &["a1"]) };
                manifests.add(local).unwrap();
                scenario($backend, manifests, follows_local_endpoints);
            }

            // rows: 81
            #[test]
            fn udp_clients_recover_once_there_is_an_endpoint() {
                scenario($backend, Manifests::default(), recovers_once_there_is_an_endpoint);
            }
        }
    )* };
}

service_tests! {
    iptables_legacy: Backend::IptablesLegacy;
    iptables_nft: Backend::IptablesNft;
    ipvs: Backend::Ipvs;
}

/// These tests concern only iptables: IPVS removes a UDP destination together with its flows.
macro_rules! rule_tests {
    ($($module:ident: $backend:expr;)*) => { $(
        mod $module {
            use super::*;

            // rows of iptables: 83, 84
            #[test]
            fn flows_to_serving_endpoints_are_kept() {
                let manifests = one_service(&["a1", "b1", "b2", "c1"]);
                scenario($backend, manifests, keeps_other_flows);
            }

            // rows of iptables: 85
            #[test]
            fn flows_are_deleted_after_the_rules_are_written() {
                scenario($backend, one_service(&["b1"]), deletes_flows_after_the_rules_are_written);
            }
        }
    )* };
}

rule_tests! {
    rules_of_iptables_legacy: Backend::IptablesLegacy;
    rules_of_iptables_nft: Backend::IptablesNft;
}

#[test]
fn flows_end_at_the_next_start_if_their_service_was_deleted_meanwhile() {
    for backend in [Backend::IptablesLegacy, Backend::IptablesNft, Backend::Nftables] {
        scenario(backend, one_service(&["b1"]), forgets_what_was_removed_meanwhile);
    }
}
