#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;
use crate::{
    Dirty,
    model::{Change, Conditions, EndpointPort, Service},
};

fn key(i: u8) -> ServiceKey {
    ServiceKey::new("ns", &format!("svc{i}"))
}

fn udp(name: &str, port: u16, node_port: u16) -> ServicePort {
    ServicePort { name: name.into(), protocol: Protocol::Udp, port, node_port }
}

fn dns(i: u8) -> Service {
    let cluster_ips = vec![IpAddr::from([10, 96, 0, i]), format!("fd00:96::{i}").parse().unwrap()];
    Service::new(key(i), cluster_ips, vec![udp("dns", 53, 30053)])
}

fn pod(last: u8) -> Endpoint {
    let port = |protocol| EndpointPort::new("dns", protocol, 5353);
    Endpoint::new(IpAddr::from([10, 244, 0, last]), Arc::from([port(Protocol::Tcp), port(Protocol::Udp)]))
}

/// Creates a UDP port that carries conditions.
fn of_port(name: &str, port: u16, conditions: Conditions) -> EndpointPort {
    EndpointPort { conditions: Some(conditions), ..EndpointPort::new(name, Protocol::Udp, port) }
}

fn cluster_ip(i: u8) -> Frontend {
    Frontend::Address(IpAddr::from([10, 96, 0, i]), Protocol::Udp, 53)
}

/// A state with a tracker.
#[derive(Default)]
struct World {
    state: State,
    tracker: Tracker,
    dirty: Dirty,
}

impl World {
    /// A world with one Service that has one endpoint.
    fn serving() -> Self {
        let mut world = Self::default();
        world.step([Change::from(dns(1)), endpoint(1, 1)]);
        world
    }

    /// Applies changes in a step that succeeds.
    fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> Cleanup {
        self.apply(changes);
        let plan = self.tracker.plan(&self.state, &std::mem::take(&mut self.dirty).services);
        self.tracker.commit(plan)
    }

    /// Applies changes in a step that fails, so its plan is not committed.
    fn failed_step(&mut self, changes: impl IntoIterator<Item = Change>) {
        self.apply(changes);
        drop(self.tracker.plan(&self.state, &self.dirty.services));
    }

    fn apply(&mut self, changes: impl IntoIterator<Item = Change>) {
        changes.into_iter().for_each(|change| _ = self.state.apply(change, &mut self.dirty));
    }
}

fn rule(cleanup: &Cleanup, destination: Frontend) -> &FlowRule {
    cleanup.rules().find(|(found, _)| *found == destination).map(|(_, rule)| rule).unwrap()
}

fn endpoint(i: u8, last: u8) -> Change {
    Change::Endpoint(key(i), pod(last))
}

fn removal(i: u8, last: u8) -> Change {
    Change::RemoveEndpoint(key(i), pod(last).address)
}

#[test]
fn all_flows_are_suspects_when_all_rules_are_programmed() {
    let mut world = World::serving();
    let plan = world.tracker.plan_all(&world.state);
    assert_eq!(rule(&plan.cleanup, cluster_ip(1)).suspects, Suspects::Any);
    world.tracker.commit(plan);
    let suspects = |cleanup: &Cleanup| rule(cleanup, cluster_ip(1)).suspects.clone();
    let next = world.step([endpoint(1, 2)]);
    assert_eq!(suspects(&next), Suspects::Any, "the full sync may have programmed a newer state than the plan saw");
    let later = world.step([endpoint(1, 3)]);
    assert_ne!(suspects(&later), Suspects::Any);
    let gone = world.step([Change::RemoveService(key(1)), removal(1, 1)]);
    let at: SocketAddr = "10.96.0.1:53".parse().unwrap();
    assert!(!gone.is_stale(at, at, |_| false), "untranslated flows may belong to another program");
}

/// The connection tracking table of a kernel whose rules may send new flows to any endpoint.
#[derive(Default)]
struct ConntrackTable {
    flows: BTreeSet<(Frontend, SocketAddr)>,
}

fn address_of(destination: Frontend) -> SocketAddr {
    match destination {
        Frontend::Address(address, _, port) => SocketAddr::new(address, port),
        Frontend::NodePort(Family::V4, _, port) => SocketAddr::new("192.0.2.11".parse().unwrap(), port),
        Frontend::NodePort(Family::V6, _, port) => SocketAddr::new("2001:db8::11".parse().unwrap(), port),
    }
}

impl ConntrackTable {
    /// Adds a flow to each endpoint of each destination.
    fn add_traffic(&mut self, state: &State) {
        for (destination, keep) in state.entries().flat_map(|(key, _)| owned_destinations(state, key)) {
            self.flows.extend(keep.iter().map(|source| (destination, *source)));
        }
    }

    /// Deletes the stale flows of the families that `cleanup` concerns.
    fn clean(&mut self, cleanup: &Cleanup) {
        self.flows.retain(|(destination, source)| {
            let to = address_of(*destination);
            let is_listed = cleanup.concerns(destination.family());
            !(is_listed && cleanup.is_stale(to, *source, |address| to.ip() == address))
        });
    }
}

fn any_change() -> impl Strategy<Value = Change> {
    let service =
        (1u8..4, 0u16..2, 0i64..3, any::<bool>(), any::<bool>()).prop_map(|(i, port, created, shared, second)| {
            let mut service = dns(i);
            service.ports[0].port = 53 + port;
            service.created_unix_seconds = created;
            if shared {
                service.external_ips = vec!["192.0.2.100".parse().unwrap()];
            }
            if second {
                service.ports.push(udp("more", 99, 0));
            }
            Change::from(service)
        });
    let endpoint = (1u8..4, 1u8..5, 0u8..3, 0u8..3, 0u16..2).prop_map(|(i, last, state, second, port)| {
        let conditions = |state| Conditions { ready: state == 0, serving: state < 2, terminating: state == 1 };
        let ports = [EndpointPort::new("dns", Protocol::Udp, 5353 + port), of_port("more", 99, conditions(second))];
        let mut endpoint = Endpoint { ports: Arc::from(ports), ..pod(last) };
        endpoint.conditions = conditions(state);
        Change::Endpoint(key(i), endpoint)
    });
    prop_oneof![
        3 => service,
        5 => endpoint,
        1 => (1u8..4).prop_map(|i| Change::RemoveService(key(i))),
        3 => (1u8..4, 1u8..5).prop_map(|(i, last)| removal(i, last)),
    ]
}

/// The step fails.
const FAILED: u8 = 0;
/// The step succeeds, and its cleanup is delayed.
const DELAYED: u8 = 1;

proptest! {
    /// After any changes and failed or delayed steps, a cleanup deletes all stale flows and no
    /// valid flow.
    #[test]
    fn a_cleanup_deletes_all_stale_flows_and_no_valid_flow(
        steps in proptest::collection::vec((proptest::collection::vec(any_change(), 1..4), 0u8..3), 1..25),
    ) {
        let (mut world, mut table, mut pending) = (World::default(), ConntrackTable::default(), Cleanup::default());
        for (changes, outcome) in steps {
            if outcome == FAILED {
                world.failed_step(changes);
                // The kernel may have carried out a step that the agent counts as failed.
                table.add_traffic(&world.state);
                continue;
            }
            pending.merge(world.step(changes));
            table.add_traffic(&world.state);
            if outcome == DELAYED {
                continue;
            }
            let before = table.flows.clone();
            table.clean(&std::mem::take(&mut pending));
            let is_valid = |(destination, source): &(Frontend, SocketAddr)| {
                let owner = world.state.frontends().owner(destination);
                owner.and_then(|owner| owned_destinations(&world.state, owner).remove(destination)).is_some_and(|keep| keep.contains(source))
            };
            let expected: BTreeSet<_> = before.into_iter().filter(is_valid).collect();
            prop_assert_eq!(&table.flows, &expected);
        }
    }
}
