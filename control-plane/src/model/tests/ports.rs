//! Tests that conditions, node and hints belong to an address and a port, as in kube-proxy's
//! endpoint cache.

use headgate_core::{
    Family, NodeFacts,
    view::{ServicePortView, service_views},
};

use super::*;

/// A slice endpoint with its conditions, on `node-1`.
fn endpoint(address: &str, ready: bool, serving: bool, terminating: bool) -> Value {
    json!({"addresses": [address], "nodeName": "node-1",
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating}})
}

/// A Service with the ports `http` and `metrics`.
fn two_ports() -> Value {
    service("s", json!({"ports": [{"name": "http", "port": 80}, {"name": "metrics", "port": 90}]}))
}

fn port(name: &str, number: u16) -> Value {
    json!([{"name": name, "port": number}])
}

/// The endpoints that `node-1` uses for each port of Service x/s.
fn views(bench: &Bench) -> Vec<ServicePortView> {
    service_views(&bench.state, &Arc::new(ServiceKey::new("x", "s")), Family::V4, &NodeFacts::named("node-1"))
}

/// Endpoints of each service port as `address:port`, in the order of the spec.
fn served(bench: &Bench) -> Vec<Vec<String>> {
    let texts = |view: &ServicePortView| {
        view.cluster_endpoints.iter().map(|to| format!("{}:{}", to.address, to.port)).collect()
    };
    views(bench).iter().map(texts).collect()
}

/// Two benches with these slices: in the first bench the slices arrive in the order of the array,
/// in the second bench in reverse order.
fn in_both_orders(slices: [Value; 2]) -> [Bench; 2] {
    let [first, second] = slices;
    [Bench::with(&[two_ports(), first.clone(), second.clone()]), Bench::with(&[two_ports(), second, first])]
}

// rows: 9, 10
#[test]
fn a_port_that_is_not_ready_gets_no_traffic_even_if_another_port_is_ready() {
    let a = slice("a", "s", json!([endpoint("10.1.0.1", true, true, false)]), port("http", 8080));
    let b = slice("b", "s", json!([endpoint("10.1.0.1", false, false, false)]), port("metrics", 9090));
    for mut bench in in_both_orders([a, b]) {
        assert_eq!(served(&bench), [vec!["10.1.0.1:8080"], vec![]]);
        assert_eq!(bench.problems(), [""; 0], "slices that list different ports do not conflict");
    }
}

// rows: 9, 10
#[test]
fn a_ready_port_gets_traffic_even_if_another_port_is_not_ready() {
    let a = slice("a", "s", json!([endpoint("10.1.0.1", false, false, false)]), port("http", 8080));
    let b = slice("b", "s", json!([endpoint("10.1.0.1", true, true, false)]), port("http", 8081));
    for mut bench in in_both_orders([a, b]) {
        assert_eq!(served(&bench), [vec!["10.1.0.1:8081"], vec![]]);
        assert_eq!(bench.problems(), [""; 0]);
    }
}

// rows: 10
#[test]
fn the_slice_with_the_later_name_counts_for_a_port_in_two_slices() {
    let not_ready = || json!([endpoint("10.1.0.1", false, false, false)]);
    let ready = || json!([endpoint("10.1.0.1", true, true, false)]);
    for (a, b, wanted) in [(not_ready(), ready(), 1), (ready(), not_ready(), 0)] {
        for bench in in_both_orders([
            slice("a", "s", a.clone(), port("http", 8080)),
            slice("b", "s", b.clone(), port("http", 8080)),
        ]) {
            assert_eq!(served(&bench)[0].len(), wanted);
        }
    }
}

// rows: 10
#[test]
fn a_terminating_entry_never_replaces_another_entry_for_its_port() {
    let dying = |serving| json!([endpoint("10.1.0.1", false, serving, true)]);
    let not_ready = || json!([endpoint("10.1.0.1", false, false, false)]);
    // A pod that is not ready has taken over the address of a terminating pod. The terminating pod
    // still serves.
    for (a, b) in [(not_ready(), dying(true)), (dying(true), not_ready())] {
        for bench in in_both_orders([
            slice("a", "s", a.clone(), port("http", 8080)),
            slice("b", "s", b.clone(), port("http", 8080)),
        ]) {
            assert_eq!(served(&bench)[0], [""; 0]);
        }
    }
    // Of two terminating entries, the entry in the first slice by name counts.
    for (a, b, wanted) in [(dying(true), dying(false), 1), (dying(false), dying(true), 0)] {
        for bench in in_both_orders([
            slice("a", "s", a.clone(), port("http", 8080)),
            slice("b", "s", b.clone(), port("http", 8080)),
        ]) {
            assert_eq!(served(&bench)[0].len(), wanted);
        }
    }
}

// rows: 10
#[test]
fn within_a_slice_the_last_entry_of_an_address_counts_unless_it_is_terminating() {
    let ready = || endpoint("10.1.0.1", true, true, false);
    let not_ready = || endpoint("10.1.0.1", false, false, false);
    let dying = || endpoint("10.1.0.1", false, true, true);
    for (entries, wanted) in [
        (json!([not_ready(), ready()]), 1),
        (json!([ready(), not_ready()]), 0),
        (json!([ready(), dying()]), 1),
        (json!([dying(), not_ready(), ready(), dying()]), 1),
    ] {
        let bench = Bench::with(&[two_ports(), slice("a", "s", entries, port("http", 8080))]);
        assert_eq!(served(&bench)[0].len(), wanted);
    }
}

// rows: 9, 10
#[test]
fn node_and_hints_of_a_port_come_from_the_slice_that_lists_the_port() {
    let on = |node: &str, zone: &str| json!([{"addresses": ["10.1.0.1"], "nodeName": node, "hints": {"forZones": [{"name": zone}]}}]);
    let a = slice("a", "s", on("node-1", "z1"), port("http", 8080));
    let b = slice("b", "s", on("node-2", "z2"), port("metrics", 9090));
    for bench in in_both_orders([a, b]) {
        let local: Vec<usize> = views(&bench).iter().map(|view| view.local_endpoints.len()).collect();
        assert_eq!(local, [1, 0]);
        let (key, z2) = (Arc::new(ServiceKey::new("x", "s")), Some(Arc::from("z2")));
        let facts = NodeFacts { zone: z2, ..NodeFacts::named("node-3") };
        let views = service_views(&bench.state, &key, Family::V4, &facts);
        // The only endpoint of a port is used even without a hint for the zone.
        assert!(views.iter().all(|view| view.cluster_endpoints.len() == 1));
    }
}
