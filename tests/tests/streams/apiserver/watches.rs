//! Watches when all goes well: changes, selectors, bookmarks, resuming.

use std::time::Duration;

use headgate_tests::apiserver::{
    ApiServer, Kind, Options, Verb,
    objects::{node, service},
};
use k8s_openapi::api::core::v1::{Node, Service};
use kube::runtime::watcher;

use super::{
    follower::{follow, follow_with},
    plain_http::watch_lines,
};

#[tokio::test]
async fn changes_and_deletes_arrive_in_order() {
    let server = ApiServer::start().unwrap();
    server.apply(node("a").build()).unwrap();
    let mut nodes = follow::<Node>(&server).await;
    nodes.until_listed().await;
    server.apply(node("b").build()).unwrap();
    server.apply(node("b").label("turn", "2").build()).unwrap();
    server.delete(Kind::Node, "", "a").unwrap();
    server.apply(node("b").label("turn", "3").build()).unwrap();
    nodes.until("the last change came", |nodes| nodes.label("b", "turn") == Some("3")).await;
    assert_eq!((nodes.applied, nodes.deleted, nodes.lists), (3, 1, 1));
    assert_eq!(nodes.names(), ["b"]);
    assert_eq!(nodes.state["b"].metadata.resource_version, Some(server.version().to_string()));
}

#[tokio::test]
async fn objects_that_stop_matching_are_deleted_and_those_that_start_are_added() {
    let server = ApiServer::start().unwrap();
    server.apply(service("shop", "web").cluster_ip("10.96.0.1").build()).unwrap();
    let config =
        watcher::Config::default().labels("!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name");
    let mut services = follow_with::<Service>(&server, config.fields("spec.clusterIP!=None")).await;
    services.until_names(&["web"]).await;
    let foreign =
        service("shop", "web").cluster_ip("10.96.0.1").label("service.kubernetes.io/service-proxy-name", "other");
    server.apply(foreign.clone().build()).unwrap();
    services.until_names(&[]).await;
    // A change of an object that is not selected is no event; the next that is selected proves it.
    server.apply(foreign.label("more", "x").build()).unwrap();
    server.apply(service("shop", "web").cluster_ip("10.96.0.1").build()).unwrap();
    services.until_names(&["web"]).await;
    server.apply(service("shop", "web").cluster_ip("None").build()).unwrap();
    services.until_names(&[]).await;
    assert_eq!((services.applied, services.deleted), (1, 2));
}

#[tokio::test]
async fn deleted_events_carry_the_version_of_the_delete() {
    let server = ApiServer::start().unwrap();
    let from = server.version();
    server.apply(service("shop", "web").label("app", "web").build()).unwrap();
    server.apply(service("shop", "web").label("app", "db").build()).unwrap();
    server.delete(Kind::Service, "shop", "web").unwrap();
    let path = format!("/api/v1/services?watch=1&timeoutSeconds=1&resourceVersion={from}");
    let told = |events: &[serde_json::Value]| {
        let one = |event: &serde_json::Value| {
            format!(
                "{} {} {}",
                event["type"].as_str().unwrap(),
                event["object"]["metadata"]["labels"]["app"].as_str().unwrap(),
                event["object"]["metadata"]["resourceVersion"].as_str().unwrap()
            )
        };
        events.iter().map(one).collect::<Vec<_>>()
    };
    let all = watch_lines(&server, &path);
    assert_eq!(told(&all), ["ADDED web 2", "MODIFIED db 3", "DELETED db 4"]);
    let selected = watch_lines(&server, &format!("{path}&labelSelector=app%3Dweb"));
    assert_eq!(told(&selected), ["ADDED web 2", "DELETED web 3"]);
    assert!(watch_lines(&server, &path.replace("/services", "/namespaces/other/services")).is_empty());
}

#[tokio::test]
async fn a_watch_from_nowhere_begins_with_the_current_state() {
    let server = ApiServer::start().unwrap();
    server.apply(node("a").build()).unwrap();
    server.apply(node("b").build()).unwrap();
    for path in
        ["/api/v1/nodes?watch=true&timeoutSeconds=1", "/api/v1/nodes?watch=true&timeoutSeconds=1&resourceVersion=0"]
    {
        let events = watch_lines(&server, path);
        let kinds: Vec<_> =
            events.iter().map(|event| (event["type"].as_str(), event["object"]["kind"].as_str())).collect();
        assert_eq!(kinds, [(Some("ADDED"), Some("Node")); 2], "{path}");
    }
}

#[tokio::test]
async fn bookmarks_come_periodically_with_the_version_of_other_kinds_writes() {
    let options = Options { bookmark_interval: Duration::from_millis(20), ..Options::default() };
    let server = ApiServer::start_with(options).unwrap();
    server.apply(node("a").build()).unwrap();
    let from = server.version();
    server.apply(service("shop", "web").build()).unwrap();
    let path = format!("/api/v1/nodes?watch=1&timeoutSeconds=1&allowWatchBookmarks=true&resourceVersion={from}");
    let events = watch_lines(&server, &path);
    assert!(events.len() > 1, "one comes at the end; more come before: {events:?}");
    for event in &events {
        assert_eq!((&event["type"], &event["object"]["kind"]), (&"BOOKMARK".into(), &"Node".into()));
        assert_eq!(event["object"]["metadata"]["resourceVersion"], server.version().to_string());
        assert!(event["object"]["metadata"]["annotations"].is_null());
    }
    assert!(watch_lines(&server, &path.replace("allowWatchBookmarks=true&", "")).is_empty());
}

#[tokio::test]
async fn a_bookmark_spares_a_relist_after_compaction() {
    let server = ApiServer::start().unwrap();
    server.apply(node("a").build()).unwrap();
    let mut nodes = follow::<Node>(&server).await;
    nodes.until_listed().await;
    nodes.poll_until("it watches", &server, |server| server.open_watches(Some(Kind::Node)) == 1).await;
    for turn in 0..5 {
        server.apply(service("shop", "web").label("turn", &turn.to_string()).build()).unwrap();
    }
    assert_eq!(server.send_bookmarks(Some(Kind::Node)), 1);
    server.compact();
    server.drop_watches(Some(Kind::Node));
    nodes
        .poll_until("it watches again", &server, |server| {
            server.requests(Verb::Watch, Some(Kind::Node)) == 2 && server.open_watches(Some(Kind::Node)) == 1
        })
        .await;
    server.apply(node("b").build()).unwrap();
    nodes.until_names(&["a", "b"]).await;
    assert_eq!((nodes.lists, nodes.errors.len()), (1, 0));
    let last = server.recorded().pop().unwrap();
    assert!(last.query.ends_with(&format!("resourceVersion={}", server.version() - 1)), "{}", last.query);
}

#[tokio::test]
async fn a_watch_that_times_out_resumes_where_it_was() {
    let server = ApiServer::start().unwrap();
    let mut nodes = follow_with::<Node>(&server, watcher::Config::default().timeout(1)).await;
    nodes.until_listed().await;
    nodes.poll_until("it watched twice", &server, |server| server.requests(Verb::Watch, None) >= 2).await;
    server.apply(node("b").build()).unwrap();
    nodes.until_names(&["b"]).await;
    assert_eq!((nodes.lists, nodes.errors.len()), (1, 0));
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_no_watch_behind() {
    let server = ApiServer::start().unwrap();
    let mut nodes = follow::<Node>(&server).await;
    nodes.until_listed().await;
    nodes.poll_until("it watches", &server, |server| server.open_watches(None) == 1).await;
    drop(nodes);
    server.wait_until("the watch is gone", |server| server.open_watches(None) == 0).await.unwrap();
}
