//! `Inspect.Wait`: waits until every agent has programmed the present value of a Service or an
//! endpoint.
//!
//! The waiter sleeps until an agent reports, connects or leaves, or until a commit. After each of
//! these events, the waiter counts agents with the fleet's map of distinct versions, which is
//! cheap. The waiter examines every agent only in three cases: when it finds the version to wait
//! for, at the end, and while agents reject the Service or the endpoint.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use headgate_core::{
    ServiceKey,
    node_state::{NodeState, SETTLED, SourceState},
};
use headgate_proto::v1;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tonic::Status;

use super::{Agent, Fleet};
use crate::{identity::Expiry, serve::context::Lifecycle, store::positions_from_wire, transaction::SourceKind};

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest wait. Longer timeouts are cut to a day, so that a deadline can always be computed.
const MAX_TIMEOUT: Duration = Duration::from_secs(86_400);

/// The shortest time between two messages.
const PACE: Duration = Duration::from_millis(100);

/// The maximum number of agents that one message names.
const MAX_NAMED: usize = 1000;

/// The state of a `Wait` request.
pub(crate) struct Waiter {
    fleet: Arc<Fleet>,
    key: ServiceKey,
    endpoint: Option<IpAddr>,
    gone: bool,
    positions: BTreeMap<SourceKind, u64>,
    deadline: Instant,
    expiry: Option<Expiry>,
    /// The version to wait for, and the nodes that had a stream when this version was found. `None`
    /// until this version is found.
    target: Option<(u64, Vec<Arc<str>>)>,
    last: Option<v1::WaitProgress>,
    programmed: watch::Receiver<()>,
    head: watch::Receiver<u64>,
    moves: watch::Receiver<u64>,
    source: watch::Receiver<SourceState>,
    lifecycle: watch::Receiver<Lifecycle>,
    is_over: bool,
}

impl Waiter {
    /// Checks a request and begins to wait.
    ///
    /// # Errors
    ///
    /// `INVALID_ARGUMENT` names the bad field. A retry of the same request fails again.
    pub(crate) fn new(fleet: Arc<Fleet>, request: v1::WaitRequest, expiry: Option<Expiry>) -> Result<Self, Status> {
        let v1::WaitRequest { namespace, name, endpoint, gone, timeout_ms, positions } = request;
        if namespace.is_empty() || name.is_empty() {
            return Err(Status::invalid_argument("namespace and name: both are required"));
        }
        let endpoint = match endpoint.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| {
                Status::invalid_argument(
                    "endpoint: not an IP address; `headgatectl endpoints SERVICE` lists the addresses",
                )
            })?),
        };
        let timeout = if timeout_ms == 0 { DEFAULT_TIMEOUT } else { Duration::from_millis(timeout_ms) };
        let context = &fleet.context;
        let store = &context.store;
        Ok(Self {
            key: ServiceKey::new(&namespace, &name),
            endpoint,
            gone,
            positions: positions_from_wire(&positions),
            deadline: Instant::now() + timeout.min(MAX_TIMEOUT),
            expiry,
            target: None,
            last: None,
            programmed: fleet.progress().changes(),
            head: store.head(),
            moves: store.moves(),
            source: store.watch_source(),
            lifecycle: context.lifecycle.subscribe(),
            is_over: false,
            fleet,
        })
    }

    /// Returns the next message, or `None` after the last message.
    pub(crate) async fn next(&mut self) -> Option<Result<v1::WaitProgress, Status>> {
        if self.is_over {
            return None;
        }
        loop {
            if let Some(denied) = self.expiry.and_then(Expiry::due) {
                self.is_over = true;
                return Some(Err(denied.into()));
            }
            if *self.lifecycle.borrow() != Lifecycle::Serving {
                self.is_over = true;
                return Some(Err(Status::unavailable("this replica stops")));
            }
            // The values of the four receivers are marked as seen before the agents are counted, so
            // that a change during the count wakes the waiter.
            self.programmed.borrow_and_update();
            self.head.borrow_and_update();
            self.moves.borrow_and_update();
            self.source.borrow_and_update();
            let counted_at = Instant::now();
            let timed_out = counted_at >= self.deadline;
            let progress = self.progress(timed_out);
            if timed_out || self.last.as_ref() != Some(&progress) {
                if self.last.is_some() && !timed_out {
                    sleep(PACE).await;
                }
                self.is_over = timed_out;
                self.last = Some(progress.clone());
                return Some(Ok(progress));
            }
            self.changed().await;
            // ACKs that arrive within [`PACE`] are counted together. The first ACK after a quiet
            // time is counted at once.
            sleep_until((counted_at + PACE).min(self.deadline)).await;
        }
    }

    /// Waits for an event that may change the answer.
    async fn changed(&mut self) {
        let has_target = self.target.is_some();
        let is_cut_off = *self.source.borrow() != SourceState::Following;
        tokio::select! {
            Ok(()) = self.programmed.changed(), if has_target || is_cut_off => {}
            Ok(()) = self.head.changed(), if !has_target => {}
            Ok(()) = self.moves.changed(), if !has_target => {}
            Ok(()) = self.source.changed() => {}
            _ = self.lifecycle.changed() => {}
            () = sleep_until(self.deadline) => {}
            () = Expiry::passed(self.expiry) => {}
        }
    }

    /// Sets `target` if the version to wait for is known. Returns the value of
    /// `WaitProgress.waiting_for`: "source", "service" or "endpoint" while the waiter waits for a
    /// state of the source, or else an empty string.
    fn find_target(&mut self) -> &'static str {
        // A replica that does not follow its source does not have the present state.
        if self.fleet.context.store.source_state() != SourceState::Following {
            return "source";
        }
        if self.target.is_some() {
            return "";
        }
        let store = &self.fleet.context.store;
        if store.behind(&self.positions).is_some() {
            return "source";
        }
        let Some(version) = store.version_of(&self.key, self.endpoint, self.gone) else {
            return if self.endpoint.is_some() { "endpoint" } else { "service" };
        };
        let nodes = self.fleet.all().into_iter().map(|agent| Arc::clone(&agent.node)).collect();
        self.target = Some((version, nodes));
        ""
    }

    fn progress(&mut self, timed_out: bool) -> v1::WaitProgress {
        let waiting_for = self.find_target();
        let source = self.fleet.context.store.source_state();
        let progressed = self.fleet.progress();
        let version = self.target.as_ref().map_or(0, |(version, _)| *version);
        let (agents, mut programmed) = progressed.programmed(version);
        let mut progress = v1::WaitProgress {
            replica: self.fleet.context.settings.replica_name.clone(),
            waiting_for: waiting_for.into(),
            version,
            agents: agents as u64,
            timed_out,
            source_state: source.to_string(),
            ..Default::default()
        };
        if source != SourceState::Following {
            // No agent of this replica counts as programmed. A replica without agents waits for
            // nothing: all agents follow other replicas.
            progress.waiting_for = if agents == 0 { "" } else { "source" }.into();
            if timed_out {
                progress.laggards = self.agents_without_source(source);
            }
            return progress;
        }
        let Some((version, nodes)) = &self.target else { return progress };
        let rejections = progressed.rejections(|rejection| self.concerns(&rejection.resource));
        if !rejections.is_empty() {
            // All agents are listed only if an agent rejects the Service or the endpoint, which is
            // rare.
            let all = self.fleet.all();
            let has = |node: &str| {
                all.binary_search_by(|agent| (*agent.node).cmp(node))
                    .ok()
                    .is_some_and(|index| all[index].record().kernel_version() >= *version)
            };
            programmed = programmed.saturating_sub(rejections.keys().filter(|node| has(node)).count());
        }
        progress.programmed = programmed as u64;
        if programmed < agents {
            progress.waiting_for = "agents".into();
        }
        if timed_out || programmed == agents {
            let gone = nodes.iter().filter(|node| !self.fleet.has(node)).take(MAX_NAMED);
            progress.disconnected = gone.map(ToString::to_string).collect();
        }
        if timed_out {
            progress.laggards = self.laggards(*version, &rejections);
        }
        progress
    }

    /// Returns true if a rejected resource is the Service of this wait, or an endpoint of this
    /// wait.
    fn concerns(&self, resource: &str) -> bool {
        let key = &self.key;
        match (resource.split_once(' '), self.endpoint) {
            (Some(("Service", rejected)), _) => *rejected == key.to_string(),
            (Some(("Endpoint", rejected)), endpoint) => {
                let (service, address) = rejected.split_once(' ').unwrap_or((rejected, ""));
                service == key.to_string() && endpoint.is_none_or(|endpoint| address.parse() == Ok(endpoint))
            }
            _ => resource.strip_prefix("endpoints of service ") == Some(key.name.as_str()),
        }
    }

    /// Returns all agents as laggards. No agent counts as up to date while this replica does not
    /// follow its source.
    fn agents_without_source(&self, source: SourceState) -> Vec<v1::Laggard> {
        let store = &self.fleet.context.store;
        let settled = store.version_before(SETTLED);
        let agents = self.fleet.all().into_iter().take(MAX_NAMED);
        let laggard = |agent: Arc<Agent>| {
            let (programmed_version, reported) = {
                let record = agent.record();
                (record.programmed_version, record.reported(settled))
            };
            let reason = agent.reason(store, source, NodeState::of(source, reported));
            self.laggard(&agent, programmed_version, reason)
        };
        agents.map(laggard).collect()
    }

    /// Returns the agents that have not programmed the version, and the agents that reject the
    /// Service or the endpoint of this wait. The agent with the lowest programmed version is first.
    fn laggards(
        &self,
        version: u64,
        rejections: &std::collections::HashMap<Arc<str>, v1::Rejection>,
    ) -> Vec<v1::Laggard> {
        let mut laggards = Vec::new();
        for agent in self.fleet.all() {
            let (programmed_version, kernel_version, error) = {
                let record = agent.record();
                (record.programmed_version, record.kernel_version(), record.last_error.clone())
            };
            let rejection = rejections.get(&agent.node);
            if kernel_version >= version && rejection.is_none() {
                continue;
            }
            let rejected = rejection.map(|rejection| {
                let v1::Rejection { resource, field, reason } = rejection;
                format!("rejected {resource}, {field}: {reason}")
            });
            laggards.push(self.laggard(&agent, programmed_version, rejected.unwrap_or(error)));
        }
        laggards.sort_by(|a, b| a.programmed_version.cmp(&b.programmed_version).then_with(|| a.node.cmp(&b.node)));
        laggards.truncate(MAX_NAMED);
        laggards
    }

    fn laggard(&self, agent: &Agent, programmed_version: u64, reason: String) -> v1::Laggard {
        v1::Laggard {
            node: agent.node.to_string(),
            programmed_version,
            sent_version: agent.sent_version(),
            lag_ms: agent.lag_ms(&self.fleet.context.store, programmed_version),
            reason,
        }
    }
}
