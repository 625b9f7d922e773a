//! Endpoints are unchanged after encoding and decoding, in full and with references.
#![allow(clippy::unwrap_used, missing_docs)]

use std::{net::IpAddr, sync::Arc};

use headgate_core::{
    Change, Conditions, Dirty, Endpoint, EndpointPort, Hints, Placement, Protocol, ServiceKey, State, Weight,
    digest::endpoint_hash,
    reference::{self, Referable},
};
use headgate_proto::{ChangesBuilder, Decoder, References, v1};
use proptest::prelude::*;
use prost::Message as _;

fn key() -> ServiceKey {
    ServiceKey::new("prod", "web")
}

fn any_conditions() -> impl Strategy<Value = Conditions> {
    any::<[bool; 3]>().prop_map(|[ready, serving, terminating]| Conditions { ready, serving, terminating })
}

fn any_placement() -> impl Strategy<Value = Arc<Placement>> {
    let names = |letter: char| {
        prop::collection::btree_set(0u8..3, 0..3).prop_map(move |numbers| {
            numbers.into_iter().map(|n| format!("{letter}{n}").into()).collect::<Vec<Arc<str>>>()
        })
    };
    let weights = prop_oneof![Just(0), Just(50), Just(100), Just(200), Just(u16::MAX)];
    let parts = (prop::option::of(0u8..3), prop::option::of(0u8..2), names('z'), names('n'), weights);
    parts.prop_map(|(node, zone, zones, nodes, weight)| {
        let weight = Weight::from_hundredths(weight);
        let hints = Some(Arc::new(Hints { zones, nodes })).filter(|hints| **hints != Hints::default());
        let name = |letter: char, number: Option<u8>| number.map(|number| Arc::from(format!("{letter}{number}")));
        Placement { node: name('n', node), zone: name('z', zone), hints, weight }.into()
    })
}

fn any_ports() -> impl Strategy<Value = Arc<[EndpointPort]>> {
    let protocol = prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)];
    let carried = (prop::option::of(any_conditions()), prop::option::of(any_placement()));
    prop::collection::btree_map((0u8..3, protocol, 80u16..82), carried, 0..4).prop_map(|ports| {
        let port = |((name, protocol, port), (conditions, placement))| EndpointPort {
            conditions,
            placement,
            ..EndpointPort::new(format!("port-{name}"), protocol, port)
        };
        ports.into_iter().map(port).collect()
    })
}

prop_compose! {
    fn any_endpoint()(
        last in 0u8..5, is_v6 in any::<bool>(), ports in any_ports(), conditions in any_conditions(), placement in any_placement(),
    ) -> Endpoint {
        let address = if is_v6 { format!("fd00::{last:x}").parse().unwrap() } else { IpAddr::from([10, 0, 0, last]) };
        Endpoint { address, ports, conditions, placement }
    }
}

fn received(decoder: &mut Decoder, changes: &v1::Changes) -> Vec<Endpoint> {
    let bytes = changes.encode_to_vec();
    let (changes, rejections) = decoder.changes(v1::Changes::decode(bytes.as_slice()).unwrap()).unwrap();
    assert_eq!(rejections, []);
    let endpoint = |change| match change {
        Change::Endpoint(found, endpoint) if found == key() => endpoint,
        other => panic!("{other:?}"),
    };
    changes.into_iter().map(endpoint).collect()
}

proptest! {
    #[test]
    fn endpoints_are_unchanged_after_encoding_and_decoding(
        held in prop::collection::vec(any_endpoint(), 0..4),
        sent in prop::collection::vec((any_endpoint(), prop::option::of(any::<prop::sample::Index>())), 1..5),
    ) {
        let (mut decoder, mut state) = (Decoder::default(), State::default());
        for endpoint in held {
            state.apply(Change::Endpoint(key(), endpoint), &mut Dirty::default());
        }
        decoder.refer_to(Referable::of(&state));
        let held: Vec<&Endpoint> =
            state.entry(&key()).into_iter().flat_map(|entry| entry.endpoints().values()).collect();
        let (mut builder, mut wanted) = (ChangesBuilder::default(), Vec::new());
        for (mut endpoint, known) in sent {
            let mut references = References::default();
            // The endpoint has the placement of an endpoint that the receiver holds.
            if let Some(known) = known.filter(|_| !held.is_empty()).map(|index| held[index.index(held.len())]) {
                endpoint.placement = Arc::clone(&known.placement);
                references.placement = Some(reference::placement(&known.placement));
            }
            builder.push(&Change::Endpoint(key(), endpoint.clone()), 0, references);
            wanted.push(endpoint);
        }
        let estimated = builder.estimated_bytes();
        let changes = builder.finish();
        prop_assert!(changes.encoded_len() <= estimated, "{} of {} bytes", changes.encoded_len(), estimated);
        let got = received(&mut decoder, &changes);
        prop_assert_eq!(&got, &wanted);
        let hash = |endpoint: &Endpoint| endpoint_hash(&key(), endpoint);
        prop_assert_eq!(got.iter().map(hash).collect::<Vec<_>>(), wanted.iter().map(hash).collect::<Vec<_>>());
    }

    /// Digests depend on the properties of ports.
    #[test]
    fn endpoints_that_differ_have_different_hashes(one in any_endpoint(), ports in any_ports()) {
        let other = Endpoint { ports, ..one.clone() };
        prop_assert_eq!(one == other, endpoint_hash(&key(), &one) == endpoint_hash(&key(), &other));
    }
}

type ChangePort = fn(&mut v1::EndpointPort);

#[test]
fn a_port_with_an_unknown_condition_or_placement_makes_only_its_endpoint_unusable() {
    let message = |change: ChangePort| {
        let mut builder = ChangesBuilder::default();
        for (last, port) in [(1, 80), (2, 81)] {
            let ports: Arc<[EndpointPort]> = [EndpointPort::new("http", Protocol::Tcp, port)].into();
            builder.endpoint(&key(), &Endpoint::new([10, 0, 0, last].into(), ports), 0);
        }
        let mut changes = builder.finish();
        change(&mut changes.port_lists[0].ports[0]);
        changes
    };
    let cases: [(&str, ChangePort); 2] = [
        ("condition 8 is unknown", |port| port.conditions = Some(8)),
        ("refers to placement 4, but there are 1", |port| port.placement = 5),
    ];
    for (reason, change) in cases {
        let (changes, rejections) = Decoder::default().changes(message(change)).unwrap();
        let [Change::Endpoint(_, endpoint)] = changes.as_slice() else { panic!("{changes:?}") };
        assert_eq!(endpoint.address, IpAddr::from([10, 0, 0, 2]));
        let [rejection] = rejections.as_slice() else { panic!("{rejections:?}") };
        assert_eq!((&*rejection.resource, &*rejection.field), ("Endpoint prod/web 10.0.0.1", "ports"));
        assert!(rejection.reason.contains(reason), "{rejection:?}");
    }
}
