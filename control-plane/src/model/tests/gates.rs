//! Pods that lack only the readiness gate of Headgate.

use headgate_core::Conditions;

use super::*;
use crate::objects::{GATE, PodId};

const WAITING: &[(&str, &str, &str)] = &[("ContainersReady", "True", ""), ("Ready", "False", "ReadinessGatesNotReady")];
const PROGRAMMED: &[(&str, &str, &str)] =
    &[("ContainersReady", "True", ""), (GATE, "True", ""), ("Ready", "False", "ReadinessGatesNotReady")];
const READY: &[(&str, &str, &str)] = &[("ContainersReady", "True", ""), (GATE, "True", ""), ("Ready", "True", "")];
const FAILED: &[(&str, &str, &str)] = &[("ContainersReady", "False", ""), ("Ready", "False", "ContainersNotReady")];

fn bench() -> Bench {
    Bench::new(ModelSettings { reads_pods: true, ..ModelSettings::default() })
}

fn put(bench: &mut Bench, uid: &str, conditions: &[(&str, &str, &str)]) {
    let condition =
        |(name, status, reason): &(&str, &str, &str)| json!({"type": name, "status": status, "reason": reason});
    let conditions: Vec<Value> = conditions.iter().map(condition).collect();
    let pod = json!({
        "metadata": {"namespace": "x", "name": "web-1", "uid": uid},
        "spec": {"readinessGates": [{"conditionType": GATE}]},
        "status": {"conditions": conditions},
    });
    let pod = Object::deserialize(ObjectKind::Pod, pod).unwrap();
    bench.model.event(Event::Apply(Box::new(pod)), "");
}

/// An endpoint of the pod `web-1`. `is_ready` is the value of `ready` and `serving`.
fn of_pod(address: &str, uid: &str, is_ready: bool) -> Value {
    json!({"addresses": [address], "targetRef": {"kind": "Pod", "name": "web-1", "uid": uid},
        "conditions": {"ready": is_ready, "serving": is_ready, "terminating": false}})
}

/// A model whose endpoint is ready because its pod waits.
fn waiting_bench() -> Bench {
    let mut bench = bench();
    put_slice(&mut bench, "u1", false);
    put(&mut bench, "u1", WAITING);
    assert!(is_ready(&mut bench, "s"));
    bench
}

fn put_slice(bench: &mut Bench, uid: &str, is_ready: bool) {
    bench.apply(&slice("s-1", "s", json!([of_pod("10.1.0.1", uid, is_ready)]), http(80)));
}

/// Whether the endpoint 10.1.0.1 of a Service is ready.
fn is_ready(bench: &mut Bench, name: &str) -> bool {
    bench.flush();
    let entry = bench.state.entry(&ServiceKey::new("x", name)).unwrap();
    let conditions = entry.endpoints().get(&"10.1.0.1".parse().unwrap()).unwrap().conditions;
    assert!(conditions.ready == conditions.serving && !conditions.terminating, "{conditions:?}");
    conditions.ready
}

fn waiting(bench: &mut Bench) -> Vec<Option<String>> {
    bench.flush();
    bench.gates.drain(..).map(|change| change.waiting.map(|names| format!("{names} {}", names.uid))).collect()
}

#[test]
fn a_pod_that_waits_is_ready_and_the_steps_that_follow_change_nothing() {
    for is_pod_first in [true, false] {
        let mut bench = bench();
        put_slice(&mut bench, "u1", false);
        assert!(!is_ready(&mut bench, "s"));
        if is_pod_first {
            bench.delete(ObjectKind::EndpointSlice, "x", "s-1");
            bench.flush();
        }
        put(&mut bench, "u1", WAITING);
        put_slice(&mut bench, "u1", false);
        assert!(is_ready(&mut bench, "s"));
        assert_eq!(waiting(&mut bench), [Some("x/web-1 u1".to_owned())]);
        put(&mut bench, "u1", PROGRAMMED);
        assert_eq!((bench.flush(), waiting(&mut bench)), (Vec::new(), vec![None]));
        put(&mut bench, "u1", READY);
        assert_eq!(bench.flush(), []);
        put_slice(&mut bench, "u1", true);
        assert_eq!(bench.flush(), []);
        // The pod is not held any more.
        put_slice(&mut bench, "u1", false);
        assert!(!is_ready(&mut bench, "s"));
        put(&mut bench, "u1", READY);
        assert_eq!((bench.flush(), waiting(&mut bench)), (Vec::new(), Vec::new()));
        assert!(bench.model.endpoints.gates.keys().next().is_none());
    }
}

#[test]
fn a_slice_may_be_faster_than_the_pod() {
    let mut bench = waiting_bench();
    put_slice(&mut bench, "u1", true);
    assert_eq!(bench.flush(), []);
    put(&mut bench, "u1", READY);
    assert_eq!((bench.flush(), waiting(&mut bench).pop()), (Vec::new(), Some(None)));
    // A watch of pods that hangs does not keep an endpoint that stops to serve.
    put(&mut bench, "u1", WAITING);
    put_slice(&mut bench, "u1", false);
    assert!(!is_ready(&mut bench, "s"));
}

#[test]
fn a_pod_that_fails_or_goes_or_another_pod_is_not_ready() {
    for step in ["fails", "goes", "another", "lost"] {
        let mut bench = waiting_bench();
        match step {
            "fails" => put(&mut bench, "u1", FAILED),
            "goes" => bench.delete(ObjectKind::Pod, "x", "web-1"),
            "another" => put(&mut bench, "u2", WAITING),
            _ => put(&mut bench, "u1", &[("ContainersReady", "True", ""), (GATE, "True", ""), ("Ready", "False", "")]),
        }
        assert!(!is_ready(&mut bench, "s"), "{step}");
        assert!(waiting(&mut bench).contains(&None), "{step}");
    }
}

/// The drain barrier asks for the pod whose entry nodes use.
#[test]
fn the_pod_of_an_address_is_the_held_one_if_its_entry_counts() {
    let mut bench = bench();
    put_slice(&mut bench, "u1", false);
    let mut serving = of_pod("10.1.0.1", "u2", false);
    serving["conditions"]["serving"] = json!(true);
    bench.apply(&slice("s-2", "s", json!([serving]), http(80)));
    let pod = |bench: &mut Bench| {
        bench.flush();
        bench.pods.pop().unwrap().pod.unwrap().0
    };
    assert_eq!(pod(&mut bench), PodId::new("u2", "web-1").in_namespace("x"));
    put(&mut bench, "u1", WAITING);
    assert!(is_ready(&mut bench, "s"));
    assert_eq!(pod(&mut bench), PodId::new("u1", "web-1").in_namespace("x"));
}

/// The pod of an address that several slices list is the pod whose entry counts, also after only
/// conditions have changed.
// rows: 10
#[test]
fn the_pod_of_an_address_is_the_one_whose_entry_counts() {
    let mut bench = bench();
    let put = |bench: &mut Bench, slice_name: &str, uid: &str, is_ready: bool| {
        bench.apply(&slice(slice_name, "s", json!([of_pod("10.1.0.1", uid, is_ready)]), http(80)));
    };
    let pods = |bench: &mut Bench| {
        bench.flush();
        bench.pods.drain(..).filter_map(|change| change.pod).map(|(pod, _)| pod).collect::<Vec<_>>()
    };
    let id = |uid: &str| PodId::new(uid, "web-1").in_namespace("x");
    put(&mut bench, "a", "u1", true);
    put(&mut bench, "b", "u2", false);
    assert_eq!(pods(&mut bench).last(), Some(&id("u1")));
    put(&mut bench, "a", "u1", false);
    put(&mut bench, "b", "u2", true);
    assert_eq!(pods(&mut bench), [id("u2")]);
}

#[test]
fn terminating_endpoints_and_endpoints_without_a_pod_are_used_as_written() {
    let mut bench = bench();
    put(&mut bench, "u1", WAITING);
    let mut terminating = of_pod("10.1.0.1", "u1", false);
    terminating["conditions"]["terminating"] = json!(true);
    let mut unnamed = of_pod("10.1.0.2", "", false);
    unnamed["targetRef"]["uid"] = Value::Null;
    // With publishNotReadyAddresses.
    let mut published = of_pod("10.1.0.3", "u1", false);
    published["conditions"]["ready"] = json!(true);
    bench.apply(&slice("s-1", "s", json!([terminating, unnamed, published]), http(80)));
    bench.flush();
    let entry = bench.state.entry(&ServiceKey::new("x", "s")).unwrap();
    let found: Vec<Conditions> = entry.endpoints().values().map(|endpoint| endpoint.conditions).collect();
    let conditions = |ready, terminating| Conditions { ready, serving: false, terminating };
    assert_eq!(found, [conditions(false, true), conditions(false, false), conditions(true, false)]);
}

#[test]
fn all_services_and_ports_of_a_pod_change_together_and_nothing_else_is_visited() {
    let mut bench = bench();
    let other = |host: u8| json!({"addresses": [format!("10.2.0.{host}")]});
    let mut many: Vec<Value> = (1..=200).map(other).collect();
    many.push(of_pod("10.1.0.1", "u1", false));
    bench.apply(&slice("s-1", "s", json!(many), http(80)));
    bench.apply(&slice("s-2", "s", json!([of_pod("10.1.0.1", "u1", false)]), json!([{"name": "more", "port": 90}])));
    bench.apply(&slice("t-1", "t", json!([of_pod("10.1.0.1", "u1", false)]), http(80)));
    bench.flush();
    // Each of the three endpoints is looked up before and after, those of s in two slices.
    let before = bench.model.endpoints.visits();
    put(&mut bench, "u1", WAITING);
    assert_eq!(bench.model.endpoints.visits() - before, 10);
    assert!(is_ready(&mut bench, "s") && is_ready(&mut bench, "t"));
    let entry = bench.state.entry(&ServiceKey::new("x", "s")).unwrap();
    let endpoint = entry.endpoints().get(&"10.1.0.1".parse().unwrap()).unwrap();
    assert_eq!(endpoint.port_states().filter(|state| state.conditions.ready).count(), 2);
    // Service t follows later.
    put(&mut bench, "u1", READY);
    bench.apply(&slice("s-2", "s", json!([of_pod("10.1.0.1", "u1", true)]), json!([{"name": "more", "port": 90}])));
    assert_eq!(bench.flush(), []);
    assert!(bench.model.take_problems().unwrap_or_default().is_empty());
}
