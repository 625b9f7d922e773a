//! Balances agents between replicas. A replica with more agents than its share asks some of these
//! agents to move to another replica, a few at a time.
//!
//! Agents choose a replica at random when they connect. They do not move when a replica is added.
//! So without balancing, the replica that was replaced last in a rollout would have few agents.
//! `decision.rs` decides how many agents to ask. This file collects the numbers and asks the
//! agents.

mod decision;
mod memory;

use std::{collections::HashMap, sync::Arc, time::Duration};

use fastrand::Rng;
use headgate_core::{ServiceKey, node_state::SourceState};
use tokio::time::{Instant, sleep};

use self::{
    decision::{Band, Decision, STEP},
    memory::Memory,
};
use super::{Agent, Fleet};
use crate::{metrics::level, serve::context::Lifecycle};

/// The time within which an agent moves after it was asked to move. Each agent chooses a random
/// moment within this time, so the moves of one step are spread over the time until the next step.
pub(crate) const MOVE_WITHIN: Duration = STEP;

/// Asks agents to move until its task is aborted. The ready endpoints of `service` are the
/// replicas.
pub(crate) async fn run(fleet: Arc<Fleet>, service: ServiceKey) {
    let mut balance = Balance::new(service);
    loop {
        sleep(STEP.mul_f64(0.5 + balance.rng.f64())).await;
        balance.step(&fleet, Instant::now());
    }
}

struct Balance {
    service: ServiceKey,
    decision: Decision,
    memory: Memory<Arc<str>>,
    rng: Rng,
    /// The last known number of ready replicas; `None` until the source has been listed.
    replicas: Option<usize>,
    is_futile: bool,
}

impl Balance {
    fn new(service: ServiceKey) -> Self {
        let (decision, memory) = (Decision::default(), Memory::default());
        Self { service, decision, memory, rng: Rng::new(), replicas: None, is_futile: false }
    }

    fn step(&mut self, fleet: &Fleet, now: Instant) {
        let band = self.band(fleet);
        let metrics = &fleet.context.metrics;
        metrics.balance_replicas.set(level(self.replicas.unwrap_or(0)));
        metrics.balance_limit.set(level(band.map_or(0, |band| band.limit)));
        // A list of all agents is expensive. So a replica makes the list only while it is above its
        // limit or asks agents to move.
        let is_busy = self.decision.is_moving() || band.is_some_and(|band| fleet.len() > band.limit);
        let agents: HashMap<Arc<str>, Arc<Agent>> = if is_busy { known_agents(fleet) } else { HashMap::new() };
        let (may_be_asked, view) = self.memory.view(band, agents.keys().cloned().collect(), now);
        let was_moving = self.decision.is_moving();
        let count = self.decision.step(view, now);
        let service = &self.service;
        if let Some(band) = band.filter(|_| self.decision.is_moving() != was_moving) {
            let Band { replicas, share, .. } = band;
            let agents = agents.len();
            if was_moving {
                tracing::info!(agents, share, replicas, "balancing stopped: no more agents are asked to move");
            } else {
                tracing::info!(%service, agents, share, replicas, "this replica has more agents than its share: it asks some agents to move to another replica");
            }
        }
        if let Some(view) = view {
            let is_futile = view.is_futile();
            if is_futile && !self.is_futile {
                let (asked, returned) = (view.asked, view.returned);
                tracing::warn!(%service, asked, returned, "agents that were asked to move to another replica came back; check that agents know all replicas (--control-plane) and can reach them");
            }
            self.is_futile = is_futile;
        }
        for node in self.memory.ask(may_be_asked, count, now, &mut self.rng) {
            if let Some(agent) = agents.get(&node) {
                tracing::debug!(%node, "asked an agent to move to another replica");
                agent.ask_to_move();
                metrics.balance_asked.inc();
            }
        }
    }

    /// Returns how many agents this replica may have. Returns `None` if the replica stops or does
    /// not follow its source, or if there are no Nodes or no other replicas.
    fn band(&mut self, fleet: &Fleet) -> Option<Band> {
        let store = &fleet.context.store;
        // A replica that does not follow its source cannot know which replicas are ready, so it
        // asks no agents to move.
        if fleet.context.lifecycle() != Lifecycle::Serving || store.source_state() != SourceState::Following {
            return None;
        }
        let replicas = store.ready_endpoints(&self.service);
        if self.replicas != Some(replicas) {
            self.replicas = Some(replicas);
            let service = &self.service;
            if replicas == 0 {
                tracing::warn!(%service, "--balance-service has no ready endpoints, so agents are not balanced; check that it is the control plane's Service and is not headless");
            } else {
                tracing::info!(%service, replicas, "agents are balanced between the ready replicas");
            }
        }
        Band::new(store.counts().nodes, replicas)
    }
}

/// Returns the agents whose Nodes are in the source, by node name.
fn known_agents(fleet: &Fleet) -> HashMap<Arc<str>, Arc<Agent>> {
    let agents = fleet.all().into_iter().map(|agent| (Arc::clone(&agent.node), agent));
    agents.filter(|(node, _)| fleet.context.store.node(node).node.is_some()).collect()
}

#[cfg(test)]
mod simulation_tests;
