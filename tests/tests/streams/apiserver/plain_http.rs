//! Details that kube-rs hides: the form of answers, and how connections end.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use headgate_tests::apiserver::{
    ApiServer, Cut, Kind, Options,
    objects::{endpoint_slice, node, service},
};
use serde_json::{Value, json};

/// The status code and the body of an answer.
fn get(server: &ApiServer, path: &str) -> (u16, String) {
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn get_json(server: &ApiServer, path: &str) -> (u16, Value) {
    let (code, body) = get(server, path);
    (code, serde_json::from_str(&body).unwrap())
}

/// The events of a watch that ends by its timeout. Checks that the response has its last chunk.
fn watch_lines(server: &ApiServer, path: &str) -> Vec<Value> {
    let (code, body) = get(server, path);
    assert!(code == 200 && body.ends_with("0\r\n\r\n"), "the last chunk is missing: {code} {body}");
    body.lines().filter(|line| line.starts_with('{')).map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn requests_that_the_watch_loop_never_sends_are_refused() {
    let server = ApiServer::start().unwrap();
    for (path, code) in [
        ("/api/v1/configmaps", 404),
        ("/api/v1/namespaces/shop/services/web", 404),
        ("/api/v1/services?labelSelector=app%3Dweb", 400),
        ("/api/v1/nodes?fieldSelector=spec.clusterIP!=None", 400),
        ("/api/v1/services?watch=true&sendInitialEvents=true", 422),
    ] {
        let (answered, status) = get_json(&server, path);
        assert_eq!((answered, &status["code"], &status["kind"]), (code, &json!(code), &json!("Status")), "{path}");
    }
}

#[test]
fn a_watch_from_a_compacted_version_gets_an_error_event_or_a_code() {
    let server = ApiServer::start().unwrap();
    server.apply(service("shop", "web").build()).unwrap();
    server.compact();
    let path = "/api/v1/services?watch=true&resourceVersion=1";
    let (code, event) = get_json(&server, path);
    assert_eq!((code, &event["type"], &event["object"]["code"]), (200, &json!("ERROR"), &json!(410)));
    server.set_options(|options| options.gone_as_http_status = true);
    let (code, status) = get_json(&server, path);
    assert_eq!((code, &status["kind"], &status["reason"]), (410, &json!("Status"), &json!("Expired")));
}

#[test]
fn lists_have_the_form_of_a_real_api_server() {
    let server = ApiServer::start().unwrap();
    let stored = server.apply(endpoint_slice("shop", "web-x", "web").endpoint("10.1.0.1", "n1").build()).unwrap();
    let (_, list) = get_json(&server, "/apis/discovery.k8s.io/v1/endpointslices");
    assert_eq!((&list["kind"], &list["apiVersion"]), (&json!("EndpointSliceList"), &json!("discovery.k8s.io/v1")));
    assert_eq!(list["metadata"], json!({"resourceVersion": server.version().to_string()}));
    let item = &list["items"][0];
    assert!(item.get("kind").is_none() && item.get("apiVersion").is_none());
    assert_eq!(item["metadata"], stored["metadata"]);
}

#[test]
fn later_pages_show_the_version_of_the_first_page() {
    let server = ApiServer::start().unwrap();
    for name in ["a", "b", "c"] {
        server.apply(node(name).build()).unwrap();
    }
    let (_, first) = get_json(&server, "/api/v1/nodes?limit=2");
    server.delete(Kind::Node, "", "c").unwrap();
    server.apply(node("d").build()).unwrap();
    let token = first["metadata"]["continue"].as_str().unwrap().replace(' ', "+");
    let next = format!("/api/v1/nodes?limit=2&continue={token}");
    let (_, second) = get_json(&server, &next);
    assert_eq!((second["items"].as_array().unwrap().len(), &second["items"][0]["metadata"]["name"]), (1, &json!("c")));
    assert_eq!(second["metadata"], json!({"resourceVersion": first["metadata"]["resourceVersion"]}));
    server.expire_continue_tokens();
    assert_eq!(get(&server, &next).0, 410);
}

#[test]
fn streaming_lists_end_with_a_bookmark() {
    let server = ApiServer::start().unwrap();
    server.apply(service("shop", "web").build()).unwrap();
    let query = "watch=true&timeoutSeconds=1&allowWatchBookmarks=true&sendInitialEvents=true\
                 &resourceVersionMatch=NotOlderThan";
    let events = watch_lines(&server, &format!("/api/v1/services?{query}"));
    assert_eq!((&events[0]["type"], &events[0]["object"]["kind"]), (&json!("ADDED"), &json!("Service")));
    assert_eq!(events[1]["type"], "BOOKMARK");
    assert_eq!(events[1]["object"]["metadata"]["annotations"], json!({"k8s.io/initial-events-end": "true"}));
    assert_eq!(events[1]["object"]["metadata"]["resourceVersion"], server.version().to_string());
}

#[test]
fn periodic_bookmarks_have_the_version_of_writes_to_other_kinds() {
    let options = Options { bookmark_interval: Duration::from_millis(20), ..Options::default() };
    let server = ApiServer::start_with(options).unwrap();
    server.apply(node("a").build()).unwrap();
    let from = server.version();
    server.apply(service("shop", "web").build()).unwrap();
    let path = format!("/api/v1/nodes?watch=true&timeoutSeconds=1&allowWatchBookmarks=true&resourceVersion={from}");
    let events = watch_lines(&server, &path);
    assert!(events.len() > 1, "no bookmark came before the last one: {events:?}");
    for event in &events {
        assert_eq!((&event["type"], &event["object"]["kind"]), (&json!("BOOKMARK"), &json!("Node")));
        assert_eq!(event["object"]["metadata"]["resourceVersion"], server.version().to_string());
        assert!(event["object"]["metadata"]["annotations"].is_null());
    }
}

#[tokio::test]
async fn a_cut_watch_ends_in_the_middle_of_an_event() {
    for how in [Cut::Close, Cut::Reset] {
        let server = ApiServer::start().unwrap();
        let mut socket = TcpStream::connect(server.address()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        write!(socket, "GET /api/v1/services?watch=true&resourceVersion=1 HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        server.wait_until("the watch is open", |server| server.open_watches(None) == 1).await.unwrap();
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
