//! `Inspect.Wait`: waits until every node has programmed the present value of a Service or an
//! endpoint (discovery.proto, sections 16 and 18).

use std::{net::IpAddr, time::Duration};

use headgate_core::{ServiceKey, node_state::SourceState};
use headgate_proto::v1::{self, question::Wanted};
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::serve::{
    everywhere::{Absence, Everywhere, Question, Verdict},
    fleet::Fleet,
};

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest wait. Longer timeouts are cut to a day, so that a deadline can always be computed.
const MAX_TIMEOUT: Duration = Duration::from_secs(86_400);

/// The maximum number of nodes that each list of an answer names.
const MAX_NAMED: usize = 1_000;

/// A checked `Wait` request.
pub(super) struct CheckedWait {
    question: Question,
    deadline: Instant,
    allow_absent: bool,
}

impl CheckedWait {
    /// Checks a request, and begins to count the time.
    ///
    /// # Errors
    ///
    /// `INVALID_ARGUMENT` names the bad field. A retry of the same request fails again.
    pub(super) fn new(request: v1::WaitRequest) -> Result<Self, Status> {
        let v1::WaitRequest { namespace, name, endpoint, gone, timeout_ms, allow_absent } = request;
        if namespace.is_empty() || name.is_empty() {
            return Err(Status::invalid_argument("namespace and name: both are required"));
        }
        let address: Option<IpAddr> = match endpoint.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| {
                Status::invalid_argument(
                    "endpoint: not an IP address; `headgatectl endpoints SERVICE` lists the addresses",
                )
            })?),
        };
        let timeout = if timeout_ms == 0 { DEFAULT_TIMEOUT } else { Duration::from_millis(timeout_ms) };
        let endpoints = vec![(ServiceKey::new(&namespace, &name), address)];
        let wanted = if gone { Wanted::Gone } else { Wanted::Present };
        let question = Question { wanted, endpoints, positions: std::collections::BTreeMap::new() };
        Ok(Self { question, deadline: Instant::now() + timeout.min(MAX_TIMEOUT), allow_absent })
    }

    /// Waits until all nodes have programmed the state, or until the deadline.
    pub(super) async fn answer(&self, fleet: &Fleet, everywhere: &Everywhere) -> v1::WaitAnswer {
        if let Err(waiting_for) = self.until_seen(fleet).await {
            let problem = fleet.context.store.source_problem();
            return v1::WaitAnswer {
                waiting_for: waiting_for.into(),
                problems: problem.into_iter().map(|problem| format!("replica: {problem}")).collect(),
                nodes: everywhere.look().nodes as u64,
                ..v1::WaitAnswer::default()
            };
        }
        let Question { wanted, endpoints, .. } = &self.question;
        let is_enough = |verdict: &Verdict| self.allow_absent && !verdict.is_blind && verdict.unconfirmed.is_empty();
        let verdict = everywhere.until(*wanted, endpoints.clone(), self.deadline, is_enough).await;
        let named = |absence: (&String, &Absence)| everywhere.absent_agent(absence.0, *absence.1);
        let (laggards, absent) = (verdict.unconfirmed.len(), verdict.absent.len());
        let mut unconfirmed: Vec<v1::Laggard> = verdict.unconfirmed.values().cloned().collect();
        unconfirmed.sort_by_key(|laggard| laggard.programmed_version);
        unconfirmed.truncate(MAX_NAMED);
        v1::WaitAnswer {
            done: !verdict.is_blind
                && laggards == 0
                && (absent == 0 || self.allow_absent)
                && (verdict.nodes > 0 || self.allow_absent),
            waiting_for: if verdict.is_blind || laggards + absent > 0 { "nodes".into() } else { String::new() },
            version: verdict.version,
            nodes: verdict.nodes as u64,
            programmed: verdict.confirmed() as u64,
            laggards: unconfirmed,
            laggard_count: laggards as u64,
            absent: verdict.absent.iter().take(MAX_NAMED).map(named).collect(),
            absent_count: absent as u64,
            problems: verdict.problems.iter().map(|(who, what)| format!("{who}: {what}")).collect(),
            standby_count: verdict.standby.len() as u64,
            standby: verdict.standby.into_values().take(MAX_NAMED).collect(),
        }
    }

    /// Waits until the store of this replica has the state. The error names the missing condition.
    async fn until_seen(&self, fleet: &Fleet) -> Result<(), &'static str> {
        let store = &fleet.context.store;
        let mut source = store.watch_source();
        let following = timeout_at(self.deadline, source.wait_for(|state| *state == SourceState::Following));
        if !matches!(following.await, Ok(Ok(_))) {
            return Err("source");
        }
        let interest = store.interest(self.question.topics());
        while self.question.seen(fleet).is_err() {
            if Instant::now() >= self.deadline {
                return Err(if self.question.endpoints[0].1.is_some() { "endpoint" } else { "service" });
            }
            interest.changed_until(self.deadline).await;
        }
        Ok(())
    }
}
