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
    let mut bench = Bench::with(&[service("s", json!({}))]);
    bench.apply(&service("s", json!({"externalIPs": large(50_000)})));
    let changes = bench.flush();
    assert_eq!(changes.len(), 1);
    assert!(bytes(&changes[0].change) < MAX_SERVER_MESSAGE_BYTES / 2);
    for field in ["externalIPs", "loadBalancerSourceRanges"] {
        let many = if field == "externalIPs" {
            large(120_000)
        } else {
            Value::Array((0..120_000).map(|n| format!("fd00:{:x}:{:x}::/64", n >> 16, n & 0xffff).into()).collect())
        };
        bench.apply(&service("s", json!({ field: many })));
        assert!(bench.problems()[0].contains("bytes on the wire"));
        assert!(bench.flush().is_empty(), "the last good version stays");
    }
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
