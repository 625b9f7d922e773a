//! The moves of the model, and the conditions that must hold.

use std::{collections::BTreeMap, time::Duration};

use headgate_control_plane::{objects::SourceKind, store::Resume};
use headgate_core::node_state::SourceState;
use tokio::time::Instant;

use super::{
    agent::{Agent, Program},
    barrier::{Barrier, Broken},
    replica::{Replica, Stream},
    source::{BASE, History, KINDS, Places},
};

/// The intervals, in seconds, after which the agent checks whether another replica is better. The
/// sum of the intervals is longer than two bounded times. The first time is the wait for a replica
/// that is behind. The second time is how long an agent stays at a replica before it may move.
const CHECKS: [u64; 7] = [5, 10, 20, 40, 80, 160, 320];

/// A move of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Move {
    /// A replica receives the next event of a kind.
    Deliver(usize, SourceKind),
    /// A replica receives the next event of each kind, in one step.
    DeliverStep(usize),
    /// A replica receives a bookmark, which says that the replica missed no event of the kind.
    Bookmark(usize, SourceKind),
    /// A replica restarts, and has listed nothing yet.
    Restart(usize),
    /// A replica lists the newest version that any replica has seen.
    List(usize),
    /// A replica loses the API server.
    CutOff(usize),
    /// A replica reaches the API server again.
    Reconnect(usize),
    /// The agent's stream breaks, and the agent connects to a replica.
    Connect(usize),
    /// The agent reads one message.
    Read,
    /// The agent reads all messages.
    ReadAll,
    /// The agent saves to disk the state that its kernel has.
    Save,
    /// The agent ends, and the given program starts with the state on the agent's disk.
    RestartAgent(Program),
    /// The kernel accepts the state that the agent holds, and the replica of the agent's stream
    /// receives the ACK.
    Program,
    /// Enough time passes that every replica with contact to the API server receives all events,
    /// and that all bounded waits end.
    PassTime,
}

pub(crate) struct World {
    barrier: Barrier,
    source: History,
    replicas: Vec<Replica>,
    agent: Agent,
    stream: Option<Stream>,
    now: Instant,
    head: u64,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

impl World {
    /// Creates replicas that have listed the source's first version, and an agent that has received
    /// this version from the first replica.
    pub(crate) fn new(source: History, replicas: usize, program: Program) -> Self {
        let now = Instant::now();
        let replicas: Vec<_> = (0..replicas).map(|_| Replica::new(true)).collect();
        let agent = Agent::new(program, now);
        let barrier = Barrier::new(replicas.len());
        let mut world =
            Self { barrier, source, replicas, agent, stream: None, now, head: BASE, counts: BTreeMap::new() };
        for replica in &mut world.replicas {
            replica.list(&world.source, BASE);
        }
        world.act(Move::Connect(0));
        world.act(Move::ReadAll);
        world.act(Move::Save);
        world.act(Move::Program);
        world
    }

    /// Breaks a rule of the drain barrier.
    pub(crate) fn break_rule(&mut self, broken: Broken) {
        self.barrier.broken = Some(broken);
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    pub(crate) fn act(&mut self, action: Move) {
        let head = self.head();
        match action {
            Move::Deliver(replica, kind) => self.replicas[replica].deliver(&self.source, &[kind]),
            Move::DeliverStep(replica) => self.replicas[replica].deliver(&self.source, &KINDS),
            Move::Bookmark(replica, kind) => self.replicas[replica].bookmark(&self.source, kind, head),
            Move::Restart(replica) => {
                self.replicas[replica] = Replica::new(self.replicas[replica].has_contact);
                self.barrier.acked[replica] = None;
                // A restart breaks the replica's streams.
                self.stream.take_if(|stream| stream.replica == replica);
            }
            Move::List(replica) => self.replicas[replica].list(&self.source, head),
            Move::CutOff(replica) => self.replicas[replica].set_contact(false),
            Move::Reconnect(replica) => self.replicas[replica].set_contact(true),
            Move::Connect(replica) => self.connect(replica),
            Move::Read => {
                self.read();
            }
            Move::ReadAll => while self.read() {},
            Move::Save => self.agent.save(),
            // The rules of the last run stay until a replica has confirmed the state from disk.
            // Only after a reboot, the agent programs this state; docs/drain.md names this limit of
            // the barrier.
            Move::Program => {
                if let Some(stream) = self.stream.as_ref().filter(|_| !self.agent.is_unconfirmed) {
                    let epoch = self.replicas[stream.replica].store.epoch();
                    self.barrier.program(&self.agent.held, stream.replica, epoch);
                }
            }
            Move::RestartAgent(program) => {
                self.stream = None;
                self.agent.restart(program, self.now);
            }
            Move::PassTime => {
                for replica in &mut self.replicas {
                    replica.list(&self.source, head);
                    replica.catch_up(&self.source, head);
                }
                CHECKS.map(Duration::from_secs).into_iter().for_each(|time| self.pass(time));
            }
        }
        if !self.agent.may_go_back {
            let opened = self.barrier.check(&self.replicas);
            *self.counts.entry("drained").or_default() += opened;
        }
    }

    /// The newest version of the source that any replica has ever seen.
    fn head(&mut self) -> u64 {
        let seen = self.replicas.iter().flat_map(|replica| replica.positions.values().copied());
        self.head = seen.fold(self.head, u64::max);
        self.head
    }

    fn connect(&mut self, to: usize) {
        let replica = &self.replicas[to];
        let at_begin = if replica.is_listed() { self.source.places(&replica.state) } else { Places::new() };
        let hello = self.agent.begin(at_begin, self.now);
        let resume = hello.map(|wire| Resume::from_wire(&wire).unwrap());
        let (stream, mode, welcome) = Stream::open(to, replica, resume);
        self.stream = Some(stream);
        self.barrier.acked[to] = Some(None);
        self.count(mode.as_str());
        self.agent.receive(&self.source, welcome, self.now);
    }

    /// Reads one message. Returns false if no message is due.
    fn read(&mut self) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        let Some(body) = stream.next(&self.replicas[stream.replica], self.now) else {
            if stream.is_waiting() {
                self.count("waits");
            }
            return false;
        };
        if !self.agent.receive(&self.source, body, self.now) {
            self.stream = None;
            self.count("dropped");
        }
        true
    }

    /// Lets time pass. A heartbeat arrives, and the agent reads, decides, and may move.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        // A real agent tries replicas in random order. The model tries the worst replica first.
        let at = self.stream.as_ref().map_or_else(|| self.worst(), |stream| stream.replica);
        if self.stream.is_none() {
            self.connect(at);
        }
        self.agent.receive(&self.source, Stream::heartbeat(&self.replicas[at]), self.now);
        while self.read() {}
        let others = || {
            let others = self.replicas.iter().enumerate().filter(|(index, _)| *index != at);
            others.map(|(index, replica)| (index, replica.standing())).collect()
        };
        if let Some(to) = self.agent.decide(others, self.now) {
            self.count("moves");
            self.assert_better(to);
            self.connect(to);
            while self.read() {}
        }
    }

    /// Asserts that an agent with a state moves only to a replica that follows the source or has
    /// newer values than the agent.
    fn assert_better(&self, to: usize) {
        let replica = &self.replicas[to];
        let is_following = replica.store.source_state() == SourceState::Following;
        // A replica that listed later may have newer values. An agent cannot know whether the
        // replica has newer values.
        let is_listed_later = replica.listed_at.is_some_and(|version| version > BASE);
        if is_following || is_listed_later || self.agent.held.position().is_none() {
            return;
        }
        let held = self.source.places(self.agent.held.state());
        let there = self.source.places(&replica.state);
        let is_new = self.agent.may_lack() || there.iter().any(|(key, place)| held[key] < *place);
        assert!(
            is_new,
            "the agent holds {held:?} and moves to a replica that does not follow the source and has no newer value: {there:?}"
        );
    }

    /// The replica with the least useful source state. `Unlisted` is less useful than `CutOff`, and
    /// `CutOff` is less useful than `Following`.
    fn worst(&self) -> usize {
        let rank = |index: &usize| match self.replicas[*index].store.source_state() {
            SourceState::Unlisted => 0,
            SourceState::CutOff => 1,
            SourceState::Following => 2,
        };
        (0..self.replicas.len()).min_by_key(rank).unwrap()
    }

    /// Restores the source from a backup. All replicas restart with the source's first version.
    pub(crate) fn restore(&mut self) {
        self.source = History::first(0);
        self.head = BASE;
        for index in 0..self.replicas.len() {
            self.act(Move::Restart(index));
            self.act(Move::List(index));
        }
        self.agent.may_go_back = true;
    }

    fn following(&self) -> impl Iterator<Item = &Replica> {
        self.replicas.iter().filter(|replica| replica.store.source_state() == SourceState::Following)
    }

    /// Checks the conditions at the end: first with the replicas in their current state, then with
    /// all replicas in contact with the source.
    pub(crate) fn finish(&mut self) {
        self.settle();
        for replica in 0..self.replicas.len() {
            self.act(Move::Reconnect(replica));
            self.act(Move::List(replica));
        }
        self.head = self.source.end();
        // The new program can use every value.
        self.act(Move::Save);
        self.act(Move::RestartAgent(Program::New));
        self.settle();
        self.counts.insert("rejections", self.agent.rejections);
        let (state, nodes) = self.source.at(self.source.end());
        assert!(self.agent.held.state().digests() == state.digests(), "the agent does not have the source's state");
        assert_eq!(
            self.agent.node.as_ref(),
            nodes.get(super::source::NODE),
            "the agent does not have the source's Node"
        );
    }

    /// Lets time pass until every bounded wait has ended. After these waits, the agent must hold
    /// everything that a replica can serve, and must not move again.
    fn settle(&mut self) {
        self.act(Move::PassTime);
        self.act(Move::PassTime);
        let moves = self.counts.get("moves").copied();
        self.act(Move::PassTime);
        assert_eq!(self.counts.get("moves").copied(), moves, "the agent still moves although nothing changes");
        let held = self.source.places(self.agent.held.state());
        let node = self.agent.node.as_ref();
        for replica in self.following() {
            for (key, place) in self.source.places(&replica.state) {
                let withheld = self.agent.program_can_use(&key) && held[&key] < place;
                assert!(
                    !withheld,
                    "the agent holds version {} of {key}, and a replica could serve version {place}",
                    held[&key]
                );
            }
            let own = replica.store.node(super::source::NODE).node;
            let (there, here) = (self.source.node_place(own.as_deref()), self.source.node_place(node));
            assert!(
                here >= there,
                "the agent holds version {here} of its own Node, and a replica could serve version {there}"
            );
        }
        // While the agent follows an unlisted replica, the agent must hold everything that a listed
        // replica could serve. Listed replicas that are behind the agent do not count.
        let here = self.stream.as_ref().map(|stream| self.replicas[stream.replica].store.source_state());
        if here == Some(SourceState::Unlisted)
            && let Some(point) = self.agent.held.point()
        {
            let seen = Resume::from_wire(&point).unwrap().positions;
            let listed = self.replicas.iter().filter(|replica| replica.is_listed());
            for replica in listed.filter(|replica| replica.store.behind(&seen).is_none()) {
                let there = self.source.places(&replica.state);
                let is_new = |(key, place): (&String, &u64)| self.agent.program_can_use(key) && held[key] < *place;
                assert!(!there.iter().any(is_new), "the agent holds {held:?}, and a replica could serve {there:?}");
            }
        }
        let can_serve = self.replicas.iter().any(|replica| replica.store.source_state() != SourceState::Unlisted);
        assert!(
            !can_serve || self.agent.held.position().is_some(),
            "the agent holds no state, and a replica could serve one"
        );
    }
}
