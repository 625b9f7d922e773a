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

/// All conditions of an entry, each with its precedence: ready, then not terminating, then serving.
fn all_conditions() -> Vec<[bool; 3]> {
    (0..8).map(|bits| [bits & 4 != 0, bits & 2 != 0, bits & 1 != 0]).collect()
}

/// Of entries for one address and port, the one with the highest precedence counts, in any order of
/// entries, of slices and of events. Nothing is reported, because two pods on the network of a node
/// may be listed so.
// rows: 10
#[test]
fn of_entries_for_one_port_the_ready_one_counts_in_any_order() {
    let entry = |[ready, lives, serving]: [bool; 3]| endpoint("10.1.0.1", ready, serving, !lives);
    for a in all_conditions() {
        for b in all_conditions() {
            let [ready, lives, serving] = a.max(b);
            let is_served = ready || (!lives && serving);
            let slices = [
                slice("a", "s", json!([entry(a)]), port("http", 8080)),
                slice("b", "s", json!([entry(b)]), port("http", 8080)),
            ];
            let both = slice("a", "s", json!([entry(a), entry(b)]), port("http", 8080));
            let [first, second] = in_both_orders(slices);
            for mut bench in [first, second, Bench::with(&[two_ports(), both])] {
                assert_eq!(!served(&bench)[0].is_empty(), is_served, "{a:?} {b:?}");
                assert_eq!(bench.problems(), [""; 0]);
            }
        }
    }
}

/// The pod of an address that several slices list is the pod whose entry counts, also after only
/// conditions have changed.
// rows: 10
#[test]
fn the_pod_of_an_address_is_the_one_whose_entry_counts() {
    let of_pod = |slice_name: &str, pod: &str, ready: bool| {
        let mut entry = endpoint("10.1.0.1", ready, ready, false);
        entry["targetRef"] = json!({"kind": "Pod", "namespace": "x", "name": pod, "uid": pod});
        slice(slice_name, "s", json!([entry]), port("http", 8080))
    };
    let mut bench = Bench::with(&[two_ports(), of_pod("a", "one", true), of_pod("b", "two", false)]);
    let pods = |bench: &mut Bench| {
        bench.flush();
        bench.pods.drain(..).filter_map(|change| change.pod).map(|(pod, _)| pod).collect::<Vec<_>>()
    };
    let id = |name: &str| PodId::new(name, name).in_namespace("x");
    assert_eq!(pods(&mut bench).last(), Some(&id("one")));
    bench.apply(&of_pod("a", "one", false));
    bench.apply(&of_pod("b", "two", true));
    assert_eq!(pods(&mut bench), [id("two")]);
}

/// Among equal entries, the last one counts, and the first one if they terminate.
// rows: 10
#[test]
fn among_equal_entries_the_order_of_names_decides() {
    let on = |node: &str, terminating: bool| {
        json!([{"addresses": ["10.1.0.1"], "nodeName": node,
            "conditions": {"ready": !terminating, "serving": true, "terminating": terminating}}])
    };
    for (terminating, local) in [(false, 0), (true, 1)] {
        let a = slice("a", "s", on("node-1", terminating), port("http", 8080));
        let b = slice("b", "s", on("node-2", terminating), port("http", 8080));
        for mut bench in in_both_orders([a, b]) {
            assert_eq!(views(&bench)[0].local_endpoints.len(), local);
            assert_eq!(bench.problems().len(), 1);
        }
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
