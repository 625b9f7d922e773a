//! After faults of a server, kube-rs's watcher must hold the server's state again.

use std::time::Duration;

use headgate_tests::apiserver::{ApiServer, Cut, Kind, RequestFault, RequestFilter, Restart, Verb, objects::node};
use k8s_openapi::api::core::v1::Node;

use super::follower::{Follower, follow};

/// A server with one node, and a watcher that has listed the node and has an open watch.
async fn watching() -> (ApiServer, Follower<Node>) {
    let server = ApiServer::start().unwrap();
    server.apply(node("a").build()).unwrap();
    let mut nodes = follow::<Node>(&server).await;
    nodes.until_listed().await;
    nodes.poll_until("the watcher watches", &server, |server| server.open_watches(Some(Kind::Node)) == 1).await;
    (server, nodes)
}

async fn until_watches_again(nodes: &mut Follower<Node>, server: &ApiServer, watches: u64) {
    let again = |server: &ApiServer| server.requests(Verb::Watch, None) >= watches && server.open_watches(None) == 1;
    nodes.poll_until("the watcher watches again", server, again).await;
}

#[tokio::test]
async fn events_of_a_blocked_kind_wait_while_others_are_delivered() {
    let (server, mut nodes) = watching().await;
    server.block(Kind::Node);
    server.apply(node("b").build()).unwrap();
    server.send_bookmarks(None);
    let mut cidrs = follow::<k8s_openapi::api::networking::v1::ServiceCIDR>(&server).await;
    cidrs.until_listed().await;
    server.apply(headgate_tests::apiserver::objects::service_cidr("x", &["10.0.0.0/8"]).build()).unwrap();
    cidrs.until_names(&["x"]).await;
    assert!(
        tokio::time::timeout(Duration::from_millis(100), nodes.until("an event arrives", |nodes| nodes.applied > 0))
            .await
            .is_err()
    );
    server.release(Kind::Node);
    nodes.until_names(&["a", "b"]).await;
}

#[tokio::test]
async fn a_restored_backup_restores_the_version() {
    let (server, mut nodes) = watching().await;
    let backup = server.backup();
    for turn in 0..5 {
        server.apply(node("b").label("turn", &turn.to_string()).build()).unwrap();
    }
    nodes.until("the last change arrives", |nodes| nodes.label("b", "turn") == Some("4")).await;
    server.restart(&Restart::RestoreBackup(backup.clone())).unwrap();
    assert_eq!(server.version(), backup.version());
    assert_eq!(server.list(Kind::Node).len(), 1);
    // Like a real server, the stand-in accepts a watch from a later version, which the restored
    // server has lost. The watch receives no events until the server has reached a version after
    // the lost version.
    until_watches_again(&mut nodes, &server, 2).await;
    server.apply(node("c").build()).unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(100), nodes.until_names(&["c"])).await.is_err());
    server.compact();
    server.expire_watches(None);
    nodes.until_names(&["a", "c"]).await;
}

/// Random writes and random faults. At the end, the watcher has the server's objects.
#[tokio::test]
async fn after_random_faults_the_watcher_has_the_servers_state() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (server, mut nodes) = watching().await;
    for turn in 0..300 {
        let name = format!("n{}", random.u8(..12));
        match random.u8(..16) {
            0 => drop(server.drop_watches(None)),
            1 => drop(server.cut_watches(None, Cut::Close)),
            2 => drop(server.cut_watches_on_next_event(None, Cut::Reset)),
            3 => server.compact(),
            4 => drop(server.expire_watches(None)),
            5 => server
                .restart(
                    &random.choice([Restart::KeepHistory, Restart::LoseHistory, Restart::RaiseVersions(9)]).unwrap(),
                )
                .unwrap(),
            6 => {
                server.fail_next(
                    1,
                    RequestFilter::all(),
                    RequestFault::Status { code: 500, retry_after_seconds: None },
                );
            }
            7 => drop(server.send_bookmarks(None)),
            8..11 if server.get(Kind::Node, "", &name).is_some() => drop(server.delete(Kind::Node, "", &name).unwrap()),
            _ => drop(server.apply(node(&name).label("turn", &turn.to_string()).build()).unwrap()),
        }
        if random.bool() {
            let waited = nodes.until("the timeout", |_| false);
            assert!(tokio::time::timeout(Duration::from_millis(random.u64(..4)), waited).await.is_err());
        }
    }
    server.clear_faults();
    server.apply(node("last").build()).unwrap();
    nodes.until("the last object arrives", |nodes| nodes.state.contains_key("last")).await;
    let expected: Vec<_> = server
        .list(Kind::Node)
        .iter()
        .map(|object| {
            let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
            (text(&object["metadata"]["name"]), text(&object["metadata"]["resourceVersion"]))
        })
        .collect();
    let seen: Vec<_> = nodes
        .state
        .values()
        .map(|object| (object.metadata.name.clone(), object.metadata.resource_version.clone()))
        .collect();
    assert_eq!(seen, expected, "seed {seed}");
}
