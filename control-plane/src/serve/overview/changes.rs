//! The times of changes, until the last node of all replicas had them (discovery.proto, section
//! 21). This file does no I/O.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant, SystemTime},
};

use headgate_proto::v1;

use crate::{
    objects::SourceKind,
    serve::{
        context::{milliseconds, unix_ms},
        fleet::{LocalChange, LocalOutcome},
    },
    store::{positions_from_wire, positions_to_wire},
};

/// The maximum number of changes of another replica that are remembered.
const MAX_TOLD: usize = 1_024;

const DONE: &str = "done";
const RUNNING: &str = "running";
const INCOMPLETE: &str = "incomplete";

/// What another replica has told about its commits, in order of version.
#[derive(Debug, Default)]
pub(crate) struct Told(VecDeque<(BTreeMap<SourceKind, u64>, Instant, v1::ChangeTime)>);

impl Told {
    /// Takes in what arrived at `now`. A change replaces an earlier statement about its version.
    pub(crate) fn add(&mut self, change: v1::ChangeTime, now: Instant) {
        let ago = Duration::from_micros(change.programmed_ago_microseconds);
        let told = (positions_from_wire(&change.positions), now.checked_sub(ago).unwrap_or(now), change);
        match self.0.binary_search_by_key(&told.2.version, |(.., known)| known.version) {
            Ok(index) => self.0[index] = told,
            Err(index) => self.0.insert(index, told),
        }
        self.0.drain(..self.0.len().saturating_sub(MAX_TOLD));
    }

    /// Returns the first change with these positions.
    fn find(&self, wanted: &[(SourceKind, u64)]) -> Option<(Instant, &v1::ChangeTime)> {
        let has = |positions: &BTreeMap<SourceKind, u64>, (kind, wanted): &(SourceKind, u64)| {
            positions.get(kind).is_none_or(|position| position >= wanted)
        };
        let index = self.0.partition_point(|(positions, ..)| !wanted.iter().all(|wanted| has(positions, wanted)));
        self.0.get(index).map(|(_, end, change)| (*end, change))
    }
}

/// What all replicas know about a change of this replica.
#[derive(Debug)]
pub(crate) struct ChangeEverywhere {
    pub(crate) change: v1::ChangeTime,
    /// The time from the trigger to the last node; `None` while it is running or if it is
    /// incomplete.
    pub(crate) time: Option<Duration>,
}

impl ChangeEverywhere {
    pub(crate) fn is_running(&self) -> bool {
        self.change.state == RUNNING
    }
}

/// Describes a change as this replica alone knows it. `holding` is the node that holds up what is
/// running, and why.
pub(crate) fn change_here(local: &LocalChange, holding: Option<&(String, String)>, now: Instant) -> v1::ChangeTime {
    let LocalChange { version, commit, outcome, nodes } = local;
    let (state, end, slowest, reason) = match outcome {
        LocalOutcome::Done(end, node) => (DONE, *end, node.to_string(), String::new()),
        LocalOutcome::Lost(end, node) => {
            (INCOMPLETE, *end, node.to_string(), "the node lost its stream before it had the change".to_owned())
        }
        LocalOutcome::Running => {
            let (node, reason) = holding.cloned().unwrap_or_default();
            (RUNNING, now, node, reason)
        }
    };
    let (service, address) = commit.subject.clone().unzip();
    let positions = commit.positions.iter().map(|(kind, position, _)| (*kind, *position));
    v1::ChangeTime {
        version: *version,
        unix_ms: unix_ms(SystemTime::now() - commit.received.elapsed()),
        service: service.map(|key| key.to_string()).unwrap_or_default(),
        endpoint: address.flatten().map(|address| address.to_string()).unwrap_or_default(),
        changed: commit.changed as u64,
        trigger: commit.trigger.as_str().into(),
        arrived_after_ms: milliseconds(commit.waited),
        everywhere_after_ms: milliseconds(commit.time_until(end)),
        nodes: *nodes as u64,
        missing: 0,
        state: state.into(),
        slowest,
        reason,
        positions: positions_to_wire(positions),
        programmed_ago_microseconds: u64::try_from(now.saturating_duration_since(end).as_micros()).unwrap_or(u64::MAX),
    }
}

/// Describes a change as all replicas know it. `others` are the joined replicas that have agents,
/// and `all` is the number of nodes that count.
pub(crate) fn change_everywhere(
    local: &LocalChange,
    holding: Option<&(String, String)>,
    others: &[(&str, &Told)],
    all: u64,
    now: Instant,
) -> ChangeEverywhere {
    let mut change = change_here(local, holding, now);
    let moved = local.commit.positions.iter().filter(|(.., has_moved)| *has_moved);
    let moved: Vec<_> = moved.map(|(kind, position, _)| (*kind, *position)).collect();
    let mut end = match &local.outcome {
        LocalOutcome::Done(end, _) | LocalOutcome::Lost(end, _) => *end,
        LocalOutcome::Running => now,
    };
    let rank = |state: &str| [DONE, INCOMPLETE, RUNNING].iter().position(|known| *known == state);
    // Without positions, nobody knows which change of another replica is the same.
    for (replica, told) in others.iter().filter(|_| !moved.is_empty()) {
        let silent = || v1::ChangeTime {
            state: RUNNING.into(),
            reason: format!("replica {replica} has not told when its agents had the change"),
            ..v1::ChangeTime::default()
        };
        let (ended, theirs) = told.find(&moved).map_or_else(|| (now, silent()), |(end, theirs)| (end, theirs.clone()));
        change.nodes += theirs.nodes;
        let is_worse = rank(&theirs.state) > rank(&change.state);
        let is_later = theirs.state == DONE && change.state == DONE && theirs.nodes > 0 && ended > end;
        if is_worse || is_later {
            end = if theirs.state == RUNNING { now } else { ended };
            (change.state, change.slowest, change.reason) = (theirs.state, theirs.slowest, theirs.reason);
        }
    }
    let time = local.commit.time_until(end);
    change.everywhere_after_ms = milliseconds(time);
    change.missing = all.saturating_sub(change.nodes);
    (change.positions, change.programmed_ago_microseconds) = (Vec::new(), 0);
    let is_done = change.state == DONE && change.nodes > 0;
    ChangeEverywhere { change, time: is_done.then_some(time) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Commit;

    const SLICES: SourceKind = SourceKind::EndpointSlices;

    fn local(version: u64, position: u64, received: Instant, outcome: LocalOutcome) -> LocalChange {
        let commit = Commit {
            received,
            trigger: Default::default(),
            waited: Duration::from_millis(100),
            subject: None,
            changed: 1,
            positions: [(SLICES, position, true), (SourceKind::Services, 900, false)].into(),
        };
        LocalChange { version, commit, outcome, nodes: 2 }
    }

    /// What a replica tells about a commit that reached these positions of slices.
    fn told(now: Instant, all: &[(u64, u64, LocalOutcome)]) -> Told {
        let mut told = Told::default();
        for (version, position, outcome) in all {
            told.add(change_here(&local(*version, *position, now, outcome.clone()), None, now), now);
        }
        told
    }

    #[test]
    fn the_last_node_of_all_replicas_ends_a_change() {
        let now = Instant::now() + Duration::from_secs(60);
        let at = |ms: u64| now - Duration::from_millis(1_000 - ms);
        let done = |ms: u64, node: &str| LocalOutcome::Done(at(ms), node.into());
        let own = local(7, 50, at(0), done(30, "a"));
        // The other replica has merged the change with a later one, and numbers it otherwise.
        let other = told(now, &[(1, 49, done(10, "x")), (2, 52, done(80, "b")), (3, 60, done(500, "y"))]);
        let both = change_everywhere(&own, None, &[("cp-2", &other)], 5, now);
        assert_eq!(both.time.map(|time| time.as_millis()), Some(180), "{both:?}");
        assert_eq!((both.change.slowest.as_str(), both.change.nodes, both.change.missing), ("b", 4, 1));
        let alone = change_everywhere(&own, None, &[], 2, now);
        assert_eq!((alone.change.everywhere_after_ms, alone.change.state.as_str()), (130, "done"));
        let faster = told(now, &[(2, 50, done(5, "b"))]);
        assert_eq!(change_everywhere(&own, None, &[("cp-2", &faster)], 4, now).change.slowest, "a");
    }

    #[test]
    fn a_change_runs_until_every_replica_has_told() {
        let now = Instant::now() + Duration::from_secs(60);
        let done = || LocalOutcome::Done(now, "b".into());
        let own = local(7, 50, now, LocalOutcome::Done(now, "a".into()));
        let state = |others: &[(&str, &Told)]| {
            let ChangeEverywhere { change, time } = change_everywhere(&own, None, others, 4, now);
            (change.state, change.slowest, time.is_some())
        };
        let behind = told(now, &[(1, 49, done())]);
        assert_eq!(state(&[("cp-2", &behind)]), ("running".into(), String::new(), false));
        let lost = told(now, &[(1, 50, LocalOutcome::Lost(now, "b".into()))]);
        assert_eq!(state(&[("cp-2", &lost)]), ("incomplete".into(), "b".into(), false));
        assert_eq!(state(&[("cp-2", &lost), ("cp-3", &behind)]).0, "running");
        let mut told = told(now, &[(1, 50, LocalOutcome::Running)]);
        assert_eq!(state(&[("cp-2", &told)]).0, "running");
        told.add(change_here(&local(1, 50, now, done()), None, now), now);
        assert_eq!(state(&[("cp-2", &told)]), ("done".into(), "a".into(), true));
        // A folder of manifests has no positions to compare.
        let commit = Commit { positions: [].into(), ..own.commit.clone() };
        let own = LocalChange { commit, ..own };
        assert!(change_everywhere(&own, None, &[("cp-2", &behind)], 4, now).time.is_some());
    }
}
