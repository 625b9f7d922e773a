#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;

fn key(name: &str) -> Arc<ServiceKey> {
    Arc::new(ServiceKey::new("ns", name))
}

fn address(last: u8) -> SocketAddr {
    SocketAddr::from(([10, 244, 0, last], 8080))
}

fn wanted(interval_ms: u32, last: impl IntoIterator<Item = u8>) -> ServiceTargets {
    ServiceTargets { interval_ms: Some(interval_ms), addresses: last.into_iter().map(address).collect() }
}

/// Asserts the invariants between the fields of `Checks`.
fn assert_consistent(checks: &Checks) {
    let waiting: BTreeSet<(u64, SocketAddr)> = checks
        .targets
        .iter()
        .filter_map(|(address, target)| match target.next {
            Next::At(at) => Some((at, *address)),
            Next::Running(_) => None,
        })
        .collect();
    assert_eq!(waiting, checks.due);
    assert_eq!(checks.failing, checks.targets.values().filter(|target| target.is_failing).count());
    let wanted: BTreeSet<SocketAddr> = checks.services.values().flatten().copied().collect();
    assert_eq!(wanted, checks.targets.keys().copied().collect());
    for (address, target) in &checks.targets {
        let users: BTreeSet<_> = target.users.keys().cloned().collect();
        let of = checks.services.iter().filter(|(_, addresses)| addresses.contains(address));
        assert_eq!(users, of.map(|(key, _)| Arc::clone(key)).collect());
    }
}

/// Makes the next check of the only target at the time when it is due, and reports `has_passed`.
/// Returns that time and the services whose failing endpoints changed.
fn next_outcome(checks: &mut Checks, has_passed: bool) -> (u64, Vec<Arc<ServiceKey>>) {
    let now = checks.next_due_ms().unwrap();
    let started = checks.start(now).unwrap();
    assert!(checks.start(now).is_none() && checks.next_due_ms().is_none(), "no other check starts meanwhile");
    (now, checks.finish(&started, Some(has_passed), now))
}

#[test]
fn only_two_equal_outcomes_in_a_row_change_the_state() {
    let mut checks = Checks::new(CheckTiming::default(), 7);
    let (web, other) = (key("web"), key("other"));
    checks.set_service(&web, Some(wanted(1000, [1])), 0);
    checks.set_service(&other, Some(wanted(4000, [1])), 0);
    assert_eq!((checks.len(), checks.failing_count()), (1, 0));
    for has_passed in [true, false, true, false, true] {
        assert_eq!(next_outcome(&mut checks, has_passed).1, []);
    }
    let (first, changed) = next_outcome(&mut checks, false);
    assert_eq!(changed, []);
    let (second, changed) = next_outcome(&mut checks, false);
    let pause = second - first;
    assert!((225..=275).contains(&pause), "the second check follows after a quarter of the interval: {pause}");
    assert_eq!(changed, [Arc::clone(&other), Arc::clone(&web)]);
    assert_eq!((checks.failing(&web), checks.failing(&other)), ([address(1)].into(), [address(1)].into()));
    let (third, changed) = next_outcome(&mut checks, false);
    let pause = third - second;
    assert!((900..=1100).contains(&pause), "the shorter interval of the two services applies: {pause}");
    assert_eq!(changed, []);
    for (has_passed, count) in [(true, 0), (false, 0), (true, 0), (true, 2)] {
        assert_eq!(next_outcome(&mut checks, has_passed).1.len(), count);
    }
    assert!(checks.failing(&web).is_empty());
    assert_consistent(&checks);
}

#[test]
fn a_check_takes_at_most_a_quarter_of_its_interval() {
    let mut checks = Checks::new(CheckTiming { interval_ms: 60_000, timeout_ms: 1_000 }, 7);
    checks.set_service(&key("slow"), Some(ServiceTargets { interval_ms: None, addresses: [address(1)].into() }), 0);
    checks.set_service(&key("quick"), Some(wanted(500, [2])), 0);
    let timeouts: BTreeSet<_> =
        std::iter::from_fn(|| checks.start(60_000)).map(|check| (check.address, check.timeout_ms)).collect();
    assert_eq!(timeouts, [(address(1), 1_000), (address(2), 125)].into());
}

#[test]
fn the_earliest_check_starts_first_and_first_checks_are_spread() {
    let mut checks = Checks::new(CheckTiming::default(), 1);
    checks.set_service(&key("web"), Some(wanted(1000, 0..50)), 0);
    let order: Vec<_> = checks.due.iter().map(|(_, address)| *address).collect();
    let started: Vec<_> = std::iter::from_fn(|| checks.start(3000)).map(|check| check.address).collect();
    assert_eq!((started.len(), started), (50, order));
    // First checks are spread over the interval.
    let mut checks = Checks::new(CheckTiming::default(), 1);
    checks.set_service(&key("web"), Some(wanted(1000, 0..250)), 0);
    let early = std::iter::from_fn(|| checks.start(6_250)).count();
    assert!((75..175).contains(&early), "{early}");
}

#[derive(Debug, Clone)]
enum Step {
    Set(u8, Option<(u32, Vec<u8>)>),
    Start,
    Finish(usize, bool),
    Advance(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let set = (1..4000_u32, prop::collection::vec(0..6_u8, 0..4));
    prop_oneof![
        (0..3_u8, prop::option::of(set)).prop_map(|(service, set)| Step::Set(service, set)),
        Just(Step::Start),
        (0..8_usize, any::<bool>()).prop_map(|(which, passed)| Step::Finish(which, passed)),
        (0..5000_u64).prop_map(Step::Advance),
    ]
}

proptest! {
    #[test]
    fn fields_agree_after_any_sequence_of_calls(steps in prop::collection::vec(step(), 0..60), seed: u64) {
        let mut checks = Checks::new(CheckTiming::default(), seed);
        let (mut now, mut running) = (0, Vec::new());
        for step in steps {
            match step {
                Step::Set(service, set) => {
                    let set = set.map(|(interval, last)| wanted(interval, last));
                    checks.set_service(&key(&service.to_string()), set, now);
                }
                Step::Start => running.extend(checks.start(now)),
                Step::Finish(which, passed) if which < running.len() => {
                    let check = running.remove(which);
                    let changed = checks.finish(&check, Some(passed), now);
                    for key in changed {
                        prop_assert_eq!(checks.failing(&key).contains(&check.address), !passed);
                    }
                }
                Step::Finish(..) => {}
                Step::Advance(time) => now += time,
            }
            assert_consistent(&checks);
        }
    }

    /// When an endpoint stops or starts to answer, the checks detect it within two intervals. The
    /// time that a failing check takes does not matter.
    #[test]
    fn a_change_is_detected_within_two_intervals(
        interval in 500..20_000_u32,
        timeout in 1..10_000_u32,
        first_pause in 0..40_000_u64,
        times_out: bool,
        seed: u64,
    ) {
        let mut checks = Checks::new(CheckTiming { interval_ms: interval, timeout_ms: timeout }, seed);
        let web = key("web");
        checks.set_service(&web, Some(wanted(interval, [1, 2])), 0);
        let interval = u64::from(interval);
        // Address 1 fails from `down` to `up`. Address 2 never fails.
        let (down, up) = (first_pause, first_pause + 5 * interval);
        let end = up + 5 * interval;
        let mut running: BTreeSet<(u64, u64, bool)> = BTreeSet::new();
        let mut by_ticket = HashMap::new();
        let mut now = 0;
        while now < end {
            while let Some(check) = checks.start(now) {
                let passes = check.address == address(2) || !(down..up).contains(&now);
                let took = if !passes && times_out { u64::from(check.timeout_ms) } else { 0 };
                running.insert((now + took, check.ticket, passes));
                by_ticket.insert(check.ticket, check);
            }
            while let Some((at, ticket, passes)) = running.first().copied().filter(|(at, ..)| *at <= now) {
                running.remove(&(at, ticket, passes));
                checks.finish(&by_ticket[&ticket], Some(passes), now);
            }
            let is_failing = !checks.failing(&web).is_empty();
            if (down + 2 * interval..up).contains(&now) {
                prop_assert_eq!(checks.failing(&web), [address(1)].into(), "at {}", now);
            }
            prop_assert!(!is_failing || (down..up + 2 * interval).contains(&now), "at {}", now);
            let next = running.first().map(|(at, ..)| *at).into_iter().chain(checks.next_due_ms()).min().unwrap();
            let edges = [down + 2 * interval, up - 1, up + 2 * interval];
            now = edges.into_iter().filter(|edge| *edge > now).chain([next.max(now + 1)]).min().unwrap();
        }
    }
}
