//! Tests with an API server that hangs: its connections stay open, and no event arrives. Every
//! program shows the growing age of its data, and forwarding continues.

use std::time::Duration;

use headgate_tests::apiserver::{
    ApiServer, Kind, Options, RequestFault, RequestFilter,
    objects::{endpoint_slice, service},
};
use serde_json::Value;

use super::rig::{Rig, eventually};

fn api() -> ApiServer {
    let api = ApiServer::start_with(Options { bookmark_interval: Duration::from_millis(200), ..Options::default() });
    let api = api.unwrap();
    api.apply(service("shop", "web").cluster_ip("10.96.0.10").port("", "TCP", 80, 8080).build()).unwrap();
    api.apply(slice("10.244.0.1")).unwrap();
    api
}

fn slice(address: &str) -> Value {
    endpoint_slice("shop", "web-1", "web").endpoint(address, "node-a").port("", "TCP", 8080).build()
}

/// The seconds since the last message of the source about a kind, from the replica's health page.
fn heard_ago(rig: &Rig, kind: &str) -> Result<u64, String> {
    let (_, page) = rig.replica_page("/healthz")?;
    let line = page.lines().find_map(|line| {
        line.strip_prefix(kind)?.strip_prefix(": last message from the source ")?.strip_suffix(" s ago")
    });
    line.and_then(|seconds| seconds.parse().ok()).ok_or(page.clone())
}

#[test]
fn every_program_shows_the_age_of_data_from_a_hanging_api_server() {
    let (rig, api) = Rig::watching(api, &["--watch-silence-seconds=1", "--heartbeat-seconds=1"]);
    let _agent = rig.agent(&[]);
    rig.until_programmed();
    rig.until_rule("nat", "10.244.0.1:8080");
    rig.until_metric("headgate_agent_source_age_seconds", |age| age < 2.0);

    api.fail_all(RequestFilter { verb: None, kind: Some(Kind::EndpointSlice) }, RequestFault::Stall);
    api.freeze(Kind::EndpointSlice);
    let age_by_kind = "headgate_source_age_seconds{kind=\"endpoint_slices\"}";
    for age in [4.0, 7.0] {
        rig.until_metric("headgate_agent_source_age_seconds", |seen| seen >= age);
        eventually("the replica's metrics show the age", || {
            let (_, page) = rig.replica_page("/metrics")?;
            let value = |name: &str| page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
            if value(age_by_kind) >= Some(age) { Ok(()) } else { Err(page.clone()) }
        });
    }
    eventually("the agent's status shows the age", || {
        let (_, status) = rig.page("/status")?;
        let agent: Value = serde_json::from_str(&status).map_err(|error| error.to_string())?;
        let is_shown = agent["sourceAgeSeconds"].as_f64() >= Some(7.0) && agent["connected"] == true;
        if is_shown { Ok(()) } else { Err(status) }
    });
    assert!(heard_ago(&rig, "endpoint_slices").unwrap() >= 7);
    eventually("events of other kinds arrive", || {
        heard_ago(&rig, "nodes").and_then(|age| if age < 5 { Ok(()) } else { Err(age.to_string()) })
    });
    let status = rig.headgatectl(&["status"]).unwrap();
    assert!(status.contains("endpoint_slices "), "{status}");
    let rules = rig.rules("iptables-nft-save", "nat");
    assert!(
        rules.iter().any(|rule| rule.contains("10.244.0.1:8080")),
        "the rules do not forward to the last known endpoint: {rules:?}"
    );

    api.apply(slice("10.244.0.2")).unwrap();
    api.clear_faults();
    rig.until_rule("nat", "10.244.0.2:8080");
    rig.until_metric("headgate_agent_source_age_seconds", |age| age < 2.0);
}

/// The HTTP client must not log its own error for each attempt, because the warning of the source
/// contains more information.
#[test]
fn only_the_source_logs_that_an_api_server_refuses_connections() {
    let (rig, api) = Rig::watching(api, &[]);
    eventually("everything is listed", || match rig.control_plane_log() {
        log if log.contains("listed") => Ok(()),
        log => Err(log),
    });
    api.stop();
    let log = eventually("the source warns", || match rig.control_plane_log() {
        log if log.contains("check the address and the network") => Ok(log),
        log => Err(log),
    });
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("ERROR")).collect();
    assert_eq!(errors, [""; 0]);
}
