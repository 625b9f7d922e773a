//! What all nodes have programmed, as all replicas together know it (discovery.proto, sections 16
//! and 18). `wait`, the drain barrier and the readiness gate ask here.
//!
//! `replicas.rs` follows the other replicas. `here.rs` answers for this replica. `judge.rs`
//! combines the answers of one round to a verdict.

mod here;
mod judge;
mod replicas;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{FutureExt as _, future::join_all};
use headgate_core::node_state::NodeState;
use headgate_proto::v1::{self, question::Wanted};
use tokio::{
    sync::watch,
    time::{sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

pub use self::judge::{Absence, Round, Verdict};
pub(crate) use self::{
    here::{HURRY, Question, answer, last_of},
    replicas::{Link, PeerCaller, Replicas},
};
use super::{context::milliseconds, fleet::Fleet};
use crate::store::PACE;

/// The longest time between two rounds of answers.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// How long a replica that starts tries to join the others before it accepts agents.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_secs(2);

/// The state of a Node without an agent.
pub(crate) const NO_AGENT: &str = "no_agent";

/// Asks all replicas.
pub(crate) struct Everywhere {
    fleet: Arc<Fleet>,
    /// `None` if the options do not name the other replicas.
    replicas: Option<Arc<Replicas>>,
    started: Instant,
    is_announced: AtomicBool,
    /// Where agents reach this replica, if it knows no other one.
    alone: watch::Sender<Arc<[String]>>,
}

impl Everywhere {
    /// Creates the mechanism of a replica. It knows no other replica before [`Self::start`].
    pub(crate) fn new(fleet: Arc<Fleet>) -> Arc<Self> {
        let peers = fleet.context.settings.peers.clone();
        let replicas = peers.map(|peers| Replicas::new(Arc::clone(&fleet), peers));
        let is_announced = AtomicBool::new(replicas.is_none());
        let alone = watch::Sender::new([fleet.context.settings.ports.agents.to_string()].into());
        Arc::new(Self { fleet, replicas, started: Instant::now(), is_announced, alone })
    }

    /// Joins and follows the other replicas, until `stopped`. Returns once they know this one, or
    /// at once if only the source says where they are.
    pub(crate) async fn start(self: &Arc<Self>, stopped: CancellationToken) {
        let essentials = replicas::reserve(Arc::clone(&self.fleet.context), self.replicas.clone());
        tokio::spawn(stopped.clone().run_until_cancelled_owned(essentials));
        let Some(replicas) = self.replicas.clone() else { return };
        tokio::spawn(stopped.clone().run_until_cancelled_owned(Arc::clone(&replicas).run()));
        let (everywhere, is_listed) = (Arc::clone(self), replicas.until_listed().now_or_never().is_some());
        let join = async move {
            replicas.until_listed().await;
            // A replica that cannot be reached in this time may learn of this one later.
            let _ = timeout(ANNOUNCE_TIMEOUT, replicas.joined()).await;
            replicas.announce();
            everywhere.is_announced.store(true, Ordering::Release);
        };
        let joining = tokio::spawn(stopped.run_until_cancelled_owned(join));
        if is_listed {
            // The task cannot fail: it does not panic, and nobody else stops it.
            let _ = joining.await;
        }
    }

    /// Where agents reach all replicas, this one first.
    pub(crate) fn announced(&self) -> watch::Receiver<Arc<[String]>> {
        self.replicas.as_ref().map_or(&self.alone, |replicas| &replicas.announced).subscribe()
    }

    /// True once agents may open streams, because the other replicas know this one.
    pub(crate) fn is_announced(&self) -> bool {
        self.is_announced.load(Ordering::Acquire)
    }

    pub(crate) fn replicas(&self) -> Option<&Arc<Replicas>> {
        self.replicas.as_ref()
    }

    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        self.replicas.as_ref().map(|replicas| replicas.links()).unwrap_or_default()
    }

    /// How many of the joined replicas have a lower epoch than this one.
    pub(crate) fn rank(&self) -> u32 {
        let epoch_of = |link: Arc<Link>| link.look(|replica| replica.ok().map(|replica| replica.identity.epoch));
        let epochs: BTreeSet<u64> = self.links().into_iter().filter_map(epoch_of).collect();
        u32::try_from(epochs.range(..self.fleet.context.store.epoch()).count()).unwrap_or(u32::MAX)
    }

    /// Notes that another replica has joined this one, until the result is dropped.
    pub(crate) fn caller(&self, epoch: u64) -> Option<PeerCaller> {
        let replicas = self.replicas.as_ref().filter(|_| epoch != self.fleet.context.store.epoch());
        replicas.map(|replicas| replicas.caller(epoch))
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Asks all replicas until the answer is yes, until it is of no use to wait, until
    /// `is_enough`, or until `limit`. The source of each replica must have reached the positions
    /// that this replica has now.
    pub(crate) async fn until(
        &self,
        wanted: Wanted,
        endpoints: Vec<(headgate_core::ServiceKey, Option<std::net::IpAddr>)>,
        limit: tokio::time::Instant,
        is_enough: impl Fn(&Verdict) -> bool,
    ) -> Verdict {
        let positions = self.fleet.context.store.changed_positions();
        let positions = positions.into_iter().filter(|(kind, _)| kind.is_comparable()).collect();
        let question = Question { wanted, endpoints, positions };
        let mut rosters = self.fleet.rosters();
        let mut members = self.fleet.progress().members();
        let part = self.fleet.context.settings.patience_part;
        let (_none, never) = watch::channel(0);
        let mut replicas = self.replicas.as_ref().map_or(never, |replicas| replicas.changes());
        loop {
            // Marked as seen before the round, so that a change meanwhile leads to another.
            rosters.borrow_and_update();
            members.borrow_and_update();
            replicas.borrow_and_update();
            let asked_at = tokio::time::Instant::now();
            let mut verdict = self.round(&question, limit).await;
            let now = tokio::time::Instant::now();
            let lost = verdict.lost().filter(|_| question.spends_patience()).map(|node| Arc::from(node.as_str()));
            let lost: Vec<Arc<str>> = lost.collect();
            let is_given_up = |node: &&Arc<str>| self.fleet.turns().check_patience(node, now.into_std()).is_err();
            verdict.given_up = lost.iter().filter(is_given_up).map(ToString::to_string).collect();
            if verdict.holds() || verdict.is_final() || is_enough(&verdict) || now >= limit {
                return verdict;
            }
            tokio::select! {
                Ok(()) = rosters.changed() => {}
                // A Node was added or deleted.
                Ok(()) = members.changed() => {}
                Ok(()) = replicas.changed() => {}
                () = sleep_until((now + part).min(limit)), if !lost.is_empty() => {
                    let now = Instant::now();
                    for node in &lost {
                        // The next round looks at what is left.
                        let _ = self.fleet.turns().spend_patience(node, now);
                    }
                }
                // A replica grows old enough, or an agent begins to acknowledge.
                () = sleep_until((asked_at + ASK_AGAIN).min(limit)) => {}
            }
            sleep_until((asked_at + PACE).min(limit)).await;
        }
    }

    /// Asks all replicas once.
    async fn round(&self, question: &Question, limit: tokio::time::Instant) -> Verdict {
        let links = self.links();
        let here = answer(&self.fleet, question, limit);
        let others = join_all(links.iter().map(|link| link.ask(question, limit)));
        let (here, others) = tokio::join!(here, others);
        let version = here.version;
        Verdict { version, ..self.judge(Some(here), &links, others) }
    }

    /// What is known about all Nodes without a question: the agents count as unconfirmed.
    pub(crate) fn look(&self) -> Verdict {
        let links = self.links();
        let others = links.iter().map(|_| None).collect();
        self.judge(None, &links, others)
    }

    /// Combines the roster and the answer of this replica with those of `links`. `others` has their
    /// answers and epochs.
    pub(crate) fn judge(
        &self,
        here: Option<v1::QuestionAnswer>,
        links: &[Arc<Link>],
        others: Vec<Option<(u64, v1::QuestionAnswer)>>,
    ) -> Verdict {
        let mut round = Round::default();
        let name = &self.fleet.context.settings.replica_name;
        // The rosters are read after the answers, so a node that has moved meanwhile is seen.
        self.fleet.with_roster(|roster| round.add(name, roster.nodes(), here));
        for (link, answer) in links.iter().zip(others) {
            link.look(|replica| {
                if let Ok(replica) = replica {
                    let nodes = replica.nodes.iter().map(|(node, (number, departed))| (node, *number, *departed));
                    // The address may have another replica by now.
                    let answer = answer.filter(|(epoch, _)| *epoch == replica.identity.epoch);
                    round.add(&replica.identity.replica, nodes, answer.map(|(_, answer)| answer));
                }
            });
        }
        let nodes = self.fleet.context.store.node_names();
        let is_blind = nodes.is_empty()
            && self.replicas.as_ref().is_some_and(|replicas| !replicas.problems(Duration::ZERO).is_empty());
        let mut verdict = Verdict { is_blind, ..round.verdict(&nodes, self.problems()) };
        if is_blind {
            verdict.problems.extend(self.problems());
        }
        verdict
    }

    /// Why replicas may be missing that know more about a Node; empty if none is.
    pub(crate) fn problems(&self) -> BTreeMap<String, String> {
        let time = self.fleet.context.settings.uncovered_after;
        let Some(replicas) = &self.replicas else {
            let text = "start every control plane replica with --peers, so that replicas know each other";
            return [("--peers".to_owned(), text.to_owned())].into();
        };
        let mut problems = replicas.problems(time);
        let is_young = self.uptime() < time;
        if is_young || self.fleet.with_roster(|roster| roster.is_incomplete(time)) {
            let text = match is_young {
                true => format!("it has run for less than {} s", time.as_secs()),
                false => "it has forgotten nodes for lack of room".to_owned(),
            };
            problems.insert(format!("replica {}", self.fleet.context.settings.replica_name), text);
        }
        problems
    }

    /// Describes a Node without an agent.
    pub(crate) fn absent_agent(&self, node: &str, absence: Absence) -> v1::Laggard {
        let (reason, programmed_version) = match absence {
            Absence::Lost { departed_ms, version } => {
                (format!("the agent lost its stream {} s ago, and no replica has one", departed_ms / 1_000), version)
            }
            Absence::Never => ("no replica has ever had a stream of this Node's agent".to_owned(), 0),
            Absence::Unknown => ("no replica that is known has had a stream of this Node's agent".to_owned(), 0),
        };
        v1::Laggard { node: node.to_owned(), reason, programmed_version, ..v1::Laggard::default() }
    }

    /// The row of a Node without an agent, or of an agent that its replica does not list; `None`
    /// for other nodes.
    pub(crate) fn without_agent(&self, verdict: &Verdict, node: &str) -> Option<v1::AgentInfo> {
        let mut row = v1::AgentInfo { node: node.to_owned(), ..v1::AgentInfo::default() };
        if let Some(absence) = verdict.absent.get(node) {
            row.state = NO_AGENT.into();
            (row.zone, row.pool) = self.fleet.context.store.place_of(node);
            v1::Laggard { reason: row.reason, programmed_version: row.programmed_version, .. } =
                self.absent_agent(node, *absence);
            if let Absence::Lost { departed_ms, .. } = absence {
                // The row has the time in a field of its own.
                "the agent lost its stream, and no replica has one".clone_into(&mut row.reason);
                row.departed_ms = *departed_ms;
            }
        } else {
            let laggard = verdict.unconfirmed.get(node)?;
            row.state = NodeState::Waiting.as_str().into();
            (row.zone, row.pool) = self.fleet.context.store.place_of(node);
            row.reason = format!("replica {} does not list its agents", laggard.replica);
            row.replica = laggard.replica.clone();
        }
        Some(row)
    }

    /// The replicas that this replica knows, without itself.
    pub(crate) fn replica_infos(&self) -> Vec<v1::ReplicaInfo> {
        let info = |link: Arc<Link>| {
            link.look(|replica| match replica {
                Ok(replica) => v1::ReplicaInfo {
                    replica: replica.identity.replica.clone(),
                    epoch: format!("{:016x}", replica.identity.epoch),
                    state: "joined".into(),
                    for_ms: milliseconds(replica.since.elapsed()),
                    agents: replica.nodes.values().filter(|(_, departed)| departed.is_none()).count() as u64,
                    ..v1::ReplicaInfo::default()
                },
                Err(problem) => v1::ReplicaInfo {
                    replica: link.address.to_string(),
                    state: "unreachable".into(),
                    problem: problem.to_owned(),
                    ..v1::ReplicaInfo::default()
                },
            })
        };
        let vanished = |(epoch, replica, at): (u64, String, Instant)| v1::ReplicaInfo {
            replica,
            epoch: format!("{epoch:016x}"),
            state: "vanished".into(),
            for_ms: milliseconds(at.elapsed()),
            ..v1::ReplicaInfo::default()
        };
        let time = self.fleet.context.settings.uncovered_after;
        let gone = self.replicas.as_ref().map(|replicas| replicas.vanished(time)).unwrap_or_default();
        let mut infos: Vec<_> = self.links().into_iter().map(info).chain(gone.into_iter().map(vanished)).collect();
        infos.sort_by(|a, b| a.replica.cmp(&b.replica));
        infos
    }
}
