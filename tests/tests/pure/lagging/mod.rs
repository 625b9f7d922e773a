//! An agent moves between replicas of which each watch is held back for itself, and is never given
//! older state, at any interleaving. Nothing that a replica could serve is withheld from it beyond
//! the bounds of the contract, and it does not move in circles.
//!
//! A model: the parts that decide are the real ones (the replica's store, resumption and waits, the
//! agent's machine, what it holds, what it writes to disk and whether it stays, and the bytes
//! between them); the source, its watches, the network and time are a list of moves. Each key of
//! the source, and the agent's own Node, takes its values in a known order, so what an agent holds
//! of it is the place in that order, and no place may ever go down.

mod agent;
mod replica;
mod source;
mod world;

use std::collections::BTreeMap;

use headgate_control_plane::transaction::SourceKind;
use proptest::prelude::*;

use agent::Program;
use source::{History, KINDS};
use world::{Move, World};

const SLICE: SourceKind = SourceKind::EndpointSlices;
const SERVICE: SourceKind = SourceKind::Services;
const NODES: SourceKind = SourceKind::Nodes;

/// Whether two moves in a row have the same outcome in either order: what comes to different
/// replicas.
fn commute(a: Move, b: Move) -> Option<(usize, usize)> {
    match (a, b) {
        (Move::Deliver(a, _), Move::Deliver(b, _)) if a != b => Some((a, b)),
        _ => None,
    }
}

/// Every order of what happens in each of these lists, which keep their own order; of orders that
/// differ only in moves that commute, one.
fn interleave(lists: &[Vec<Move>], visit: &mut impl FnMut(&[Move])) {
    fn descend(lists: &[Vec<Move>], at: &mut [usize], path: &mut Vec<Move>, visit: &mut impl FnMut(&[Move])) {
        let mut is_leaf = true;
        for list in 0..lists.len() {
            let Some(action) = lists[list].get(at[list]) else { continue };
            is_leaf = false;
            if path.last().and_then(|last| commute(*last, *action)).is_some_and(|(last, next)| last > next) {
                continue;
            }
            at[list] += 1;
            path.push(*action);
            descend(lists, at, path, visit);
            path.pop();
            at[list] -= 1;
        }
        if is_leaf {
            visit(path);
        }
    }
    descend(lists, &mut vec![0; lists.len()], &mut Vec::new(), visit);
}

/// How many interleavings there were, and how often the agent resumed in each way, waited, moved
/// and dropped a stream.
type Counts = BTreeMap<&'static str, u64>;

/// Runs every interleaving with two replicas, over so many events of the source.
fn explore(program: Program, events: usize, lists: &[Vec<Move>]) -> Counts {
    explore_with(2, program, events, lists)
}

fn explore_with(replicas: usize, program: Program, events: usize, lists: &[Vec<Move>]) -> Counts {
    let mut counts = Counts::new();
    interleave(lists, &mut |moves| {
        *counts.entry("runs").or_default() += 1;
        let run = || {
            // What is drawn at random is the same in each run.
            fastrand::seed(7);
            let mut world = World::new(History::first(events), replicas, program);
            moves.iter().for_each(|action| world.act(*action));
            world.finish();
            for (what, times) in &world.counts {
                *counts.entry(what).or_default() += times;
            }
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        if let Err(panic) = result {
            eprintln!("after {moves:?}");
            std::panic::resume_unwind(panic);
        }
    });
    counts
}

/// Each of these has happened.
fn assert_happened(counts: &Counts, what: &[&str]) {
    assert!(what.iter().all(|what| counts.get(what).is_some_and(|count| *count > 0)), "{counts:?}");
}

#[test]
fn every_interleaving_of_moves_and_of_what_each_replica_has_seen() {
    use Move::{Deliver, Go, ReadAll};
    let lists = [
        vec![Deliver(0, SLICE), Deliver(0, SERVICE)],
        vec![Deliver(1, SLICE), Deliver(1, SERVICE)],
        vec![ReadAll, Go(1), ReadAll, Go(0), ReadAll],
    ];
    let counts = explore(Program::New, 2, &lists);
    // Each replica's two events stand in any of the six gaps.
    assert_eq!(counts["runs"], 21 * 21);
    assert_happened(&counts, &["waits", "digests", "log"]);
}

#[test]
fn every_interleaving_where_streams_break_in_the_middle_and_each_kind_is_held_back_for_itself() {
    use Move::{Bookmark, Deliver, Go, Read, ReadAll};
    let lists = [
        vec![Deliver(0, SLICE), Deliver(0, SERVICE)],
        vec![Deliver(1, SLICE), Bookmark(1, SERVICE)],
        vec![ReadAll, Go(1), Read, Read, Go(0), Read],
    ];
    let counts = explore(Program::New, 2, &lists);
    assert!(counts["runs"] > 400, "{counts:?}");
    assert_happened(&counts, &["waits", "digests", "log"]);
}

#[test]
fn every_interleaving_with_a_replica_that_starts_anew() {
    use Move::{Deliver, Go, List, Read, ReadAll, Restart};
    let lists = [
        vec![Deliver(0, SLICE)],
        vec![Deliver(1, SLICE), Restart(1), List(1), Deliver(1, SERVICE)],
        vec![Go(1), Read, Read, Go(0), ReadAll],
    ];
    let counts = explore(Program::New, 3, &lists);
    assert!(counts["runs"] > 300, "{counts:?}");
    assert_happened(&counts, &["waits", "digests"]);
}

#[test]
fn every_interleaving_of_moves_and_of_nodes_that_each_replica_has_seen() {
    use Move::{Deliver, Go, Read, ReadAll};
    // The first change of the own Node is the third event.
    let lists = [
        vec![Deliver(0, SERVICE), Deliver(0, NODES)],
        vec![Deliver(1, NODES), Deliver(1, SLICE)],
        vec![Read, Go(1), Read, Go(0), ReadAll],
    ];
    let counts = explore(Program::New, 3, &lists);
    assert_eq!(counts["runs"], 21 * 21);
    assert_happened(&counts, &["digests", "log"]);
}

#[test]
fn every_interleaving_with_steps_in_parts_while_the_head_moves_and_the_agent_starts_from_disk() {
    use Move::{Deliver, DeliverStep, Go, Read, RestartAgent, Save};
    let lists = [
        vec![DeliverStep(0), Deliver(0, SLICE), DeliverStep(0)],
        vec![Read, Save, RestartAgent(Program::New), Go(0), Read, Read, Read],
    ];
    let counts = explore(Program::New, 8, &lists);
    assert!(counts["runs"] > 100, "{counts:?}");
    assert_happened(&counts, &["log"]);
}

#[test]
fn every_interleaving_with_an_agent_that_starts_from_disk_with_rejected_resources() {
    use Move::{Deliver, Go, ReadAll, RestartAgent, Save};
    // The seventh event is a Service that only the new program can use.
    let lists = [
        vec![Deliver(0, SERVICE), Deliver(0, SERVICE), Deliver(0, SERVICE)],
        vec![Deliver(1, SERVICE)],
        vec![ReadAll, Save, RestartAgent(Program::New), Go(0), ReadAll],
    ];
    let counts = explore(Program::Old, 7, &lists);
    assert!(counts["runs"] > 300, "{counts:?}");
    assert_happened(&counts, &["log", "digests", "rejections"]);
}

#[test]
fn every_interleaving_where_a_stream_breaks_before_its_snapshot_after_a_rejection() {
    use Move::{Deliver, Go, ReadAll, RestartAgent, Save};
    let lists = [
        vec![Deliver(0, SERVICE), Deliver(0, SERVICE), Deliver(0, SERVICE), Deliver(0, SLICE)],
        vec![ReadAll, Go(1), Go(0), ReadAll, Save, RestartAgent(Program::New), Go(0)],
    ];
    let counts = explore(Program::Old, 7, &lists);
    assert_eq!(counts["runs"], 330);
    assert_happened(&counts, &["log", "digests", "rejections"]);
}

#[test]
fn every_interleaving_where_one_of_three_replicas_follows_the_source() {
    use Move::{CutOff, DeliverStep, Go, Pass, Restart};
    let lists = [vec![CutOff(0)], vec![CutOff(1), Restart(1)], vec![DeliverStep(2), Go(1), Pass, Go(0)]];
    let counts = explore_with(3, Program::New, 6, &lists);
    assert_eq!(counts["runs"], 105);
    assert_happened(&counts, &["moves"]);
}

#[test]
fn every_interleaving_with_replicas_that_lose_the_api_server_or_never_list() {
    use Move::{CutOff, DeliverStep, Go, Pass, ReadAll, Restart};
    let lists = [vec![DeliverStep(0), CutOff(0)], vec![CutOff(1), Restart(1)], vec![ReadAll, Go(1), Pass, Go(0)]];
    let counts = explore(Program::New, 6, &lists);
    assert!(counts["runs"] > 300, "{counts:?}");
    assert_happened(&counts, &["waits", "digests", "moves"]);
}

#[test]
fn a_restored_source_is_followed_in_the_end() {
    for moves in [vec![Move::Go(0)], vec![Move::Go(1)], vec![Move::RestartAgent(Program::New), Move::Go(1)]] {
        let mut world = World::new(History::first(8), 2, Program::New);
        (0..4).for_each(|_| world.act(Move::DeliverStep(0)));
        [Move::ReadAll, Move::Save].into_iter().for_each(|action| world.act(action));
        world.restore();
        moves.into_iter().for_each(|action| world.act(action));
        world.finish();
    }
}

fn any_program() -> impl Strategy<Value = Program> {
    prop::sample::select(vec![Program::Old, Program::New])
}

fn any_move(replicas: usize) -> impl Strategy<Value = Move> {
    let kind = || prop::sample::select(KINDS.to_vec());
    prop_oneof![
        8 => (0..replicas, kind()).prop_map(|(replica, kind)| Move::Deliver(replica, kind)),
        3 => (0..replicas).prop_map(Move::DeliverStep),
        2 => (0..replicas, kind()).prop_map(|(replica, kind)| Move::Bookmark(replica, kind)),
        1 => (0..replicas).prop_map(Move::Restart),
        2 => (0..replicas).prop_map(Move::List),
        2 => (0..replicas).prop_map(Move::CutOff),
        2 => (0..replicas).prop_map(Move::Reach),
        4 => (0..replicas).prop_map(Move::Go),
        6 => Just(Move::Read),
        4 => Just(Move::ReadAll),
        2 => Just(Move::Save),
        1 => any_program().prop_map(Move::RestartAgent),
        1 => Just(Move::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn long_histories_with_three_replicas(
        program in any_program(),
        moves in prop::collection::vec(any_move(3), 1..80),
        seed in any::<u64>(),
    ) {
        fastrand::seed(seed);
        let mut world = World::new(History::whole(), 3, program);
        moves.iter().for_each(|action| world.act(*action));
        world.finish();
    }
}
