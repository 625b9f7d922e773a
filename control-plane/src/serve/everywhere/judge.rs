//! Combines what all replicas know to one verdict about all Nodes (discovery.proto, sections 16 and
//! 18). This file does no I/O.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Instant,
};

use headgate_proto::v1;

use crate::serve::{context::milliseconds, fleet::Departed};

/// Why a Node has no agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// Some replica remembers a stream of the node.
    Lost {
        /// How long ago the stream ended, in milliseconds.
        departed_ms: u64,
        /// The last version that the node had acknowledged, by the numbers of its last replica.
        version: u64,
    },
    /// Replicas may be missing that know more.
    Unknown,
    /// No replica has ever had a stream of the node.
    Never,
}

impl Absence {
    /// The values of [`Self::reason`].
    pub(crate) const REASONS: [&str; 3] = ["lost", "unknown", "never"];

    /// The label `reason` of the metric.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Lost { .. } => "lost",
            Self::Unknown => "unknown",
            Self::Never => "never",
        }
    }
}

/// What all replicas together say.
#[derive(Debug, Default)]
pub struct Verdict {
    /// The number of nodes that count.
    pub nodes: usize,
    /// The agents that are not confirmed.
    pub unconfirmed: BTreeMap<String, v1::Laggard>,
    /// The nodes in standby. Nobody knows what their proxies do, and nobody waits for them.
    pub standby: BTreeMap<String, v1::Laggard>,
    /// The Nodes without an agent.
    pub absent: BTreeMap<String, Absence>,
    /// The Nodes without an agent for which pods have waited too long.
    pub given_up: BTreeSet<String>,
    /// The problems of replicas, by name.
    pub problems: BTreeMap<String, String>,
    /// The version at the asking replica.
    pub version: u64,
    /// The source has no Nodes, and a replica is missing, whose agents nobody knows.
    pub is_blind: bool,
}

impl Verdict {
    /// The number of nodes that are confirmed.
    pub(crate) fn confirmed(&self) -> usize {
        self.nodes - self.unconfirmed.len() - self.absent.len() - self.standby.len()
    }

    /// Returns true if all Nodes are confirmed, except those that never had an agent or stand by.
    #[must_use]
    pub fn holds(&self) -> bool {
        !self.is_blind && self.unconfirmed.is_empty() && self.absent.values().all(|absence| *absence == Absence::Never)
    }

    /// The Nodes that have lost their agent.
    pub(crate) fn lost(&self) -> impl Iterator<Item = &String> {
        self.absent.iter().filter(|(_, absence)| matches!(absence, Absence::Lost { .. })).map(|(node, _)| node)
    }

    /// Returns true if it is of no use to wait: only nodes are missing for which pods have waited
    /// too long.
    #[must_use]
    pub fn is_final(&self) -> bool {
        let is_waited_for =
            |(node, absence): (&String, &Absence)| *absence != Absence::Never && !self.given_up.contains(node);
        !self.is_blind
            && !self.absent.iter().any(is_waited_for)
            && self.unconfirmed.values().all(|laggard| laggard.is_stalled)
    }

    /// The names of the nodes that prevent the statement.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &str> {
        let absent = self.absent.iter().filter(|(_, absence)| **absence != Absence::Never).map(|(node, _)| node);
        self.unconfirmed.keys().chain(absent).map(String::as_str)
    }

    /// The names of the Nodes that never had an agent.
    pub(crate) fn uncovered(&self) -> impl Iterator<Item = &str> {
        let never = self.absent.iter().filter(|(_, absence)| **absence == Absence::Never);
        never.map(|(node, _)| node.as_str())
    }

    /// Says why the statement does not hold: which nodes, of which at most `named` are named, have
    /// not confirmed `what`.
    pub(crate) fn why(&self, what: &str, named: usize) -> String {
        let names: Vec<&str> = self.missing().take(named).collect();
        let more = self.missing().count() - names.len();
        let names = match (names.is_empty(), more) {
            (true, _) => String::new(),
            (false, 0) => format!(": {}", names.join(", ")),
            (false, more) => format!(": {} and {more} more", names.join(", ")),
        };
        let stalled = self.unconfirmed.values().filter(|laggard| laggard.is_stalled).count() + self.given_up.len();
        let stalled = match stalled {
            0 => String::new(),
            count => format!("; pods hardly wait for {count} of them, which rejected the Service or took too long"),
        };
        let problems: String = self.problems.iter().map(|(who, what)| format!("; {who}: {what}")).collect();
        format!("these nodes have not confirmed {what}{names}; `headgatectl agents` shows why{stalled}{problems}")
    }
}

/// Collects what replicas say in one round of answers.
#[derive(Debug, Default)]
pub struct Round {
    /// Nodes with a stream to some replica that does not name them.
    confirmed: HashSet<Arc<str>>,
    departed: HashMap<Arc<str>, Departed>,
    verdict: Verdict,
}

impl Round {
    /// Adds a replica: its name, its roster (each node with the number of its last change, and
    /// `None` if it has a stream), and its answer; `None` if it does not answer.
    pub fn add<'a>(
        &mut self,
        replica: &str,
        roster: impl Iterator<Item = (&'a Arc<str>, u64, Option<Departed>)>,
        answer: Option<v1::QuestionAnswer>,
    ) {
        let Round { confirmed, departed, verdict } = self;
        let (number, problem) = match &answer {
            None => (0, "it does not answer".to_owned()),
            Some(answer) => (answer.roster, answer.problem.clone()),
        };
        let mut named: HashMap<String, v1::Laggard> = HashMap::new();
        if let Some(answer) = answer {
            named.extend(answer.unconfirmed.into_iter().map(|laggard| (laggard.node.clone(), laggard)));
        }
        let mut has_agents = false;
        for (node, changed, state) in roster {
            if let Some(state) = state {
                let latest = departed.entry(Arc::clone(node)).or_insert(state);
                *latest = if state.at > latest.at { state } else { *latest };
                continue;
            }
            has_agents = true;
            let unanswered = || {
                let reason = if problem.is_empty() { "the node has just connected" } else { &*problem };
                let (node, replica, reason) = (node.to_string(), replica.to_owned(), reason.to_owned());
                v1::Laggard { node, replica, reason, ..v1::Laggard::default() }
            };
            let laggard = named.remove(&**node);
            let laggard = if changed > number || !problem.is_empty() {
                Some(laggard.unwrap_or_else(unanswered))
            } else {
                laggard
            };
            match laggard {
                Some(laggard) if !laggard.standby.is_empty() && changed <= number => {
                    verdict.standby.insert(node.to_string(), laggard);
                }
                Some(laggard) => drop(verdict.unconfirmed.insert(node.to_string(), laggard)),
                None => drop(confirmed.insert(Arc::clone(node))),
            }
        }
        if has_agents && !problem.is_empty() {
            verdict.problems.insert(format!("replica {replica}"), problem);
        }
    }

    /// Decides about all Nodes. `nodes` are all Nodes of the source, and whether they count.
    /// `problems` says why replicas may be missing that know more; empty if none is.
    #[must_use]
    pub fn verdict(self, nodes: &[(Arc<str>, bool)], problems: BTreeMap<String, String>) -> Verdict {
        let Round { mut confirmed, departed, mut verdict } = self;
        let now = Instant::now();
        // A replica that names a node counts more than one that confirms it, because the latter may
        // not have noticed yet that the node has moved.
        let Verdict { unconfirmed, standby, .. } = &mut verdict;
        standby.retain(|node, _| !unconfirmed.contains_key(node));
        let is_named = |node: &str| unconfirmed.contains_key(node) || standby.contains_key(node);
        confirmed.retain(|node| !is_named(node));
        verdict.nodes = confirmed.len() + unconfirmed.len() + standby.len();
        // A source without Nodes, such as a folder, says nothing about nodes that were deleted.
        let remembered = departed.keys().filter(|_| nodes.is_empty()).map(|node| (Arc::clone(node), true));
        let counted: Vec<_> = remembered.chain(nodes.iter().cloned()).filter(|(_, counts)| *counts).collect();
        for (node, _) in counted {
            let Verdict { unconfirmed, standby, .. } = &verdict;
            if confirmed.contains(&node) || unconfirmed.contains_key(&*node) || standby.contains_key(&*node) {
                continue;
            }
            let absence = match departed.get(&node) {
                Some(Departed { at, version }) => Absence::Lost {
                    departed_ms: milliseconds(now.saturating_duration_since(*at)).max(1),
                    version: *version,
                },
                None if problems.is_empty() => Absence::Never,
                None => Absence::Unknown,
            };
            verdict.nodes += 1;
            verdict.absent.insert(node.to_string(), absence);
        }
        if verdict.absent.values().any(|absence| *absence == Absence::Unknown) {
            verdict.problems.extend(problems);
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> Arc<str> {
        name.into()
    }

    fn answer(roster: u64, unconfirmed: &[&str]) -> Option<v1::QuestionAnswer> {
        let laggard = |name: &&str| v1::Laggard { node: (*name).to_owned(), ..v1::Laggard::default() };
        let unconfirmed = unconfirmed.iter().map(laggard).collect();
        Some(v1::QuestionAnswer { roster, version: 1, unconfirmed, ..v1::QuestionAnswer::default() })
    }

    fn add(
        round: &mut Round,
        replica: &str,
        present: &[(&str, u64)],
        departed: &[&str],
        said: Option<v1::QuestionAnswer>,
    ) {
        let present: Vec<_> = present.iter().map(|(name, number)| (node(name), *number, None)).collect();
        let lost = Departed { at: Instant::now(), version: 5 };
        let departed = departed.iter().map(|name| (node(name), 1, Some(lost)));
        let all: Vec<_> = present.into_iter().chain(departed).collect();
        round.add(replica, all.iter().map(|(node, number, state)| (node, *number, *state)), said);
    }

    fn verdict(round: Round, nodes: &[&str], problems: &[&str]) -> Verdict {
        let problems = problems.iter().map(|problem| ("x".to_owned(), (*problem).to_owned())).collect();
        let excluded = [(node("excluded"), false)];
        let nodes = nodes.iter().map(|name| (node(name), true)).chain(excluded).collect::<Vec<_>>();
        round.verdict(&nodes, problems)
    }

    #[test]
    fn what_is_forgotten_or_unknown_counts_against_the_claim() {
        // A node that lost its stream counts, also if no replica has its Node any more by then.
        let mut round = Round::default();
        add(&mut round, "r1", &[], &["a"], answer(1, &[]));
        let lost = verdict(round, &["a"], &[]);
        assert!(matches!(lost.absent["a"], Absence::Lost { version: 5, .. }) && !lost.holds());
        // A Node that nobody has seen counts while replicas may be missing.
        let unknown = verdict(Round::default(), &["a"], &["it vanished"]);
        assert!(!unknown.holds() && unknown.problems.len() == 1);
        assert!(verdict(Round::default(), &["a"], &[]).holds());
        // The agents of a replica that does not answer count.
        let mut round = Round::default();
        add(&mut round, "r1", &[("a", 1)], &[], None);
        assert_eq!(verdict(round, &["a"], &[]).missing().collect::<Vec<_>>(), ["a"]);
        // Without any Node in the source, what is remembered counts.
        let mut round = Round::default();
        add(&mut round, "r1", &[("a", 1)], &["b"], answer(1, &[]));
        assert_eq!(round.verdict(&[], BTreeMap::new()).missing().collect::<Vec<_>>(), ["b"]);
        // A node without a Node counts while it has a stream.
        let mut round = Round::default();
        add(&mut round, "r1", &[("a", 1)], &["b"], answer(1, &["a"]));
        assert_eq!(verdict(round, &[], &[]).missing().collect::<Vec<_>>(), ["a"]);
    }

    /// Another replica that knows better counts more, and a replica that may not know its agents
    /// yet says nothing.
    #[test]
    fn nodes_in_standby_count_apart() {
        let in_standby = |mut said: v1::QuestionAnswer| {
            said.unconfirmed[0].standby = "kube-proxy (iptables)".into();
            Some(said)
        };
        let said = || in_standby(answer(1, &["a"]).unwrap_or_default());
        let mut round = Round::default();
        add(&mut round, "r1", &[("a", 1), ("b", 1)], &[], said());
        let found = verdict(round, &["a", "b", "c"], &[]);
        assert!(found.holds() && found.standby.contains_key("a"));
        assert_eq!((found.nodes, found.confirmed(), found.missing().count()), (3, 1, 0));
        let mut round = Round::default();
        add(&mut round, "r1", &[("a", 1)], &[], said());
        add(&mut round, "r2", &[("a", 1)], &[], answer(1, &["a"]));
        let found = verdict(round, &["a"], &[]);
        assert!(!found.holds() && found.standby.is_empty() && found.nodes == 1);
        let mut round = Round::default();
        let problem = |said: v1::QuestionAnswer| v1::QuestionAnswer { problem: "behind".into(), ..said };
        add(&mut round, "r1", &[("a", 1), ("b", 1)], &[], said().map(problem));
        let found = verdict(round, &["a", "b"], &[]);
        assert_eq!(found.missing().collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn nobody_waits_for_nodes_that_have_held_up_others_too_long() {
        let mut round = Round::default();
        let mut said = answer(1, &["a"]).unwrap_or_default();
        said.unconfirmed[0].is_stalled = true;
        add(&mut round, "r1", &[("a", 1), ("b", 1)], &[], Some(said));
        let found = verdict(round, &["a", "b", "c"], &[]);
        assert!(found.is_final() && !found.holds());
        let mut round = Round::default();
        add(&mut round, "r1", &[("b", 1)], &["a"], answer(1, &[]));
        let mut found = verdict(round, &["a", "b"], &[]);
        assert!(!found.is_final());
        found.given_up = found.lost().cloned().collect();
        assert!(found.is_final() && !found.holds());
    }
}
