//! A tenant writes Services that need many objects on every node. Other tenants' changes are
//! programmed, the kernel has a limited number of objects for each Service, and what is too large
//! is rejected by name.

use std::{
    collections::BTreeSet,
    net::Ipv4Addr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use headgate_core::{
    Change, Endpoint, EndpointPort, Protocol, Service, ServiceKey, ServicePort,
    explain::{Mode, NodeSettings},
    iptables::NodePortAddresses,
    view::MasqueradeConfig,
};
use headgate_node_agent::{
    dataplane::{NodeDataplane, nftables::NftablesDataplane},
    reconcile::{Reconciler, SyncMetrics, Timing},
    state::{AgentState, Snapshot, StateUpdate},
};
use headgate_oracle::compare;
use headgate_tests::{
    cases::{self, SourceAddress, case::ask},
    testbed::{
        AgentSetup, Backend, Manifests, Namespace, Testbed, Transport,
        manifests::{self, Port, ServiceType, Via},
        process::output,
    },
};
use serde_json::json;

use crate::nftables::{config, patiently};

/// Longest time that a test waits before it fails.
const GUARD: Duration = Duration::from_secs(60);

/// The number of elements in a map of the table for IPv4.
fn elements(bed: &Testbed, map: &str) -> Result<usize> {
    let listed = bed.machines().machine("node-a")?.tool("nft", &["list", "map", "ip", "headgate", map])?;
    Ok(listed.matches(" : ").count())
}

/// With 100 ports and consistent-hash, each Service has 12,800 slots, and not 204,800. If its ports
/// have equal endpoints, it has 128. Another tenant's endpoint changes meanwhile.
#[test]
fn a_service_with_consistent_hash_and_100_ports_has_few_slots() {
    let ports = |has_one_target: bool| -> Vec<Port> {
        let port = |number: u16| Port {
            name: Box::leak(format!("p{number}").into_boxed_str()),
            transport: Transport::Tcp,
            port: number,
            target_port: if has_one_target { 8080 } else { 10_000 + number },
        };
        (1..=100).map(port).collect()
    };
    let hashed = |name: &str, has_one_target| manifests::Service {
        ports: ports(has_one_target),
        service_type: ServiceType::ClusterIp,
        patch: Some(|_| json!({"metadata": {"annotations": {"headgate.io/load-balancing": "consistent-hash"}}})),
        ..manifests::Service::new(name, &["a1", "b1"])
    };
    let mut all = Manifests::default();
    all.add(manifests::Service::new("web", &["a1"])).unwrap();
    let bed = Testbed::machines_only(Backend::Nftables, all).unwrap();
    bed.start_programs("node-a", &AgentSetup::default()).unwrap();
    let before = elements(&bed, "endpoints").unwrap();
    bed.update(|all| {
        all.add(hashed("attack", false))?;
        all.add(hashed("shared", true))?;
        all.service_mut("web")?.endpoints = manifests::ready(&["b1"]);
        Ok(())
    })
    .unwrap();
    let question = ask("a3", "web", Via::ClusterIp);
    cases::run(&bed, &[question.answered(&["b1"], SourceAddress::Kept)]).unwrap();
    // While its hash table grows or shrinks, the kernel may list an element twice, or leave one
    // out.
    let until = |expected: usize| {
        cases::changes::eventually(|| {
            let found = elements(&bed, "endpoints")?;
            ensure!(found == expected, "{found} endpoints, not {expected}");
            Ok(())
        })
    };
    until(before + 100 * 128 + 128).unwrap();
    bed.update(|all| all.remove("attack").and_then(|_| all.remove("shared")).map(drop)).unwrap();
    until(before).unwrap();
}

fn service(name: &str, last: u8, ports: u16, external_ips: u32) -> Change {
    let port = |number| ServicePort { name: "p".into(), protocol: Protocol::Tcp, port: number, node_port: 0 };
    let address = [10, 96, 0, last].into();
    let mut service = Service::new(ServiceKey::new("ns", name), vec![address], (1..=ports).map(port).collect());
    service.external_ips = (0..external_ips).map(|number| Ipv4Addr::from(0xc633_0000 + number).into()).collect();
    Change::from(service)
}

fn endpoint(service: &str, number: u32) -> Change {
    let ports = [EndpointPort::new("p", Protocol::Tcp, 8080)].into();
    Change::Endpoint(ServiceKey::new("ns", service), Endpoint::new(Ipv4Addr::from(0x0af4_0000 + number).into(), ports))
}

/// A faulty replica sends what a control plane would refuse. The agent leaves out the Service that
/// is too large, and programs a large one in several transactions.
#[test]
fn what_is_too_large_for_a_node_is_rejected_and_what_is_large_is_programmed_in_parts() {
    Namespace::for_test("attack-large").unwrap().run(large_services).unwrap();
}

fn large_services() -> Result<()> {
    let options = config();
    let shared = Arc::new(AgentState::new("node-a"));
    let dataplane = Box::new(NftablesDataplane::new(&options)?);
    let (reconciler, progress) =
        Reconciler::new(dataplane, Arc::clone(&shared), SyncMetrics::default(), Timing::default());
    let running = thread::spawn(|| reconciler.run());
    let snapshot = Some(Snapshot { buckets: Default::default(), rejected: Default::default() });
    let update = |version, changes| StateUpdate { epoch: 1, version, changes, ..StateUpdate::default() };
    shared.apply(StateUpdate { snapshot, ..update(1, vec![service("web", 1, 1, 0), endpoint("web", 1)]) });
    let wait = |version| {
        let deadline = Instant::now() + GUARD;
        let reached = || progress.borrow().programmed.as_ref().map(|one| one.target.version);
        while reached() != Some(version) {
            ensure!(Instant::now() < deadline, "{:?}", progress.borrow().clone());
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    };
    wait(1)?;
    let mut changes = vec![service("attack", 2, 100, 200), service("large", 3, 1, 0), endpoint("web", 2)];
    changes.extend((0..20_000).map(|number| endpoint("large", number)));
    changes.extend((0..20).map(|number| endpoint("attack", number)));
    shared.apply(update(2, changes));
    wait(2)?;
    let rejections = progress.borrow().rejections.clone();
    let named: Vec<&str> = rejections.iter().map(|rejection| rejection.resource.as_str()).collect();
    ensure!(named == ["Service ns/attack"], "{rejections:?}");
    ensure!(rejections[0].reason.contains("divide it into several Services"), "{rejections:?}");
    // While its hash table grows, the kernel may list an element twice, or leave one out.
    let deadline = Instant::now() + GUARD;
    loop {
        let listed = output("nft", &["list", "map", "ip", "headgate", "endpoints"]);
        let (_, listed) = listed.split_once("elements").context("the map is empty")?;
        let elements = listed.split(',').map(|element| element.trim_matches(['=', '{', '}', ' ', '\t', '\n']));
        let elements: BTreeSet<&str> = elements.filter(|element| element.contains(" : ")).collect();
        if elements.len() == 20_002 {
            break;
        }
        ensure!(Instant::now() < deadline, "{} endpoints", elements.len());
        thread::sleep(Duration::from_millis(100));
    }
    ensure!(!output("nft", &["list", "map", "ip", "headgate", "services"]).contains("10.96.0.2 "));
    // The large Service shrinks, and the other one is small enough.
    let removed = (10..20_000).map(|number| {
        Change::RemoveEndpoint(ServiceKey::new("ns", "large"), Ipv4Addr::from(0x0af4_0000 + number).into())
    });
    shared.apply(update(3, removed.chain([service("attack", 2, 100, 100)]).collect()));
    wait(3)?;
    // The rejection may be withdrawn after the version is programmed.
    let deadline = Instant::now() + GUARD;
    while !progress.borrow().rejections.is_empty() {
        ensure!(Instant::now() < deadline, "{:?}", progress.borrow().rejections);
        thread::sleep(Duration::from_millis(2));
    }
    shared.stop();
    running.join().ok().context("the reconcile loop panicked")?;
    let settings = NodeSettings {
        mode: Mode::Nftables,
        masquerade: MasqueradeConfig::default(),
        node_ports_v4: NodePortAddresses::All,
        node_ports_v6: NodePortAddresses::All,
        localhost_node_ports: false,
    };
    let mut decoder = NftablesDataplane::new(&options)?;
    for table in patiently(|| decoder.decode())? {
        let compared = shared.with_state(|state| {
            compare(state, &headgate_core::NodeFacts::named("node-a"), &settings, table, &|_| true)
        });
        ensure!(compared.differences.is_empty() && compared.frontends > 10_000, "{:?}", compared.differences);
    }
    Ok(())
}
