//! Any order, split or squash of the same events ends in the same state.

use proptest::prelude::*;

use super::*;

/// Versions of objects that collide on purpose: few names, few addresses.
fn any_event() -> impl Strategy<Value = Value> {
    let endpoint = (0_u8..6, any::<bool>(), 0_u8..3).prop_map(|(address, terminating, node)| {
        json!({"addresses": [format!("10.1.0.{}", address + 1)], "nodeName": format!("n{node}"),
            "conditions": {"ready": !terminating, "serving": true, "terminating": terminating}})
    });
    let a_slice =
        (0_u8..4, 0_u8..2, prop::collection::vec(endpoint, 0..5), 1_u32..4).prop_map(|(name, of, endpoints, port)| {
            slice(&format!("slice{name}"), &format!("s{of}"), json!(endpoints), http(port))
        });
    let a_service = (0_u8..2, 1_u8..4, any::<bool>()).prop_map(|(name, address, headless)| {
        let cluster_ip = if headless { "None".to_owned() } else { format!("10.0.0.{address}") };
        service(&format!("s{name}"), json!({"clusterIP": cluster_ip}))
    });
    prop_oneof![3 => a_slice, 1 => a_service]
}

proptest! {
    /// The last versions of objects alone decide: whatever came between them, in whatever order between objects, in however many
    /// transactions, by events or by lists.
    #[test]
    fn only_the_objects_that_there_are_matter(
        events in prop::collection::vec((any_event(), any::<bool>(), any::<bool>()), 1..40),
        shuffle in any::<prop::sample::Index>(),
    ) {
        let mut by_event = Bench::default();
        let mut last: std::collections::BTreeMap<ObjectKey, Value> = std::collections::BTreeMap::new();
        for (value, deletes, flushes) in &events {
            let key = object(value).key();
            if *deletes {
                by_event.model.event(Event::Delete(key.clone()), "");
                last.remove(&key);
            } else {
                by_event.apply(value);
                last.insert(key, value.clone());
            }
            if *flushes {
                by_event.flush();
            }
        }
        by_event.flush();
        let mut values: Vec<Value> = last.into_values().collect();
        if !values.is_empty() {
            let middle = shuffle.index(values.len());
            values.rotate_left(middle);
        }
        let squashed = Bench::with(&values);
        prop_assert_eq!(by_event.state.digests(), squashed.state.digests());
        values.reverse();
        for kind in ObjectKind::ALL {
            let listed = values.iter().map(object).filter(|object| object.kind() == kind);
            by_event.model.replace(kind, listed.map(|object| Event::Apply(Box::new(object))).collect());
        }
        prop_assert_eq!(by_event.flush(), vec![], "a list of what is known changes nothing");
        let (mut left, mut right) = (by_event, squashed);
        prop_assert_eq!(left.problems(), right.problems());
    }
}
