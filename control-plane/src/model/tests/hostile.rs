//! Hostile objects, which try to break the rules of other services or the streams of all agents.

use headgate_proto::{ChangesBuilder, MAX_SERVER_MESSAGE_BYTES, References};

use super::*;

/// The size of a message that contains only this resource.
fn bytes(change: &Change) -> usize {
    let mut builder = ChangesBuilder::default();
    builder.push(change, 1, References::default());
    builder.estimated_bytes()
}

#[test]
fn a_name_with_the_text_of_a_rule_is_refused() {
    let evil = "x\" -j ACCEPT\n-A INPUT -j DROP";
    let mut bench = Bench::with(&[service("s", json!({}))]);
    let mut elsewhere = service("t", json!({"clusterIP": "10.0.0.3"}));
    elsewhere["metadata"]["namespace"] = evil.into();
    let objects = [
        service(evil, json!({"clusterIP": "10.0.0.2"})),
        elsewhere,
        service("u", json!({"clusterIP": "10.0.0.4", "ports": [{"name": evil, "port": 80}]})),
        slice("a", evil, json!([ready("10.1.0.1")]), http(80)),
        slice("b", "s", json!([ready("10.1.0.2")]), json!([{"name": evil, "port": 80}])),
    ];
    for value in &objects {
        bench.apply(value);
        let problems = bench.problems();
        assert!(problems.iter().any(|problem| problem.contains("is not a valid name")), "{problems:?}");
        assert!(problems.iter().all(|problem| problem.len() < 1_000), "{problems:?}");
    }
    assert!(bench.flush().is_empty(), "these objects are not served");
    assert!(bench.service("s").is_some());
    bench.apply(&slice(
        "c",
        "s",
        json!([{"addresses": ["10.1.0.3"], "nodeName": evil, "zone": evil,
        "hints": {"forZones": [{"name": evil}, {"name": "z"}], "forNodes": [{"name": evil}]}}]),
        http(80),
    ));
    bench.flush();
    assert_eq!(bench.endpoints("s"), ["10.1.0.3:80"], "the endpoint is used without the invalid names");
    let state = bench.state.entry(&ServiceKey::new("x", "s")).unwrap();
    let endpoint = state.endpoints().values().next().unwrap();
    let placement = &endpoint.placement;
    assert_eq!((&placement.node, &placement.zone), (&None, &None));
    assert_eq!(placement.hints.as_ref().unwrap().zones, [Arc::from("z")]);
}

#[test]
fn a_service_that_is_too_large_for_a_message_is_refused() {
    let addresses = |count: u32| (0..count).map(|n| format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255)).collect();
    let large =
        |count: u32| -> Value { Value::Array(Vec::<String>::into_iter(addresses(count)).map(Value::from).collect()) };
    let mut bench = Bench::within(ModelSettings::MAX_SERVICE_BUDGET);
    bench.apply(&service("s", json!({"externalIPs": large(120_000)})));
    assert!(bench.problems()[0].contains("the Service has 120001 frontends"));
    let changes = bench.flush();
    assert!(changes.len() == 1 && bytes(&changes[0].change) < MAX_SERVER_MESSAGE_BYTES / 2);
    assert!(bench.service("s").unwrap().frontend_count() <= Service::MAX_FRONTENDS);
    let ranges = (0..120_000).map(|n| format!("fd00:{:x}:{:x}::/64", n >> 16, n & 0xffff).into());
    bench.apply(&service("s", json!({"loadBalancerSourceRanges": Value::Array(ranges.collect())})));
    assert!(bench.problems()[0].contains("bytes on the wire"));
    assert!(bench.flush().is_empty(), "the last good version stays");
    bench.apply(&service("s", json!({})));
    assert_eq!(bench.flush().len(), 1, "the corrected Service is served");
}

#[test]
fn an_endpoint_never_becomes_larger_than_a_message() {
    let ports = |slice: usize| -> Value {
        let port = |n: usize| json!({"name": format!("{slice}-{n}-{}", "n".repeat(50)), "port": 1 + n});
        Value::Array((0..6_000).map(port).collect())
    };
    let mut bench = Bench::with(&[service("s", json!({}))]);
    for number in 0..4 {
        bench.apply(&slice(&number.to_string(), "s", json!([ready("10.1.0.1")]), ports(number)));
        for change in bench.flush() {
            assert!(bytes(&change.change) < MAX_SERVER_MESSAGE_BYTES / 2 + 1_024);
        }
    }
    assert!(bench.problems().iter().any(|problem| problem.contains("too many ports together")));
    let mut many = ports(0);
    many.as_array_mut().unwrap().extend(ports(1).as_array().unwrap().iter().cloned());
    bench.apply(&slice("z", "s", json!([ready("10.1.0.2")]), many));
    assert!(bench.problems().iter().any(|problem| problem.contains("EndpointSlice x/z ports")));
    let hints: Vec<Value> = (0..10_000).map(|n| json!({"name": format!("zone-{n}")})).collect();
    bench.apply(&slice("y", "s", json!([{"addresses": ["10.1.0.3"], "hints": {"forZones": hints}}]), http(80)));
    let changes = bench.flush();
    assert!(changes.iter().all(|change| bytes(&change.change) < MAX_SERVER_MESSAGE_BYTES / 2 + 1_024));
    assert!(bench.endpoints("s").contains(&"10.1.0.3:80".to_owned()));
}

/// Ten problems of an object are kept, and of the others the number. A change costs one line of the
/// log.
#[test]
fn an_object_with_many_problems_keeps_ten_and_the_number_of_the_others() {
    let addresses = |count: u32| -> Value {
        Value::Array((0..count).map(|n| format!("239.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255).into()).collect())
    };
    let mut weights = slice("w", "s", json!([ready("10.1.0.1")]), http(1));
    weights["metadata"]["annotations"]["headgate.io/weights"] = "x=1,".repeat(60_000).into();
    for many in [service("s", json!({"externalIPs": addresses(60_000)})), weights] {
        let mut bench = Bench::default();
        let new = bench.model.event(Event::Apply(Box::new(object(&many))), "");
        let problems = bench.model.take_problems().unwrap();
        assert_eq!(new, problems.len());
        let all: Vec<&Problem> = problems.iter().filter(|problem| problem.field != "…").collect();
        assert!(all.len() <= MAX_SHOWN && all.iter().all(|problem| problem.message.len() < 1_100), "{problems:?}");
        let last = problems.last().unwrap();
        assert!(last.message.starts_with("59990 more problems are not shown: correct"), "{last:?}");
        let logged = bench.model.take_unlogged_problems();
        assert_eq!(logged.len(), 1, "{logged:?}");
        assert_eq!(bench.model.event(Event::Apply(Box::new(object(&many))), ""), 0);
        assert!(bench.model.take_problems().is_none() && bench.model.take_unlogged_problems().is_empty());
    }
    // One more address changes only the number.
    let mut bench = Bench::with(&[service("s", json!({"externalIPs": addresses(20)}))]);
    assert!(bench.model.take_unlogged_problems()[0].message.ends_with("left out; and 10 more new problems"));
    bench.apply(&service("s", json!({"externalIPs": addresses(21)})));
    assert_eq!(bench.model.take_unlogged_problems().len(), 1);
    // A finding about the object as a whole is shown, whatever precedes it.
    let mut value = service("s", json!({"externalIPs": addresses(20), "sessionAffinity": "?"}));
    bench.apply(&value);
    assert_eq!(bench.problems().iter().filter(|problem| problem.contains("spec.sessionAffinity")).count(), 1);
    assert!(bench.model.invalid().is_some());
    value["spec"]["externalTrafficPolicy"] = "?".repeat(100_000).into();
    bench.apply(&value);
    let problems = bench.problems();
    assert!(problems.iter().any(|problem| problem.contains("externalTrafficPolicy") && problem.len() < 300));
}

/// A Service over its budget keeps its ClusterIP and its NodePorts.
#[test]
fn external_addresses_over_the_budget_are_left_out() {
    let addresses = |of: &str, count: u32| (1..=count).map(|n| format!("{of}.{n}")).collect::<Vec<_>>();
    let ports: Vec<Value> =
        (0..10).map(|n| json!({"name": format!("p{n}"), "port": 80 + n, "nodePort": 30_000 + n})).collect();
    let ingress: Vec<Value> = addresses("203.0.113", 3).into_iter().map(|ip| json!({"ip": ip})).collect();
    let mut value = service(
        "s",
        json!({"type": "LoadBalancer", "ports": ports, "externalIPs": addresses("192.0.2", 200),
            "loadBalancerSourceRanges": ["198.51.100.0/24", "198.51.101.0/24", "2001:db8::/64"]}),
    );
    value["status"] = json!({"loadBalancer": {"ingress": ingress}});
    // 20 frontends of the ClusterIP and the NodePorts, 3 × 20 of the load balancer, 2 × 10 others.
    let mut bench = Bench::within(500);
    bench.apply(&value);
    bench.flush();
    let served = bench.service("s").unwrap();
    assert_eq!((served.load_balancer_ips.len(), served.external_ips.len(), served.frontend_count()), (3, 2, 100));
    let problems = bench.problems();
    assert_eq!(problems.len(), 1);
    let parts = [
        "Service x/s spec.externalIPs the Service has 2080 frontends",
        "may have 100: give fewer addresses, ports or ranges, or raise --service-budget of the control plane",
        "the first 2 of 200 addresses here are used; the others are left out",
    ];
    assert!(parts.iter().all(|part| problems[0].contains(part)), "{problems:?}");
    // The ports alone are over the budget, so this version is not used.
    value["spec"]["ports"] =
        (0..60).map(|n| json!({"name": format!("p{n}"), "port": 80 + n, "nodePort": 30_000 + n})).collect();
    bench.apply(&value);
    assert!(bench.flush().is_empty() && bench.problems()[0].contains("spec.ports 60 ports make 120 frontends"));
    // The default leaves ordinary Services alone.
    let mut bench = Bench::default();
    let ports: Vec<Value> =
        (0..100).map(|n| json!({"name": format!("p{n}"), "port": 80 + n, "nodePort": 30_000 + n})).collect();
    bench
        .apply(&service("s", json!({"type": "LoadBalancer", "ports": ports, "externalIPs": addresses("192.0.2", 50)})));
    assert_eq!((bench.problems(), bench.flush().len()), (Vec::new(), 1));
}

/// The slices that are left out depend only on the present slices: `replay.rs` checks this too.
#[test]
fn slices_over_the_budget_of_a_service_are_left_out() {
    let ports = |count: u32| (0..count).map(|n| json!({"name": format!("p{n}"), "port": 8000 + n})).collect::<Value>();
    let endpoints = |third: u32| (1..=10).map(|n| ready(&format!("10.1.{third}.{n}"))).collect::<Value>();
    let mut bench = Bench::within(100);
    bench.apply(&slice("c", "s", endpoints(3), ports(5)));
    bench.apply(&slice("a", "s", endpoints(1), ports(5)));
    bench.flush();
    assert_eq!((bench.endpoints("s").len(), bench.problems()), (20, Vec::new()));
    // A slice that is alone over the budget takes nothing from the others.
    bench.apply(&slice("b", "s", endpoints(2), ports(11)));
    assert_eq!(bench.flush(), []);
    let problems = bench.problems();
    let parts = [
        "Service x/s endpoints its EndpointSlices have 210 endpoint ports (each address with each port of its slice, or of the Service if it has more)",
        "may have 100: give fewer endpoints or ports, divide the Service, or raise --service-budget of the control plane",
        "1 of the slices, such as EndpointSlice x/b, are left out",
    ];
    assert!(problems.len() == 1 && parts.iter().all(|part| problems[0].contains(part)), "{problems:?}");
    // Now it fits, and is before the slice c.
    bench.apply(&slice("b", "s", endpoints(2), ports(2)));
    bench.flush();
    assert!(bench.endpoints("s").len() == 20 && bench.endpoints("s")[10].starts_with("10.1.2."));
    assert!(bench.problems()[0].contains("EndpointSlice x/c"));
    bench.delete(ObjectKind::EndpointSlice, "x", "a");
    bench.flush();
    assert_eq!((bench.endpoints("s").len(), bench.model.take_problems()), (20, Some(Vec::new())));
    for name in ["b", "c"] {
        bench.delete(ObjectKind::EndpointSlice, "x", name);
    }
    bench.flush();
    assert!(bench.endpoints("s").is_empty() && bench.model.endpoints.is_empty());
    // 5,000 endpoints with ten ports are within the default budget.
    let mut bench = Bench::default();
    for number in 0..50 {
        let endpoints = (0..100).map(|n| ready(&format!("10.2.{number}.{n}"))).collect();
        bench.apply(&slice(&format!("s-{number}"), "s", endpoints, ports(10)));
    }
    assert_eq!((bench.flush().len(), bench.problems()), (5_000, Vec::new()));
}

/// Endpoints without ports and slices without endpoints count too, so the work for an address that
/// many slices list is bounded.
#[test]
fn slices_without_ports_or_endpoints_are_within_the_budget_too() {
    let mut bench = Bench::within(1_000);
    let endpoints = |last: u32| (1..=last).map(|n| ready(&format!("10.1.0.{n}"))).collect::<Value>();
    for number in 0..60 {
        bench.apply(&slice(&format!("a-{number:02}"), "s", endpoints(100), json!([])));
    }
    bench.flush();
    assert!(bench.problems()[0].contains("its EndpointSlices have 6000 endpoint ports"));
    let visits = work(&mut bench, |bench| bench.apply(&slice("a-05", "s", endpoints(100), http(80))));
    assert!((2_000..=6_000).contains(&visits), "ten slices list each of 100 addresses: {visits}");
    for number in 0..60 {
        bench.apply(&slice(&format!("b-{number:02}"), "t", json!([]), http(80)));
    }
    assert_eq!(bench.model.endpoints.counts(&ServiceKey::new("x", "t")), [0, 0]);
    let mut bench = Bench::within(50);
    for number in 0..60 {
        bench.apply(&slice(&format!("b-{number:02}"), "t", json!([]), http(80)));
    }
    assert!(bench.problems()[0].contains("10 of the slices, such as EndpointSlice x/b-50"));
}

/// A Service over its budget costs no more than others, unless the size of a slice changes.
#[test]
fn a_change_of_conditions_of_a_service_over_its_budget_visits_no_other_slice() {
    let mut bench = Bench::within(1_000);
    let endpoint = |number: u32, is_ready: bool| json!([{"addresses": [format!("10.2.{}.{}", number >> 8, number & 255)], "conditions": {"ready": is_ready}}]);
    let many = (0..1_001).map(|n| ready(&format!("10.1.{}.{}", n >> 8, n & 255))).collect::<Value>();
    bench.apply(&slice("a", "s", many, http(80)));
    for number in 0..300 {
        bench.apply(&slice(&format!("b-{number:03}"), "s", endpoint(number, true), http(80)));
    }
    assert_eq!(bench.flush().len(), 300);
    let visits = work(&mut bench, |bench| bench.apply(&slice("b-100", "s", endpoint(100, false), http(80))));
    assert!(visits < 20, "{visits} visits");
    let two = json!([ready("10.3.0.1"), ready("10.3.0.2")]);
    let visits = work(&mut bench, |bench| bench.apply(&slice("b-298", "s", two, http(80))));
    assert!(visits < 60, "only the slices that follow are visited: {visits}");
    bench.delete(ObjectKind::EndpointSlice, "x", "a");
    bench.problems();
    assert_eq!(bench.flush(), []);
}

/// Slices that contradict each other at many addresses.
#[test]
fn the_contradictions_of_slices_are_shown_as_ten_and_a_number() {
    let on = |node: &str, count: u32| {
        (1..=count).map(|n| json!({"addresses": [format!("10.1.0.{n}")], "nodeName": node})).collect::<Value>()
    };
    let mut bench = Bench::with(&[slice("a", "s", on("n1", 200), http(1)), slice("b", "s", on("n2", 200), http(1))]);
    let problems = bench.problems();
    assert!(problems.len() == MAX_SHOWN + 1 && problems[MAX_SHOWN].contains("190 more problems"), "{problems:?}");
    assert_eq!(bench.model.take_unlogged_problems().len(), 1);
    bench.apply(&slice("b", "s", on("n2", 3), http(1)));
    assert_eq!(bench.problems().len(), 3);
    bench.delete(ObjectKind::EndpointSlice, "x", "b");
    assert_eq!(bench.model.take_problems(), Some(Vec::new()));
    assert!(bench.model.conflicts.is_empty());
}

/// Many endpoints may name one pod. A change of each costs the same.
#[test]
fn many_endpoints_of_one_pod_that_waits_cost_no_more_than_others() {
    let uid = "11111111-1111-1111-1111-111111111111";
    let endpoints = (0..20_000).map(|n| {
        json!({"addresses": [format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255)], "conditions": {"ready": false, "serving": false},
            "targetRef": {"kind": "Pod", "name": "web-1", "namespace": "x", "uid": uid}})
    });
    let value = slice("a", "s", endpoints.collect(), http(1));
    let mut bench = Bench::new(ModelSettings { reads_pods: true, ..ModelSettings::default() });
    bench.apply(&value);
    let places = |bench: &Bench| bench.model.endpoints.gates.places(PodId::new(uid, "web-1").in_namespace("x")).count();
    assert_eq!(places(&bench), 20_000);
    bench.delete(ObjectKind::EndpointSlice, "x", "a");
    assert_eq!(places(&bench), 0);
}
