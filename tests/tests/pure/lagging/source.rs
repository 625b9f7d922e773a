//! The source of the model: its events in order, and the version of each value.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use headgate_control_plane::{model::NodeChange, objects::SourceKind};
use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Node, Placement, Protocol, Service, ServiceKey, ServicePort, State,
};
use headgate_proto::v1;

/// The version of the state that every replica lists first.
pub(crate) const BASE: u64 = 10;
pub(crate) const KINDS: [SourceKind; 3] = [SourceKind::Services, SourceKind::EndpointSlices, SourceKind::Nodes];
/// The node of the model's agent.
pub(crate) const NODE: &str = "node-a";

/// The version of each key's value in some state.
pub(crate) type Places = BTreeMap<String, u64>;

fn key(number: u8) -> ServiceKey {
    ServiceKey::new("shop", &format!("web-{number}"))
}

fn address(number: u8, host: u8) -> IpAddr {
    [10, 1, number, host].into()
}

/// The endpoints of the first version that the source removes later.
pub(crate) fn removed_endpoints() -> [(ServiceKey, IpAddr); 2] {
    [(key(1), address(1, 2)), (key(2), address(2, 3))]
}

/// A Service whose node port encodes its version.
fn service(number: u8, version: u64) -> Change {
    let node_port = 30_000 + u16::try_from(version).unwrap();
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port };
    Change::from(Service::new(key(number), vec![[10, 96, 0, number].into()], vec![port]))
}

/// An endpoint whose port encodes its version.
fn endpoint(number: u8, host: u8, version: u64) -> Change {
    let port = u16::try_from(version).unwrap();
    let ports: Arc<[EndpointPort]> = [EndpointPort::new("http", Protocol::Tcp, port)].into();
    let mut endpoint = Endpoint::new(address(number, host), ports);
    endpoint.placement = Placement::on(&format!("node-{host}")).into();
    Change::Endpoint(key(number), endpoint)
}

/// A Node whose zone encodes its version.
fn node(name: &str, version: u64) -> Node {
    Node {
        name: name.into(),
        zone: Some(version.to_string().into()),
        pod_cidrs: Vec::new(),
        addresses: Vec::new(),
        going_away: false,
    }
}

/// Services with values that the old program cannot use, and the versions of these values.
pub(crate) const NEED_NEW_PROGRAM: [&str; 2] = ["shop/web-2", "shop/web-4"];
const UNUSABLE: [u64; 2] = [17, 22];

/// Makes Services unusable for the old program. Each Service value with a version of `UNUSABLE`
/// gets a protocol number that the old program does not know.
pub(crate) fn as_seen_by_the_old_program(changes: &mut v1::Changes) {
    for service in &mut changes.services {
        let is_new = |version: &u64| service.ports[0].node_port == 30_000 + u32::try_from(*version).unwrap();
        if UNUSABLE.iter().any(is_new) {
            service.ports[0].protocol = 99;
        }
    }
}

/// The changes that turn an empty state into `state`.
pub(crate) fn changes_of(state: &State) -> Vec<Change> {
    let mut changes = Vec::new();
    for (key, entry) in state.entries() {
        changes.extend(entry.service().map(|service| Change::from(service.clone())));
        changes.extend(entry.endpoints().values().map(|endpoint| Change::Endpoint((**key).clone(), endpoint.clone())));
    }
    changes
}

/// The state that `changes` produce from an empty state.
pub(crate) fn state_of(changes: impl IntoIterator<Item = Change>) -> State {
    let mut state = State::default();
    for change in changes {
        state.apply(change, &mut Dirty::default());
    }
    state
}

#[derive(Debug, Clone)]
pub(crate) enum Event {
    Change(Change),
    Node(NodeChange),
}

/// The events of the source in order, one for each version.
pub(crate) struct History(Vec<(SourceKind, Event)>);

impl History {
    fn base() -> Vec<Event> {
        let services = [1, 2, 3].into_iter().map(|number| service(number, BASE));
        let endpoints = [(1, 1), (1, 2), (2, 1), (2, 3)];
        let endpoints = endpoints.into_iter().map(|(number, host)| endpoint(number, host, BASE));
        let nodes = [NODE, "node-b"].into_iter().map(|name| Event::Node(NodeChange::Apply(node(name, BASE))));
        services.chain(endpoints).map(Event::Change).chain(nodes).collect()
    }

    /// Changes, removals and additions of each kind. No removed key is added again, and no added
    /// key is removed. So each key is absent only before its addition or only after its removal.
    pub(crate) fn whole() -> Self {
        use SourceKind::{EndpointSlices, Nodes, Services};
        let mut events = Vec::new();
        let mut add = |kind, event: &dyn Fn(u64) -> Event| {
            let version = BASE + 1 + events.len() as u64;
            events.push((kind, event(version)));
        };
        let of_node = |name: &'static str| move |version| Event::Node(NodeChange::Apply(node(name, version)));
        add(EndpointSlices, &|version| Event::Change(endpoint(1, 1, version)));
        add(Services, &|version| Event::Change(service(1, version)));
        add(Nodes, &of_node(NODE));
        add(EndpointSlices, &|_| Event::Change(Change::RemoveEndpoint(key(1), address(1, 2))));
        add(EndpointSlices, &|version| Event::Change(endpoint(1, 1, version)));
        add(Services, &|_| Event::Change(Change::RemoveService(key(3))));
        // Version 17: the old program cannot use this value.
        add(Services, &|version| Event::Change(service(2, version)));
        add(Nodes, &of_node("node-b"));
        add(EndpointSlices, &|version| Event::Change(endpoint(2, 1, version)));
        add(EndpointSlices, &|version| Event::Change(endpoint(3, 4, version)));
        add(EndpointSlices, &|_| Event::Change(Change::RemoveEndpoint(key(2), address(2, 3))));
        // Version 22: the old program cannot use this value, and has no earlier value of the key.
        add(Services, &|version| Event::Change(service(4, version)));
        add(EndpointSlices, &|version| Event::Change(endpoint(4, 1, version)));
        add(Nodes, &of_node(NODE));
        add(Services, &|version| Event::Change(service(1, version)));
        add(EndpointSlices, &|version| Event::Change(endpoint(2, 1, version)));
        add(EndpointSlices, &|version| Event::Change(endpoint(4, 1, version)));
        add(EndpointSlices, &|version| Event::Change(endpoint(1, 1, version)));
        add(Nodes, &|_| Event::Node(NodeChange::Remove(NODE.into())));
        Self(events)
    }

    pub(crate) fn first(events: usize) -> Self {
        let mut source = Self::whole();
        source.0.truncate(events);
        source
    }

    fn version(&self, index: usize) -> u64 {
        BASE + 1 + index as u64
    }

    /// The version of the last event.
    pub(crate) fn end(&self) -> u64 {
        BASE + self.0.len() as u64
    }

    /// The first event of a kind after `position`, with its version.
    pub(crate) fn next(&self, kind: SourceKind, position: u64) -> Option<(u64, &Event)> {
        let events = self.0.iter().enumerate().map(|(index, (of, event))| (self.version(index), *of, event));
        events
            .filter(|(version, of, _)| *version > position && *of == kind)
            .map(|(version, _, event)| (version, event))
            .next()
    }

    /// The state and the Nodes at a version.
    pub(crate) fn at(&self, version: u64) -> (State, BTreeMap<Arc<str>, Node>) {
        let (mut state, mut nodes) = (State::default(), BTreeMap::new());
        let events = self.0.iter().take(usize::try_from(version - BASE).unwrap()).map(|(_, event)| event.clone());
        for event in Self::base().into_iter().chain(events) {
            match event {
                Event::Change(change) => drop(state.apply(change, &mut Dirty::default())),
                Event::Node(NodeChange::Apply(node) | NodeChange::ApplyExcluded(node)) => {
                    drop(nodes.insert(Arc::clone(&node.name), node));
                }
                Event::Node(NodeChange::Remove(name)) => drop(nodes.remove(&name)),
            }
        }
        (state, nodes)
    }

    /// The version of the agent's own Node. An absent Node has the version of its removal, since
    /// the source has this Node from the start.
    pub(crate) fn node_place(&self, node: Option<&Node>) -> u64 {
        let removed = || {
            let is_removal = |event: &Event| matches!(event, Event::Node(NodeChange::Remove(name)) if &**name == NODE);
            let index = self.0.iter().position(|(_, event)| is_removal(event));
            self.version(index.expect("the source never removes the Node of the agent"))
        };
        node.map_or_else(removed, |node| node.zone.as_deref().unwrap().parse().unwrap())
    }

    /// The version of each key's value in `state`.
    pub(crate) fn places(&self, state: &State) -> Places {
        let mut keys: BTreeMap<String, Vec<(u64, Option<Change>)>> = BTreeMap::new();
        let base = Self::base().into_iter().map(|event| (BASE, event));
        let events = self.0.iter().enumerate().map(|(index, (_, event))| (self.version(index), event.clone()));
        for (version, event) in base.chain(events) {
            let Event::Change(change) = event else { continue };
            let (name, value) = match &change {
                Change::Service(service) => (service.key.to_string(), Some(change)),
                Change::Endpoint(key, endpoint) => (format!("{key} {}", endpoint.address), Some(change)),
                Change::RemoveService(key) => (key.to_string(), None),
                Change::RemoveEndpoint(key, address) => (format!("{key} {address}"), None),
                other => panic!("{other:?}"),
            };
            // A key that is added later is absent at version 0.
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
