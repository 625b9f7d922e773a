//! The stand-in API server: how it cuts connections, and how its lists go on in pages. The tests of
//! the watch loop (`watch`) show everything else that it does, on real servers too.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    time::Duration,
};

use headgate_tests::apiserver::{
    ApiServer, Cut, Kind, Order,
    objects::{node, service},
};
use serde_json::{Value, json};

fn request(server: &ApiServer, path: &str) -> TcpStream {
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    socket
}

/// The status code and the object of an answer.
fn get(server: &ApiServer, path: &str) -> (u16, Value) {
    let mut answer = String::new();
    request(server, path).read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
}

#[test]
fn later_pages_show_the_version_of_the_first_page() {
    let server = ApiServer::start().unwrap();
    for name in ["a", "b", "c"] {
        server.apply(node(name).build()).unwrap();
    }
    let (_, first) = get(&server, "/api/v1/nodes?limit=2");
    server.delete(Kind::Node, "", "c").unwrap();
    server.apply(node("d").build()).unwrap();
    let token = first["metadata"]["continue"].as_str().unwrap().replace(' ', "+");
    let next = format!("/api/v1/nodes?limit=2&continue={token}");
    let (_, second) = get(&server, &next);
    assert_eq!((second["items"].as_array().unwrap().len(), &second["items"][0]["metadata"]["name"]), (1, &json!("c")));
    assert_eq!(second["metadata"], json!({"resourceVersion": first["metadata"]["resourceVersion"]}));
    server.expire_continue_tokens();
    assert_eq!(get(&server, &next).0, 410);
    assert_eq!(get(&server, "/api/v1/nodes?pretty=true").0, 400, "an unknown option is not refused");
}

#[tokio::test]
async fn a_cut_watch_ends_in_the_middle_of_an_event() {
    for how in [Cut::Close, Cut::Reset] {
        let server = ApiServer::start().unwrap();
        let mut socket = request(&server, "/api/v1/services?watch=true&resourceVersion=1");
        server.wait_until("the watch is open", |server| server.open_watches(None) == 1).await.unwrap();
        assert_eq!(server.order(Some(Kind::Service), &Order::CutOnNextEvent(how)), 1);
        server.apply(service("shop", "web").build()).unwrap();
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        let end = loop {
            match socket.read(&mut buffer) {
                Ok(0) => break Cut::Close,
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
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
