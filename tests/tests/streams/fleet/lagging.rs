//! Agents move to a replica whose watch is delayed. The agents must wait at this replica, and must
//! not receive older state. Afterwards, agents move between the replicas at random. During these
//! moves, the watch is delayed and released at random, and endpoints change. No agent may receive
//! an older position of the source than its own.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use headgate_tests::fleet::{Break, Client, relay::Relay, rig::Replica, stage::Stage};

use super::LIMIT;

/// The number of random moves.
const MOVES: u32 = 20;
/// Longest time between two moves, in milliseconds.
const PAUSE_MS: u64 = 300;
/// Options of the replicas. Agents may wait at a delayed replica for longer than the test takes.
const BEHIND_WAIT: &[&str] = &["--behind-wait-seconds", "600"];

#[test]
fn a_replica_that_is_behind_makes_agents_wait_and_sends_no_older_state() {
    let agents = 60;
    let mut stage = super::stage(agents, 200);
    let relay = Relay::start(stage.machines.server(), stage.source.api().address()).unwrap();
    let through = stage.kubeconfig_through(relay.address());
    let current = stage.start_replica(BEHIND_WAIT).unwrap();
    let behind = stage.start_replica_on(&through, BEHIND_WAIT).unwrap();
    stage.join(0, agents, current).unwrap();
    wait_for_one_behind(&mut stage, &relay, agents, behind).unwrap();
    let before = stage.fleet.ask(|worker| worker.summary().counts.connections).unwrap();
    move_at_random(&mut stage, &relay).unwrap();
    stage.compare_digests().unwrap();
    let (summary, older) = stage.fleet.ask(|worker| (worker.summary(), worker.violations().count())).unwrap();
    assert!(summary.counts.connections > before, "no agent moved");
    assert!(summary.received.batches + summary.received.snapshots > 0, "no positions were compared");
    assert_eq!(older, 0, "agents found a violation of the contract");
    let expired = metric(&stage, behind, "headgate_behind_waits_expired_total").unwrap();
    assert!(expired == 0.0, "{expired} agents received older state after a wait");
}

fn metric(stage: &Stage, replica: usize, name: &str) -> Result<f64> {
    stage.replicas[replica].metric(&stage.machines, name)
}

/// Moves all agents to a replica that is behind them. All agents are welcomed, and no agent
/// receives a resource until the replica has caught up.
fn wait_for_one_behind(stage: &mut Stage, relay: &Relay, agents: usize, behind: usize) -> Result<()> {
    relay.hold();
    let mut version = 0;
    for _ in 0..20 {
        version = stage.source.change()?;
    }
    stage.wait_for_all(version)?;
    let address = stage.replicas[behind].address();
    stage.fleet.ask(move |worker| {
        worker.set_handshakes(usize::MAX);
        worker.refresh_reference();
        worker.reconnect(Break::Close, &[address], |_| true)
    })?;
    let is_welcomed = |client: &Client| client.mode().is_some();
    stage.fleet.wait_until("all agents are welcomed", LIMIT, move |worker| {
        worker.clients().iter().filter(|client| is_welcomed(client)).count() == worker.clients().len()
    })?;
    let until = Instant::now() + LIMIT;
    while metric(stage, behind, "headgate_behind_waits_total")? < agents as f64 {
        ensure!(Instant::now() < until, "not all agents wait at the replica that is behind them");
        std::thread::sleep(Duration::from_millis(20));
    }
    let waiting = stage.fleet.ask(|worker| worker.summary())?;
    let sent = waiting.present;
    ensure!(waiting.following == 0, "{} agents follow a replica that is behind them", waiting.following);
    ensure!(sent.chunks + sent.batches + sent.snapshots == 0, "agents that must wait received {sent:?}");
    relay.release();
    stage.wait_for_all(version)
}

fn move_at_random(stage: &mut Stage, relay: &Relay) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(7);
    let addresses: Vec<_> = stage.replicas.iter().map(Replica::address).collect();
    let mut version = 0;
    for _ in 0..MOVES {
        match random.u8(0..3) {
            0 => relay.hold(),
            1 => relay.release(),
            _ => {}
        }
        for _ in 0..random.u8(0..5) {
            version = stage.source.change()?;
        }
        let address = addresses[random.usize(0..addresses.len())];
        let (share, first) = (random.usize(2..6), random.usize(0..6));
        stage.fleet.ask(move |worker| {
            let counter = std::cell::Cell::new(first);
            worker.reconnect(Break::Reset, &[address], |_| {
                counter.set(counter.get() + 1);
                counter.get() % share == 0
            })
        })?;
        std::thread::sleep(Duration::from_millis(random.u64(0..PAUSE_MS)));
    }
    relay.release();
    stage.wait_for_all(version)
}
