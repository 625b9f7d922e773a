//! Tests of the source `kubernetes` against a server with every kind of fault, and against a real
//! server if a real server is available.
//!
//! After each fault, the state must equal the server's objects. In the meantime, the source may
//! have removed only objects that the server had deleted.

mod alike;

use std::{sync::Arc, time::Duration};

use headgate_control_plane::{
    model::{Event, Model, Sink, Transaction},
    objects::{Object, ObjectKind, SourceKind},
    source::{self, SourceError, SourceSettings, SourceSpec},
};
use headgate_core::{Dirty, State};
use headgate_tests::apiserver::{
    ApiServer, ApiUnderTest, Cut, Kind, Options, Order, RequestFault, RequestFilter, Restart, Verb, failure,
    objects::{endpoint_slice, node, service, service_cidr},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::sink::{self, CollectingSink};

/// A source that watches a server. Dropping the value stops the source.
struct Watching {
    sink: Arc<CollectingSink>,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), SourceError>>,
    _kubeconfig: TempDir,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Watching {
    fn start(kubeconfig: &str) -> Self {
        Self::start_with(kubeconfig, SourceSettings::DEFAULT_WATCH_SILENCE)
    }

    fn start_with(kubeconfig: &str, watch_silence: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        std::fs::write(&path, kubeconfig).unwrap();
        let (sink, shutdown) = (Arc::new(CollectingSink::default()), CancellationToken::new());
        let dyn_sink = Arc::clone(&sink) as Arc<dyn Sink>;
        let settings = SourceSettings { kubeconfig: Some(path), watch_silence, ..SourceSettings::default() };
        let task = tokio::spawn(source::run(SourceSpec::Kubernetes, settings, dyn_sink, shutdown.clone()));
        Self { sink, shutdown, task, _kubeconfig: folder }
    }

    async fn until(&self, what: &str, condition: impl FnMut(&sink::Collected) -> bool) {
        self.sink.until(what, condition).await;
    }

    async fn synced(server: &ApiServer) -> Self {
        let watching = Self::start(&server.kubeconfig());
        watching.until("everything is listed", |c| c.synced == 1).await;
        watching.agrees_with(server).await;
        server.wait_until("every kind is watched", |server| server.open_watches(None) == 4).await.unwrap();
        watching
    }

    /// Waits until the collected state equals the server's objects.
    async fn agrees_with(&self, server: &ApiServer) {
        let objects: Vec<Value> = Kind::ALL.into_iter().flat_map(|kind| server.list(kind)).collect();
        let (state, nodes) = state_of(&objects);
        let is_same = |c: &sink::Collected| c.state.digests() == state.digests() && c.nodes.len() == nodes;
        self.sink.until("the state equals the server's objects", is_same).await;
    }

    /// Changes each kind once, and waits until the changes have arrived.
    async fn follows(&self, server: &ApiServer, mark: u8) {
        for object in changed_objects(mark) {
            server.apply(object).unwrap();
        }
        self.agrees_with(server).await;
    }

    fn removed(&self) -> Vec<String> {
        self.sink.look(|c| c.removed.clone())
    }

    fn errors(&self, reason: &str) -> u64 {
        self.sink.look(|c| c.errors_for(reason))
    }
}

/// The state that objects produce, and the number of Nodes.
fn state_of(objects: &[Value]) -> (State, usize) {
    let mut model = Model::default();
    for value in objects {
        let kind = ObjectKind::ALL.into_iter().find(|kind| kind.name() == value["kind"]).unwrap();
        model.event(Event::Apply(Box::new(Object::deserialize(kind, value).unwrap())), "");
    }
    let Transaction { changes, nodes, .. } = model.take();
    let mut state = State::default();
    for change in changes {
        state.apply(change.change, &mut Dirty::default());
    }
    (state, nodes.len())
}

fn web(address: &str) -> Value {
    service("shop", "web").cluster_ip(address).port("http", "TCP", 80, 8080).build()
}

fn headless(name: &str) -> Value {
    service("shop", name).cluster_ip("None").port("http", "TCP", 80, 8080).build()
}

fn web_slice(addresses: &[&str]) -> Value {
    let slice = endpoint_slice("shop", "web-1", "web").port("http", "TCP", 8080);
    addresses.iter().fold(slice, |slice, address| slice.endpoint(address, "n1")).build()
}

/// Creates a Service in the namespace `many`.
fn put_service(server: &ApiServer, name: &str, address: &str) {
    server.apply(service("many", name).cluster_ip(address).port("", "TCP", 80, 80).build()).unwrap();
}

fn first_objects() -> Vec<Value> {
    vec![
        web("10.0.0.10"),
        service("shop", "api").cluster_ip("10.0.0.11").port("", "TCP", 443, 8443).build(),
        web_slice(&["10.1.0.1", "10.1.0.2"]),
        endpoint_slice("shop", "web-2", "web").port("http", "TCP", 8080).endpoint("10.1.0.3", "n1").build(),
        node("n1").address("InternalIP", "192.0.2.1").pod_cidr("10.1.0.0/24").build(),
        service_cidr("kubernetes", &["10.0.0.0/16"]).build(),
    ]
}

/// Changed objects of every kind, with values that depend on `mark`. No object is removed. The
/// slice no longer contains the address of the previous mark.
fn changed_objects(mark: u8) -> Vec<Value> {
    vec![
        web(&format!("10.0.1.{mark}")),
        web_slice(&["10.1.0.1", "10.1.0.2", &format!("10.1.2.{mark}")]),
        node("n1").address("InternalIP", &format!("192.0.2.{mark}")).build(),
        service_cidr("kubernetes", &["10.0.0.0/16", &format!("10.{}.0.0/16", 10 + mark)]).build(),
    ]
}

fn server(options: Options) -> ApiServer {
    let server = ApiServer::start_with(options).unwrap();
    for object in first_objects() {
        server.apply(object).unwrap();
    }
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_are_listed_and_watched_with_selectors_that_the_server_applies() {
    let server = server(Options::default());
    server.apply(service("shop", "dns").cluster_ip("None").port("", "TCP", 80, 80).build()).unwrap();
    let watching = Watching::synced(&server).await;
    watching.sink.look(|c| {
        assert_eq!((c.commits, c.state.service_count(), c.state.endpoint_count(), c.nodes.len()), (1, 2, 3, 1));
        assert_eq!(c.positions.len(), 4);
        assert_eq!(c.heard.len(), 4);
    });
    watching.follows(&server, 1).await;
    assert_eq!(watching.removed(), [""; 0]);
    server.delete(Kind::Service, "shop", "api").unwrap();
    server.delete(Kind::EndpointSlice, "shop", "web-2").unwrap();
    server.delete(Kind::Node, "", "n1").unwrap();
    server.delete(Kind::ServiceCidr, "", "kubernetes").unwrap();
    watching.agrees_with(&server).await;
    let mut removed = watching.removed();
    removed.sort();
    assert_eq!(removed, ["Endpoint shop/web 10.1.0.3", "Node n1", "Service shop/api", "ServiceCIDR kubernetes"]);
    assert_eq!(server.requests(Verb::List, None), 0, "the source sent LIST requests to a server with streaming lists");
    let decoded = |query: &str| query.replace("%21", "!").replace("%3D", "=").replace("%2F", "/");
    let queries: Vec<String> = server.recorded().iter().map(|request| decoded(&request.query)).collect();
    let selects = ["!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"];
    assert!(queries.iter().any(|query| selects.iter().all(|part| query.contains(part))), "{queries:?}");
    assert!(queries.iter().any(|query| query.contains("!service.kubernetes.io/headless")), "{queries:?}");
    assert!(watching.sink.look(|c| c.errors.is_empty()));
}
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_that_end_or_break_are_resumed() {
    let server = server(Options::default());
    let watching = Watching::synced(&server).await;
    let initial = server.requests(Verb::Watch, None);
    assert_eq!(server.order(None, &Order::Close), 4);
    watching.follows(&server, 1).await;
    server.wait_until("all watches are open again", |server| server.open_watches(None) == 4).await.unwrap();
    assert_eq!(watching.errors("connection_lost"), 0, "the normal end of a watch counted as an error");
    for (mark, how) in [(2, Cut::Close), (3, Cut::Reset)] {
        assert_eq!(server.order(None, &Order::CutNow(how)), 4);
        watching.follows(&server, mark).await;
        server.wait_until("all watches are open again", |server| server.open_watches(None) == 4).await.unwrap();
    }
    let lost = watching.errors("connection_lost");
    assert_eq!(lost, 8, "expected one error for each cut");
    server.order(None, &Order::CutOnNextEvent(Cut::Close));
    watching.follows(&server, 4).await;
    watching.until("the cuts are counted", |c| c.errors_for("connection_lost") == 12).await;
    server.wait_until("all watches are open again", |server| server.open_watches(None) == 4).await.unwrap();
    assert!(server.requests(Verb::Watch, None) >= initial + 16);
    // In each round, the slice drops one address. Nothing else may be removed.
    let removed = watching.removed();
    assert!(removed.iter().all(|key| key.starts_with("Endpoint shop/web 10.1.2.")), "{removed:?}");
    let relists = server.recorded().iter().filter(|request| request.query.contains("sendInitialEvents")).count();
    assert_eq!(relists, 4, "a kind was listed again");
}

/// With the default settings of etcd, a kind without changes brings no bookmark for many minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_server_is_not_cut_off() {
    let server = server(Options { bookmarks: false, ..Options::default() });
    let watching = Watching::start_with(&server.kubeconfig(), Duration::from_secs(3));
    watching.until("everything is listed", |c| c.synced == 1).await;
    // Each round is a cycle of the watches, in which the server shows that it has nothing new.
    for _ in 0..12 {
        let heard = watching.sink.look(|c| c.heard[&SourceKind::EndpointSlices]);
        watching.until("the kind is current", |c| c.heard[&SourceKind::EndpointSlices] > heard).await;
    }
    watching.sink.look(|c| assert!(c.cut_offs.is_empty(), "{:?}", c.cut_offs));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_is_counted_and_removes_nothing() {
    let server = server(Options::default());
    let watching = Watching::synced(&server).await;
    let lines = [
        "<html>502 Bad Gateway</html>\n",
        "{\"type\":\"ADDED\",\"object\":{}}\n",
        "{\"type\":\"MODIFIED\",\"object\":{\"metadata\":{\"name\":\"web\",\"namespace\":\"shop\"}}}\n",
        "{\"type\":\"SOMETHING\",\"object\":{}}\n",
        "null\n",
        "\u{0}\u{1}\n",
        "{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"\"}}}\n",
    ];
    for (round, line) in lines.iter().enumerate() {
        assert_eq!(server.order(None, &Order::Raw((*line).into())), 4);
        let wanted = 4 * (round as u64 + 1);
        watching.until("the garbage is counted", |c| c.errors_for("malformed_answer") == wanted).await;
        watching.follows(&server, round as u8).await;
        server.wait_until("all watches are open again", |server| server.open_watches(None) == 4).await.unwrap();
    }
    let removed = watching.removed();
    assert!(removed.iter().all(|key| key.starts_with("Endpoint shop/web 10.1.2.")), "{removed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_does_not_decode_does_not_affect_others() {
    let server = server(Options::default());
    let broken =
        service("shop", "broken").cluster_ip("10.0.0.12").field("spec.ports", json!([{"port": "many"}])).build();
    server.apply(broken).unwrap();
    let watching = Watching::start(&server.kubeconfig());
    watching.until("all valid objects are served", |c| c.synced == 1 && c.state.service_count() == 2).await;
    watching.sink.look(|c| {
        let problems = c.problem_texts();
        assert!(
            problems.len() == 1 && problems[0].contains("Service shop/broken | spec.ports[0].port"),
            "{problems:?}"
        );
        assert_eq!(c.errors_for("malformed_object"), 1);
    });
    let mut worse = web("10.0.0.10");
    worse["spec"]["ports"] = json!("none");
    server.apply(worse).unwrap();
    watching.until("the second problem is reported", |c| c.problems.len() == 2).await;
    watching.sink.look(|c| assert!(c.serves("shop", "web") && c.removed.is_empty()));
    server.apply(web("10.0.0.13")).unwrap();
    server.delete(Kind::Service, "shop", "broken").unwrap();
    watching.until("both problems are resolved", |c| c.problems.is_empty()).await;
    watching.agrees_with(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_server_are_retried() {
    let server = server(Options::default());
    server.fail_next(6, RequestFilter::all(), RequestFault::status(500));
    server.fail_next(2, RequestFilter::all(), RequestFault::Cut(Cut::Reset));
    server.fail_next(2, RequestFilter::all(), RequestFault::Garbage("<html>".into()));
    server.fail_next(1, RequestFilter::all(), RequestFault::Status { code: 429, retry_after_seconds: Some(1) });
    let watching = Watching::synced(&server).await;
    assert_eq!((watching.errors("server_error"), watching.errors("throttled")), (6, 1));
    assert!(watching.errors("connection_failed") + watching.errors("connection_lost") >= 2);
    server.fail_next(3, RequestFilter::verb(Verb::Watch), RequestFault::status(503));
    server.order(None, &Order::Close);
    watching.follows(&server, 1).await;
    let unavailable = failure(500, "InternalError", "etcdserver: leader changed").body;
    server.wait_until("all watches are open again", |server| server.open_watches(None) == 4).await.unwrap();
    assert_eq!(server.order(None, &Order::Error(unavailable)), 4);
    watching.follows(&server, 2).await;
    watching.until("each error is counted", |c| c.errors_for("server_error") == 13).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_streaming_lists_is_listed_in_pages() {
    let server = server(Options { streaming_lists: false, ..Options::default() });
    for number in 0..1_200 {
        let (a, b) = (number / 200, number % 200);
        put_service(&server, &format!("s{number}"), &format!("10.3.{a}.{b}"));
    }
    let watching = Watching::synced(&server).await;
    assert_eq!(watching.errors("refused"), 4, "expected one refused streaming list of each kind");
    assert!(server.requests(Verb::List, Some(Kind::Service)) >= 3);
    watching.follows(&server, 1).await;
    // Continue tokens expire between pages, and some requests for pages fail.
    let lists = server.requests(Verb::List, Some(Kind::Service));
    server.fail_next(2, RequestFilter::verb(Verb::List), RequestFault::status(500));
    server.restart(&Restart::LoseHistory).unwrap();
    let wanted = |server: &ApiServer| {
        server.open_watches(None) == 4 && server.requests(Verb::List, Some(Kind::Service)) >= lists + 3
    };
    server.wait_until("every kind is listed again", wanted).await.unwrap();
    watching.follows(&server, 2).await;
    assert_eq!(watching.removed(), ["Endpoint shop/web 10.1.2.1"]);
}

/// Kubernetes 1.28 to 1.30 has no streaming lists and no ServiceCIDRs, and cannot select Services
/// by `spec.clusterIP`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_before_1_31_are_followed() {
    let server = server(Options::before_1_31());
    server.delete(Kind::ServiceCidr, "", "kubernetes").unwrap();
    server.apply(headless("dns")).unwrap();
    let watching = Watching::start(&server.kubeconfig());
    watching.until("everything is listed", |c| c.synced == 1).await;
    watching.agrees_with(&server).await;
    watching.sink.look(|c| {
        assert!(c.serves("shop", "web") && !c.serves("shop", "dns"));
        let refused = |kind| c.errors.get(&(kind, "refused")).copied().unwrap_or_default();
        // The streaming list and the field selector are refused.
        assert_eq!(refused(SourceKind::Services), 2);
        assert_eq!((refused(SourceKind::EndpointSlices), refused(SourceKind::Nodes)), (1, 1));
    });
    for service in [headless("web"), headless("later"), web("10.0.0.10")] {
        server.apply(service).unwrap();
        watching.agrees_with(&server).await;
    }
    assert_eq!(watching.removed(), ["Service shop/web"], "expected one removal of the Service, while it is headless");
    watching.sink.look(|c| assert!(c.problems.is_empty(), "{:?}", c.problems));
}

/// After a reconnect, the watch reaches an older API server, which does not support the field
/// selector.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_at_an_older_server_continues_without_the_field_selector() {
    let server = server(Options::default());
    let watching = Watching::synced(&server).await;
    server.set_options(|options| options.service_field_selectors = false);
    server.order(None, &Order::Close);
    server.apply(headless("dns")).unwrap();
    watching.follows(&server, 1).await;
    server.wait_until("all watches are open again", |server| server.open_watches(None) == 4).await.unwrap();
    watching.sink.look(|c| assert_eq!(c.errors[&(SourceKind::Services, "refused")], 1));
    assert_eq!(watching.removed(), [""; 0]);
    let relists = server.recorded().iter().filter(|request| request.query.contains("sendInitialEvents")).count();
    assert_eq!(relists, 4, "a kind was listed again");
}

/// After any failure of a streaming list, the next request for this kind is a list in pages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_streaming_list_is_followed_by_a_list_in_pages() {
    let status = |code, retry_after_seconds| RequestFault::Status { code, retry_after_seconds };
    let faults = [
        status(500, None),
        status(504, None),
        status(403, None),
        status(429, Some(1)),
        RequestFault::Cut(Cut::Reset),
        RequestFault::Garbage("<html>\n".into()),
        RequestFault::Garbage("".into()),
    ];
    for fault in faults {
        let server = server(Options::default());
        for kind in Kind::ALL {
            server.fail_next(1, RequestFilter::verb_of(Verb::Watch, kind), fault.clone());
        }
        let watching = Watching::synced(&server).await;
        watching.follows(&server, 1).await;
        for kind in Kind::ALL {
            let recorded = server.recorded();
            let asked: Vec<_> = recorded.iter().filter(|request| request.kind == Some(kind)).collect();
            let verbs: Vec<Verb> = asked.iter().map(|request| request.verb).take(2).collect();
            assert_eq!(verbs, [Verb::Watch, Verb::List], "{} after {fault:?}", kind.name());
            let streaming = asked.iter().filter(|request| request.query.contains("sendInitialEvents")).count();
            assert_eq!(streaming, 1, "{} after {fault:?}", kind.name());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_breaks_removes_nothing() {
    let server = server(Options::default());
    let watching = Watching::synced(&server).await;
    server.delete(Kind::Service, "shop", "api").unwrap();
    watching.agrees_with(&server).await;
    // A streaming list stalls before its first object and is cut. The list in pages that follows is
    // also cut.
    server.block(Kind::Service);
    server.fail_next(1, RequestFilter::verb_of(Verb::List, Kind::Service), RequestFault::Cut(Cut::Close));
    server.compact();
    let asked = |server: &ApiServer| {
        [Verb::Watch, Verb::List].map(|verb| server.requests(verb, Some(Kind::Service))).iter().sum::<u64>()
    };
    let before = asked(&server);
    server.order(Some(Kind::Service), &Order::Expire);
    // When the source requests a third list, two lists have been cut.
    let are_cut = |server: &ApiServer| {
        server.order(Some(Kind::Service), &Order::CutNow(Cut::Close));
        asked(server) >= before + 3
    };
    server.wait_until("two lists are cut", are_cut).await.unwrap();
    watching.sink.look(|c| assert!(c.serves("shop", "web")));
    server.release(Kind::Service);
    watching.follows(&server, 1).await;
    assert_eq!(watching.removed(), ["Service shop/api"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unusable_kubeconfig_is_an_error_at_once() {
    let run = source::run(
        SourceSpec::Kubernetes,
        SourceSettings { kubeconfig: Some("/nowhere/kubeconfig".into()), ..SourceSettings::default() },
        Arc::new(CollectingSink::default()),
        CancellationToken::new(),
    );
    let error = tokio::time::timeout(Duration::from_secs(60), run).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("/nowhere/kubeconfig"), "{error}");
}
