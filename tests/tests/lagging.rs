//! An agent moves between replicas of which each watch is held back for itself, and is never given older state, at any interleaving.
//!
//! A model: the parts that decide are the real ones (the replica's store and resumption, the agent's machine and what it holds, the bytes between
//! them); the source, its watches, the network and time are a list of moves. Each key of the source takes its values in a known order, so what an agent
//! holds of it is the place in that order, and no place may ever go down.
#![allow(clippy::unwrap_used, missing_docs)]

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use headgate_control_plane::{
    metrics::Metrics,
    store::{Cursor, Limits, Resume, ResumeMode, Resumption, Store},
    transaction::{Sink as _, SourceKind, Transaction, TriggeredChange},
};
use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Placement, Protocol, Service, ServiceKey, ServicePort, State,
    reference::Referable,
};
use headgate_node_agent::session::{
    held::Held,
    machine::{Effect, Machine},
};
use headgate_proto::{frame::PREFIX_BYTES, v1};
use proptest::prelude::*;
use prost::Message as _;

/// What every replica has from the start.
const BASE: u64 = 10;
const KINDS: [SourceKind; 2] = [SourceKind::Services, SourceKind::EndpointSlices];

fn key(number: u8) -> ServiceKey {
    ServiceKey::new("shop", &format!("web-{number}"))
}

fn address(number: u8, host: u8) -> IpAddr {
    [10, 1, number, host].into()
}

/// A Service whose node port tells its version.
fn service(number: u8, version: u64) -> Change {
    let node_port = 30_000 + u16::try_from(version).unwrap();
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port };
    Change::from(Service::new(key(number), vec![[10, 96, 0, number].into()], vec![port]))
}

/// An endpoint whose port tells its version.
fn endpoint(number: u8, host: u8, version: u64) -> Change {
    let port = u16::try_from(version).unwrap();
    let ports: Arc<[EndpointPort]> = [EndpointPort::new("http", Protocol::Tcp, port)].into();
    let mut endpoint = Endpoint::new(address(number, host), ports);
    endpoint.placement = Placement::on(&format!("node-{host}")).into();
    Change::Endpoint(key(number), endpoint)
}

/// The source: what happened, in order, one change a version.
struct Source(Vec<(SourceKind, Change)>);

impl Source {
    fn base() -> Vec<Change> {
        let endpoints = [(1, 1), (1, 2), (2, 1), (2, 3)];
        let endpoints = endpoints.into_iter().map(|(number, host)| endpoint(number, host, BASE));
        [1, 2, 3].into_iter().map(|number| service(number, BASE)).chain(endpoints).collect()
    }

    /// Changes, removals, and what is new, of both kinds. No key comes back once it is gone, so that its absence says when.
    fn whole() -> Self {
        use SourceKind::{EndpointSlices, Services};
        let mut events = Vec::new();
        let mut add = |kind, change: &dyn Fn(u64) -> Change| {
            let version = BASE + 1 + events.len() as u64;
            events.push((kind, change(version)));
        };
        add(EndpointSlices, &|version| endpoint(1, 1, version));
        add(Services, &|version| service(1, version));
        add(EndpointSlices, &|_| Change::RemoveEndpoint(key(1), address(1, 2)));
        add(EndpointSlices, &|version| endpoint(1, 1, version));
        add(Services, &|_| Change::RemoveService(key(3)));
        add(EndpointSlices, &|version| endpoint(2, 1, version));
        add(Services, &|version| service(2, version));
        add(EndpointSlices, &|version| endpoint(3, 4, version));
        add(EndpointSlices, &|_| Change::RemoveEndpoint(key(2), address(2, 3)));
        add(Services, &|version| service(1, version));
        add(EndpointSlices, &|version| endpoint(2, 1, version));
        add(EndpointSlices, &|version| endpoint(1, 1, version));
        Self(events)
    }

    fn first(events: usize) -> Self {
        let mut source = Self::whole();
        source.0.truncate(events);
        source
    }

    fn version(&self, index: usize) -> u64 {
        BASE + 1 + index as u64
    }

    /// The first event of a kind above `position`, with its version.
    fn next(&self, kind: SourceKind, position: u64) -> Option<(u64, &Change)> {
        let events = self.0.iter().enumerate().map(|(index, (of, change))| (self.version(index), *of, change));
        events
            .filter(|(version, of, _)| *version > position && *of == kind)
            .map(|(version, _, change)| (version, change))
            .next()
    }

    /// The state at a version.
    fn state(&self, version: u64) -> State {
        let mut state = State::default();
        let events = self.0.iter().take(usize::try_from(version - BASE).unwrap()).map(|(_, change)| change.clone());
        Self::base().into_iter().chain(events).for_each(|change| {
            state.apply(change, &mut Dirty::default());
        });
        state
    }

    /// How far along its values each key is in `state`: at the version that brought what is held.
    fn places(&self, state: &State) -> BTreeMap<String, u64> {
        let mut keys: BTreeMap<String, Vec<(u64, Option<Change>)>> = BTreeMap::new();
        let base = Self::base().into_iter().map(|change| (BASE, change));
        let events = self.0.iter().enumerate().map(|(index, (_, change))| (self.version(index), change.clone()));
        for (version, change) in base.chain(events) {
            let (name, value) = match &change {
                Change::Service(service) => (service.key.to_string(), Some(change)),
                Change::Endpoint(key, endpoint) => (format!("{key} {}", endpoint.address), Some(change)),
                Change::RemoveService(key) => (key.to_string(), None),
                Change::RemoveEndpoint(key, address) => (format!("{key} {address}"), None),
                other => panic!("{other:?}"),
            };
            // What comes later was absent at first.
            let first = if version > BASE { vec![(0, None)] } else { Vec::new() };
            keys.entry(name).or_insert(first).push((version, value));
        }
        let mut held: BTreeMap<String, Change> = BTreeMap::new();
        for (key, entry) in state.entries() {
            held.extend(entry.service().map(|service| (key.to_string(), Change::from(service.clone()))));
            held.extend(entry.endpoints().values().map(|endpoint| {
                (format!("{key} {}", endpoint.address), Change::Endpoint((**key).clone(), endpoint.clone()))
            }));
        }
        let place = |(name, values): (String, Vec<(u64, Option<Change>)>)| {
            let value = held.get(&name);
            let found = values.iter().rev().find(|(_, known)| known.as_ref() == value);
            let version = found.unwrap_or_else(|| panic!("{name} never had the value {value:?}")).0;
            (name, version)
        };
        keys.into_iter().map(place).collect()
    }
}

struct Replica {
    store: Store,
    /// Where the watch of each kind is.
    positions: BTreeMap<SourceKind, u64>,
    is_listed: bool,
}

impl Replica {
    fn new() -> Self {
        let store = Store::new(Limits::default(), Arc::new(Metrics::default()));
        Self { store, positions: BTreeMap::new(), is_listed: false }
    }

    /// The source as it was at a version, as a whole.
    fn list(&mut self, source: &Source, version: u64) {
        let mut state = Vec::new();
        for (key, entry) in source.state(version).entries() {
            state.extend(entry.service().map(|service| Change::from(service.clone())));
            state
                .extend(entry.endpoints().values().map(|endpoint| Change::Endpoint((**key).clone(), endpoint.clone())));
        }
        self.commit(state, KINDS.map(|kind| (kind, version)).to_vec(), Vec::new());
        self.store.synced();
        self.is_listed = true;
    }

    fn commit(&mut self, changes: Vec<Change>, positions: Vec<(SourceKind, u64)>, bookmarks: Vec<(SourceKind, u64)>) {
        self.positions.extend(positions.iter().chain(&bookmarks).copied());
        let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).collect();
        self.store.commit(Transaction { changes, positions, bookmarks, ..Transaction::default() });
    }
}

/// Where an agent's stream is.
enum Stream {
    None,
    Waiting(usize, Resumption),
    At(usize, Cursor),
}

struct Agent {
    machine: Machine,
    held: Held,
    stream: Stream,
    places: BTreeMap<String, u64>,
}

/// What may happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    /// The next event of a kind comes to a replica.
    Deliver(usize, SourceKind),
    /// A bookmark comes: nothing was missed up to before the kind's next event.
    Bookmark(usize, SourceKind),
    /// A replica starts anew, and lists nothing yet.
    Restart(usize),
    /// It lists the source, as new as any replica has seen it.
    List(usize),
    /// The agent's stream breaks, and it goes to a replica.
    Go(usize),
    /// The agent reads one message.
    Read,
    /// The agent reads all that there is.
    ReadAll,
}

struct World {
    source: Source,
    replicas: Vec<Replica>,
    agent: Agent,
    head: u64,
    /// How often the agent found nothing to read because it had to wait for its replica.
    waits: u64,
    resumed: BTreeMap<&'static str, u64>,
}

impl World {
    /// Replicas that have listed the source at its beginning, and an agent that has it from the first of them.
    fn new(source: Source, replicas: usize) -> Self {
        let agent = Agent {
            machine: Machine::new("node-a".into()),
            held: Held::default(),
            stream: Stream::None,
            places: BTreeMap::new(),
        };
        let replicas = (0..replicas).map(|_| Replica::new()).collect();
        let mut world = Self { source, replicas, agent, head: BASE, waits: 0, resumed: BTreeMap::new() };
        for replica in &mut world.replicas {
            replica.list(&world.source, BASE);
        }
        world.act(Move::Go(0));
        world.act(Move::ReadAll);
        world
    }

    fn act(&mut self, action: Move) {
        match action {
            Move::Deliver(replica, kind) => {
                let replica = &mut self.replicas[replica];
                let next = replica.positions.get(&kind).and_then(|position| self.source.next(kind, *position));
                let Some((version, change)) = next else { return };
                replica.commit(vec![change.clone()], vec![(kind, version)], Vec::new());
            }
            Move::Bookmark(replica, kind) => {
                let head = self.head();
                let replica = &mut self.replicas[replica];
                let Some(position) = replica.positions.get(&kind) else { return };
                let upto = self.source.next(kind, *position).map_or(head, |(version, _)| head.min(version - 1));
                if upto > *position {
                    replica.commit(Vec::new(), Vec::new(), vec![(kind, upto)]);
                }
            }
            Move::Restart(replica) => {
                // Remembers what it had seen.
                self.head();
                self.replicas[replica] = Replica::new();
                // Its streams broke.
                if matches!(self.agent.stream, Stream::Waiting(at, _) | Stream::At(at, _) if at == replica) {
                    self.agent.stream = Stream::None;
                }
            }
            Move::List(replica) => {
                let head = self.head();
                if !self.replicas[replica].is_listed {
                    self.replicas[replica].list(&self.source, head);
                }
            }
            Move::Go(replica) => self.go(replica),
            Move::Read => {
                self.read();
            }
            Move::ReadAll => while self.read() {},
        }
    }

    /// The newest version of the source that anybody has ever seen.
    fn head(&mut self) -> u64 {
        let seen = self.replicas.iter().flat_map(|replica| replica.positions.values().copied());
        self.head = seen.fold(self.head, u64::max);
        self.head
    }

    fn go(&mut self, to: usize) {
        let store = &self.replicas[to].store;
        let agent = &mut self.agent;
        let hello = agent.held.resume().map(|wire| v1::Resume::decode(wire.encode_to_vec().as_slice()).unwrap());
        agent.machine.begin(agent.held.position());
        let resume = hello.map(|wire| Resume::from_wire(&wire).unwrap());
        let (mode, begun) = Resumption::begin(store, resume);
        *self.resumed.entry(mode.as_str()).or_default() += 1;
        let welcome = v1::Welcome {
            replica: format!("replica-{to}"),
            epoch: store.epoch(),
            resume: match mode {
                ResumeMode::Log => v1::welcome::ResumeMode::Log,
                ResumeMode::Digests => v1::welcome::ResumeMode::Digests,
                ResumeMode::Full => v1::welcome::ResumeMode::Full,
            }
            .into(),
            ..v1::Welcome::default()
        };
        agent.stream = match begun {
            Ok(cursor) => Stream::At(to, cursor),
            Err(resumption) => Stream::Waiting(to, resumption),
        };
        self.receive(v1::server_message::Body::Welcome(welcome));
    }

    /// Reads one message; whether there was one.
    fn read(&mut self) -> bool {
        if let Stream::Waiting(at, resumption) = &self.agent.stream {
            let at = *at;
            match resumption.go_on(&self.replicas[at].store) {
                Ok(cursor) => self.agent.stream = Stream::At(at, cursor),
                Err(_) => {
                    self.waits += 1;
                    return false;
                }
            }
        }
        let Stream::At(at, cursor) = &mut self.agent.stream else { return false };
        let Some(frame) = self.replicas[*at].store.next_frame(cursor) else { return false };
        self.receive(v1::ServerMessage::decode(&frame[PREFIX_BYTES..]).unwrap().body.unwrap());
        true
    }

    fn receive(&mut self, body: v1::server_message::Body) {
        let agent = &mut self.agent;
        for effect in agent.machine.on_message(v1::ServerMessage { body: Some(body) }).unwrap() {
            match effect {
                Effect::Apply(step) => {
                    agent.held.apply(step, &mut Dirty::default());
                    let places = self.source.places(agent.held.state());
                    for (key, place) in &agent.places {
                        assert!(places[key] >= *place, "{key} went back from version {place} to {}", places[key]);
                    }
                    agent.places = places;
                }
                Effect::Reject(nack) => panic!("{nack:?}"),
                _ => {}
            }
        }
        if agent.machine.needs_referable() {
            agent.machine.refer_to(Referable::of(agent.held.state()));
        }
    }

    /// Everything arrives everywhere at last, and the agent with it.
    fn finish(&mut self) {
        for replica in 0..self.replicas.len() {
            self.act(Move::List(replica));
            for kind in KINDS {
                for _ in 0..=self.source.0.len() {
                    self.act(Move::Deliver(replica, kind));
                }
            }
        }
        for replica in 0..self.replicas.len() {
            for kind in KINDS {
                self.act(Move::Bookmark(replica, kind));
            }
        }
        if matches!(self.agent.stream, Stream::None) {
            self.act(Move::Go(0));
        }
        self.act(Move::ReadAll);
        let end = self.source.state(self.source.version(self.source.0.len()) - 1);
        assert!(self.agent.held.state().digests() == end.digests(), "the agent does not have the source's state");
    }
}

/// Whether two moves in a row have the same outcome in either order: what comes to different replicas.
fn commute(a: Move, b: Move) -> Option<(usize, usize)> {
    match (a, b) {
        (Move::Deliver(a, _), Move::Deliver(b, _)) if a != b => Some((a, b)),
        _ => None,
    }
}

/// Every order of what happens in each of these lists, which keep their own order; of orders that differ only in moves that commute, one.
fn interleave(lists: &[Vec<Move>], visit: &mut impl FnMut(&[Move])) {
    fn descend(lists: &[Vec<Move>], at: &mut [usize], path: &mut Vec<Move>, visit: &mut impl FnMut(&[Move])) {
        let mut is_leaf = true;
        for list in 0..lists.len() {
            let Some(action) = lists[list].get(at[list]) else { continue };
            is_leaf = false;
            if path.last().and_then(|last| commute(*last, *action)).is_some_and(|(last, next)| last > next) {
                continue;
            }
            at[list] += 1;
            path.push(*action);
            descend(lists, at, path, visit);
            path.pop();
            at[list] -= 1;
        }
        if is_leaf {
            visit(path);
        }
    }
    descend(lists, &mut vec![0; lists.len()], &mut Vec::new(), visit);
}

/// Runs every interleaving; how many there were, how often an agent had to wait, and how it resumed.
fn explore(events: usize, lists: &[Vec<Move>]) -> (usize, u64, BTreeMap<&'static str, u64>) {
    let (mut count, mut waits, mut resumed) = (0, 0, BTreeMap::new());
    interleave(lists, &mut |moves| {
        count += 1;
        let run = || {
            let mut world = World::new(Source::first(events), 2);
            moves.iter().for_each(|action| world.act(*action));
            waits += world.waits;
            for (mode, times) in &world.resumed {
                *resumed.entry(*mode).or_default() += times;
            }
            world.finish();
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        if let Err(panic) = result {
            eprintln!("after {moves:?}");
            std::panic::resume_unwind(panic);
        }
    });
    (count, waits, resumed)
}

const SLICE: SourceKind = SourceKind::EndpointSlices;
const SERVICE: SourceKind = SourceKind::Services;

#[test]
fn every_interleaving_of_moves_and_of_what_each_replica_has_seen() {
    use Move::{Deliver, Go, ReadAll};
    let lists = [
        vec![Deliver(0, SLICE), Deliver(0, SERVICE)],
        vec![Deliver(1, SLICE), Deliver(1, SERVICE)],
        vec![ReadAll, Go(1), ReadAll, Go(0), ReadAll],
    ];
    let (count, waits, resumed) = explore(2, &lists);
    // Each replica's two events stand in any of the six gaps.
    assert_eq!(count, 21 * 21);
    assert!(waits > 0 && resumed["digests"] > 0 && resumed["log"] > 0, "{waits} {resumed:?}");
}

#[test]
fn every_interleaving_where_streams_break_in_the_middle_and_each_kind_is_held_back_for_itself() {
    use Move::{Bookmark, Deliver, Go, Read, ReadAll};
    let lists = [
        vec![Deliver(0, SLICE), Deliver(0, SERVICE)],
        vec![Deliver(1, SLICE), Bookmark(1, SERVICE)],
        vec![ReadAll, Go(1), Read, Go(0), Read],
    ];
    let (count, waits, resumed) = explore(2, &lists);
    assert!(count > 400, "{count}");
    assert!(waits > 0 && resumed["digests"] > 0 && resumed["log"] > 0, "{waits} {resumed:?}");
}

#[test]
fn every_interleaving_with_a_replica_that_starts_anew() {
    use Move::{Deliver, Go, List, Read, ReadAll, Restart};
    let lists = [
        vec![Deliver(0, SLICE)],
        vec![Deliver(1, SLICE), Restart(1), List(1), Deliver(1, SERVICE)],
        vec![Go(1), Read, Go(0), ReadAll],
    ];
    let (count, waits, resumed) = explore(3, &lists);
    assert!(count > 300, "{count}");
    assert!(waits > 0 && resumed["digests"] > 0, "{waits} {resumed:?}");
}

fn any_move(replicas: usize) -> impl Strategy<Value = Move> {
    let kind = || prop::sample::select(KINDS.to_vec());
    prop_oneof![
        8 => (0..replicas, kind()).prop_map(|(replica, kind)| Move::Deliver(replica, kind)),
        2 => (0..replicas, kind()).prop_map(|(replica, kind)| Move::Bookmark(replica, kind)),
        1 => (0..replicas).prop_map(Move::Restart),
        2 => (0..replicas).prop_map(Move::List),
        4 => (0..replicas).prop_map(Move::Go),
        3 => Just(Move::Read),
        4 => Just(Move::ReadAll),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn long_histories_with_three_replicas(moves in prop::collection::vec(any_move(3), 1..80)) {
        let mut world = World::new(Source::whole(), 3);
        moves.iter().for_each(|action| world.act(*action));
        world.finish();
    }
}
