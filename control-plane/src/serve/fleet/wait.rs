//! `Inspect.Wait`: until every agent has programmed what a service or an endpoint is now.
//!
//! The waiter sleeps until an ACK, a commit, or an agent that comes or goes wakes it. Then it
//! counts agents by the map of distinct versions. It looks at each agent when it finds the version,
//! and at the end.

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
/// Longer waits are cut to a day, so that a deadline can always be computed.
const MAX_TIMEOUT: Duration = Duration::from_secs(86_400);
/// Between two messages, however much happens.
const PACE: Duration = Duration::from_millis(100);
/// Agents named in one message.
const MAX_NAMED: usize = 1000;

/// See the module.
pub(crate) struct Waiter {
    fleet: Arc<Fleet>,
    key: ServiceKey,
    endpoint: Option<IpAddr>,
    gone: bool,
    positions: BTreeMap<SourceKind, u64>,
    deadline: Instant,
    expiry: Option<Expiry>,
    /// The version that brought what is waited for, once it is known, and the nodes that had a
    /// stream then.
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
    /// Checks a request.
    pub(crate) fn new(fleet: Arc<Fleet>, request: v1::WaitRequest, expiry: Option<Expiry>) -> Result<Self, Status> {
        let v1::WaitRequest { namespace, name, endpoint, gone, timeout_ms, positions } = request;
        if namespace.is_empty() || name.is_empty() {
            return Err(Status::invalid_argument("namespace and name: both are needed"));
        }
        let endpoint = match endpoint.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| {
                Status::invalid_argument("endpoint: not an IP address; `headgatectl endpoints SERVICE` lists them")
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

    /// The next message; `None` after the last.
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
            // Marked before the count, so that a change in the meantime wakes the waiter.
            self.programmed.borrow_and_update();
            self.head.borrow_and_update();
            self.moves.borrow_and_update();
            self.source.borrow_and_update();
            let looked = Instant::now();
            let timed_out = looked >= self.deadline;
            let progress = self.progress(timed_out);
            if timed_out || self.last.as_ref() != Some(&progress) {
                if self.last.is_some() && !timed_out {
                    sleep(PACE).await;
                }
                self.is_over = timed_out;
                self.last = Some(progress.clone());
                return Some(Ok(progress));
            }
            self.wake().await;
            // One count for all ACKs of the next moments. The first ACK after a quiet time is
            // counted at once.
            sleep_until((looked + PACE).min(self.deadline)).await;
        }
    }

    async fn wake(&mut self) {
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

    /// What is missing before there is a version to wait for; sets it otherwise.
    fn find_target(&mut self) -> &'static str {
        // The state of a replica that is cut off from its source is not the present state.
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
            // None of its agents counts. If it has none, nobody is waited for: they are at other
            // replicas.
            progress.programmed = 0;
            progress.waiting_for = if agents == 0 { "" } else { "source" }.into();
            if timed_out {
                progress.laggards = self.strays(source);
            }
            return progress;
        }
        let Some((version, nodes)) = &self.target else { return progress };
        let rejections = progressed.rejections(|rejection| self.concerns(&rejection.resource));
        if !rejections.is_empty() {
            // Few agents reject anything, so each of these is looked at.
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

    /// Whether a rejected resource is the service, or an endpoint that is waited for.
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

    /// All agents, none of which can be up to date while the replica is cut off from its source.
    fn strays(&self, source: SourceState) -> Vec<v1::Laggard> {
        let store = &self.fleet.context.store;
        let settled = store.version_before(SETTLED);
        let agents = self.fleet.all().into_iter().take(MAX_NAMED);
        let stray = |agent: Arc<Agent>| {
            let (programmed_version, reported) = {
                let record = agent.record();
                (record.programmed_version, record.reported(settled))
            };
            let state = NodeState::of(source, reported);
            v1::Laggard {
                node: agent.node.to_string(),
                programmed_version,
                sent_version: agent.sent_version(),
                lag_ms: agent.lag_ms(store, programmed_version),
                reason: agent.reason(store, source, state),
            }
        };
        agents.map(stray).collect()
    }

    /// Who has not programmed the version, the worst first.
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
            laggards.push(v1::Laggard {
                node: agent.node.to_string(),
                programmed_version,
                sent_version: agent.sent_version(),
                lag_ms: agent.lag_ms(&self.fleet.context.store, programmed_version),
                reason: rejected.unwrap_or(error),
            });
        }
        laggards.sort_by(|a, b| a.programmed_version.cmp(&b.programmed_version).then_with(|| a.node.cmp(&b.node)));
        laggards.truncate(MAX_NAMED);
        laggards
    }
}
