#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::{
    model::{Change, ServiceCidr},
    state::{Dirty, State},
};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

fn address(last: u8) -> IpAddr {
    [10, 96, 0, last].into()
}

/// An IPv4 or IPv6 address, so that frontends of both families compete.
fn any_address(last: std::ops::Range<u8>) -> impl Strategy<Value = IpAddr> {
    let of_family = |(last, is_v6): (u8, bool)| {
        if is_v6 { [0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last)].into() } else { address(last) }
    };
    (last, any::<bool>()).prop_map(of_family)
}

fn addresses() -> impl Strategy<Value = Vec<IpAddr>> {
    prop::collection::btree_set(any_address(1..4), 0..3).prop_map(|addresses| addresses.into_iter().collect())
}

/// The ClusterIPs of a Service: one, or one of each family.
fn cluster_ips() -> impl Strategy<Value = Vec<IpAddr>> {
    prop_oneof![
        any_address(1..6).prop_map(|address| vec![address]),
        (1u8..6, 1u8..6).prop_map(|(v4, v6)| vec![address(v4), [0xfd00, 0, 0, 0, 0, 0, 0, u16::from(v6)].into()]),
    ]
}

/// Every frontend that a Service specifies, with its claims.
fn frontends_of(service: &Service) -> Vec<(Frontend, Claim)> {
    service.ports.iter().flat_map(|port| frontends_of_port(service, port)).collect()
}

prop_compose! {
    /// A Service of a few, with few addresses, ports and ages, so that most claims compete.
    fn any_service()(
        name in prop::sample::select(&NAMES[..]), created_unix_seconds in 0i64..3, cluster_ips in cluster_ips(),
        load_balancer_ips in addresses(), external_ips in addresses(),
        ports in prop::collection::btree_map(
            (prop::sample::select(vec![Protocol::Tcp, Protocol::Udp]), 80u16..83),
            prop_oneof![Just(0), Just(30_000u16)], 1..3,
        ),
    ) -> Service {
        let port = |((protocol, port), node_port)| ServicePort { name: "".into(), protocol, port, node_port };
        let ports = ports.into_iter().map(port).collect();
        let service = Service::new(ServiceKey::new("ns", name), cluster_ips, ports);
        Service { created_unix_seconds, load_balancer_ips, external_ips, ..service }
    }
}

fn any_change() -> impl Strategy<Value = Change> {
    let removal = prop::sample::select(&NAMES[..]).prop_map(|name| Change::RemoveService(ServiceKey::new("ns", name)));
    let ranges = prop::sample::select(vec![vec![], vec!["10.96.0.0/30"], vec!["10.96.0.2/31", "fd00::/125"]]);
    let service_cidr = ranges.prop_map(|ranges: Vec<&str>| {
        let cidrs = ranges.into_iter().map(|range| range.parse().unwrap()).collect();
        Change::ServiceCidr(ServiceCidr { name: "kubernetes".into(), cidrs })
    });
    let no_service_cidr = Just(Change::RemoveServiceCidr("kubernetes".into()));
    prop_oneof![8 => any_service().prop_map(Change::from), 2 => removal, 2 => service_cidr, 1 => no_service_cidr]
}

/// What is reserved, and whether with whole addresses.
type Reserved = (BTreeSet<Frontend>, bool);

fn any_reserved() -> impl Strategy<Value = Reserved> {
    let protocol = || prop::sample::select(vec![Protocol::Tcp, Protocol::Udp]);
    let frontend = prop_oneof![
        (any_address(1..4), protocol(), 80u16..83)
            .prop_map(|(address, protocol, port)| Frontend::Address(address, protocol, port)),
        protocol().prop_map(|protocol| Frontend::NodePort(Family::V4, protocol, 30_000)),
    ];
    (prop::collection::btree_set(frontend, 0..4), any::<bool>())
}

/// A change of a Service, or of what is reserved.
#[derive(Debug, Clone)]
enum Step {
    Change(Change),
    Reserve(Reserved),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![5 => any_change().prop_map(Step::Change), 1 => any_reserved().prop_map(Step::Reserve)]
}

fn services(state: &State) -> Vec<&Service> {
    state.entries().filter_map(|(_, entry)| entry.service()).collect()
}

/// The owner of a frontend by the rules at the head of the module, without any index.
fn owner_by_the_rules<'a>(
    state: &'a State,
    (reserved, with_addresses): &Reserved,
    frontend: Frontend,
) -> Option<&'a ServiceKey> {
    let services = services(state);
    let is_in_range = |address: IpAddr| {
        let mut ranges = state.service_cidrs().flat_map(|service_cidr| &service_cidr.cidrs);
        ranges.any(|range| range.contains(&address))
    };
    let is_candidate = |claim: &Claim| match frontend {
        Frontend::Address(address, ..) => *claim == Claim::ClusterIp || !is_in_range(address),
        Frontend::NodePort(..) => true,
    };
    let claim = |service: &&'a Service| {
        let claims = frontends_of(service).into_iter();
        let claim = claims.filter(|(of, _)| *of == frontend).map(|(_, claim)| claim).filter(is_candidate).min()?;
        Some((claim, service.created_unix_seconds, &service.key))
    };
    let strongest = services.iter().filter_map(claim).min();
    let holders = services.iter().filter(|service| match frontend {
        Frontend::Address(address, ..) => service.cluster_ips.contains(&address),
        Frontend::NodePort(..) => false,
    });
    let holder = holders.map(|service| (service.created_unix_seconds, &service.key)).min();
    let is_address =
        |of: &Frontend| matches!((of, frontend), (Frontend::Address(of, ..), Frontend::Address(at, ..)) if *of == at);
    let is_reserved = reserved.contains(&frontend) || *with_addresses && reserved.iter().any(is_address);
    match (holder, strongest) {
        (Some((_, holder)), Some((claim, ..))) if claim != Claim::ClusterIp => Some(holder),
        (Some((_, holder)), None) if reserved.contains(&frontend) => Some(holder),
        (_, Some((claim, ..))) if claim != Claim::ClusterIp && is_reserved => None,
        (_, strongest) => strongest.map(|(.., key)| key),
    }
}

/// The frontends that each Service owns.
fn owned(state: &State) -> BTreeSet<(ServiceKey, Frontend)> {
    let all = services(state).into_iter().flat_map(|service| {
        let frontends = frontends_of(service).into_iter().map(|(frontend, _)| (service.key.clone(), frontend));
        frontends.collect::<Vec<_>>()
    });
    all.filter(|(key, frontend)| state.frontends().owns(key, frontend)).collect()
}

/// Whether a conflict is about a frontend.
fn is_at(conflict: &Conflict<'_>, frontend: Frontend) -> bool {
    match (conflict.place, frontend) {
        (Place::Address(lost), Frontend::Address(address, ..)) => lost == address,
        (place, frontend) => place == Place::Frontend(frontend),
    }
}

proptest! {
    #[test]
    fn owners_follow_the_rules_after_any_changes(steps in prop::collection::vec(any_step(), 1..20)) {
        let (mut state, mut reserved) = (State::default(), Reserved::default());
        for step in steps {
            let before = owned(&state);
            let mut dirty = Dirty::default();
            match step {
                Step::Change(change) => {
                    state.apply(change, &mut dirty);
                }
                Step::Reserve(new) => {
                    reserved = new;
                    state.reserve(&reserved.0, reserved.1, &mut dirty);
                }
            }
            let after = owned(&state);
            for (key, frontend) in before.symmetric_difference(&after) {
                prop_assert!(dirty.services.contains(key), "{} gained or lost {}, and is not dirty", key, frontend);
            }
            let services = services(&state);
            let mut losers = BTreeSet::new();
            for service in &services {
                let conflicts: Vec<_> = state.frontends().conflicts(&service.key).collect();
                for (frontend, _) in frontends_of(service) {
                    let owner = owner_by_the_rules(&state, &reserved, frontend);
                    prop_assert_eq!(state.frontends().owner(&frontend), owner, "the owner of {}", frontend);
                    let found = conflicts.iter().filter(|conflict| is_at(conflict, frontend)).count();
                    prop_assert_eq!(found, usize::from(owner != Some(&service.key)), "{} of {}", frontend, service.key);
                    if owner != Some(&service.key) {
                        losers.insert(service.key.clone());
                    }
                }
                for conflict in conflicts {
                    let at = frontends_of(service).into_iter().filter(|(frontend, _)| is_at(&conflict, *frontend));
                    prop_assert_eq!(at.map(|(_, claim)| claim).min(), Some(conflict.claim), "{}", conflict);
                    prop_assert!(conflict.owner.is_none_or(|owner| *owner.key != service.key), "{}", conflict);
                }
            }
            for (key, conflict) in state.frontends().reserved_conflicts(&BTreeSet::new()) {
                prop_assert!(state.frontends().conflicts(key).any(|of| of.place == conflict.place), "{}", conflict);
            }
            let found: BTreeSet<ServiceKey> = state.frontends().losers().map(|key| (**key).clone()).collect();
            prop_assert_eq!((state.frontends().losers().len(), found), (losers.len(), losers));
        }
    }
}

/// Whatever two Services share, an edit visits the frontends whose claims differ, each once.
#[test]
fn an_edit_of_one_shared_address_visits_only_the_frontends_there() {
    let ports: Vec<_> =
        (1..=10).map(|port| ServicePort { name: "".into(), protocol: Protocol::Tcp, port, node_port: 0 }).collect();
    let shared: Vec<IpAddr> = (1..=9).map(address).collect();
    let with = |name: &str, last: u8, created_unix_seconds: i64, external_ips: &[IpAddr]| {
        let service = Service::new(ServiceKey::new("t", name), vec![address(last)], ports.clone());
        Service { created_unix_seconds, external_ips: external_ips.to_vec(), ..service }
    };
    let mut state = State::default();
    let mut edit = |service: Service| {
        let mut dirty = Dirty::default();
        state.apply(service.into(), &mut dirty);
        let losers: BTreeSet<String> = dirty.lost.values().map(ToString::to_string).collect();
        (dirty.services.len(), dirty.lost.len(), losers.into_iter().collect::<Vec<_>>().join(" "))
    };
    assert_eq!(edit(with("old", 100, 1, &shared)), (1, 0, String::new()));
    assert_eq!(edit(with("new", 101, 2, &shared)), (1, 0, String::new()));
    for _ in 0..2 {
        assert_eq!(edit(with("old", 100, 1, &shared[1..])), (2, 10, "t/old".into()));
        assert_eq!(edit(with("old", 100, 1, &shared)), (2, 10, "t/new".into()));
    }
    assert_eq!(edit(with("old", 100, 1, &[])), (2, 90, "t/old".into()));
    assert_eq!(edit(with("new", 101, 2, &shared[..3])), (1, 60, "t/new".into()));
}

/// Otherwise a tenant would get the packets for a ClusterIP that the API server gives to a Service
/// later, or that another proxy serves.
#[test]
fn an_address_in_the_range_of_a_service_cidr_is_served_only_as_a_cluster_ip() {
    let port = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    let mut state = State::default();
    let mut taker = Service::new(ServiceKey::new("a", "taker"), vec![address(9)], vec![port.clone()]);
    (taker.external_ips, taker.load_balancer_ips) = (vec![address(1)], vec![[192, 0, 2, 1].into()]);
    let frontend = |address| Frontend::Address(address, Protocol::Tcp, 80);
    state.apply(taker.clone().into(), &mut Dirty::default());
    assert!(state.frontends().owns(&taker.key, &frontend(address(1))));
    let mut dirty = Dirty::default();
    let cidrs = vec!["10.96.0.0/16".parse().unwrap()];
    state.apply(Change::ServiceCidr(ServiceCidr { name: "kubernetes".into(), cidrs }), &mut dirty);
    assert_eq!(dirty.services.iter().map(ToString::to_string).collect::<Vec<_>>(), ["a/taker"]);
    for (of, is_owned) in [(address(1), false), (address(9), true), ([192, 0, 2, 1].into(), true)] {
        assert_eq!(state.frontends().owns(&taker.key, &frontend(of)), is_owned, "{of}");
    }
    let conflicts = |state: &State| state.frontends().conflicts(&taker.key).map(|c| c.to_string()).collect::<Vec<_>>();
    let of_range =
        "10.96.0.1 is in the range of a ServiceCIDR, which is for ClusterIPs: give the Service another address";
    assert_eq!(conflicts(&state), [of_range]);
    // The API server gives the address to a Service.
    let owner = Service::new(ServiceKey::new("t", "web"), vec![address(1)], vec![port]);
    state.apply(owner.into(), &mut Dirty::default());
    assert_eq!(state.frontends().owner(&frontend(address(1))).unwrap().to_string(), "t/web");
    assert!(conflicts(&state)[0].starts_with("10.96.0.1 belongs to Service t/web, whose ClusterIP it is"));
    state.apply(Change::RemoveServiceCidr("kubernetes".into()), &mut Dirty::default());
    assert_eq!((conflicts(&state).len(), state.frontends().losers().len()), (1, 1));
    state.apply(Change::RemoveService(ServiceKey::new("t", "web")), &mut Dirty::default());
    assert!(state.frontends().owns(&taker.key, &frontend(address(1))) && conflicts(&state).is_empty());
}
