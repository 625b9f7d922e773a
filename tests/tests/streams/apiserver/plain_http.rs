//! The wire itself: codes, Status bodies and shapes that kube-rs hides.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use headgate_tests::apiserver::{
    ApiServer, Cut, Kind, Options,
    objects::{endpoint_slice, service},
};
use serde_json::{Value, json};

pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) head: String,
    pub(crate) body: Value,
}

fn exchange(server: &ApiServer, method: &str, path: &str, body: &str) -> (String, String) {
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    write!(
        socket,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

fn send(server: &ApiServer, method: &str, path: &str, body: &str) -> Answer {
    let (head, body) = exchange(server, method, path, body);
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { code, head, body: serde_json::from_str(&body).unwrap_or(Value::String(body)) }
}

pub(crate) fn get(server: &ApiServer, path: &str) -> Answer {
    send(server, "GET", path, "")
}

/// The events of a watch that ends by its time-out. Checks that the response is chunked and ends as one.
pub(crate) fn watch_lines(server: &ApiServer, path: &str) -> Vec<Value> {
    let (head, body) = exchange(server, "GET", path, "");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(head.to_lowercase().contains("transfer-encoding: chunked"), "{head}");
    assert!(body.ends_with("0\r\n\r\n"), "the last chunk is missing: {body}");
    body.lines().filter(|line| line.starts_with('{')).map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn refusals_are_statuses() {
    let options = Options { future_version_wait: Duration::ZERO, history_limit: 2, ..Options::default() };
    let server = ApiServer::start_with(options).unwrap();
    for number in 0..5 {
        server.apply(service("shop", &format!("web-{number}")).build()).unwrap();
    }
    let expected = [
        ("/api/v1/pods", 404, "NotFound"),
        ("/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices/none", 404, "NotFound"),
        ("/api/v1/services?labelSelector=a%20b", 400, "BadRequest"),
        ("/api/v1/services?fieldSelector=spec.selector%3Dx", 400, "BadRequest"),
        ("/api/v1/services?limit=many", 400, "BadRequest"),
        ("/api/v1/services?continue=zz", 400, "BadRequest"),
        ("/api/v1/services?resourceVersion=x", 422, "Invalid"),
        ("/api/v1/services?resourceVersionMatch=Exact", 422, "Invalid"),
        ("/api/v1/services?watch=1&sendInitialEvents=true", 422, "Invalid"),
        ("/api/v1/services?resourceVersion=2&resourceVersionMatch=Exact", 410, "Expired"),
        ("/api/v1/services?resourceVersion=99", 504, "Timeout"),
    ];
    for (path, code, reason) in expected {
        let answer = get(&server, path);
        assert_eq!((answer.code, answer.body["reason"].as_str()), (code, Some(reason)), "{path}: {}", answer.body);
        assert_eq!(answer.body["kind"], "Status");
        assert_eq!(answer.body["status"], "Failure");
        assert_eq!(answer.body["code"], code);
        assert!(answer.body["message"].as_str().is_some_and(|message| !message.is_empty()));
    }
    assert_eq!(send(&server, "PATCH", "/api/v1/namespaces/shop/services/web-0", "{}").code, 405);
}

#[test]
fn a_watch_from_a_compacted_version_gets_an_error_event_or_a_code() {
    let server = ApiServer::start().unwrap();
    server.apply(service("shop", "web").build()).unwrap();
    server.apply(service("shop", "db").build()).unwrap();
    server.compact();
    let path = "/api/v1/services?watch=true&resourceVersion=1";
    let event = get(&server, path);
    assert_eq!((event.code, &event.body["type"]), (200, &json!("ERROR")));
    assert_eq!((&event.body["object"]["code"], &event.body["object"]["reason"]), (&json!(410), &json!("Expired")));
    server.set_options(|options| options.gone_as_http_status = true);
    let code = get(&server, path);
    assert_eq!((code.code, &code.body["kind"]), (410, &json!("Status")));
}

#[test]
fn lists_have_the_real_shape() {
    let server = ApiServer::start().unwrap();
    let stored = server.apply(endpoint_slice("shop", "web-x", "web").endpoint("10.1.0.1", "n1").build()).unwrap();
    let list = get(&server, "/apis/discovery.k8s.io/v1/endpointslices").body;
    assert_eq!((&list["kind"], &list["apiVersion"]), (&json!("EndpointSliceList"), &json!("discovery.k8s.io/v1")));
    assert_eq!(list["metadata"], json!({"resourceVersion": server.version().to_string()}));
    let item = &list["items"][0];
    assert!(item.get("kind").is_none() && item.get("apiVersion").is_none());
    assert_eq!(item["metadata"], stored["metadata"]);
    let metadata = &stored["metadata"];
    assert_eq!(metadata["uid"].as_str().map(str::len), Some(36));
    assert_eq!(metadata["creationTimestamp"].as_str().map(str::len), Some("2025-01-01T00:00:00Z".len()));
    assert_eq!(metadata["generation"], 1);
    let whole = get(&server, "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices/web-x").body;
    assert_eq!(whole, stored);
}

#[test]
fn reads_at_versions() {
    let server = ApiServer::start().unwrap();
    server.apply(service("shop", "web").build()).unwrap();
    let then = server.version();
    server.apply(service("shop", "db").build()).unwrap();
    let count = |query: &str| {
        let list = get(&server, &format!("/api/v1/namespaces/shop/services?{query}")).body;
        (
            list["items"].as_array().unwrap().len(),
            list["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap(),
        )
    };
    assert_eq!(count(&format!("resourceVersion={then}&resourceVersionMatch=Exact")), (1, then));
    assert_eq!(count(&format!("resourceVersion={then}&resourceVersionMatch=NotOlderThan")), (2, then + 1));
    assert_eq!(count(&format!("resourceVersion={then}")), (2, then + 1));
    assert_eq!(count("resourceVersion=0&limit=1"), (2, then + 1));
    assert_eq!(count(&format!("resourceVersion={then}&limit=5")), (1, then));
}

#[test]
fn a_read_at_a_coming_version_waits_for_it() {
    let server =
        ApiServer::start_with(Options { future_version_wait: Duration::from_secs(60), ..Options::default() }).unwrap();
    let next = server.version() + 1;
    let list = std::thread::scope(|scope| {
        let reading = scope.spawn(|| get(&server, &format!("/api/v1/services?resourceVersion={next}")));
        while server.recorded().is_empty() {
            std::thread::yield_now();
        }
        server.apply(service("shop", "web").build()).unwrap();
        reading.join().unwrap()
    });
    assert_eq!(list.body["items"].as_array().unwrap().len(), 1);
}

#[test]
fn streaming_lists_end_in_their_bookmark() {
    let server = ApiServer::start().unwrap();
    server.apply(service("shop", "web").build()).unwrap();
    let query =
        "watch=1&timeoutSeconds=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    let events = watch_lines(&server, &format!("/api/v1/services?{query}"));
    assert_eq!((&events[0]["type"], &events[0]["object"]["kind"]), (&json!("ADDED"), &json!("Service")));
    assert_eq!(events[1]["type"], "BOOKMARK");
    assert_eq!(events[1]["object"]["metadata"]["annotations"], json!({"k8s.io/initial-events-end": "true"}));
    assert_eq!(events[1]["object"]["metadata"]["resourceVersion"], server.version().to_string());
}

#[test]
fn writes_over_http() {
    let server = ApiServer::start().unwrap();
    let (all, one) = (Kind::Service.collection_path(Some("shop")), Kind::Service.object_path("shop", "web"));
    let body = json!({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.1"}});
    let made = send(&server, "POST", &all, &body.to_string());
    assert_eq!(
        (made.code, &made.body["kind"], &made.body["metadata"]["namespace"]),
        (201, &json!("Service"), &json!("shop"))
    );
    assert_eq!(send(&server, "POST", &all, &body.to_string()).body["reason"], "AlreadyExists");
    let mut changed = made.body.clone();
    changed["metadata"]["labels"] = json!({"app": "web"});
    let updated = send(&server, "PUT", &one, &changed.to_string());
    assert_eq!((updated.code, &updated.body["metadata"]["uid"]), (200, &made.body["metadata"]["uid"]));
    assert_eq!(send(&server, "PUT", &one, &changed.to_string()).body["reason"], "Conflict");
    assert_eq!(get(&server, &one).body, updated.body);
    let deleted = send(&server, "DELETE", &one, "");
    assert_eq!((deleted.code, &deleted.body["status"]), (200, &json!("Success")));
    assert_eq!(send(&server, "DELETE", &one, "").code, 404);
    assert_eq!(send(&server, "PUT", &one, &body.to_string()).code, 404);
}

#[test]
fn bad_writes_are_refused_with_the_reason() {
    let server = ApiServer::start().unwrap();
    let all = Kind::Service.collection_path(Some("shop"));
    let bad = [
        ("{", 400),
        ("[]", 400),
        ("{\"kind\":\"Pod\"}", 400),
        ("{}", 422),
        ("{\"metadata\":7}", 422),
        ("{\"metadata\":{}}", 422),
        ("{\"metadata\":{\"name\":\"a\",\"namespace\":\"other\"}}", 400),
        ("{\"metadata\":{\"name\":7}}", 422),
    ];
    for (body, code) in bad {
        let answer = send(&server, "POST", &all, body);
        assert_eq!(answer.code, code, "{body}: {}", answer.body);
    }
    assert_eq!(server.version(), 1, "nothing was written");
    let large = format!("{{\"metadata\":{{\"name\":\"{}\"}}}}", "x".repeat(4 * 1024 * 1024));
    assert_eq!(send(&server, "POST", &all, &large).code, 413);
}

#[test]
fn version_and_health() {
    let server = ApiServer::start().unwrap();
    assert!(get(&server, "/version").body["gitVersion"].as_str().unwrap().starts_with("v1."));
    assert_eq!(get(&server, "/readyz").body, "ok");
}

#[tokio::test]
async fn a_cut_is_half_an_event_and_no_end() {
    for how in [Cut::Close, Cut::Reset] {
        let server = ApiServer::start().unwrap();
        let mut socket = TcpStream::connect(server.address()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        write!(socket, "GET /api/v1/services?watch=1&resourceVersion=1 HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        server.wait_until("it watches", |server| server.open_watches(None) == 1).await.unwrap();
        assert_eq!(server.cut_watches_on_next_event(Some(Kind::Service), how), 1);
        server.apply(service("shop", "web").build()).unwrap();
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        let end = loop {
            match socket.read(&mut buffer) {
                Ok(0) => break Cut::Close,
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
                    break Cut::Reset;
                }
            }
        };
        assert_eq!(end, how);
        let text = String::from_utf8(bytes).unwrap();
        let line = text.lines().find(|line| line.starts_with('{')).unwrap();
        assert!(serde_json::from_str::<Value>(line).unwrap_err().is_eof(), "{line}");
        assert!(!text.ends_with("0\r\n\r\n"), "{text}");
    }
}
