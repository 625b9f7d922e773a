#![allow(clippy::unwrap_used)]
use super::*;

const FOLLOWING: SourceState = SourceState::Following;
const CUT_OFF: SourceState = SourceState::CutOff;
const UNLISTED: SourceState = SourceState::Unlisted;

fn at(position: u64) -> Positions {
    [(1, position)].into()
}

fn standing(source: SourceState, position: u64) -> Standing {
    let positions = if source == UNLISTED { Positions::new() } else { at(position) };
    Standing { source, changed: positions.clone(), positions }
}

fn chosen(trouble: Trouble, held: Option<u64>, others: &[Standing]) -> Option<usize> {
    let held = held.map(|position| HeldState { positions: at(position), may_lack: false });
    choose(trouble, held.as_ref(), others, false)
}

#[test]
fn an_agent_with_a_state_moves_to_a_replica_that_follows_and_is_not_behind() {
    for trouble in [Trouble::Unlisted, Trouble::CutOff, Trouble::Stalled, Trouble::Crowded] {
        let others = [standing(CUT_OFF, 5), standing(FOLLOWING, 4), standing(FOLLOWING, 5), standing(UNLISTED, 0)];
        assert_eq!(chosen(trouble, Some(5), &others), Some(2), "{trouble:?}");
        assert_eq!(chosen(trouble, Some(6), &others), None, "{trouble:?}: all other replicas are behind the agent");
    }
}

#[test]
fn an_agent_with_the_replicas_state_stays_while_all_replicas_are_cut_off() {
    let others = [standing(CUT_OFF, 5), standing(UNLISTED, 0)];
    for trouble in [Trouble::Unlisted, Trouble::CutOff, Trouble::Stalled] {
        assert_eq!(chosen(trouble, Some(5), &others), None, "{trouble:?}");
    }
    let ahead = [standing(CUT_OFF, 9)];
    assert_eq!(chosen(Trouble::CutOff, Some(5), &ahead), None, "both replicas are cut off, so the agent stays");
    assert_eq!(chosen(Trouble::Unlisted, Some(5), &ahead), Some(0), "the other replica has newer changes");
    // Another replica may send the resources that the agent's state lacks.
    let lacking = HeldState { positions: at(5), may_lack: true };
    assert_eq!(choose(Trouble::Unlisted, Some(&lacking), &others, false), Some(0));
    assert_eq!(choose(Trouble::CutOff, Some(&lacking), &others, false), None);
}

#[test]
fn an_agent_without_a_state_moves_to_the_best_replica() {
    let all = [standing(UNLISTED, 0), standing(CUT_OFF, 5), standing(FOLLOWING, 5)];
    for trouble in [Trouble::Unlisted, Trouble::Stalled] {
        for count in 0..=3 {
            let best = (count > 1).then(|| count - 1);
            assert_eq!(chosen(trouble, None, &all[..count]), best, "{trouble:?} {count}");
        }
    }
    assert_eq!(chosen(Trouble::CutOff, None, &all[..2]), None);
    assert_eq!(chosen(Trouble::CutOff, None, &all), Some(2));
}

#[test]
fn after_a_long_loss_of_the_source_an_agent_moves_to_a_replica_that_is_behind() {
    let held = HeldState { positions: at(9), may_lack: false };
    let others = [standing(UNLISTED, 0), standing(CUT_OFF, 5), standing(FOLLOWING, 5)];
    for trouble in [Trouble::Unlisted, Trouble::CutOff] {
        assert_eq!(choose(trouble, Some(&held), &others, false), None, "{trouble:?}");
        assert_eq!(choose(trouble, Some(&held), &others, true), Some(2), "{trouble:?}");
        let better = [standing(FOLLOWING, 5), standing(FOLLOWING, 9)];
        assert_eq!(choose(trouble, Some(&held), &better, true), Some(1), "a replica that is not behind is better");
    }
    // The pauses between requests have grown, and the agent has moved before.
    let (now, mut limits) = (Instant::now(), MoveLimits::default());
    (0..8).for_each(|_| limits.moved(now));
    let mut failover = Failover::new(&limits, now);
    failover.on_progress(true, now);
    failover.on_source(CUT_OFF, now);
    let until = now + RESTORE_PATIENCE;
    while let Some(at) = failover.due_at().filter(|at| *at < until) {
        failover.due(at);
    }
    assert!(!failover.accepts_older());
    assert_eq!((failover.due_at(), failover.due(until)), (Some(until), None));
    let asks = failover.due_at().unwrap();
    assert!(failover.accepts_older() && asks >= until && asks <= until + CUT_OFF_PATIENCE[1]);
    assert_eq!(failover.due(asks), Some(Trouble::CutOff));
    failover.on_source(UNLISTED, asks);
    assert!(failover.accepts_older());
    failover.on_source(FOLLOWING, asks);
    failover.on_source(CUT_OFF, asks);
    assert!(!failover.accepts_older(), "the source was there meanwhile");
}

#[test]
fn the_choice_among_equal_replicas_is_random() {
    let others = [standing(FOLLOWING, 5), standing(FOLLOWING, 5)];
    let choices: std::collections::BTreeSet<_> = (0..100).map(|_| chosen(Trouble::CutOff, Some(5), &others)).collect();
    assert_eq!(choices, [Some(0), Some(1)].into());
}

#[test]
fn an_agent_asks_after_a_bounded_wait_unless_the_trouble_ends() {
    let now = Instant::now();
    for (source, trouble, [from, to]) in
        [(UNLISTED, Trouble::Unlisted, UNLISTED_PATIENCE), (CUT_OFF, Trouble::CutOff, CUT_OFF_PATIENCE)]
    {
        let mut failover = Failover::new(&MoveLimits::default(), now);
        failover.on_progress(true, now);
        failover.on_source(source, now);
        assert_eq!(failover.trouble, Some(trouble));
        let asks = failover.due_at().unwrap();
        assert!(asks >= now + from && asks <= now + to);
        // A repeated report of the same state does not restart the wait.
        failover.on_source(source, now + from);
        assert_eq!(failover.due_at(), Some(asks));
        failover.on_source(FOLLOWING, now + from);
        assert_eq!((failover.trouble, failover.due_at()), (None, None));
    }
}

#[test]
fn a_stream_is_stalled_only_if_the_replica_completes_no_snapshot_for_any_agent() {
    let now = Instant::now();
    let mut failover = Failover::new(&MoveLimits::default(), now);
    failover.on_source(FOLLOWING, now);
    let half = STALLED_PATIENCE / 2;
    failover.on_snapshots_sent(7, now + half);
    failover.update_trouble(now + STALLED_PATIENCE);
    assert_eq!(failover.trouble, None, "the replica completes snapshots for other agents");
    failover.on_progress(false, now + STALLED_PATIENCE);
    failover.on_snapshots_sent(7, now + STALLED_PATIENCE + half);
    failover.update_trouble(now + 2 * STALLED_PATIENCE);
    assert_eq!(failover.trouble, Some(Trouble::Stalled));
    failover.on_progress(true, now + 2 * STALLED_PATIENCE);
    assert_eq!(failover.trouble, None);
}

#[test]
fn stays_grow_with_each_move_and_start_again_after_a_long_stay() {
    let (mut limits, mut now, [first, longest]) =
        (MoveLimits::default(), Instant::now(), [STAYS.first(), STAYS.longest()]);
    let mut stays = Vec::new();
    for _ in 0..8 {
        limits.moved(now);
        let mut failover = Failover::new(&limits, now);
        (failover.trouble, failover.ask_at) = (Some(Trouble::Stalled), now);
        let until = failover.due_at().unwrap();
        stays.push(until - now);
        now = until;
    }
    assert_eq!(stays[..3], [first, 2 * first, 4 * first]);
    assert_eq!(stays[7], longest);
    now += SETTLED_AFTER;
    limits.moved(now);
    assert_eq!(limits.stays_until, Some(now + first));
}

#[test]
fn a_balance_request_is_followed_once_and_not_before_its_time() {
    let now = Instant::now();
    let mut failover = Failover::new(&MoveLimits::default(), now);
    failover.on_source(FOLLOWING, now);
    failover.on_progress(true, now);
    let at = now + Duration::from_secs(1);
    failover.on_balance_request(at);
    assert_eq!((failover.due(now), failover.due_at()), (None, Some(at)));
    assert_eq!((failover.due(at), failover.due_at()), (Some(Trouble::Crowded), None));
    assert_eq!(failover.due(at), None);
    let others = [standing(CUT_OFF, 9), standing(UNLISTED, 0)];
    // For balance, an agent does not move to a replica that does not follow its source.
    assert_eq!(chosen(Trouble::Crowded, Some(5), &others), None);
}
