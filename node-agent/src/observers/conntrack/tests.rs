#![allow(clippy::unwrap_used)]
use std::sync::mpsc;

use headgate_core::{Change, Dirty, Endpoint, EndpointPort, Service, ServiceKey, ServicePort, conntrack::Suspects};
use headgate_netlink::Refusal;

use super::*;

/// Longest time that a test waits before it fails.
const GUARD: Duration = Duration::from_secs(30);

/// A state with a tracker. The kernel accepts the rules of every step.
#[derive(Default)]
struct World {
    state: State,
    tracker: Tracker,
}

impl World {
    fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> Cleanup {
        let mut dirty = Dirty::default();
        changes.into_iter().for_each(|change| _ = self.state.apply(change, &mut dirty));
        let plan = self.tracker.plan(&self.state, &dirty.services);
        self.tracker.commit(plan)
    }
}

fn service() -> Change {
    let port = ServicePort { name: "dns".into(), protocol: Protocol::Udp, port: 53, node_port: 0 };
    Change::from(Service::new(ServiceKey::new("ns", "dns"), vec!["10.96.0.10".parse().unwrap()], vec![port]))
}

fn pod(last: u8) -> Endpoint {
    let port = EndpointPort::new("dns", Protocol::Udp, 53);
    Endpoint::new([10, 244, 0, last].into(), [port].into())
}

fn endpoint(last: u8) -> Change {
    Change::Endpoint(ServiceKey::new("ns", "dns"), pod(last))
}

fn gone(last: u8) -> Change {
    Change::RemoveEndpoint(ServiceKey::new("ns", "dns"), pod(last).address)
}

fn answered_by(last: u8) -> Suspects {
    Suspects::Sources([(pod(last).address, 53).into()].into())
}

/// The suspects of the cleanup's only rule.
fn suspects(cleanup: &Cleanup) -> Suspects {
    let rules: Vec<_> = cleanup.rules().collect();
    assert_eq!(rules.len(), 1, "{cleanup:?}");
    rules[0].1.suspects.clone()
}

#[test]
fn a_failed_pass_is_repeated_with_the_changes_that_arrived_meanwhile() {
    let mut world = World::default();
    world.step([service(), endpoint(1), endpoint(2), endpoint(3)]);
    let (searched, passes) = mpsc::channel();
    let (answer, answers) = mpsc::channel::<bool>();
    let worker = Worker::start(move |cleanup| {
        searched.send(suspects(cleanup)).unwrap();
        let kept = || SweepError::Kept { count: 1, last: Refusal::of_code(libc::EBUSY) };
        if answers.recv().unwrap() { Ok(()) } else { Err(kept()) }
    })
    .unwrap();
    worker.hand_over(world.step([gone(1)]));
    assert_eq!(passes.recv_timeout(GUARD).unwrap(), answered_by(1));
    // During the pass, endpoint 2 is removed and endpoint 1 is added again, so that the flows of
    // endpoint 1 are no longer stale.
    worker.hand_over(world.step([gone(2)]));
    worker.hand_over(world.step([endpoint(1)]));
    answer.send(false).unwrap();
    assert_eq!(passes.recv_timeout(GUARD).unwrap(), answered_by(2));
    answer.send(true).unwrap();
    // The flows of endpoint 2 are deleted, so the next pass does not search for them.
    worker.hand_over(world.step([gone(3)]));
    assert_eq!(passes.recv_timeout(GUARD).unwrap(), answered_by(3));
    answer.send(true).unwrap();
    drop(worker);
    assert!(passes.try_recv().is_err());
}

#[test]
fn the_thread_stops_during_the_pause_after_a_failed_pass() {
    let worker = Worker::start(|_| Err(SweepError::Kept { count: 1, last: Refusal::of_code(libc::EBUSY) })).unwrap();
    let mut world = World::default();
    worker.hand_over(world.step([service(), endpoint(1)]));
    drop(worker);
}

#[test]
fn the_step_after_a_full_sync_searches_all_flows_of_its_services() {
    let (searched, passes) = mpsc::channel();
    let worker = Worker::start(move |cleanup| {
        searched.send(suspects(cleanup)).unwrap();
        Ok(())
    });
    let mut cleaner = ConntrackCleaner::with(worker.unwrap());
    let (mut state, node) = (State::default(), NodeFacts::named("node-1"));
    let mut step = |changes: Vec<Change>, full: bool| {
        let mut dirty = Dirty::default();
        changes.into_iter().for_each(|change| _ = state.apply(change, &mut dirty));
        cleaner.plan(&state, &node, if full { Scope::All } else { Scope::Services(&dirty.services) });
        cleaner.applied();
    };
    step(vec![service(), endpoint(1), endpoint(2), endpoint(3)], true);
    assert_eq!(passes.recv_timeout(GUARD).unwrap(), Suspects::Any);
    // The full sync may have programmed endpoints unknown to the tracker: suspect all flows.
    step(vec![gone(1)], false);
    assert_eq!(passes.recv_timeout(GUARD).unwrap(), Suspects::Any);
    step(vec![gone(2)], false);
    assert_eq!(passes.recv_timeout(GUARD).unwrap(), answered_by(2));
}
