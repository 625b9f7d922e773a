//! Agents beyond the share of this replica are asked to go to another, a few at a time.
//!
//! Agents choose a replica at random when they connect, and do not move when a replica is added.
//! After a rollout, the replica that was replaced last would have few agents. `decision.rs` decides
//! how many agents to ask; this file gets the numbers and asks.

mod decision;
mod memory;
#[cfg(test)]
mod simulation;

use std::{collections::HashMap, sync::Arc, time::Duration};

use fastrand::Rng;
use headgate_core::{ServiceKey, node_state::SourceState};
use tokio::time::{Instant, sleep};

use self::{
    decision::{Band, Decision, STEP},
    memory::Memory,
};
use super::{Agent, Fleet};
use crate::serve::context::Lifecycle;

/// Time within which an agent that is asked to move does so: the agents of one step, spread until
/// the next.
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
    /// None before the source has been listed.
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
        fleet.context.metrics.set_balance(self.replicas.unwrap_or(0), band.map_or(0, |band| band.limit));
        // Only a replica with many agents looks at each of them.
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
                tracing::info!(agents, share, replicas, "no more agents are asked to go elsewhere");
            } else {
                tracing::info!(%service, agents, share, replicas, "more agents than this replica's share: some are asked to go elsewhere");
            }
        }
        if let Some(view) = view {
            let is_futile = view.is_futile();
            if is_futile && !self.is_futile {
                let (asked, returned) = (view.asked, view.returned);
                tracing::warn!(%service, asked, returned, "agents that were asked to go elsewhere came back; see that agents know all replicas (--control-plane) and reach them");
            }
            self.is_futile = is_futile;
        }
        for node in self.memory.ask(may_be_asked, count, now, &mut self.rng) {
            if let Some(agent) = agents.get(&node) {
                tracing::debug!(%node, "asked to go elsewhere");
                agent.ask_to_move();
                fleet.context.metrics.balance_asked.inc();
            }
        }
    }

    /// The band to be within; none while it is not known.
    fn band(&mut self, fleet: &Fleet) -> Option<Band> {
        let store = &fleet.context.store;
        // A replica that cannot hear its source does not know which replicas are ready, and keeps
        // what agents it has.
        if fleet.context.lifecycle() != Lifecycle::Serving || store.source_state() != SourceState::Following {
            return None;
        }
        let replicas = store.ready_endpoints(&self.service);
        if self.replicas != Some(replicas) {
            self.replicas = Some(replicas);
            let service = &self.service;
            if replicas == 0 {
                tracing::warn!(%service, "--balance-service has no ready endpoints: nothing is balanced; see that it is a Service of the control plane's, and not headless");
            } else {
                tracing::info!(%service, replicas, "ready replicas, between which agents are balanced");
            }
        }
        Band::new(store.node_count(), replicas)
    }
}

/// Agents of nodes that the source knows, by node.
fn known_agents(fleet: &Fleet) -> HashMap<Arc<str>, Arc<Agent>> {
    let agents = fleet.all().into_iter().map(|agent| (Arc::clone(&agent.node), agent));
    agents.filter(|(node, _)| fleet.context.store.node(node).node.is_some()).collect()
}
