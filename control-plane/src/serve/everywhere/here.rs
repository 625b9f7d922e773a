//! The answer of this replica alone to a question: since when its store has the wanted state, and
//! which of its agents lack it in their kernels.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use headgate_core::ServiceKey;
use headgate_proto::v1::{self, question::Wanted};
use tokio::time::{Instant, sleep_until};

use crate::{
    metrics::kind_name,
    model::Problem,
    objects::SourceKind,
    serve::{
        context::Warning,
        fleet::{Agent, Fleet, Record},
    },
    store::{Last, PACE, Topic},
};

/// For this time after a question, agents acknowledge new batches at once.
pub(crate) const HURRY: Duration = Duration::from_secs(60);

/// A question to all agents. An endpoint without an address is the Service itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) wanted: Wanted,
    pub(crate) endpoints: Vec<(ServiceKey, Option<IpAddr>)>,
    /// The positions that the source must have reached.
    pub(crate) positions: BTreeMap<SourceKind, u64>,
}

impl Question {
    fn services(&self) -> BTreeSet<ServiceKey> {
        self.endpoints.iter().map(|(key, _)| key.clone()).collect()
    }

    /// True for questions of pods, which wait for nodes. A person who waits may wait for ever.
    pub(crate) fn spends_patience(&self) -> bool {
        matches!(self.wanted, Wanted::Usable | Wanted::Unusable)
    }

    /// What changes the answer of the store.
    pub(crate) fn topics(&self) -> impl Iterator<Item = Topic<'_>> {
        self.endpoints.iter().flat_map(|(key, address)| {
            [Some(Topic::Service(key)), address.map(|address| Topic::Endpoint(key, address))].into_iter().flatten()
        })
    }

    /// Returns the version since which the store of this replica has the wanted state, except where
    /// endpoints are the last ones. The error says why it does not have the state. Positions do not
    /// count.
    pub(crate) fn seen(&self, fleet: &Fleet) -> Result<u64, String> {
        let store = &fleet.context.store;
        if !store.is_synced() {
            return Err("the replica has not listed its source".into());
        }
        let mut since = 0;
        if self.endpoints.is_empty() {
            since = store.listed_version();
        }
        for (key, address) in &self.endpoints {
            let version = match (self.wanted, address) {
                (Wanted::Present | Wanted::Gone, address) => {
                    let is_gone = self.wanted == Wanted::Gone;
                    let found = store.version_of(key, *address, is_gone);
                    found.ok_or(if is_gone { "still exists" } else { "is not known" })
                }
                (Wanted::Usable, Some(address)) => store.ready_since(key, *address).ok_or("is not ready"),
                (Wanted::Unusable, Some(address)) => store.usage(key, *address).unused().map(|(version, _)| version),
                (Wanted::Unspecified, _) | (Wanted::Usable | Wanted::Unusable, None) => {
                    Err("needs an address and a state in this question")
                }
            };
            let version = version.map_err(|problem| match address {
                None => format!("Service {key} {problem}"),
                Some(address) => format!("endpoint {address} of Service {key} {problem}"),
            })?;
            since = since.max(version);
        }
        // What was never there is programmed with the first state.
        Ok(since.max(1).min(store.version()))
    }
}

/// Says where an endpoint stays in use; `None` if nowhere.
pub(crate) fn last_of(key: &ServiceKey, address: IpAddr, last: Last) -> Option<String> {
    match last {
        Last::No => None,
        Last::Everywhere => Some(format!("{address} is the last endpoint of Service {key}")),
        Last::OnItsNode => Some(format!("{address} is the last endpoint of Service {key} on its node")),
    }
}

/// Answers a question at `until`, or once all agents with patience left are confirmed.
pub(crate) async fn answer(fleet: &Fleet, question: &Question, until: Instant) -> v1::QuestionAnswer {
    let store = &fleet.context.store;
    // Agents with nothing to acknowledge may have some patience back.
    for agent in fleet.all().iter().filter(|agent| agent.record().is_stalled()) {
        agent.update(Record::end_stall);
    }
    // Nobody has checked that a pod without endpoints exists.
    if !question.endpoints.is_empty() {
        store.hurry(HURRY);
    }
    let (part, services) = (fleet.context.settings.patience_part, question.services());
    // The version, and when the next part of the patience with agents that lack it is spent.
    let mut spent_at: Option<(u64, Instant)> = None;
    let (mut members, mut moves, mut source) = (fleet.progress().members(), store.moves(), store.watch_source());
    let interest = store.interest(question.topics());
    // `wait` asks for the state that the store has now, and not for later ones.
    let mut target = None;
    loop {
        // Marked as seen before the look, so that a change meanwhile wakes this task.
        members.borrow_and_update();
        moves.borrow_and_update();
        source.borrow_and_update();
        let now = Instant::now();
        // The length comes first, because the census copies the list of all agents.
        if fleet.len() == 0
            && let (roster, agents) = fleet.census()
            && agents.is_empty()
        {
            // Nobody has to be waited for, and no agent of another replica is confirmed here.
            return v1::QuestionAnswer { roster, ..v1::QuestionAnswer::default() };
        }
        let behind = store.behind(&question.positions);
        let seen = match (&behind, target) {
            (Some((kind, here, there)), _) => {
                store.want_position(*kind, *there);
                let kind = kind_name(*kind);
                Err(format!("the replica is at position {here} of {kind}, and another replica is at {there}"))
            }
            (None, Some(version)) => Ok(version),
            (None, None) => question.seen(fleet),
        };
        let version = seen.as_ref().ok().copied();
        if matches!(question.wanted, Wanted::Present | Wanted::Gone) {
            target = version;
        }
        spent_at = version.filter(|_| question.spends_patience()).map(|version| match spent_at {
            Some((old, at)) if old == version && at > now => (version, at),
            Some((old, _)) if old == version => {
                spend_patience(fleet, version);
                (version, now + part)
            }
            _ => (version, now + part),
        });
        let is_programmed = version.is_some_and(|version| fleet.progress().floor() >= version);
        let is_complete = is_programmed && (question.spends_patience() || !fleet.progress().is_rejected(&services));
        if is_complete || now >= until {
            return final_answer(fleet, question, seen);
        }
        let programmed = async {
            match version.filter(|_| !is_programmed) {
                Some(version) => fleet.progress().reached(version).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = programmed => {}
            Ok(()) = members.changed() => {}
            () = interest.changed(), if target.is_none() => {}
            Ok(()) = moves.changed(), if behind.is_some() => {}
            Ok(_) = source.changed() => {}
            () = sleep_until(spent_at.map_or(until, |(_, at)| until.min(at))) => {}
        }
        sleep_until((now + PACE).min(until)).await;
    }
}

fn final_answer(fleet: &Fleet, question: &Question, seen: Result<u64, String>) -> v1::QuestionAnswer {
    let (version, services) = (seen.as_ref().ok().copied(), question.services());
    // The number and the agents belong together: another agent is not confirmed by this answer.
    let (roster, agents) = fleet.census();
    let is_missing = |agent: &&Arc<Agent>| version.is_none_or(|version| !agent.record().confirms(version, &services));
    let unconfirmed = agents.iter().filter(is_missing);
    let describe = |agent: &Arc<Agent>| {
        let mut laggard = agent.laggard(&fleet.context, version.unwrap_or_default(), &services);
        // Only a rejection is left. A person may wait until it is withdrawn, and pods do not.
        let is_final = version.is_some_and(|version| agent.record().has_programmed(version));
        laggard.is_stalled |= is_final && question.spends_patience();
        laggard
    };
    v1::QuestionAnswer {
        roster,
        version: version.unwrap_or_default(),
        problem: seen.err().unwrap_or_default(),
        unconfirmed: unconfirmed.map(describe).collect(),
    }
}

/// Spends a part of the patience with each agent whose kernel lacks a version. Rejections spend
/// none: whoever writes a Service could otherwise spend the patience with all nodes.
fn spend_patience(fleet: &Fleet, version: u64) {
    let is_awaited = |record: &Record| !record.is_standby && !record.has_programmed(version);
    for agent in fleet.all().iter().filter(|agent| is_awaited(&agent.record())) {
        let left = fleet.turns().spend_patience(&agent.node, std::time::Instant::now());
        let Err(until) = left else { continue };
        let is_news = !agent.record().is_stalled();
        agent.update(|record| record.stalled_until = Some(until));
        if let Some(Problem { object, message, .. }) = agent.stall_problem().filter(|_| is_news)
            && fleet.context.warnings.admit(Warning::Stalled, Instant::now())
        {
            tracing::warn!(object, "{message}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        metrics::Metrics,
        serve::context::{Context, Settings, Signal},
        store::{Limits, ResumeMode, Store},
    };

    #[tokio::test]
    async fn a_question_waits_again_for_a_node_that_has_some_patience_back() {
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let fleet = Fleet::new(Context::new(store, metrics, Settings::default()));
        let hello = v1::Hello::default();
        let address = ([192, 0, 2, 1], 1).into();
        let agent = Arc::new(Agent::new("a".into(), address, &hello, ResumeMode::Full, Arc::new(Signal::new())));
        fleet.enter(&agent);
        // The node says nothing more, as in a cluster without changes.
        agent.update(|record| record.stalled_until = Some(std::time::Instant::now()));
        assert_eq!(fleet.progress().floor(), u64::MAX);
        let question = Question { wanted: Wanted::Unusable, endpoints: Vec::new(), positions: BTreeMap::new() };
        let answer = answer(&fleet, &question, Instant::now()).await;
        assert_eq!((fleet.progress().floor(), answer.unconfirmed[0].is_stalled), (0, false));
    }
}
