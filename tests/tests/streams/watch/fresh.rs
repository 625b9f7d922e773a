//! When a source is fresh (discovery.proto, sections 9 and 14). The times of a cycle are checked by
//! the unit tests of the plan, with a simulated clock. These tests use cycles of a second.

use super::*;

const CYCLE: Duration = Duration::from_secs(1);

async fn synced(server: &ApiServer) -> Watching {
    let watching = Watching::start_with(&server.kubeconfig(), CYCLE);
    watching.until("everything is listed", |c| c.synced == 1).await;
    watching.agrees_with(server).await;
    watching
}

/// The queries of the lists of Services so far: the small lists, and the others.
fn lists(server: &ApiServer) -> (usize, usize) {
    let recorded = server.recorded();
    let lists = recorded.iter().filter(|request| request.verb == Verb::List && request.kind == Some(Kind::Service));
    let (small, full): (Vec<_>, Vec<_>) =
        lists.partition(|request| request.query.contains("limit=1&") || request.query.ends_with("limit=1"));
    (small.len(), full.len())
}

/// No kind changes, and the server sends no bookmarks. The versions of small lists show that the
/// kinds are current.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_cluster_without_bookmarks_is_followed_without_lists() {
    let server = server(Options { bookmarks: false, ..Options::default() });
    let watching = synced(&server).await;
    let heard = watching.sink.look(|c| c.heard[&SourceKind::ServiceCidrs]);
    server.wait_until("the server was asked in five cycles", |server| lists(server).0 >= 5).await.unwrap();
    watching
        .until("each cycle shows that the kind is current", |c| c.heard[&SourceKind::ServiceCidrs] >= heard + 4)
        .await;
    assert_eq!(lists(&server).1, 0, "a quiet kind was listed");
    watching.follows(&server, 1).await;
    watching.sink.look(|c| assert!(c.cut_offs.is_empty() && c.errors.is_empty(), "{:?} {:?}", c.cut_offs, c.errors));
}

/// Only slices change, so the version of the server moves on, and no bookmark shows that the watch
/// of Services has reached it. Lists show it instead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_kind_without_bookmarks_is_listed_and_not_cut_off() {
    let server = server(Options { bookmarks: false, ..Options::default() });
    let watching = synced(&server).await;
    let mut mark = 0_u8;
    let are_listed = |server: &ApiServer| {
        mark = mark.wrapping_add(1);
        server.apply(web_slice(&[&format!("10.1.3.{mark}")])).unwrap();
        lists(server).1 >= 3
    };
    server.wait_until("Services are listed in three cycles", are_listed).await.unwrap();
    watching.follows(&server, 1).await;
    watching.sink.look(|c| assert!(c.cut_offs.is_empty() && c.errors.is_empty(), "{:?} {:?}", c.cut_offs, c.errors));
}

/// The watches of one kind bring nothing: the watch cache of the server is stuck, or a proxy keeps
/// dead connections open. Watches of other kinds work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_brings_nothing_cuts_the_source_off() {
    for are_dead in [false, true] {
        let server = server(Options::default());
        let watching = synced(&server).await;
        if are_dead {
            server.freeze(Kind::EndpointSlice);
        } else {
            server.block(Kind::EndpointSlice);
        }
        let mut mark = 0_u8;
        let mut change = || {
            mark = mark.wrapping_add(1);
            server.apply(web_slice(&["10.1.0.1", &format!("10.1.4.{mark}")])).unwrap();
        };
        let is_cut_off = |c: &sink::Collected| {
            change();
            c.cut_off.as_ref().is_some_and(|why| why.contains("EndpointSlice"))
        };
        watching.until("the source is cut off", is_cut_off).await;
        // Lists bring the changes, but do not end the cut-off.
        change();
        watching.agrees_with(&server).await;
        let listed = server.requests(Verb::List, Some(Kind::EndpointSlice));
        server
            .wait_until("cycles pass", |server| server.requests(Verb::List, Some(Kind::EndpointSlice)) > listed + 3)
            .await
            .unwrap();
        watching.sink.look(|c| {
            let is_counted = c.errors.contains_key(&(SourceKind::EndpointSlices, "timeout"));
            assert!(c.cut_off.is_some() && is_counted == are_dead, "{:?}", c.errors);
        });
        server.release(Kind::EndpointSlice);
        change();
        watching.until("the watch brings something", |c| c.cut_off.is_none()).await;
        watching.follows(&server, 1).await;
        watching.sink.look(|c| assert_eq!(c.cut_offs.len(), 1, "{:?}", c.cut_offs));
    }
}

/// Each watch of a kind breaks at the same version, so only a list can bring the next change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_breaks_at_the_same_version_again_is_listed() {
    let decode = failure(500, "InternalError", "unable to decode an event from the watch stream").body;
    let error_event = format!("{}\n", json!({"type": "ERROR", "object": decode}));
    for answer in ["{\"type\":\"ADDED\",\"object\":{}}\n", &error_event] {
        let server = server(Options::default());
        let watching = Watching::synced(&server).await;
        let fault = RequestFault::Garbage(answer.to_owned().into());
        server.fail_all(RequestFilter::verb_of(Verb::Watch, Kind::Service), fault);
        server.order(Some(Kind::Service), &Order::Close);
        watching.follows(&server, 1).await;
        assert_eq!(watching.removed(), [""; 0]);
    }
}
