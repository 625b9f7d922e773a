//! Attacks by readers, and by texts that reach a terminal.

use std::{fs, process::Command};

use bytes::Bytes;
use headgate_proto::v1::{GetStatusRequest, ListServicesRequest, QueryNodeRequest, inspect_client::InspectClient};
use headgate_tests::testbed::{control_plane::ControlPlane, process::program};
use tokio::net::TcpStream;

const AUDIT: &str = "headgate::audit";

/// A control plane with these options, and the folder of its files.
fn control_plane(options: &[&str]) -> (ControlPlane, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("manifests")).unwrap();
    fs::write(folder.path().join("manifests/none.yaml"), "apiVersion: v1\nkind: List\nitems: []\n").unwrap();
    let source = format!("--source=files:{}", folder.path().join("manifests").display());
    let options = options.iter().map(|option| (*option).to_owned());
    let options: Vec<_> = [source, "--insecure-loopback".to_owned()].into_iter().chain(options).collect();
    (ControlPlane::start(folder.path(), &options).unwrap(), folder)
}

fn headgatectl(server: &str, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(program("headgatectl").unwrap());
    let output = command.args(["--server", server]).args(arguments).env("NO_COLOR", "1").output().unwrap();
    let all = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(all).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_request_of_a_reader_leaves_a_trace_and_a_flood_leaves_its_number() {
    let (control_plane, _folder) = control_plane(&[]);
    let mut reader = InspectClient::connect(format!("http://{}", control_plane.inspect)).await.unwrap();
    let request = ListServicesRequest { namespace: "shop".into(), name: String::new() };
    reader.list_services(request).await.unwrap();
    // The answer is an error: no such node.
    let query = QueryNodeRequest { node: "node\u{202e}\n9".into(), ..QueryNodeRequest::default() };
    reader.query_node(query).await.unwrap_err();
    let line = control_plane.until_logged("Inspect/ListServices").unwrap();
    for text in [AUDIT, "anybody at 127.0.0.1", "object=\"shop/*\"", "result=Ok"] {
        assert!(line.contains(text), "{text}: {line}");
    }
    let line = control_plane.until_logged("Inspect/QueryNode").unwrap();
    assert!(line.contains("result=InvalidArgument") && line.contains("node\\u{202e}\\n9"), "{line}");
    // This one ends before there is an answer.
    let socket = TcpStream::connect(control_plane.inspect).await.unwrap();
    let (mut requests, mut connection) = h2::client::handshake(socket).await.unwrap();
    let mut pings = connection.ping_pong().unwrap();
    let connection = tokio::spawn(connection);
    let verify = http::Request::post("http://replica/headgate.v1.Inspect/VerifyNodes").body(()).unwrap();
    let (_response, mut body) = requests.send_request(verify, false).unwrap();
    // The first bytes of a message, without the rest.
    body.send_data(Bytes::from_static(&[0, 0, 0]), false).unwrap();
    // The first ping may overtake the request, and the second one cannot.
    for _ in 0..2 {
        pings.ping(h2::Ping::opaque()).await.unwrap();
    }
    body.send_reset(h2::Reason::CANCEL);
    let line = control_plane.until_logged("Inspect/VerifyNodes").unwrap();
    // The service may read the reset before it ends.
    assert!(["result=Cancelled", "result=Internal"].iter().any(|result| line.contains(result)), "{line}");
    connection.abort();
    for _ in 0..1_000 {
        reader.get_status(GetStatusRequest { only_this_replica: true, last_changes: 0 }).await.unwrap();
    }
    let audited = || control_plane.log().unwrap().lines().filter(|line| line.contains(AUDIT)).count();
    // A slow machine needs more than a second for them, and a client has ten lines in each.
    assert!((200..800).contains(&audited()), "{} lines", audited());
    let line = control_plane.until_logged("are not in the audit log").unwrap();
    assert!(line.contains("most_from=\"anybody at 127.0.0.1 headgate.v1.Inspect/GetStatus ("), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_log_can_be_switched_off_and_the_others_stay() {
    let (control_plane, _folder) = control_plane(&["--log=info,headgate::audit=off"]);
    let mut reader = InspectClient::connect(format!("http://{}", control_plane.inspect)).await.unwrap();
    reader.get_status(GetStatusRequest::default()).await.unwrap();
    let log = control_plane.log().unwrap();
    assert!(log.contains("control plane runs") && !log.contains(AUDIT), "{log}");
}

#[test]
fn a_text_of_another_party_does_not_reach_the_terminal_as_it_is() {
    let (control_plane, _folder) = control_plane(&["--replica-name=good\u{202e}evil\u{9b}2J\u{200b}"]);
    let server = format!("http://{}", control_plane.inspect);
    for arguments in [&["status"][..], &["status", "-o", "json"]] {
        let (is_done, text) = headgatectl(&server, arguments);
        assert!(is_done && text.contains("good") && text.contains("202e"), "{text}");
        let hostile = |letter: &char| !matches!(letter, '\n' | '"' | '\'' | '\\') && letter.escape_debug().len() > 1;
        assert_eq!(text.chars().find(hostile), None, "{text:?}");
    }
    let (is_done, text) = headgatectl(&server, &["status", "-o", "json"]);
    let status: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(is_done && status["replica"] == "good\u{202e}evil\u{9b}2J\u{200b}", "the JSON says the same: {text}");
}
