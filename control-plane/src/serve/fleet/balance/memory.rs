//! Remembers which agents were asked to move, and when.

use std::{collections::HashMap, hash::Hash};

use fastrand::Rng;
use tokio::time::Instant;

use super::decision::{Band, LEAVING, MEMORY, View};

/// The agents that were asked to move within the last [`MEMORY`]. Their number is bounded, because
/// a replica asks only a few agents in each step. `A` identifies an agent.
#[derive(Debug)]
pub(super) struct Memory<A> {
    asked: HashMap<A, Instant>,
    /// The number of ready replicas when the agents were asked; 0 if there was no [`Band`]. When
    /// this number changes, all agents may be asked again.
    replicas: usize,
}

impl<A> Default for Memory<A> {
    fn default() -> Self {
        Self { asked: HashMap::new(), replicas: 0 }
    }
}

impl<A: Hash + Eq + Clone> Memory<A> {
    /// Returns the agents of `here` that may be asked to move, and the numbers for the decision.
    /// `here` holds the agents with a stream to this replica.
    pub(super) fn view(&mut self, band: Option<Band>, here: Vec<A>, now: Instant) -> (Vec<A>, Option<View>) {
        let replicas = band.map_or(0, |band| band.replicas);
        if replicas != self.replicas {
            self.replicas = replicas;
            self.asked.clear();
        }
        let Some(band) = band else { return (Vec::new(), None) };
        self.asked.retain(|_, at| now.duration_since(*at) < MEMORY);
        let is_leaving = |at: &Instant| now.duration_since(*at) < LEAVING;
        let asked = self.asked.values().filter(|at| !is_leaving(at)).count();
        let (mut agents, mut returned, mut may_be_asked) = (0, 0, Vec::with_capacity(here.len()));
        for agent in here {
            match self.asked.get(&agent) {
                Some(at) if is_leaving(at) => {}
                Some(_) => (agents, returned) = (agents + 1, returned + 1),
                None => {
                    agents += 1;
                    may_be_asked.push(agent);
                }
            }
        }
        (may_be_asked, Some(View { band, agents, asked, returned }))
    }

    /// Chooses `count` agents at random, and remembers that they are asked. Returns all agents of
    /// `may_be_asked` if there are fewer than `count`.
    pub(super) fn ask(&mut self, mut may_be_asked: Vec<A>, count: usize, now: Instant, rng: &mut Rng) -> Vec<A> {
        let count = count.min(may_be_asked.len());
        for chosen in 0..count {
            let other = rng.usize(chosen..may_be_asked.len());
            may_be_asked.swap(chosen, other);
        }
        may_be_asked.truncate(count);
        self.asked.extend(may_be_asked.iter().map(|agent| (agent.clone(), now)));
        may_be_asked
    }

    /// Returns the number of agents that are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.asked.len()
    }
}
