#![allow(clippy::unwrap_used)]
mod large;
mod ledger;
mod problems;

use std::{sync::Mutex, thread::JoinHandle};

use headgate_core::{Change, Family, Node, NodeFacts, State, StateSource};

use super::*;
use crate::{
    dataplane::{
        Dataplane, DualStack, KernelHandle,
        in_memory::{self, Call, Control},
    },
    state::{Held, OwnNode, Restored},
    testing::{endpoint, no_endpoint, service, snapshot, update},
};

/// Longest time that a test waits before it fails.
const GUARD: Duration = Duration::from_secs(30);

struct Loop {
    shared: Arc<AgentState>,
    control: Control,
    metrics: SyncMetrics,
    progress: watch::Receiver<Progress>,
    thread: Option<JoinHandle<()>>,
}

impl Loop {
    fn start(timing: Timing) -> Self {
        Self::start_with(AgentState::new("node-1"), timing, None)
    }

    /// Starts, and waits until these resources are in the kernel as version 1.
    fn programmed(timing: Timing, changes: Vec<Change>) -> Self {
        let run = Self::start(timing);
        run.snapshot(1, changes);
        run.wait_programmed(1);
        run
    }

    /// Starts with a state from disk, and with or without rules in the kernel.
    fn start_from_disk(timing: Timing, has_rules: bool) -> Self {
        let mut state = State::default();
        state.apply(service("web", 80), &mut Dirty::default());
        let agent_version = env!("CARGO_PKG_VERSION").to_owned();
        let point = v1::Resume { epoch: 1, version: 5, agent_version, ..Default::default() };
        let restored = Restored { held: Held::restored(state, &point), node: None, may_be_behind: true };
        Self::start_with(AgentState::restored("node-1", restored), timing, Some(has_rules))
    }

    fn start_with(shared: AgentState, timing: Timing, has_rules: Option<bool>) -> Self {
        let (dataplane, control) = in_memory::dataplane();
        has_rules.into_iter().for_each(|has_rules| control.next_verdict(has_rules));
        // Maintenance waits until the state is confirmed.
        control.needs_maintenance();
        Self::of(Box::new(dataplane), control, shared, timing)
    }

    fn of(dataplane: Box<dyn NodeDataplane>, control: Control, shared: AgentState, timing: Timing) -> Self {
        let (shared, metrics) = (Arc::new(shared), SyncMetrics::default());
        let (reconciler, progress) = Reconciler::new(dataplane, Arc::clone(&shared), metrics.clone(), timing);
        let thread = Some(std::thread::spawn(|| reconciler.run()));
        Self { shared, control, metrics, progress, thread }
    }

    fn wait_calls(&self, count: usize) -> Vec<Call> {
        assert!(self.control.wait_for(GUARD, |calls| calls.len() >= count), "{:?}", self.control.calls());
        self.control.calls()
    }

    fn wait_progress(&self, enough: impl Fn(&Progress) -> bool) -> Progress {
        let deadline = Instant::now() + GUARD;
        loop {
            let progress = self.progress.borrow().clone();
            if enough(&progress) {
                return progress;
            }
            assert!(Instant::now() < deadline, "{progress:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_programmed(&self, version: u64) -> Programmed {
        let reached = |progress: &Progress| programmed_version(progress) == Some(version);
        self.wait_progress(reached).programmed.unwrap()
    }

    fn snapshot(&self, version: u64, changes: Vec<Change>) {
        self.shared.apply(snapshot(version, changes));
    }

    fn batch(&self, version: u64, changes: Vec<Change>) {
        self.shared.apply(update(version, changes));
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        self.control.hold(false);
        self.shared.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn programmed_version(progress: &Progress) -> Option<u64> {
    Some(progress.programmed.as_ref()?.target.version)
}

/// Returns long periods, so that no check, no verification and no retry of quarantined services
/// interferes with a test, and short pauses after failures.
fn timing() -> Timing {
    let backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(5), Jitter::Full);
    let period = Duration::from_secs(3600);
    let quarantine = Backoff::new(period, period, Jitter::None);
    Timing { sync_period: period, rules_period: period, backoff, quarantine, ..Timing::default() }
}

fn retry() -> DataplaneError {
    DataplaneError::new(ErrorKind::Retry, "another process holds the lock")
}

/// The agent's Node, in zone a.
fn node() -> Node {
    let (pod_cidrs, addresses) = (Vec::new(), Vec::new());
    Node { name: "node-1".into(), zone: Some("a".into()), pod_cidrs, addresses, going_away: false }
}

fn own_node(revision: u64, node: Option<&Node>) -> OwnNode {
    OwnNode { revision, node: node.cloned(), position: None, reserved: std::collections::BTreeSet::new() }
}

fn apply_of(calls: &[Call], index: usize) -> Vec<String> {
    match &calls[index] {
        Call::Apply(services, _) => services.clone(),
        other => panic!("{other:?}"),
    }
}

// rows: 91
#[test]
fn nothing_is_written_before_the_first_snapshot() {
    let run = Loop::start(timing());
    run.shared.set_node(&own_node(1, None));
    let node = node();
    run.shared.set_node(&own_node(2, Some(&node)));
    run.snapshot(1, vec![service("web", 80)]);
    let calls = run.wait_calls(1);
    let Call::Full(_, facts) = &calls[0] else { panic!("{calls:?}") };
    assert_eq!(facts.zone.as_deref(), Some("a"), "the first write includes the facts that arrived before it");
    let programmed = run.wait_programmed(1);
    assert_eq!((programmed.target.node_revision, programmed.services_planned), (2, 1));
    assert_eq!(run.control.calls().len(), 1);
}

// rows: 93
#[test]
fn a_state_from_disk_is_programmed_if_rules_are_missing() {
    let run = Loop::start_from_disk(timing(), false);
    run.wait_programmed(5);
    assert!(matches!(run.control.calls()[..], [Call::Check, Call::Full(..)]), "{:?}", run.control.calls());
}

#[test]
fn rules_that_are_in_place_stay_until_the_control_plane_confirms_the_state() {
    for has_newer in [false, true] {
        let run = Loop::start_from_disk(timing(), true);
        run.wait_calls(1);
        if has_newer {
            run.batch(6, vec![endpoint("web", 1, 8080)]);
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(run.control.calls(), [Call::Check], "the rules in the kernel may be newer than what was received");
        run.shared.confirm();
        run.wait_programmed(if has_newer { 6 } else { 5 });
        assert!(matches!(run.control.calls()[..], [Call::Check, Call::Full(..)]), "{:?}", run.control.calls());
    }
}

#[test]
fn a_version_that_changes_nothing_is_programmed_without_a_call_to_the_dataplane() {
    let run = Loop::programmed(timing(), vec![service("web", 80)]);
    run.batch(2, vec![service("web", 80), no_endpoint("web", 1)]);
    assert_eq!(run.wait_programmed(2).services_planned, 0);
    assert_eq!(run.control.calls().len(), 1);
}

// rows: 95
#[test]
fn changes_while_the_kernel_is_busy_become_one_step() {
    let run = Loop::programmed(timing(), vec![service("web", 80), service("db", 5432)]);
    run.control.hold(true);
    run.batch(2, vec![endpoint("web", 1, 8080)]);
    // The session receives changes while the kernel is busy.
    for version in 3..100 {
        run.batch(version, vec![endpoint("web", u8::try_from(version).unwrap(), 1), endpoint("db", 1, 5432)]);
    }
    assert_eq!(programmed_version(&run.progress.borrow()), Some(1), "version 2 is not in the kernel yet");
    run.control.hold(false);
    run.wait_programmed(99);
    let calls = run.control.calls();
    assert!(calls.len() <= 3, "{}", calls.len());
    let Some(Call::Apply(_, digests)) = calls.last() else { panic!("{calls:?}") };
    // The last step programs the newest values.
    assert_eq!(*digests, run.shared.with_state(|state: &State| state.digests().clone()));
}

#[test]
fn a_full_sync_follows_a_failed_step_and_includes_newer_changes() {
    let differs = || DataplaneError::new(ErrorKind::NeedsFullSync, "a parent chain is missing");
    for failures in [vec![retry(), retry()], vec![differs()]] {
        let run = Loop::programmed(timing(), vec![service("web", 80), service("db", 5432)]);
        let count = failures.len();
        failures.into_iter().for_each(|failure| run.control.fail_next(failure));
        run.batch(2, vec![endpoint("web", 1, 8080)]);
        run.wait_programmed(2);
        let calls = run.control.calls();
        assert_eq!(calls.len(), 2 + count);
        assert_eq!(apply_of(&calls, 1), ["prod/web"]);
        assert!(calls[2..].iter().all(|call| matches!(call, Call::Full(..))), "{calls:?}");
        assert!(run.wait_progress(|progress| programmed_version(progress) == Some(2)).failure.is_none());
        // After the full sync, steps are partial again.
        run.batch(3, vec![endpoint("web", 2, 8080)]);
        run.wait_programmed(3);
        assert_eq!(apply_of(&run.control.calls(), 2 + count), ["prod/web"]);
    }
}

// rows: 96
#[test]
fn removed_rules_are_programmed_again() {
    let run = Loop::start(Timing { sync_period: Duration::from_millis(5), ..timing() });
    run.control.next_verdict(false);
    run.snapshot(1, vec![service("web", 80)]);
    let repaired = |calls: &[Call]| calls.iter().filter(|call| matches!(call, Call::Full(..))).count() == 2;
    assert!(run.control.wait_for(GUARD, repaired), "{:?}", run.control.calls());
    let calls = run.control.calls();
    assert!(matches!(calls[..3], [Call::Full(..), Call::Check, Call::Full(..)]), "{calls:?}");
    assert_eq!(run.metrics.repairs.get(), 1);
}

#[test]
fn a_failure_says_whether_programmed_rules_may_be_lost_until_a_sync_succeeds() {
    let run = Loop::programmed(timing(), vec![service("web", 80)]);
    let fail = || (0..10_000).for_each(|_| run.control.fail_next(retry()));
    let failed = |version: u64| {
        let has_failed = |failure: &Failure| failure.target.version == version;
        let is_reached = |progress: &Progress| {
            if version == 1 {
                run.shared.signal(Wake::Rules);
            }
            progress.failure.as_ref().is_some_and(has_failed)
        };
        run.wait_progress(is_reached).failure.unwrap().is_lost
    };
    fail();
    assert!(failed(1), "nobody knows what the kernel holds");
    run.batch(2, vec![endpoint("web", 1, 80)]);
    assert!(failed(2), "version 1 is not in the kernel again");
    run.control.recover();
    run.wait_programmed(2);
    fail();
    run.batch(3, vec![endpoint("web", 2, 80)]);
    assert!(!failed(3), "nobody removed the rules of version 2");
}

// rows: 29, 107
#[test]
fn row_107_a_deleted_node_keeps_its_last_zone_addresses_and_pod_ranges() {
    let run = Loop::programmed(timing(), vec![service("web", 80)]);
    let node = Node {
        pod_cidrs: vec!["10.1.0.0/24".parse().unwrap()],
        addresses: vec!["192.0.2.1".parse().unwrap()],
        ..node()
    };
    run.shared.set_node(&own_node(1, Some(&node)));
    run.wait_calls(2);
    run.shared.set_node(&own_node(2, None));
    run.wait_progress(|progress| progress.programmed.as_ref().is_some_and(|one| one.target.node_revision == 2));
    assert_eq!(run.control.calls().len(), 2, "the deletion of the Node causes no call to the dataplane");
    assert_eq!(run.shared.node(), Some(Node { going_away: true, ..node.clone() }));
    run.shared
        .with_facts(|_, facts| assert_eq!((facts.zone.as_deref(), &facts.addresses), (Some("a"), &node.addresses)));
    // A Node that is created again replaces all these values.
    let back = Node { zone: Some("b".into()), ..node };
    run.shared.set_node(&own_node(3, Some(&back)));
    run.wait_calls(3);
    assert!(matches!(&run.control.calls()[2], Call::Full(_, facts) if facts.zone.as_deref() == Some("b")));
    assert_eq!(run.shared.node(), Some(back));
}

fn rejected_services(progress: &Progress) -> Vec<&str> {
    progress.rejections.iter().map(|rejection| rejection.resource.as_str()).collect()
}

#[test]
fn a_service_that_the_kernel_rejects_delays_no_other_service() {
    let run = Loop::programmed(timing(), vec![service("web", 80), service("db", 5432)]);
    run.control.reject(&["prod/web"]);
    run.batch(2, vec![endpoint("web", 1, 8080), endpoint("db", 1, 5432)]);
    run.wait_programmed(2);
    let progress = run.progress.borrow().clone();
    assert_eq!((rejected_services(&progress), &progress.failure), (vec!["Service prod/web"], &None));
    assert!(progress.rejections[0].reason.contains("no such match"), "{:?}", progress.rejections);
    let suspects = Some(vec!["prod/db".to_owned(), "prod/web".to_owned()]);
    let calls = run.control.calls();
    let is_found = matches!(&calls[2], Call::FindFaults(found) if *found == suspects);
    assert!(is_found && matches!(calls[3], Call::Full(..)) && calls.len() == 4, "{calls:?}");
    assert_eq!((run.metrics.services_rejected.get(), run.metrics.service_rejections.get()), (1, 1));

    // Other services are programmed as usual. When the quarantined service changes, the loop tries
    // it alone, after the step.
    run.batch(3, vec![endpoint("db", 2, 5432)]);
    run.wait_programmed(3);
    run.batch(4, vec![endpoint("web", 2, 8080), endpoint("db", 3, 5432)]);
    run.wait_programmed(4);
    let calls = run.wait_calls(7);
    assert!(matches!(&calls[6], Call::FindFaults(Some(found)) if found == &["prod/web"]), "{calls:?}");
    assert_eq!(run.control.quarantined(), ["prod/web"]);

    // After a change that the kernel accepts, a step programs it and withdraws the rejection.
    run.control.reject(&[]);
    run.batch(5, vec![endpoint("web", 3, 8080)]);
    let progress = run.wait_progress(|progress| progress.rejections.is_empty());
    assert_eq!(programmed_version(&progress), Some(5));
    assert!(run.control.quarantined().is_empty());
    assert_eq!(apply_of(&run.control.calls(), run.control.calls().len() - 1), ["prod/web"]);
    assert_eq!((run.metrics.services_rejected.get(), run.metrics.service_rejections.get()), (0, 1));
}

#[test]
fn an_unchanged_service_in_quarantine_is_tried_again() {
    let quarantine = Backoff::new(Duration::from_millis(1), Duration::from_millis(4), Jitter::Half);
    let run = Loop::start(Timing { quarantine, ..timing() });
    run.control.reject(&["prod/web"]);
    run.snapshot(1, vec![service("web", 80), service("db", 5432)]);
    run.wait_programmed(1);
    assert!(matches!(run.control.calls()[..3], [Call::Full(..), Call::FindFaults(None), Call::Full(..)]));
    run.wait_calls(6);
    assert_eq!(run.control.quarantined(), ["prod/web"]);
    run.control.reject(&[]);
    run.wait_progress(|progress| progress.rejections.is_empty());
    let applies =
        |calls: &[Call]| calls.iter().any(|call| matches!(call, Call::Apply(services, _) if services == &["prod/web"]));
    assert!(applies(&run.control.calls()), "{:?}", run.control.calls());
}

#[test]
fn planning_services_again_is_not_a_failure_and_the_version_is_reported_when_it_is_programmed() {
    let run = Loop::start(timing());
    let again = |services: &[Arc<ServiceKey>]| {
        let services = services.iter().cloned().collect();
        run.control.fail_next(DataplaneError::plan_again("no scheduler mh", services));
    };
    again(&[]);
    run.snapshot(1, vec![service("web", 80), service("db", 5432)]);
    run.wait_programmed(1);
    assert!(matches!(run.control.calls()[..], [Call::Full(..), Call::Full(..)]), "{:?}", run.control.calls());
    again(&[Arc::new(ServiceKey::new("prod", "web"))]);
    run.batch(2, vec![endpoint("db", 1, 5432)]);
    run.wait_programmed(2);
    let calls = run.control.calls();
    assert_eq!(apply_of(&calls, 2), ["prod/db"]);
    assert_eq!(apply_of(&calls, 3), ["prod/db", "prod/web"]);
    assert_eq!((calls.len(), &run.progress.borrow().failure), (4, &None));
}

#[test]
fn a_rejection_without_a_faulty_service_is_a_failure() {
    let run = Loop::programmed(timing(), vec![service("web", 80)]);
    run.control.fail_next(DataplaneError::new(ErrorKind::Rejected, "line 1 failed"));
    run.batch(2, vec![endpoint("web", 1, 8080)]);
    run.wait_programmed(2);
    let calls = run.control.calls();
    assert!(matches!(calls[1..], [Call::Apply(..), Call::FindFaults(_), Call::Full(..)]), "{calls:?}");
    assert!(run.progress.borrow().rejections.is_empty());
}

#[test]
fn newer_changes_wait_for_a_pause_after_a_failed_sync() {
    let now = Instant::now();
    let failed = AfterFailure {
        generation: 7,
        retry_at: now + Duration::from_secs(10),
        retry_changed_at: now + Duration::from_secs(2),
    };
    let pace = Pace { not_before: now, after_failure: Some(failed) };
    assert_eq!(pace.next(7), failed.retry_at);
    assert_eq!(pace.next(8), failed.retry_changed_at);
    let late = Pace { not_before: now + Duration::from_secs(5), ..pace };
    assert_eq!(late.next(8), late.not_before, "the shortest time between two syncs still applies");
    assert_eq!(Pace { after_failure: None, ..pace }.next(8), now);
}

/// A loop that has programmed Services `web` and `db`, and that the test steps.
fn stepped(timing: Timing) -> (Reconciler, Control) {
    let (dataplane, control) = in_memory::dataplane();
    let shared = Arc::new(AgentState::new("node-1"));
    let (mut reconciler, _) = Reconciler::new(Box::new(dataplane), shared, SyncMetrics::default(), timing);
    reconciler.shared.apply(snapshot(1, vec![service("web", 80), service("db", 5432)]));
    reconciler.begin();
    reconciler.step(Wake::Work);
    (reconciler, control)
}

#[test]
fn changes_that_arrive_all_the_time_do_not_delay_checks() {
    let period = Duration::from_millis(20);
    let (mut reconciler, control) = stepped(Timing { sync_period: period, ..timing() });
    let until = Instant::now() + GUARD;
    for version in 2.. {
        std::thread::sleep(period / 10);
        reconciler.shared.apply(update(version, vec![endpoint("web", 1, u16::try_from(version).unwrap())]));
        reconciler.step(Wake::Work);
        if control.calls().contains(&Call::Check) {
            break;
        }
        assert!(Instant::now() < until, "{:?}", control.calls());
    }
}

#[test]
fn the_second_verification_that_fails_leads_to_a_full_sync_and_an_error_of_another_kind_at_once() {
    let (mut reconciler, control) = stepped(timing());
    let mut needs_full_after = |kind| {
        control.fail_next(DataplaneError::new(kind, "interrupted"));
        reconciler.verify_rules();
        let needs_full = reconciler.unfinished.needs_full;
        if needs_full {
            reconciler.step(Wake::Work);
        }
        needs_full
    };
    assert!(!needs_full_after(ErrorKind::Retry));
    assert!(needs_full_after(ErrorKind::Retry));
    assert!(!needs_full_after(ErrorKind::Retry), "the full sync begins a new row");
    assert!(needs_full_after(ErrorKind::NeedsFullSync));
}

#[test]
fn maintenance_that_is_due_while_the_rules_are_verified_makes_the_result_void() {
    let (mut reconciler, control) = stepped(timing());
    control.forget("prod/db");
    control.needs_maintenance();
    reconciler.verify_rules();
    assert_eq!((reconciler.maintain_at(), reconciler.unfinished.needs_full), (None, false));
    reconciler.verify_rules();
    assert!(reconciler.unfinished.needs_full);
}
