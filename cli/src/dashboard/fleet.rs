//! What the page shows, kept up to date by streams of a replica, and sent on to every open page as
//! differences.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use headgate_proto::v1::{AgentsChange, WatchAgentsRequest};
use serde_json::{Map, Value, json};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, interval, sleep};

use super::rows;
use crate::answer::{Failure, Session, now_unix_ms};
use crate::args::{Args, Output};
use crate::client::{self, Replica};
use crate::units::milliseconds;

/// The interval of requests for the status. Everything else comes as it changes.
const STATUS_INTERVAL: Duration = Duration::from_secs(15);
/// The most changes that a replica lists, and that are kept for pages that open later.
const MAX_CHANGES: usize = 256;
/// The most lines that wait for a page. A page that reads too slowly is disconnected, and begins
/// again.
const MAX_WAITING_LINES: usize = 256;
/// The pauses between attempts to reach a replica.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(15)];

/// The fleet as the page shows it, with the pages that follow it.
#[derive(Default)]
pub(super) struct Fleet {
    /// The lines that describe the connection to a replica.
    link: Value,
    status: Map<String, Value>,
    /// The row of each node.
    nodes: BTreeMap<String, Value>,
    is_complete: bool,
    /// The rows of the last changes, the oldest first.
    changes: VecDeque<Value>,
    pages: Vec<mpsc::Sender<Bytes>>,
    opened: Rc<Notify>,
    replica: Option<Replica>,
}

pub(super) type Shared = Rc<RefCell<Fleet>>;

fn line(value: &Value) -> Bytes {
    Bytes::from(format!("{value}\n"))
}

impl Fleet {
    /// A connection of a replica that answers now, or why there is none.
    pub(super) fn replica(&self) -> Result<Replica, String> {
        let problem = || self.link["problem"].as_str().unwrap_or("no replica has answered yet").to_owned();
        self.replica.clone().ok_or_else(problem)
    }

    /// Opens a page: returns everything that is known, and then what changes.
    pub(super) fn open(&mut self) -> mpsc::Receiver<Bytes> {
        let (page, lines) = mpsc::channel(MAX_WAITING_LINES);
        let all: Vec<&Value> = self.nodes.values().collect();
        let known = [
            self.link.clone(),
            json!({ "t": "status", "now": now_unix_ms(), "s": self.status }),
            json!({ "t": "nodes", "all": true, "complete": self.is_complete, "set": all }),
            json!({ "t": "times", "list": self.changes }),
        ];
        for value in known.iter().filter(|value| !value.is_null()) {
            // The channel is empty, so there is room.
            let _ = page.try_send(line(value));
        }
        self.pages.push(page);
        self.opened.notify_one();
        lines
    }

    fn publish(&mut self, value: &Value) {
        let line = line(value);
        self.pages.retain(|page| page.try_send(line.clone()).is_ok());
    }

    fn set_link(&mut self, replica: Option<Replica>, problem: &str, retry: Duration) {
        let server = replica.as_ref().map_or("", |replica| replica.server.as_str());
        let (is_up, now, retry_ms) = (replica.is_some(), now_unix_ms(), milliseconds(retry));
        self.link =
            json!({ "t": "link", "up": is_up, "server": server, "problem": problem, "retry_ms": retry_ms, "at": now });
        self.replica = replica;
        self.publish(&self.link.clone());
    }

    /// Takes a new status, and sends on only the fields that differ.
    fn set_status(&mut self, status: Value) {
        let Value::Object(status) = status else { return };
        let differs = |(name, value): &(&String, &Value)| self.status.get(*name) != Some(*value);
        let new: Map<String, Value> =
            status.iter().filter(differs).map(|(name, value)| (name.clone(), value.clone())).collect();
        self.status = status;
        self.publish(&json!({ "t": "status", "now": now_unix_ms(), "s": new }));
    }

    fn add_changes(&mut self, changes: &[Value], left_out: u64) {
        if changes.is_empty() && left_out == 0 {
            return;
        }
        self.changes.retain(|known| changes.iter().all(|new| new[0] != known[0]));
        self.changes.extend(changes.iter().cloned());
        let excess = self.changes.len().saturating_sub(MAX_CHANGES);
        self.changes.drain(..excess);
        self.publish(&json!({ "t": "times", "list": changes, "left_out": left_out }));
    }

    /// Takes a message of `WatchAgents`. `seen` has the nodes since the begin of the watch: once
    /// the replica has sent all, other nodes are gone.
    fn take(&mut self, message: AgentsChange, seen: &mut HashSet<String>) {
        let now = now_unix_ms();
        let mut set = Vec::new();
        for agent in &message.agents {
            let row = rows::node(agent, now);
            seen.insert(agent.node.clone());
            if self.nodes.get(&agent.node) != Some(&row) {
                self.nodes.insert(agent.node.clone(), row.clone());
                set.push(row);
            }
        }
        let mut gone = message.removed;
        if message.is_complete {
            gone.extend(self.nodes.keys().filter(|node| !seen.contains(*node)).cloned());
            seen.clear();
        }
        for node in &gone {
            self.nodes.remove(node);
        }
        self.is_complete |= message.is_complete;
        if message.is_complete || !set.is_empty() || !gone.is_empty() {
            self.publish(&json!({ "t": "nodes", "set": set, "gone": gone, "complete": self.is_complete }));
        }
        self.add_changes(&message.changes.iter().map(rows::change).collect::<Vec<_>>(), message.changes_left_out);
    }
}

/// Keeps the fleet up to date while a page is open. Asks nothing while no page is open.
pub(super) async fn follow(fleet: &Shared, args: &Args) {
    let opened = Rc::clone(&fleet.borrow().opened);
    let mut pause = PAUSES[0];
    loop {
        while fleet.borrow().pages.is_empty() {
            opened.notified().await;
        }
        let began = Instant::now();
        let problem = match client::connect(&args.server, &args.tls).await {
            Err(error) => Some(error.to_string()),
            Ok(replica) => match watch(fleet, replica).await {
                Ok(()) => None,
                Err(failure) => Some(failure.to_string()),
            },
        };
        let Some(problem) = problem else {
            fleet.borrow_mut().set_link(None, "", Duration::ZERO);
            continue;
        };
        if began.elapsed() > PAUSES[1] {
            pause = PAUSES[0];
        }
        fleet.borrow_mut().set_link(None, &problem, pause);
        sleep(pause).await;
        pause = (pause * 2).min(PAUSES[1]);
    }
}

/// Follows a replica until no page is open, or until the connection fails.
async fn watch(fleet: &Shared, replica: Replica) -> Result<(), Failure> {
    let sink = &mut io::sink();
    let mut session = Session::new(replica, Output::Json, sink);
    ask_status(fleet, &mut session, MAX_CHANGES as u32).await?;
    let answer = session.replica.client.watch_agents(WatchAgentsRequest::default()).await;
    let mut agents = session.stream(answer)?;
    let mut seen = HashSet::new();
    let mut ticks = interval(STATUS_INTERVAL);
    ticks.reset();
    loop {
        tokio::select! {
            message = session.next(&mut agents) => {
                let message = message?;
                let is_complete = message.is_complete;
                fleet.borrow_mut().take(message, &mut seen);
                if is_complete {
                    fleet.borrow_mut().set_link(Some(session.replica.clone()), "", Duration::ZERO);
                }
            }
            _ = ticks.tick() => {
                fleet.borrow_mut().pages.retain(|page| !page.is_closed());
                if fleet.borrow().pages.is_empty() {
                    return Ok(());
                }
                ask_status(fleet, &mut session, 0).await?;
            }
        }
    }
}

async fn ask_status(fleet: &Shared, session: &mut Session<'_>, last_changes: u32) -> Result<(), Failure> {
    let mut status = session.status(last_changes).await?;
    let changes = std::mem::take(&mut status.fleet.get_or_insert_default().last_changes);
    let mut fleet = fleet.borrow_mut();
    fleet.set_status(serde_json::to_value(status).map_err(io::Error::from)?);
    fleet.add_changes(&changes.iter().rev().map(rows::change).collect::<Vec<_>>(), 0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use headgate_proto::v1::AgentInfo;

    use super::*;

    fn message(nodes: &[(&str, &str)], is_complete: bool) -> AgentsChange {
        let agent = |(node, state): &(&str, &str)| AgentInfo {
            node: (*node).into(),
            state: (*state).into(),
            ..AgentInfo::default()
        };
        AgentsChange { agents: nodes.iter().map(agent).collect(), is_complete, ..AgentsChange::default() }
    }

    /// The lines that wait for a page.
    fn lines(page: &mut mpsc::Receiver<Bytes>) -> Vec<Value> {
        std::iter::from_fn(|| page.try_recv().ok()).map(|line| serde_json::from_slice(&line).unwrap()).collect()
    }

    #[test]
    fn a_page_gets_everything_and_then_only_what_differs() {
        let mut fleet = Fleet::default();
        let mut seen = HashSet::new();
        fleet.take(message(&[("a", "up_to_date"), ("b", "up_to_date")], true), &mut seen);
        let mut page = fleet.open();
        let known = lines(&mut page);
        assert_eq!(known.iter().find(|line| line["t"] == "nodes").unwrap()["set"].as_array().unwrap().len(), 2);
        fleet.take(message(&[("a", "up_to_date"), ("b", "behind")], false), &mut seen);
        let new = lines(&mut page);
        assert_eq!((new.len(), &new[0]["set"][0][0], &new[0]["set"][0][7]), (1, &json!("b"), &json!("behind")));
        fleet.take(message(&[("b", "behind")], false), &mut seen);
        fleet.set_status(json!({ "version": 1, "build": "x" }));
        fleet.set_status(json!({ "version": 2, "build": "x" }));
        let new = lines(&mut page);
        assert_eq!((new.len(), &new[1]["s"]), (2, &json!({ "version": 2 })));
    }

    #[test]
    fn nodes_that_a_new_watch_does_not_name_are_gone() {
        let mut fleet = Fleet::default();
        fleet.take(message(&[("a", "up_to_date"), ("b", "up_to_date")], true), &mut HashSet::new());
        let mut page = fleet.open();
        lines(&mut page);
        let mut seen = HashSet::new();
        fleet.take(message(&[("b", "up_to_date")], false), &mut seen);
        assert!(lines(&mut page).is_empty());
        fleet.take(message(&[], true), &mut seen);
        assert_eq!(lines(&mut page)[0]["gone"], json!(["a"]));
    }

    #[test]
    fn a_page_that_does_not_read_is_disconnected_and_a_change_replaces_its_earlier_row() {
        let mut fleet = Fleet::default();
        let _page = fleet.open();
        for version in 0..2 * MAX_WAITING_LINES {
            fleet.add_changes(&[json!([version, "running"])], 0);
        }
        assert!(fleet.pages.is_empty());
        assert_eq!(fleet.changes.len(), MAX_CHANGES);
        fleet.add_changes(&[json!([2 * MAX_WAITING_LINES - 1, "done"])], 0);
        assert_eq!((fleet.changes.len(), &fleet.changes[MAX_CHANGES - 1][1]), (MAX_CHANGES, &json!("done")));
    }
}
