//! Tests of `Inspect.QueryNode` and `headgatectl node`: simulated agents answer as the test says.

use futures::TryStreamExt as _;
use headgate_proto::v1::{self, agent_message::Body, inspect_client::InspectClient, node_answer, node_query};
use tokio::{task::JoinHandle, time::timeout};
use tonic::{Code, Status};

use crate::client::{Client, GUARD, channel, endpoint as endpoint_of, eventually};
use crate::replica::{Printed, Replica, endpoint, headgatectl, service};

fn status_query() -> node_query::Kind {
    node_query::Kind::Status(v1::NodeStatusQuery {})
}

/// Asks a replica in the background. Returns the parts of the answer.
fn ask(replica: &Replica, node: &str, kind: node_query::Kind) -> JoinHandle<Result<Vec<v1::NodeAnswer>, Status>> {
    let (address, node) = (replica.running.inspect_addr, node.to_owned());
    tokio::spawn(async move {
        let mut inspect = InspectClient::new(channel(address).await);
        let request =
            v1::QueryNodeRequest { node, query: Some(v1::NodeQuery { kind: Some(kind) }), ..Default::default() };
        inspect.query_node(request).await?.into_inner().try_collect().await
    })
}

/// Waits for a number of queries on a stream.
async fn queried(client: &mut Client, count: usize) -> v1::Query {
    client.until(|client| client.queries.len() >= count).await;
    client.queries[count - 1].clone()
}

fn metrics(id: u64, text: &str, is_last: bool) -> Body {
    let kind = Some(node_answer::Kind::Metrics(v1::MetricsText { text: text.into() }));
    Body::Answer(v1::Answer { id, part: Some(v1::NodeAnswer { kind }), is_last, ..v1::Answer::default() })
}

fn status(id: u64, node: &str) -> Body {
    let status = v1::NodeStatus { node: node.into(), backend: "nftables".into(), ..v1::NodeStatus::default() };
    let kind = Some(node_answer::Kind::Status(status));
    Body::Answer(v1::Answer { id, part: Some(v1::NodeAnswer { kind }), is_last: true, ..v1::Answer::default() })
}

async fn refused(asked: JoinHandle<Result<Vec<v1::NodeAnswer>, Status>>) -> (Code, String) {
    let status = timeout(GUARD, asked).await.unwrap().unwrap().unwrap_err();
    (status.code(), status.message().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_parts_of_an_answer_arrive_in_order() {
    let replica = Replica::start().await;
    replica.put([service(1, 80), endpoint(1, 1, 8080)]);
    let mut client = replica.agent("a").await;
    let asked = ask(&replica, "a", node_query::Kind::Metrics(v1::MetricsQuery { prefix: "x".into() }));
    let query = queried(&mut client, 1).await;
    let kind = query.query.unwrap().kind;
    assert_eq!(kind, Some(node_query::Kind::Metrics(v1::MetricsQuery { prefix: "x".into() })));
    let other = ask(&replica, "a", status_query());
    let second = queried(&mut client, 2).await;
    client.send(metrics(query.id, "x1 1\n", false)).await;
    client.send(status(second.id, "a")).await;
    client.send(metrics(query.id, "x2 2\n", false)).await;
    client.send(Body::Answer(v1::Answer { id: query.id, is_last: true, ..v1::Answer::default() })).await;
    // The replica ignores an answer to no query.
    client.send(status(99, "a")).await;
    let parts = timeout(GUARD, asked).await.unwrap().unwrap().unwrap();
    let text = |text: &str| Some(node_answer::Kind::Metrics(v1::MetricsText { text: text.into() }));
    assert_eq!(parts.into_iter().map(|part| part.kind).collect::<Vec<_>>(), [text("x1 1\n"), text("x2 2\n")]);
    assert_eq!(timeout(GUARD, other).await.unwrap().unwrap().unwrap().len(), 1);
    client.ack().await;
    // The stream has delivered changes as usual.
    replica.put([endpoint(1, 2, 8080)]);
    client.reach(replica.store.version()).await;
    let ignored = || replica.metric("headgate_agent_messages_ignored_total{reason=\"unknown_query\"}");
    eventually("the answer to no query is ignored", async || ignored() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_are_sent_before_a_query() {
    let replica = Replica::start().await;
    let services = || (1..400).flat_map(|number| [service(number, 80), endpoint(number, 1, 8080)]);
    replica.put(services());
    // The stream begins with a snapshot, which this client has not read when the query is asked.
    // Its window is as large as that of agents: with a small one, the HTTP/2 library takes hundreds
    // of small unread messages for an attack.
    let wide = endpoint_of(replica.running.local_addr).initial_connection_window_size(1 << 20);
    let mut client = Client::open(wide.connect().await.unwrap(), "a", None).await.unwrap();
    let asked = ask(&replica, "a", status_query());
    let query = queried(&mut client, 1).await;
    assert_eq!((client.held.version, client.ends.len()), (replica.store.version(), 1));
    client.send(status(query.id, "a")).await;
    assert_eq!(timeout(GUARD, asked).await.unwrap().unwrap().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_name_the_node_and_the_remedy() {
    let replica = Replica::start().await;
    let mut client = replica.agent("a").await;
    let (code, text) = refused(ask(&replica, "b", status_query())).await;
    assert_eq!(code, Code::NotFound);
    assert!(text.contains("node \"b\"") && text.contains("has no stream to any replica"), "{text}");

    let asked = ask(&replica, "a", status_query());
    let id = queried(&mut client, 1).await.id;
    let error = "the kernel lists nothing; look at it".into();
    client.send(Body::Answer(v1::Answer { id, is_last: true, error, ..v1::Answer::default() })).await;
    let (code, text) = refused(asked).await;
    assert_eq!(code, Code::FailedPrecondition);
    assert_eq!(text, "the agent of node a cannot answer: the kernel lists nothing; look at it");

    // Four queries wait, so the fifth query is refused. The agent is silent.
    let silent: Vec<_> = (0..4).map(|_| ask(&replica, "a", status_query())).collect();
    queried(&mut client, 5).await;
    let (code, text) = refused(ask(&replica, "a", status_query())).await;
    assert_eq!(code, Code::ResourceExhausted);
    assert!(text.contains("the agent of node a"), "{text}");
    for asked in silent {
        let (code, text) = refused(asked).await;
        assert_eq!(code, Code::DeadlineExceeded);
        assert!(text.contains("the agent of node a does not answer in time: look at"), "{text}");
    }

    let asked = ask(&replica, "a", status_query());
    queried(&mut client, 6).await;
    drop(client);
    let (code, text) = refused(asked).await;
    assert_eq!(code, Code::Unavailable);
    assert!(text.contains("the stream of the agent of node a ended, or the answer"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn headgatectl_shows_the_status_and_the_metrics_of_a_node() {
    let replica = Replica::start().await;
    let mut client = replica.agent("a").await;
    let answering = tokio::spawn(async move {
        let first = queried(&mut client, 1).await;
        client.send(status(first.id, "a")).await;
        let second = queried(&mut client, 2).await;
        client.send(status(second.id, "a")).await;
        let third = queried(&mut client, 3).await;
        client.send(metrics(third.id, "x 1\n", true)).await;
        client
    });
    let Printed { code, out, err } = headgatectl(&[&replica], "node a").await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("node         a ") && out.contains("\nbackend      nftables\n"), "{out}");
    let Printed { out, .. } = headgatectl(&[&replica], "node a -o json").await;
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["node"], &json["quarantined"]), (&"a".into(), &serde_json::json!([])));
    let Printed { out, .. } = headgatectl(&[&replica], "node a --metrics").await;
    assert_eq!(out, "x 1\n");
    let _client = answering.await.unwrap();

    let Printed { code, err, .. } = headgatectl(&[&replica], "node b").await;
    assert_eq!(code, 1);
    assert!(err.contains("no stream"), "{err}");
}

#[tokio::test(flavor = "multi_thread")]
async fn headgatectl_shows_counters_with_the_most_bytes_first() {
    let replica = Replica::start().await;
    let mut client = replica.agent("a").await;
    let row = |name: &str, frontend: &str, packets| v1::ServiceCounters {
        namespace: "ns".into(),
        name: name.into(),
        frontend: frontend.into(),
        connections: 1,
        packets,
        bytes: packets * 100,
    };
    let rows = move |frontend| vec![row("few", frontend, 2), row("none", frontend, 0), row("most", frontend, 7)];
    let answering = tokio::spawn(async move {
        for (count, frontend) in [(1, ""), (2, "10.96.0.1 port 80/TCP"), (3, "")] {
            let v1::Query { id, query } = queried(&mut client, count).await;
            let Some(node_query::Kind::Counters(v1::CountersQuery { service })) = query.unwrap().kind else {
                panic!("not a query for counters")
            };
            assert_eq!(service.map(|key| (key.namespace, key.name)).is_some(), count == 2);
            // The answer has two parts.
            for (row, is_last) in rows(frontend).chunks(2).zip([false, true]) {
                let kind = Some(node_answer::Kind::Counters(v1::Counters { services: row.to_vec() }));
                let part = Some(v1::NodeAnswer { kind });
                client.send(Body::Answer(v1::Answer { id, part, is_last, ..v1::Answer::default() })).await;
            }
        }
        client
    });
    let Printed { code, out, err } = headgatectl(&[&replica], "counters a").await;
    assert_eq!((code, err.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    let expected = [
        ["NAMESPACE", "NAME", "CONNECTIONS", "PACKETS", "BYTES"],
        ["ns", "most", "1", "7", "700"],
        ["ns", "few", "1", "2", "200"],
    ];
    assert_eq!(lines, expected);
    let Printed { out, .. } = headgatectl(&[&replica], "counters a ns/web").await;
    assert!(out.lines().count() == 4 && out.contains("0  10.96.0.1 port 80/TCP"), "{out}");
    let Printed { out, .. } = headgatectl(&[&replica], "counters a -o json").await;
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((json.as_array().unwrap().len(), &json[2]["bytes"]), (3, &700.into()));
    let _client = answering.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn headgatectl_explains_with_the_words_of_the_agent() {
    let replica = Replica::start().await;
    let mut client = replica.agent("a").await;
    let endpoint = |address: &str, reason: &str| v1::ExplainedEndpoint {
        address: address.into(),
        port: 8080,
        ready: true,
        serving: true,
        weight: 1,
        is_chosen: reason.is_empty(),
        reason: reason.into(),
        ..v1::ExplainedEndpoint::default()
    };
    let answering = tokio::spawn(async move {
        for count in 1..=3 {
            let v1::Query { id, query } = queried(&mut client, count).await;
            let Some(node_query::Kind::Explain(query)) = query.unwrap().kind else { panic!("not an explanation") };
            let expected = v1::ExplainQuery {
                service: Some(v1::ServiceKey { namespace: "ns".into(), name: "web".into() }),
                source: if count == 2 { vec![203, 0, 113, 9].into() } else { Vec::new().into() },
                destination: if count == 2 { vec![10, 96, 0, 1].into() } else { Vec::new().into() },
                port: if count == 2 { 53 } else { 0 },
                protocol: if count == 2 { "UDP".into() } else { String::new() },
                ..v1::ExplainQuery::default()
            };
            assert_eq!(query, expected);
            let first = v1::Explanation {
                destination: "10.96.0.1 port 53/UDP".into(),
                fate: "forwarded".into(),
                steps: vec!["A step.".into(), "A longer step. ".repeat(10).trim_end().into()],
                endpoints: vec![endpoint("10.244.0.1", "")],
                remarks: vec!["A remark.".into()],
                ..v1::Explanation::default()
            };
            let more = vec![endpoint("10.244.0.2", "not ready"), endpoint("fd00::1", "not ready")];
            let second = v1::Explanation { endpoints: more, ..v1::Explanation::default() };
            for (part, is_last) in [(first, false), (second, true)] {
                let part = Some(v1::NodeAnswer { kind: Some(node_answer::Kind::Explanation(part)) });
                client.send(Body::Answer(v1::Answer { id, part, is_last, ..v1::Answer::default() })).await;
            }
        }
        client
    });
    // Without --from, the first node with an agent explains.
    let Printed { code, out, err } = headgatectl(&[&replica], "explain ns/web").await;
    assert_eq!((code, err.as_str()), (0, ""));
    // A pipe has no width.
    let longer = format!("  2. {}", ["A longer step."; 10].join(" "));
    let expected = [
        "From node a to Service ns/web",
        "",
        "A remark.",
        "10.96.0.1 port 53/UDP: forwarded",
        "  1. A step.",
        &longer,
        "",
        "ENDPOINT         STATE  NODE  ZONE  CHOSEN",
        "10.244.0.1:8080  ready  -     -     yes",
        "10.244.0.2:8080  ready  -     -     no: not ready",
        "[fd00::1]:8080   ready  -     -     no: not ready",
    ];
    assert_eq!(out.lines().map(str::trim_end).collect::<Vec<_>>(), expected);
    let packet = "explain web -n ns --from a --source 203.0.113.9 --to 10.96.0.1:53/udp";
    let Printed { out, .. } = headgatectl(&[&replica], packet).await;
    assert!(out.starts_with("From 203.0.113.9, at node a, to Service ns/web"), "{out}");
    let Printed { out, .. } = headgatectl(&[&replica], "explain ns/web --from a -o json").await;
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["node"], "a");
    let endpoints = json["explanations"][0]["endpoints"].as_array().unwrap();
    assert_eq!((endpoints.len(), &endpoints[1]["reason"]), (3, &"not ready".into()));
    let _client = answering.await.unwrap();

    let Printed { code, err, .. } = headgatectl(&[&replica], "explain ns/web --from ns/nobody").await;
    assert!(code == 1 && err.contains("pod ns/nobody: no endpoint belongs to this pod"), "{err}");
    let mixed = "explain ns/web --from a --source ::1 --to 10.96.0.1:80";
    let Printed { code, err, .. } = headgatectl(&[&replica], mixed).await;
    assert!(code == 2 && err.contains("different IP families"), "{err}");
}
