//! The nodes that a replica knows: those that have a stream, and those that had one
//! (discovery.proto, sections 16 and 18).
//!
//! Each change of a node has a number. A node is listed once, at its last change, so what has
//! changed since a number costs as much as it is long.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_proto::v1;

use crate::serve::context::milliseconds;

/// The maximum number of departed nodes that are remembered, and of forgotten ones that are listed.
const MAX_REMEMBERED: usize = 65_536;

/// How a node lost its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departed {
    /// When the stream ended.
    pub at: Instant,
    /// The last version that the node had acknowledged, by the numbers of its replica.
    pub version: u64,
}

/// The nodes that this replica knows. `None` stands for a node with a stream.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    number: u64,
    nodes: HashMap<Arc<str>, (u64, Option<Departed>)>,
    /// The departed nodes, with the time from which on they are forgotten if there is no such Node.
    departed: BTreeSet<(Instant, Arc<str>)>,
    kept: HashMap<Arc<str>, Instant>,
    /// The nodes by the number of their last change, with forgotten nodes.
    changes: BTreeMap<u64, Arc<str>>,
    /// Forgotten nodes are listed from this number on.
    floor: u64,
    /// When nodes were forgotten for lack of room.
    overflowed: Option<Instant>,
}

impl Roster {
    /// The number of the last change.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// All nodes: the number of the last change, and `None` for a node with a stream.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (&Arc<str>, u64, Option<Departed>)> {
        self.nodes.iter().map(|(node, (number, departed))| (node, *number, *departed))
    }

    /// True if nodes were forgotten for lack of room within the last `time`.
    pub(crate) fn is_incomplete(&self, time: Duration) -> bool {
        self.overflowed.is_some_and(|at| at.elapsed() < time)
    }

    pub(super) fn enter(&mut self, node: &Arc<str>) -> u64 {
        self.set(Arc::clone(node), Some(None))
    }

    pub(super) fn depart(&mut self, node: Arc<str>, departed: Departed) -> u64 {
        self.set(node, Some(Some(departed)));
        while self.departed.len() > MAX_REMEMBERED
            && let Some((_, node)) = self.departed.first().cloned()
        {
            self.overflowed = Some(Instant::now());
            self.set(node, None);
        }
        self.number
    }

    /// True if a departure is later than what is known about the node.
    pub(super) fn is_news(&self, node: &Arc<str>, departed: Departed) -> bool {
        let known = self.nodes.get(node).and_then(|(_, known)| *known);
        known.is_none_or(|known| known.at < departed.at)
    }

    /// Forgets nodes whose stream and Node have been gone for `age`. `has_node` says whether there
    /// is such a Node. Returns the number if something has changed.
    pub(super) fn forget(&mut self, age: Duration, has_node: impl Fn(&Arc<str>) -> bool) -> Option<u64> {
        let old = self.departed.iter().take_while(|(at, _)| at.elapsed() >= age / 2);
        let old: Vec<_> = old.cloned().collect();
        let mut last = None;
        for (at, node) in old {
            if has_node(&node) {
                self.keep(node, Some(Instant::now()));
            } else if at.elapsed() >= age {
                last = Some(self.set(node, None));
            }
        }
        last
    }

    /// Remembers from when on a node is departed and has no Node; `None` if it is not departed.
    fn keep(&mut self, node: Arc<str>, since: Option<Instant>) {
        let old = match since {
            Some(since) => self.kept.insert(Arc::clone(&node), since),
            None => self.kept.remove(&node),
        };
        if let Some(old) = old {
            self.departed.remove(&(old, Arc::clone(&node)));
        }
        self.departed.extend(since.map(|since| (since, node)));
    }

    /// Lists a change of a node; `None` forgets the node.
    fn set(&mut self, node: Arc<str>, state: Option<Option<Departed>>) -> u64 {
        self.number += 1;
        let old = match state {
            Some(state) => self.nodes.insert(Arc::clone(&node), (self.number, state)),
            None => self.nodes.remove(&node),
        };
        if let Some((number, _)) = old {
            self.changes.remove(&number);
        }
        self.keep(Arc::clone(&node), state.flatten().map(|departed| departed.at));
        self.changes.insert(self.number, node);
        while self.changes.len() - self.nodes.len() > MAX_REMEMBERED
            && let Some((number, node)) = self.changes.pop_first()
        {
            if self.nodes.get(&node).is_some_and(|(last, _)| *last == number) {
                // The node is known, so it is listed again as a new change.
                self.number += 1;
                self.changes.insert(self.number, Arc::clone(&node));
                self.nodes.entry(node).and_modify(|(last, _)| *last = self.number);
            } else {
                self.floor = number;
            }
        }
        self.number
    }

    /// What has changed since `number`; everything if the forgotten nodes since then are not all
    /// listed.
    pub(crate) fn since(&self, number: u64) -> v1::Roster {
        let is_full = number < self.floor || number == 0;
        let mut roster = v1::Roster { number: self.number, is_full, ..v1::Roster::default() };
        let wire = |node: &Arc<str>, departed: Option<Departed>| v1::RosterNode {
            node: node.to_string(),
            departed_ms: departed.map_or(0, |departed| milliseconds(departed.at.elapsed()).max(1)),
            programmed_version: departed.map_or(0, |departed| departed.version),
        };
        let first = if is_full { 0 } else { number + 1 };
        for node in self.changes.range(first..).map(|(_, node)| node) {
            match self.nodes.get(node) {
                Some((_, None)) => roster.present.push(wire(node, None)),
                Some((_, departed)) => roster.departed.push(wire(node, *departed)),
                None if is_full => {}
                None => roster.forgotten.push(node.to_string()),
            }
        }
        roster
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(nodes: &[v1::RosterNode]) -> Vec<&str> {
        nodes.iter().map(|node| node.node.as_str()).collect()
    }

    #[test]
    fn a_roster_that_forgets_for_lack_of_room_says_so_and_keeps_the_nodes_with_a_stream() {
        let mut roster = Roster::default();
        roster.enter(&"present".into());
        for index in 0..2 * MAX_REMEMBERED + 10 {
            roster.depart(format!("node-{index}").into(), Departed { at: Instant::now(), version: 0 });
        }
        assert!(roster.is_incomplete(Duration::from_secs(600)) && !roster.is_incomplete(Duration::ZERO));
        assert_eq!(roster.nodes().count(), MAX_REMEMBERED + 1);
        assert!(roster.changes.len() <= 2 * MAX_REMEMBERED + 1);
        let late = roster.since(1);
        assert!(late.is_full && names(&late.present) == ["present"]);
    }
}
