//! What may happen in the model, and what must be true.

use std::{collections::BTreeMap, time::Duration};

use headgate_control_plane::{store::Resume, transaction::SourceKind};
use headgate_core::node_state::SourceState;
use tokio::time::Instant;

use super::{
    agent::{Agent, Program},
    replica::{Replica, Stream},
    source::{BASE, History, KINDS, Places},
};

/// Seconds between the looks of the agent at whether it stays, while time passes: in all longer
/// than any wait of an agent for a replica that is behind it, and any stay of an agent before it
/// moves again.
const LOOKS: [u64; 7] = [5, 10, 20, 40, 80, 160, 320];

/// What may happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Move {
    /// The next event of a kind comes to a replica.
    Deliver(usize, SourceKind),
    /// The next event of each kind, in one step.
    DeliverStep(usize),
    /// A bookmark comes: nothing was missed up to before the kind's next event.
    Bookmark(usize, SourceKind),
    /// A replica starts anew, and lists nothing yet.
    Restart(usize),
    /// It lists the source, as new as any replica has seen it.
    List(usize),
    /// A replica loses the API server, alone.
    CutOff(usize),
    /// It reaches it again.
    Reach(usize),
    /// The agent's stream breaks, and it goes to a replica.
    Go(usize),
    /// The agent reads one message.
    Read,
    /// The agent reads all that there is.
    ReadAll,
    /// The agent writes what its kernel has to disk.
    Save,
    /// The agent ends and starts from its disk, as this program.
    RestartAgent(Program),
    /// So much time passes that everybody has heard of what happened who can, and bounded waits are
    /// over.
    Pass,
}

pub(crate) struct World {
    source: History,
    replicas: Vec<Replica>,
    agent: Agent,
    stream: Option<Stream>,
    now: Instant,
    head: u64,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

impl World {
    /// Replicas that have listed the source at its beginning, and an agent that has it from the
    /// first of them.
    pub(crate) fn new(source: History, replicas: usize, program: Program) -> Self {
        let now = Instant::now();
        let replicas = (0..replicas).map(|_| Replica::new(true)).collect();
        let agent = Agent::new(program, now);
        let mut world = Self { source, replicas, agent, stream: None, now, head: BASE, counts: BTreeMap::new() };
        for replica in &mut world.replicas {
            replica.list(&world.source, BASE);
        }
        world.act(Move::Go(0));
        world.act(Move::ReadAll);
        world.act(Move::Save);
        world
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
                // Its streams broke.
                self.stream.take_if(|stream| stream.replica == replica);
            }
            Move::List(replica) => self.replicas[replica].list(&self.source, head),
            Move::CutOff(replica) => self.replicas[replica].set_contact(false),
            Move::Reach(replica) => self.replicas[replica].set_contact(true),
            Move::Go(replica) => self.go(replica),
            Move::Read => {
                self.read();
            }
            Move::ReadAll => while self.read() {},
            Move::Save => self.agent.save(),
            Move::RestartAgent(program) => {
                self.stream = None;
                self.agent.restart(program, self.now);
            }
            Move::Pass => {
                for replica in &mut self.replicas {
                    replica.list(&self.source, head);
                    replica.catch_up(&self.source, head);
                }
                LOOKS.map(Duration::from_secs).into_iter().for_each(|time| self.pass(time));
            }
        }
    }

    /// The newest version of the source that anybody has ever seen.
    fn head(&mut self) -> u64 {
        let seen = self.replicas.iter().flat_map(|replica| replica.positions.values().copied());
        self.head = seen.fold(self.head, u64::max);
        self.head
    }

    fn go(&mut self, to: usize) {
        let replica = &self.replicas[to];
        let at_begin = if replica.is_listed() { self.source.places(&replica.state) } else { Places::new() };
        let hello = self.agent.begin(at_begin, self.now);
        let resume = hello.map(|wire| Resume::from_wire(&wire).unwrap());
        let (stream, mode, welcome) = Stream::open(to, replica, resume);
        self.stream = Some(stream);
        self.count(mode.as_str());
        self.agent.receive(&self.source, welcome, self.now);
    }

    /// Reads one message; whether there was one.
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

    /// Time passes. Heartbeats come, and the agent reads, moves and comes back as it decides.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        // The order of replicas that an agent tries is random. This one is the worst for it.
        let at = self.stream.as_ref().map_or_else(|| self.worst(), |stream| stream.replica);
        if self.stream.is_none() {
            self.go(at);
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
            self.go(to);
            while self.read() {}
        }
    }

    /// An agent that holds a state moves only to a replica that follows the source or has something
    /// newer.
    fn assert_better(&self, to: usize) {
        let replica = &self.replicas[to];
        let is_following = replica.store.source_state() == SourceState::Following;
        // Nobody can know whether a later list brought something newer.
        let is_listed_later = replica.listed_at.is_some_and(|version| version > BASE);
        if is_following || is_listed_later || self.agent.held.position().is_none() {
            return;
        }
        let held = self.source.places(self.agent.held.state());
        let there = self.source.places(&replica.state);
        let is_new = self.agent.may_lack() || there.iter().any(|(key, place)| held[key] < *place);
        assert!(is_new, "the agent moves from {held:?} to a replica at {there:?}, which is cut off");
    }

    /// A replica that serves the agent worse than any other.
    fn worst(&self) -> usize {
        let worth = |index: &usize| match self.replicas[*index].store.source_state() {
            SourceState::Unlisted => 0,
            SourceState::CutOff => 1,
            SourceState::Following => 2,
        };
        (0..self.replicas.len()).min_by_key(worth).unwrap()
    }

    /// The source is restored from a backup: everybody starts anew with what it was at the
    /// beginning.
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

    /// Checks what must be true in the end: first while replicas are as they are, then with all of
    /// them in order.
    pub(crate) fn finish(&mut self) {
        self.settle();
        for replica in 0..self.replicas.len() {
            self.act(Move::Reach(replica));
            self.act(Move::List(replica));
        }
        self.head = self.source.end();
        // Whatever the old program could not use, the new one can.
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

    /// Time passes until every bounded wait is over. Then nothing that a replica can serve is
    /// withheld, and the agent moves no more.
    fn settle(&mut self) {
        self.act(Move::Pass);
        self.act(Move::Pass);
        let moves = self.counts.get("moves").copied();
        self.act(Move::Pass);
        assert_eq!(self.counts.get("moves").copied(), moves, "the agent still moves when everything has settled");
        let held = self.source.places(self.agent.held.state());
        let node = self.agent.node.as_ref();
        for replica in self.following() {
            for (key, place) in self.source.places(&replica.state) {
                let withheld = self.agent.program_can_use(&key) && held[&key] < place;
                assert!(!withheld, "{key} is at {}, and a replica could serve {place}", held[&key]);
            }
            let own = replica.store.node(super::source::NODE).node;
            let (there, here) = (self.source.node_place(own.as_deref()), self.source.node_place(node));
            assert!(here >= there, "the own Node is at {here}, and a replica could serve {there}");
        }
        // What one that has listed nothing withholds, another may have.
        let here = self.stream.as_ref().map(|stream| self.replicas[stream.replica].store.source_state());
        if here == Some(SourceState::Unlisted)
            && let Some(point) = self.agent.held.point(false)
        {
            let seen = Resume::from_wire(&point).unwrap().positions;
            let listed = self.replicas.iter().filter(|replica| replica.is_listed());
            for replica in listed.filter(|replica| replica.store.behind(&seen).is_none()) {
                let there = self.source.places(&replica.state);
                let is_new = |(key, place): (&String, &u64)| self.agent.program_can_use(key) && held[key] < *place;
                assert!(!there.iter().any(is_new), "the agent is at {held:?}, and a replica at {there:?}");
            }
        }
        let can_serve = self.replicas.iter().any(|replica| replica.store.source_state() != SourceState::Unlisted);
        assert!(
            !can_serve || self.agent.held.position().is_some(),
            "the agent holds nothing, and a replica has a state"
        );
    }
}
