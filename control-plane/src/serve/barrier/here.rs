//! What this replica alone knows about the endpoints of a pod: whether its store shows them as
//! unused, and which of its agents have this in their kernels.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use headgate_core::ServiceKey;
use headgate_proto::v1::{self, confirm_answer::State};
use tokio::time::{Instant, sleep_until};

use crate::{
    serve::{
        context::milliseconds,
        fleet::{Confirmations, Fleet},
    },
    store::Usage,
    transaction::SourceKind,
};

/// The shortest time between two looks at the store for one question.
const PACE: Duration = Duration::from_millis(50);

/// The maximum number of names in each list of an answer.
const MAX_NAMED: usize = 16_384;

/// For this time after a question, agents acknowledge new batches at once.
pub(super) const HURRY: Duration = Duration::from_secs(60);

/// What nodes must confirm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Wanted {
    /// They send no new connections to the endpoints.
    #[default]
    Unusable,
    /// They use the endpoints.
    Usable,
}

/// A question about the endpoints of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Question {
    pub(crate) wanted: Wanted,
    pub(crate) endpoints: Vec<(ServiceKey, IpAddr)>,
    /// The positions that the source must have reached.
    pub(crate) positions: BTreeMap<SourceKind, u64>,
    /// If not empty: answer as soon as one of these nodes is confirmed or is no Node any more.
    pub(crate) awaited: Vec<String>,
}

/// What the store shows about all endpoints together, with the endpoints that decide it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Seen {
    /// The wanted state has not come yet.
    NotYet(String),
    /// An endpoint is the last one, so it stays in use.
    Last(String),
    /// The endpoints have the wanted state since this version.
    Since(u64),
}

impl Wanted {
    /// Whether an answer belongs to this question. Older replicas know only [`Self::Unusable`].
    pub(super) fn is_answered_by(self, state: State) -> bool {
        (self == Self::Usable) == matches!(state, State::Usable | State::NotUsable)
    }

    /// Returns whether the endpoints have the wanted state, according to the store of this replica.
    pub(super) fn seen(self, fleet: &Fleet, endpoints: &[(ServiceKey, IpAddr)]) -> Seen {
        match self {
            Self::Unusable => used(fleet, endpoints.iter().map(|(key, address)| (key, *address))),
            Self::Usable => ready(fleet, endpoints),
        }
    }
}

fn ready(fleet: &Fleet, endpoints: &[(ServiceKey, IpAddr)]) -> Seen {
    let mut since = 0;
    for (key, address) in endpoints {
        match fleet.context.store.ready_since(key, *address) {
            Some(version) => since = since.max(version),
            None => return Seen::NotYet(format!("endpoint {address} of Service {key} is not ready")),
        }
    }
    Seen::Since(since)
}

/// Returns whether any of the endpoints is in use, according to the store of this replica.
pub(super) fn used<'a>(fleet: &Fleet, endpoints: impl Iterator<Item = (&'a ServiceKey, IpAddr)>) -> Seen {
    let (mut since, mut last) = (0, Vec::new());
    for (key, address) in endpoints {
        match fleet.context.store.usage(key, address) {
            Usage::InUse => return Seen::NotYet(format!("endpoint {address} of Service {key} is ready")),
            Usage::Last => last.push(format!("{address} is the last endpoint of Service {key}")),
            Usage::UnusedSince(version) => since = since.max(version),
        }
    }
    if last.is_empty() { Seen::Since(since) } else { Seen::Last(last.join("; ")) }
}

/// Answers a question: as soon as the answer is complete, or at `until`.
pub(crate) async fn confirm(fleet: &Fleet, question: &Question, until: Instant, started: Instant) -> v1::ConfirmAnswer {
    let store = &fleet.context.store;
    store.hurry(HURRY);
    let services: BTreeSet<ServiceKey> = question.endpoints.iter().map(|(key, _)| key.clone()).collect();
    let (mut outlines, mut moves) = (fleet.progress().outlines(), store.moves());
    let (mut head, mut source) = (store.head(), store.watch_source());
    loop {
        // The values are marked as seen before the look, so that a change during the look wakes
        // this task.
        outlines.borrow_and_update();
        moves.borrow_and_update();
        head.borrow_and_update();
        source.borrow_and_update();
        let now = Instant::now();
        let seen = seen(fleet, question);
        let is_seen = matches!(seen, Seen::Since(_));
        let is_complete = match &seen {
            Seen::NotYet(_) => false,
            Seen::Last(_) => true,
            Seen::Since(version) if question.awaited.is_empty() => fleet.progress().outline().floor >= *version,
            Seen::Since(version) => question
                .awaited
                .iter()
                .any(|node| fleet.confirms(node, *version, &services) || store.node(node).node.is_none()),
        };
        if is_complete || now >= until {
            let is_final = now >= until || !question.awaited.is_empty();
            let answer = answer(fleet, question.wanted, &services, seen, started);
            // An agent that rejects the Service delays the answer like an agent that is behind.
            if is_final || answer.unconfirmed.is_empty() || answer.state() == State::Last {
                return answer;
            }
        }
        tokio::select! {
            Ok(_) = outlines.changed(), if is_seen => {}
            Ok(_) = head.changed(), if !is_seen => {}
            Ok(_) = moves.changed(), if !is_seen => {}
            Ok(_) = source.changed(), if !is_seen => {}
            () = sleep_until(until) => {}
        }
        sleep_until((now + PACE).min(until)).await;
    }
}

/// Returns whether the endpoints have the wanted state. A replica that has not reached the
/// positions of the question may lack changes of the endpoints, so it does not say this of any
/// endpoint.
fn seen(fleet: &Fleet, question: &Question) -> Seen {
    let store = &fleet.context.store;
    if !store.is_synced() {
        return Seen::NotYet("the replica has not listed its source".into());
    }
    if let Some((kind, here, there)) = store.behind(&question.positions) {
        store.want_position(kind, there);
        return Seen::NotYet(format!(
            "the replica is at position {here} of {kind:?}, and another replica is at {there}"
        ));
    }
    question.wanted.seen(fleet, &question.endpoints)
}

fn answer(
    fleet: &Fleet,
    wanted: Wanted,
    services: &BTreeSet<ServiceKey>,
    seen: Seen,
    started: Instant,
) -> v1::ConfirmAnswer {
    let (state, version, reason) = match seen {
        Seen::NotYet(reason) if wanted == Wanted::Usable => (State::NotUsable, None, reason),
        Seen::NotYet(reason) => (State::InUse, None, reason),
        Seen::Last(reason) => (State::Last, None, reason),
        Seen::Since(version) if wanted == Wanted::Usable => (State::Usable, Some(version), String::new()),
        Seen::Since(version) => (State::Unusable, Some(version), String::new()),
    };
    let Confirmations { mut confirmed, mut unconfirmed, mut departed, knows_departed } =
        fleet.confirmations(version, services);
    let is_complete = knows_departed && departed.len() <= MAX_NAMED;
    [&mut confirmed, &mut unconfirmed, &mut departed].into_iter().for_each(|names| names.truncate(MAX_NAMED));
    v1::ConfirmAnswer {
        id: 0,
        replica: fleet.context.settings.replica_name.clone(),
        epoch: fleet.context.store.epoch(),
        state: state.into(),
        version: version.unwrap_or_default(),
        confirmed,
        unconfirmed,
        departed,
        uptime_ms: if is_complete { milliseconds(started.elapsed()).max(1) } else { 0 },
        reason,
    }
}
