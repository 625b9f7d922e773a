//! The rows of `WatchAgents`, and what has changed since a watcher looked last. Each change has a
//! number, and a node is listed once, at its last change. So a slow watcher gets the newest row of
//! each node, and a page costs as much as it is long.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
};

use headgate_core::node_state::NodeState;
use headgate_proto::v1;

/// The maximum number of nodes in a message.
const PAGE: usize = 256;

/// The maximum number of removed nodes that are remembered.
const MAX_REMOVED: usize = 16_384;

/// The maximum number of changes that are remembered.
const MAX_CHANGES: usize = 256;

/// A later verification is sent again only if it is later by this time.
const VERIFIED_STEP_MS: u64 = 600_000;

/// The values of `lag_ms`.
const LAG_STEPS_MS: [u64; 8] = [1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 1_800_000];

/// Returns the greatest step that a lag has reached; 0 before the first one.
pub(super) fn lag_step(lag_ms: u64) -> u64 {
    LAG_STEPS_MS.into_iter().rfind(|step| lag_ms >= *step).unwrap_or_default()
}

/// Returns what people look at.
pub(super) fn row(info: v1::AgentInfo) -> v1::AgentInfo {
    let is_late = [NodeState::Behind, NodeState::Failing].iter().any(|state| info.state == state.as_str());
    v1::AgentInfo {
        lag_ms: if is_late { lag_step(info.lag_ms) } else { 0 },
        address: String::new(),
        head_version: 0,
        sent_version: 0,
        programmed_version: 0,
        apply_microseconds: 0,
        resume: String::new(),
        resumed_resources: 0,
        connected_unix_ms: 0,
        rejections: Vec::new(),
        services_planned: 0,
        objects_written: 0,
        drift: Vec::new(),
        ..info
    }
}

/// Returns true if people see a difference between two rows.
fn is_news(old: &v1::AgentInfo, new: &v1::AgentInfo) -> bool {
    // The number of the attempt counts up.
    let error = |text: &str| text.split_once(": ").map_or(text, |(_, error)| error).to_owned();
    let neutral = |row: &v1::AgentInfo| v1::AgentInfo {
        departed_ms: u64::from(row.departed_ms > 0),
        verified_unix_ms: u64::from(row.verified_unix_ms > 0),
        last_error: error(&row.last_error),
        ..row.clone()
    };
    new.verified_unix_ms >= old.verified_unix_ms + VERIFIED_STEP_MS || neutral(old) != neutral(new)
}

/// The rows of all nodes, and the last changes of Services and endpoints.
#[derive(Debug, Default)]
pub(super) struct RowLog {
    /// The number of the last change.
    number: u64,
    /// The row of each node with its number; `None` for a removed node.
    rows: HashMap<Arc<str>, (u64, Option<v1::AgentInfo>)>,
    /// The nodes by number, and those of them that are removed.
    order: BTreeMap<u64, Arc<str>>,
    removed: BTreeMap<u64, Arc<str>>,
    /// Removals up to this number are forgotten.
    floor: u64,
    changes: VecDeque<(u64, v1::ChangeTime)>,
    /// The number of changes that were left out.
    left_out: u64,
    /// True once all nodes are listed.
    pub(super) is_complete: bool,
    /// The number of watchers, and of those that want rows.
    pub(super) watchers: usize,
    pub(super) row_watchers: usize,
}

/// What a watcher has seen.
#[derive(Debug, Clone, Default)]
pub(super) struct Place {
    begun: u64,
    seen: u64,
    seen_changes: u64,
    seen_left_out: u64,
    is_complete: bool,
    only_changes: bool,
}

/// A watcher is too slow: nodes were removed, and nobody knows which.
#[derive(Debug, PartialEq)]
pub(super) struct TooSlow;

impl RowLog {
    /// Returns the place of a watcher that has seen nothing.
    pub(super) fn place(&self, only_changes: bool) -> Place {
        Place { begun: self.number, seen_left_out: self.left_out, only_changes, ..Place::default() }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn row(&self, node: &str) -> Option<&v1::AgentInfo> {
        self.rows.get(node)?.1.as_ref()
    }

    /// Forgets all nodes, because nobody wants them.
    pub(super) fn clear(&mut self) {
        (self.rows, self.order, self.removed) = Default::default();
        (self.floor, self.is_complete) = (self.number, false);
    }

    /// Sets the row of a node; `None` removes it. Does nothing if people see no difference.
    pub(super) fn set(&mut self, node: &Arc<str>, row: Option<v1::AgentInfo>) {
        let known = self.rows.get(node);
        match (known.and_then(|(_, row)| row.as_ref()), &row) {
            (Some(old), Some(new)) if !is_news(old, new) => return,
            (None, None) => return,
            _ => {}
        }
        if let Some((number, _)) = known {
            self.order.remove(number);
            self.removed.remove(number);
        }
        self.number += 1;
        if row.is_none() {
            self.removed.insert(self.number, Arc::clone(node));
        }
        self.order.insert(self.number, Arc::clone(node));
        self.rows.insert(Arc::clone(node), (self.number, row));
        if self.removed.len() > MAX_REMOVED
            && let Some((number, node)) = self.removed.pop_first()
        {
            self.floor = number;
            self.order.remove(&number);
            self.rows.remove(&node);
        }
    }

    /// Adds changes, and counts those that are not shown.
    pub(super) fn add(&mut self, changes: Vec<v1::ChangeTime>, left_out: usize) {
        self.left_out += left_out as u64;
        for change in changes {
            self.number += 1;
            self.changes.push_back((self.number, change));
        }
        self.changes.drain(..self.changes.len().saturating_sub(MAX_CHANGES));
    }

    /// Returns the next message for a watcher; `None` if it has seen everything.
    pub(super) fn page(&self, place: &mut Place) -> Result<Option<v1::AgentsChange>, TooSlow> {
        let mut message = v1::AgentsChange::default();
        let mut is_whole = true;
        if !place.only_changes {
            if self.floor > place.seen.max(place.begun) {
                return Err(TooSlow);
            }
            for (number, node) in self.order.range(place.seen + 1..) {
                if message.agents.len() + message.removed.len() >= PAGE {
                    is_whole = false;
                    break;
                }
                place.seen = *number;
                match self.row(node) {
                    Some(row) => message.agents.push(row.clone()),
                    None if *number > place.begun => message.removed.push(node.to_string()),
                    None => {}
                }
            }
        }
        if is_whole && (self.is_complete || place.only_changes) {
            message.is_complete = !std::mem::replace(&mut place.is_complete, true);
        }
        if place.is_complete && is_whole {
            let unseen = self.changes.iter().filter(|(number, _)| *number > place.seen_changes);
            message.changes = unseen.map(|(_, change)| change.clone()).collect();
            message.changes_left_out = self.left_out - place.seen_left_out;
            (place.seen_changes, place.seen_left_out) = (self.number, self.left_out);
        }
        Ok((message != v1::AgentsChange::default()).then_some(message))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn agent(node: &str, state: &str) -> v1::AgentInfo {
        v1::AgentInfo { node: node.into(), state: state.into(), ..v1::AgentInfo::default() }
    }

    fn set(log: &mut RowLog, row: v1::AgentInfo) {
        log.set(&Arc::from(row.node.as_str()), Some(row));
    }

    /// The nodes and states of the next message, and whether it completes the list.
    fn read(log: &RowLog, place: &mut Place) -> Option<(Vec<String>, Vec<String>, bool)> {
        let message = log.page(place).unwrap()?;
        let rows = message.agents.iter().map(|row| format!("{} {}", row.node, row.state)).collect();
        Some((rows, message.removed, message.is_complete))
    }

    #[test]
    fn a_watcher_gets_all_nodes_and_then_the_newest_row_of_each_that_changed() {
        let mut log = RowLog::default();
        (0..600).for_each(|index| set(&mut log, agent(&format!("n{index:03}"), "up_to_date")));
        let mut place = log.place(false);
        let sizes: Vec<_> = std::iter::from_fn(|| read(&log, &mut place)).map(|(rows, ..)| rows.len()).collect();
        assert_eq!(sizes, [256, 256, 88]);
        log.is_complete = true;
        assert_eq!(read(&log, &mut place), Some((vec![], vec![], true)));
        for state in ["behind", "failing"] {
            set(&mut log, agent("n007", state));
        }
        log.set(&"n008".into(), None);
        let expected = (vec!["n007 failing".to_owned()], vec!["n008".to_owned()], false);
        assert_eq!(read(&log, &mut place), Some(expected));
        assert_eq!(read(&log, &mut place), None);
        let mut late = log.place(false);
        let all: Vec<_> = std::iter::from_fn(|| read(&log, &mut late)).collect();
        assert!(all.iter().map(|(rows, ..)| rows.len()).sum::<usize>() == 599 && all[2].2);
        assert!(all.iter().all(|(_, removed, _)| removed.is_empty()), "nobody has told this watcher of the node");
    }

    #[test]
    fn what_nobody_looks_at_is_no_change() {
        let mut log = RowLog { is_complete: true, ..RowLog::default() };
        let failing = |attempt, departed_ms, verified_unix_ms| v1::AgentInfo {
            last_error: format!("version 7, attempt {attempt}: no memory"),
            departed_ms,
            verified_unix_ms,
            ..agent("a", "failing")
        };
        set(&mut log, failing(1, 5_000, 1_000));
        let number = log.number();
        set(&mut log, failing(2, 6_000, 500_000));
        assert_eq!(log.number(), number);
        set(&mut log, failing(2, 6_000, 700_000));
        assert_eq!(log.number(), number + 1, "the verification is later by more than 10 minutes");
        set(&mut log, failing(2, 0, 700_000));
        assert_eq!(log.number(), number + 2, "the node has a stream again");
        let full = v1::AgentInfo { programmed_version: 7, lag_ms: 12_345, ..agent("a", "behind") };
        assert_eq!(row(full), v1::AgentInfo { lag_ms: 10_000, ..agent("a", "behind") });
        assert_eq!(row(v1::AgentInfo { lag_ms: 200, ..agent("a", "up_to_date") }).lag_ms, 0);
    }

    #[test]
    fn a_busy_fleet_of_5000_nodes_sends_less_than_200_kb_a_minute() {
        let mut log = RowLog { is_complete: true, ..RowLog::default() };
        let row = |index: u64, verified_unix_ms| v1::AgentInfo {
            agent_version: "0.1.0".into(),
            backend: "nftables".into(),
            zone: "eu-central-1a".into(),
            pool: "general-purpose".into(),
            replica: "headgate-control-plane-7d9f8b6c5-x2x4q".into(),
            verified_unix_ms,
            ..agent(&format!("ip-10-20-{index}.eu-central-1.compute.internal"), "up_to_date")
        };
        let begin = 1_800_000_000_000;
        // The last verifications that were sent are spread over ten minutes.
        (0..5_000).for_each(|index| set(&mut log, row(index, begin + index * VERIFIED_STEP_MS / 5_000)));
        let mut place = log.place(false);
        while log.page(&mut place).unwrap().is_some() {}
        let change = |version| v1::ChangeTime {
            version,
            unix_ms: begin,
            service: "production/a-service-with-a-long-name".into(),
            endpoint: "10.244.117.201".into(),
            changed: 2,
            trigger: "trigger annotation".into(),
            arrived_after_ms: 400,
            everywhere_after_ms: 700,
            nodes: 5_000,
            missing: 3,
            state: "done".into(),
            slowest: "ip-10-20-4999.eu-central-1.compute.internal".into(),
            ..v1::ChangeTime::default()
        };
        let mut bytes = 0;
        for second in 0..60 {
            // Each agent verifies its kernel once a minute. All of them have 20 changes a second.
            let now = begin + VERIFIED_STEP_MS + second * 1_000;
            (0..5_000).filter(|index| index % 60 == second).for_each(|index| set(&mut log, row(index, now)));
            log.add((0..8).map(|index| change(second * 20 + index)).collect(), 12);
            while let Some(message) = log.page(&mut place).unwrap() {
                bytes += prost::Message::encoded_len(&message);
            }
        }
        assert!((50_000..200_000).contains(&bytes), "{bytes} bytes");
    }

    #[test]
    fn a_watcher_that_missed_forgotten_removals_is_told_so() {
        let mut log = RowLog { is_complete: true, ..RowLog::default() };
        let nodes: Vec<Arc<str>> = (0..=MAX_REMOVED).map(|index| format!("n{index}").into()).collect();
        nodes.iter().for_each(|node| set(&mut log, agent(node, "up_to_date")));
        let mut slow = log.place(false);
        nodes.iter().for_each(|node| log.set(node, None));
        assert_eq!(log.page(&mut slow), Err(TooSlow));
        assert_eq!(read(&log, &mut log.place(false)), Some((vec![], vec![], true)), "all nodes are gone");
    }

    #[test]
    fn changes_follow_once_the_nodes_are_complete() {
        let mut log = RowLog::default();
        let change = |version| v1::ChangeTime { version, ..v1::ChangeTime::default() };
        let mut place = log.place(false);
        log.add(vec![change(7)], 3);
        assert_eq!(log.page(&mut place), Ok(None));
        log.is_complete = true;
        let message = log.page(&mut place).unwrap().unwrap();
        assert_eq!((message.changes, message.changes_left_out), (vec![change(7)], 3));
        log.add((0..2 * MAX_CHANGES as u64).map(change).collect(), 0);
        assert_eq!(log.page(&mut place).unwrap().unwrap().changes.len(), MAX_CHANGES);
        let message = log.page(&mut log.place(true)).unwrap().unwrap();
        assert!(message.is_complete && message.agents.is_empty() && message.changes.len() == MAX_CHANGES);
    }
}
