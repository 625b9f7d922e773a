//! A small simulated fleet against the real control plane, with agents that read nothing.

use std::time::Duration;

use headgate_tests::fleet::{
    Member, Settings,
    stage::{Setup, Stage},
};

/// A guard against hanging.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn slow_agents_cost_no_memory_and_do_not_slow_others() {
    let (agents, slow) = (40, 60);
    let settings = Settings { backoff: Duration::from_millis(50), ..Settings::default() };
    // Two agents store the resources that they receive.
    let setup =
        Setup { services: 400, endpoints: 10, agents: agents + slow, full_agents: 2, settings, is_pinned: false };
    let mut stage = Stage::set(setup).unwrap();
    stage.start_replica().unwrap();
    stage.join(0, agents, 0).unwrap();
    let address = stage.replicas[0].address();
    let member = |number| Member {
        node: format!("slow-{number:05}"),
        replicas: vec![address],
        never_reads: true,
        ..Member::default()
    };
    stage.fleet.join((0..slow).map(member).collect()).unwrap();
    let welcomed = "the slow agents have their streams";
    stage.fleet.wait_until(welcomed, LIMIT, |worker| worker.summary().counts.full_handshakes >= 100).unwrap();
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
    assert!(stage.replicas[0].metric(&stage.machines, "headgate_streams").unwrap() <= (agents + slow) as f64);
    let (first, last) = (highest[1], highest[4]);
    assert!(last <= first + (4 << 20), "memory grows with changes that nobody reads: {highest:?}");
    // Once the slow agents read, they receive current values instead of all missed changes.
    stage.fleet.ask(headgate_tests::fleet::Worker::read_again).unwrap();
    let version = stage.source.change().unwrap();
    stage.wait_for_all(version).unwrap();
    stage.compare_digests().unwrap();
}
