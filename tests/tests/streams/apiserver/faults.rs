//! Every fault, and that kube-rs's watcher ends in the right state after it.

use std::time::Duration;

use headgate_tests::apiserver::{
    ApiServer, Cut, Kind, RequestFault, RequestFilter, Restart, Verb, failure, objects::node,
};
use k8s_openapi::api::core::v1::Node;

use super::follower::{Follower, follow};

/// A server with one node, and a watcher that has listed it and watches.
async fn watching() -> (ApiServer, Follower<Node>) {
    let server = ApiServer::start().unwrap();
    server.apply(node("a").build()).unwrap();
    let mut nodes = follow::<Node>(&server).await;
    nodes.until_listed().await;
    nodes.poll_until("it watches", &server, |server| server.open_watches(Some(Kind::Node)) == 1).await;
    (server, nodes)
}

async fn until_watches_again(nodes: &mut Follower<Node>, server: &ApiServer, watches: u64) {
    let again = |server: &ApiServer| server.requests(Verb::Watch, None) >= watches && server.open_watches(None) == 1;
    nodes.poll_until("it watches again", server, again).await;
}

#[tokio::test]
async fn gone_in_mid_watch_leads_to_a_new_list() {
    let (server, mut nodes) = watching().await;
    server.block(Kind::Node);
    server.delete(Kind::Node, "", "a").unwrap();
    server.apply(node("b").build()).unwrap();
    server.compact();
    assert_eq!(server.expire_watches(None), 1);
    nodes.until("it listed again", |nodes| nodes.lists == 2).await;
    assert_eq!(nodes.names(), ["b"]);
    assert_eq!(nodes.api_error_codes(), [410]);
    server.release(Kind::Node);
    server.apply(node("c").build()).unwrap();
    nodes.until_names(&["b", "c"]).await;
}

#[tokio::test]
async fn a_compacted_version_is_gone_when_the_watch_resumes() {
    let (server, mut nodes) = watching().await;
    server.block(Kind::Node);
    server.delete(Kind::Node, "", "a").unwrap();
    server.compact();
    server.drop_watches(None);
    nodes.until("it listed again", |nodes| nodes.lists == 2).await;
    assert!(nodes.names().is_empty());
    assert_eq!(nodes.api_error_codes(), [410]);
}

#[tokio::test]
async fn dropped_watches_resume_without_loss() {
    let (server, mut nodes) = watching().await;
    for turn in 0..5_u64 {
        server.drop_watches(Some(Kind::Node));
        server.apply(node(&format!("n{turn}")).build()).unwrap();
        nodes.until("the change came", |nodes| nodes.state.len() as u64 == turn + 2).await;
        until_watches_again(&mut nodes, &server, turn + 2).await;
    }
    assert_eq!((nodes.lists, nodes.errors.len()), (1, 0));
}

#[tokio::test]
async fn cuts_in_mid_object_lose_nothing() {
    let (server, mut nodes) = watching().await;
    let mut watches = 1;
    for how in [Cut::Close, Cut::Reset] {
        server.cut_watches(None, how);
        watches += 1;
        until_watches_again(&mut nodes, &server, watches).await;
        assert_eq!(server.cut_watches_on_next_event(None, how), 1);
        server.apply(node(&format!("{how:?}").to_lowercase()).build()).unwrap();
        watches += 1;
        nodes.until("the cut event came whole", |nodes| nodes.applied as u64 == (watches - 1) / 2).await;
        until_watches_again(&mut nodes, &server, watches).await;
    }
    assert_eq!(nodes.names(), ["a", "close", "reset"]);
    assert_eq!((nodes.lists, nodes.deleted), (1, 0));
    assert_eq!(server.requests(Verb::Watch, None), watches);
}

#[tokio::test]
async fn garbage_is_an_error_and_nothing_else() {
    let (server, mut nodes) = watching().await;
    server.send_garbage(None, "\u{1}\u{2} not JSON\n");
    server.send_garbage(None, "{\"type\":\"ADDED\",\"object\":{\"metadata\":7}}\n");
    server.send_garbage(None, &b"\xff\xfe\n"[..]);
    server.apply(node("b").build()).unwrap();
    nodes.until_names(&["a", "b"]).await;
    assert!(nodes.errors.len() >= 2, "{:?}", nodes.errors);
    assert_eq!(nodes.lists, 1);
}

#[tokio::test]
async fn error_events_carry_any_status() {
    let (server, mut nodes) = watching().await;
    server.send_error_event(None, failure(500, "InternalError", "etcdserver: leader changed").body);
    server.apply(node("b").build()).unwrap();
    nodes.until_names(&["a", "b"]).await;
    assert_eq!(nodes.api_error_codes(), [500]);
    assert_eq!(nodes.lists, 1);
}

#[tokio::test]
async fn failing_requests_are_counted_down() {
    let server = ApiServer::start().unwrap();
    server.apply(node("a").build()).unwrap();
    for code in [500, 429, 503] {
        let fault = RequestFault::Status { code, retry_after_seconds: None };
        server.fail_next(2, RequestFilter::verb_of(Verb::List, Kind::Node), fault);
    }
    server.fail_next(1, RequestFilter::verb(Verb::List), RequestFault::Cut(Cut::Close));
    server.fail_next(1, RequestFilter::verb(Verb::List), RequestFault::Cut(Cut::Reset));
    server.fail_next(1, RequestFilter::verb(Verb::List), RequestFault::Garbage("<html>".into()));
    server.fail_next(
        2,
        RequestFilter::verb(Verb::Watch),
        RequestFault::Status { code: 503, retry_after_seconds: None },
    );
    let mut nodes = follow::<Node>(&server).await;
    nodes.until_names(&["a"]).await;
    // kube retries some codes and connections by itself: what it reports are those that the server gave.
    let reported = nodes.api_error_codes();
    assert!(reported.iter().all(|code| [500, 429, 503].contains(code)), "{reported:?}");
    let answered: Vec<_> = server.recorded().into_iter().filter_map(|request| request.answered).collect();
    assert_eq!(answered[..6], [500, 500, 429, 429, 503, 503]);
    server.apply(node("b").build()).unwrap();
    nodes.until_names(&["a", "b"]).await;
    assert_eq!(nodes.lists, 1);
}

#[tokio::test]
async fn retry_after_is_sent_as_a_header_and_in_the_status() {
    let server = ApiServer::start().unwrap();
    server.fail_next(1, RequestFilter::all(), RequestFault::Status { code: 429, retry_after_seconds: Some(7) });
    let refused = super::plain_http::get(&server, "/api/v1/nodes");
    assert_eq!((refused.code, &refused.body["details"]["retryAfterSeconds"]), (429, &7.into()));
    assert!(refused.head.to_lowercase().contains("\r\nretry-after: 7"), "{}", refused.head);
    assert_eq!(super::plain_http::get(&server, "/api/v1/nodes").code, 200);
}

#[tokio::test]
async fn a_stalled_request_is_accepted_and_waits() {
    let server = ApiServer::start().unwrap();
    server.apply(node("a").build()).unwrap();
    server.fail_all(RequestFilter::verb(Verb::List), RequestFault::Stall);
    let mut nodes = follow::<Node>(&server).await;
    nodes.poll_until("the list is taken", &server, |server| server.requests(Verb::List, None) == 1).await;
    assert_eq!(server.recorded()[0].answered, None);
    server.clear_faults();
    nodes.until_names(&["a"]).await;
    assert_eq!((nodes.errors.len(), server.requests(Verb::List, None)), (0, 1));
}

#[tokio::test]
async fn a_blocked_kind_is_held_back_while_others_go_on() {
    let (server, mut nodes) = watching().await;
    server.block(Kind::Node);
    server.apply(node("b").build()).unwrap();
    server.send_bookmarks(None);
    let mut cidrs = follow::<k8s_openapi::api::networking::v1::ServiceCIDR>(&server).await;
    cidrs.until_listed().await;
    server.apply(headgate_tests::apiserver::objects::service_cidr("x", &["10.0.0.0/8"]).build()).unwrap();
    cidrs.until_names(&["x"]).await;
    assert!(
        tokio::time::timeout(Duration::from_millis(100), nodes.until("anything comes", |nodes| nodes.applied > 0))
            .await
            .is_err()
    );
    server.release(Kind::Node);
    nodes.until_names(&["a", "b"]).await;
}

#[tokio::test]
async fn a_stopped_server_refuses_and_a_restarted_one_goes_on() {
    let (server, mut nodes) = watching().await;
    server.stop();
    let refused = std::net::TcpStream::connect(server.address()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(server.open_watches(None), 0);
    server.apply(node("b").build()).unwrap();
    nodes.until("it noticed", |nodes| !nodes.errors.is_empty()).await;
    server.restart(&Restart::KeepHistory).unwrap();
    nodes.until_names(&["a", "b"]).await;
    assert_eq!(nodes.lists, 1);
}

#[tokio::test]
async fn history_lost_in_a_restart_leads_to_a_new_list() {
    for restart in [Restart::LoseHistory, Restart::RaiseVersions(1_000)] {
        let (server, mut nodes) = watching().await;
        server.stop();
        server.delete(Kind::Node, "", "a").unwrap();
        server.apply(node("b").build()).unwrap();
        let version = server.version();
        server.restart(&restart).unwrap();
        nodes.until("it listed again", |nodes| nodes.lists == 2).await;
        assert_eq!(nodes.names(), ["b"], "{restart:?}");
        assert!(nodes.api_error_codes().contains(&410), "{restart:?}");
        server.apply(node("c").build()).unwrap();
        nodes.until_names(&["b", "c"]).await;
        let rise = if matches!(restart, Restart::RaiseVersions(_)) { 1_001 } else { 1 };
        assert_eq!(server.version(), version + rise);
    }
}

#[tokio::test]
async fn versions_go_back_with_a_restored_backup() {
    let (server, mut nodes) = watching().await;
    let backup = server.backup();
    for turn in 0..5 {
        server.apply(node("b").label("turn", &turn.to_string()).build()).unwrap();
    }
    nodes.until("the last change came", |nodes| nodes.label("b", "turn") == Some("4")).await;
    server.restart(&Restart::RestoreBackup(backup.clone())).unwrap();
    assert_eq!(server.version(), backup.version());
    assert_eq!(server.list(Kind::Node).len(), 1);
    // As with a real server, a watch from a version of the lost future is taken, and hears nothing of what is
    // written until the counter has passed that version.
    until_watches_again(&mut nodes, &server, 2).await;
    server.apply(node("c").build()).unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(100), nodes.until_names(&["c"])).await.is_err());
    server.compact();
    server.expire_watches(None);
    nodes.until_names(&["a", "c"]).await;
}

/// Random writes with random faults among them: whatever happens, the watcher ends with what the server has.
#[tokio::test]
async fn after_any_faults_the_state_is_the_servers() {
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
            let waited = nodes.until("nothing: it only follows for a moment", |_| false);
            assert!(tokio::time::timeout(Duration::from_millis(random.u64(..4)), waited).await.is_err());
        }
    }
    server.clear_faults();
    server.apply(node("last").build()).unwrap();
    nodes.until("the last came", |nodes| nodes.state.contains_key("last")).await;
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
