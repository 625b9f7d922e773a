//! Simulates replicas that decide independently, and agents that choose replicas at random. The
//! tests check that every replica ends up within its band, and that the moves stop.

#![allow(clippy::unwrap_used)]

use std::{collections::HashMap, time::Duration};

use fastrand::Rng;
use proptest::prelude::*;
use tokio::time::Instant;

use super::{
    decision::{Band, Decision, LEAVING, MAX_PER_STEP, MEMORY, SETTLING, STEP},
    memory::Memory,
};

/// Agents are numbered from 0. The source contains the Nodes of the agents with numbers below
/// `nodes`, and no other Nodes.
struct Simulation {
    rng: Rng,
    now: Instant,
    nodes: usize,
    replicas: Vec<Replica>,
    /// The replica of each agent.
    places: Vec<usize>,
    /// Agents below this number know only their present replica.
    pinned: usize,
    /// Moves that have not happened yet. Each entry holds the time of the move, the number of the
    /// agent, and the present replica of the agent.
    moving: Vec<(Instant, usize, usize)>,
    /// The number of times that an agent was asked to move.
    asked: usize,
}

struct Replica {
    is_ready: bool,
    next_step: Instant,
    decision: Decision,
    memory: Memory<usize>,
}

impl Simulation {
    fn new(seed: u64, nodes: usize, unknown: usize, replicas: usize) -> Self {
        let mut rng = Rng::with_seed(seed);
        let now = Instant::now();
        // A random part of the agents is spread evenly. The other agents are at one replica.
        let favourite = rng.usize(0..replicas);
        let evenness = rng.f64();
        let place = |_| if rng.f64() < evenness { rng.usize(0..replicas) } else { favourite };
        let places = (0..nodes + unknown).map(place).collect();
        let replica =
            |_| Replica { is_ready: true, next_step: now, decision: Decision::default(), memory: Memory::default() };
        let replicas = (0..replicas).map(replica).collect();
        Self { rng, now, nodes, replicas, places, pinned: 0, moving: Vec::new(), asked: 0 }
    }

    fn ready(&self) -> usize {
        self.replicas.iter().filter(|replica| replica.is_ready).count()
    }

    fn band(&self) -> Option<Band> {
        Band::new(self.nodes, self.ready())
    }

    /// Returns for each replica the number of its agents whose Nodes are in the source.
    fn loads(&self) -> Vec<usize> {
        let mut loads = vec![0; self.replicas.len()];
        for place in &self.places[..self.nodes] {
            loads[*place] += 1;
        }
        loads
    }

    /// Returns another ready replica at random, or `from` if no other replica is ready.
    fn other_replica(&mut self, from: usize) -> usize {
        let others: Vec<_> =
            (0..self.replicas.len()).filter(|other| *other != from && self.replicas[*other].is_ready).collect();
        if others.is_empty() { from } else { others[self.rng.usize(0..others.len())] }
    }

    /// Stops a replica at once. Its agents move to other replicas.
    fn stop(&mut self, replica: usize) {
        self.replicas[replica].is_ready = false;
        for agent in 0..self.places.len() {
            if self.places[agent] == replica {
                self.places[agent] = self.other_replica(replica);
            }
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += STEP / 10;
            let now = self.now;
            let arrived = self.moving.extract_if(.., |(at, ..)| *at <= now).collect::<Vec<_>>();
            for (_, agent, from) in arrived {
                if self.places[agent] == from && agent >= self.pinned {
                    self.places[agent] = self.other_replica(from);
                }
            }
            for replica in 0..self.replicas.len() {
                if self.replicas[replica].is_ready && self.replicas[replica].next_step <= now {
                    self.replicas[replica].next_step = now + STEP.mul_f64(0.5 + self.rng.f64());
                    self.step(replica);
                }
            }
        }
    }

    fn step(&mut self, number: usize) {
        let band = self.band();
        let replica = &mut self.replicas[number];
        let here = (0..self.nodes).filter(|agent| self.places[*agent] == number).collect();
        let (present, view) = replica.memory.view(band, here, self.now);
        let count = replica.decision.step(view, self.now);
        assert!(count <= MAX_PER_STEP);
        for agent in replica.memory.ask(present, count, self.now, &mut self.rng) {
            self.asked += 1;
            self.moving.push((self.now + STEP.mul_f64(self.rng.f64()), agent, number));
        }
    }

    fn is_within_bands(&self) -> bool {
        let Some(band) = self.band() else { return true };
        self.loads().iter().all(|load| *load <= band.limit)
    }

    /// Returns a time in which all necessary moves are done. In this time one replica can move all
    /// agents twice.
    fn time_to_settle(&self) -> Duration {
        SETTLING + LEAVING + STEP * u32::try_from(2 * self.nodes / MAX_PER_STEP + 60).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn replicas_reach_their_bands_and_moves_stop(seed: u64, nodes in 1_usize..600, unknown in 0_usize..100, replicas in 1_usize..8) {
        let mut simulation = Simulation::new(seed, nodes, unknown, replicas);
        let surplus: usize = simulation.band().map_or(0, |band| {
            simulation.loads().iter().map(|load| load.saturating_sub(band.share)).sum()
        });
        simulation.run(simulation.time_to_settle());
        prop_assert!(simulation.is_within_bands(), "{:?} of {:?}", simulation.loads(), simulation.band());
        // If the replica to which an agent moves is above its limit too, the agent must move again.
        // About half of the agents move a second time, about half of these agents move a third
        // time, and so on.
        prop_assert!(simulation.asked <= 3 * surplus, "{} moves for a surplus of {surplus}", simulation.asked);
        let asked = simulation.asked;
        simulation.run(Duration::from_secs(120));
        prop_assert_eq!(simulation.asked, asked, "the moves have stopped");
    }

    #[test]
    fn agents_are_balanced_after_replicas_stop_and_start(seed: u64, nodes in 50_usize..400, replicas in 2_usize..6) {
        let mut simulation = Simulation::new(seed, nodes, 0, replicas);
        for _ in 0..3 {
            let replica = simulation.rng.usize(0..replicas);
            simulation.stop(replica);
            simulation.run(Duration::from_secs(5));
            simulation.replicas[replica].is_ready = true;
            let pause = simulation.rng.u64(0..60);
            simulation.run(Duration::from_secs(pause));
        }
        simulation.run(simulation.time_to_settle());
        prop_assert!(simulation.is_within_bands(), "{:?} of {:?}", simulation.loads(), simulation.band());
        let asked = simulation.asked;
        simulation.run(Duration::from_secs(120));
        prop_assert_eq!(simulation.asked, asked);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn agents_that_know_no_other_replica_are_rarely_asked(seed: u64, nodes in 60_usize..120) {
        let mut simulation = Simulation::new(seed, nodes, 0, 2);
        simulation.places.fill(0);
        simulation.pinned = nodes;
        simulation.run(2 * MEMORY);
        // A replica asks agents until it notices that the first agents came back. After [`MEMORY`]
        // it has forgotten these agents and starts to ask again.
        let once = 2 * MAX_PER_STEP * usize::try_from(LEAVING.as_secs()).unwrap();
        prop_assert!(simulation.asked <= 3 * once, "{} times", simulation.asked);
    }
}

#[test]
fn the_memory_of_asked_agents_is_bounded() {
    let (mut memory, mut rng, start) = (Memory::default(), Rng::with_seed(1), Instant::now());
    let (mut last, step) = (HashMap::new(), 10);
    for second in (0..2 * MEMORY.as_secs()).step_by(step) {
        let now = start + Duration::from_secs(second);
        let (present, _) = memory.view(Band::new(4_000, 2), (0..4_000).collect(), now);
        for agent in memory.ask(present, step * MAX_PER_STEP, now, &mut rng) {
            let before = last.insert(agent, now);
            assert!(before.is_none_or(|before| now.duration_since(before) >= MEMORY), "asked twice within MEMORY");
        }
        assert!(memory.len() <= MAX_PER_STEP * usize::try_from(MEMORY.as_secs()).unwrap());
    }
    assert!(last.len() > memory.len(), "old requests are forgotten");
}
