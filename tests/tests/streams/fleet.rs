//! A small simulated fleet against the real control plane. The tests cover agents that all
//! reconnect at the same time, agents that are slow, vanish or send garbage, and a replica whose
//! state is older than the state of its agents.

mod lagging;

use std::time::{Duration, Instant};

use headgate_tests::{
    bench::{
        snapshots::{self, IN_FLIGHT},
        storm::{self, CHANGED},
        workload,
    },
    fleet::{
        Break, Fault, Garbage, Member, Settings,
        rig::Wire,
        stage::{Setup, Stage},
    },
};

/// A stage for `agents` agents. Two of them store the resources that they receive. No program is
/// pinned to a processor.
fn stage(agents: usize, services: u32) -> Stage {
    let settings = Settings { backoff: Duration::from_millis(50), ..Settings::default() };
    let wire = Wire::VethUnsteered;
    Stage::set(Setup { services, endpoints: 10, agents, full_agents: 2, wire, settings, is_pinned: false }).unwrap()
}

/// Waits until each metric of a replica has its expected value.
fn wait_for_metrics(stage: &Stage, expected: &[(usize, &str, f64)]) {
    let until = Instant::now() + LIMIT;
    let metric =
        |(number, name, _): &(usize, &str, f64)| stage.replicas[*number].metric(&stage.machines, name).unwrap();
    loop {
        let found: Vec<f64> = expected.iter().map(metric).collect();
        if found.iter().zip(expected).all(|(found, (_, _, expected))| found == expected) {
            return;
        }
        assert!(Instant::now() < until, "the metrics are {found:?}, and {expected:?} was expected");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A guard against hanging.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn agents_that_all_reconnect_receive_only_resources_that_differ() {
    let agents = 100;
    let mut stage = stage(agents, 400);
    // `storm::measure` checks the number of resources that were sent.
    let storm = storm::measure(&mut stage, agents).unwrap();
    assert_eq!(storm.elsewhere.summary.by_digests, agents);
    assert_eq!(storm.changed.summary.by_digests, agents);
    assert!(storm.changed.summary.present.buckets >= u64::from(CHANGED) / 2 * agents as u64);
    assert_eq!(storm.same.summary.by_log, agents);
    assert_eq!(
        storm.same.resumed_handshakes, agents as u64,
        "a TLS session was not resumed at the replica that issued it"
    );
}

#[test]
fn snapshots_are_sent_in_order_and_only_a_few_at_a_time() {
    let agents = 300;
    let mut overtaken = Vec::new();
    for _ in 0..3 {
        let mut stage = stage(agents, 800);
        let seen = snapshots::measure(&mut stage, agents).unwrap();
        assert!(seen.waited > 0 && seen.in_flight <= IN_FLIGHT, "{seen:?}");
        stage.compare_digests().unwrap();
        overtaken.push(seen.overtaken);
        // In a random order, about half of all pairs would be served out of order in every attempt.
        // On a busy processor, the fleet reads the answers of many agents at once, in any order. So
        // the test makes up to three attempts.
        if seen.overtaken < 0.4 {
            return;
        }
    }
    panic!("too many pairs of agents were served out of order; their shares: {overtaken:?}");
}

#[test]
fn slow_agents_cost_no_memory_and_do_not_slow_others() {
    let (agents, slow) = (40, 30);
    let mut stage = stage(agents + 2 * slow, 400);
    stage.start_replica(&[]).unwrap();
    stage.join(0, agents, 0).unwrap();
    let address = stage.replicas[0].address();
    let member = |number| {
        let fault = if number < slow { Fault::NeverRead } else { Fault::SlowRead { bytes_per_second: 1_000 } };
        Member { node: format!("slow-{number:05}"), replicas: vec![address], fault, ..Member::default() }
    };
    stage.fleet.join((0..2 * slow).map(member).collect()).unwrap();
    let welcomed = "the slow agents have their streams";
    let streams = (agents + 2 * slow) as f64;
    let metric = |stage: &Stage, name: &str| stage.replicas[0].metric(&stage.machines, name).unwrap();
    stage.fleet.wait_until(welcomed, LIMIT, move |worker| worker.summary().counts.full_handshakes >= 100).unwrap();
    // Commit equally many changes several times. If the replica kept changes for agents that do not
    // read, its memory would grow with each round.
    let mut highest = Vec::new();
    for _ in 0..5 {
        let mut version = 0;
        for _ in 0..400 {
            version = stage.source.change().unwrap();
        }
        stage.wait_for_all(version).unwrap();
        highest.push(stage.replicas[0].highest_resident_bytes().unwrap());
    }
    assert!(metric(&stage, "headgate_streams") <= streams);
    let (first, last) = (highest[1], highest[4]);
    assert!(last <= first + (4 << 20), "memory grows with changes that nobody reads: {highest:?}");
    let received =
        stage.fleet.ask(|worker| worker.summary_of(|client| client.member().fault == Fault::NeverRead)).unwrap();
    assert_eq!((received.agents, received.received.messages), (slow, 0), "messages arrived at agents that never read");
    // Once the slow agents read, they receive current values instead of all missed changes.
    stage.fleet.ask(|worker| worker.set_fault(Fault::None, |client| !client.is_healthy())).unwrap();
    let version = stage.source.change().unwrap();
    stage.wait_for_all(version).unwrap();
    stage.compare_digests().unwrap();
}

#[test]
fn agents_move_to_a_replica_that_starts_later_and_receive_nothing_again() {
    let agents = 60;
    let settings = Settings { backoff: Duration::from_millis(50), ..Settings::default() };
    // All agents hold a state, so that each agent resumes with the digests of its own state.
    let setup = Setup {
        services: 200,
        endpoints: 2,
        agents,
        full_agents: agents,
        wire: Wire::VethUnsteered,
        settings,
        is_pinned: false,
    };
    let mut stage = Stage::set(setup).unwrap();
    let nodes: Vec<String> = (0..agents).map(|number| format!("node-{number:05}")).collect();
    stage.source.add_nodes(nodes.iter().map(String::as_str)).unwrap();
    // The balance Service needs one endpoint for each replica. The Service of this test has two
    // endpoints, of which one is ready at first.
    let service = workload::key(0).to_string();
    let options = ["--balance-service", service.as_str()];
    stage.source.toggle(0).unwrap();
    stage.start_replica(&options).unwrap();
    stage.join(0, agents, 0).unwrap();
    wait_for_metrics(&stage, &[(0, "headgate_balance_replicas", 1.0), (0, "headgate_balance_limit_agents", 0.0)]);
    stage.start_replica(&options).unwrap();
    let addresses = [stage.replicas[0].address(), stage.replicas[1].address()];
    stage.fleet.ask(move |worker| worker.redirect(&addresses)).unwrap();
    let version = stage.source.toggle(0).unwrap();
    stage.wait_for_all(version).unwrap();
    // The share of each replica is 30 nodes. A replica accepts up to 44 agents. Above this limit,
    // the replica asks agents to move until 37 are left.
    wait_for_metrics(&stage, &[(0, "headgate_balance_limit_agents", 44.0)]);
    wait_for_metrics(&stage, &[(0, "headgate_streams", 37.0), (1, "headgate_streams", 23.0)]);
    let everybody = "every agent has a stream again";
    stage.fleet.wait_until(everybody, LIMIT, move |worker| worker.having(version) == agents).unwrap();
    let asked = "headgate_balance_asked_agents_total";
    wait_for_metrics(&stage, &[(0, asked, 23.0), (1, asked, 0.0)]);
    // The agents resumed with the state that they held, and received no resources.
    let moved = stage.fleet.ask(|worker| worker.summary_of(|client| client.counts().connections > 1)).unwrap();
    assert_eq!((moved.agents, moved.by_digests), (23, 23));
    assert_eq!((moved.present.chunks, moved.present.chunk_resources, moved.present.batch_resources), (0, 0, 0));
    let version = stage.source.change().unwrap();
    stage.wait_for_all(version).unwrap();
    assert_eq!(stage.compare_digests().unwrap(), agents);
}

#[test]
fn hostile_and_vanishing_agents_do_not_affect_others() {
    let agents = 30;
    let mut stage = stage(2 * agents, 200);
    stage.start_replica(&["--heartbeat-seconds", "1"]).unwrap();
    stage.join(0, agents, 0).unwrap();
    let address = stage.replicas[0].address();
    let layers = [Garbage::Tls, Garbage::Http2, Garbage::Grpc, Garbage::Message];
    let hostile = layers.map(Fault::Garbage).into_iter().chain([Fault::Nack]);
    let member = |(number, fault)| Member {
        node: format!("hostile-{number}"),
        replicas: vec![address],
        fault,
        ..Member::default()
    };
    let mut members: Vec<Member> = hostile.enumerate().map(member).collect();
    let source = stage.machines.vanishing_address();
    let vanishing =
        |number| Member { node: format!("vanishing-{number}"), replicas: vec![address], source, ..Member::default() };
    members.extend((0..3).map(vanishing));
    stage.fleet.join(members).unwrap();
    let metric = |stage: &Stage, name: &str| stage.replicas[0].metric(&stage.machines, name).unwrap();
    // The replica disconnects each of the four agents, and the agents connect and send garbage
    // again.
    let is_disconnected = |worker: &headgate_tests::fleet::Worker| {
        let hostile = worker.clients().iter().filter(|client| matches!(client.member().fault, Fault::Garbage(_)));
        hostile.filter(|client| client.counts().connections >= 3).count() == 4
    };
    stage.fleet.wait_until("agents that send garbage are disconnected", LIMIT, is_disconnected).unwrap();
    let is_refused =
        |worker: &headgate_tests::fleet::Worker| worker.ends().keys().any(|end| end.starts_with("status 3"));
    stage.fleet.wait_until("bytes that are not a message get INVALID_ARGUMENT", LIMIT, is_refused).unwrap();
    stage
        .fleet
        .wait_until("the vanishing agents have their streams", LIMIT, |worker| worker.having(0) == worker.healthy())
        .unwrap();
    stage
        .fleet
        .ask(move |worker| worker.set_fault(Fault::NeverRead, |client| client.member().source == source))
        .unwrap();
    stage.machines.vanish().unwrap();
    let mut version = 0;
    for _ in 0..50 {
        version = stage.source.change().unwrap();
    }
    stage.wait_for_all(version).unwrap();
    assert!(metric(&stage, "headgate_rejected_resources_total") >= 1.0, "the NACKs were not counted");
    // All agents reset their connections at the same time, and connect again.
    stage
        .fleet
        .ask(move |worker| worker.reconnect(Break::Reset, &[address], |client| client.member().is_measured))
        .unwrap();
    version = stage.source.change().unwrap();
    stage.wait_for_all(version).unwrap();
    assert_eq!(stage.compare_digests().unwrap(), 2);
}
