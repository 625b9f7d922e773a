//! A pod stops: real programs, from `headgate-drain` to the kernel and back.

use std::process::Command;

use headgate_tests::testbed::process::program;

use super::rig::{Program, Rig, eventually};

const SERVICE: &str = "apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80, targetPort: 8080}]}
";

fn node(name: &str) -> String {
    format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n")
}

/// A slice with the pod web-1 on node-a, and web-2 on node-b, each with these conditions.
fn slice(conditions: [&str; 2]) -> String {
    let mut text = "apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: '', port: 8080}]
endpoints:
"
    .to_owned();
    for (number, (node, conditions)) in ["node-a", "node-b"].iter().zip(conditions).enumerate() {
        let number = number + 1;
        text += &format!(
            "- {{addresses: [10.244.1.{number}], nodeName: {node}, conditions: {conditions}, targetRef: {{kind: Pod, name: web-{number}, uid: u{number}}}}}\n"
        );
    }
    text
}

const READY: &str = "{ready: true}";
const STOPS: &str = "{ready: false, serving: true, terminating: true}";

/// Two replicas on one machine, each with the other as a peer, and the agent of node-a.
struct Bed {
    rig: Rig,
    first: Option<Program>,
    second: Option<Program>,
    _agent: Program,
}

impl Bed {
    fn new() -> Self {
        let rig = Rig::new();
        rig.put("service", SERVICE);
        rig.put("slice", &slice([READY, READY]));
        rig.put("node-a", &node("node-a"));
        let peers = "--peers=127.0.0.1:7444,127.0.0.2:7444";
        let start = |host: u8| {
            let [listen, metrics] = [7443, 7480].map(|port| format!("=127.0.0.{host}:{port}"));
            let listen = [format!("--listen{listen}"), format!("--metrics-listen{metrics}")];
            rig.control_plane(&[&rig.manifests(), "--insecure-loopback", peers], &listen)
        };
        let (first, second) = (start(1), start(2));
        let agent = rig.agent(&["--drain-address=127.0.0.1:10261"]);
        rig.until_programmed();
        Self { rig, first: Some(first), second: Some(second), _agent: agent }
    }

    /// Starts `headgate-drain` with this query.
    fn drain(&self, query: &str) -> std::process::Child {
        let mut command = Command::new(program("headgate-drain").unwrap());
        command.args(["127.0.0.1:10261", query]).stdout(std::process::Stdio::piped());
        self.rig.run(move || command.spawn().unwrap())
    }

    fn drained(&self, query: &str) -> (bool, String) {
        let output = self.drain(query).wait_with_output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    }
}

#[test]
fn a_pod_that_stops_waits_until_the_kernel_has_removed_it() {
    let mut bed = Bed::new();
    // The source does not show yet that the pod stops.
    eventually("the answer names the address", || {
        let (is_over, text) = bed.drained("pod=shop/web-1&timeout=500ms");
        assert!(!is_over && text.starts_with("incomplete\n"), "{text}");
        // The replica may have no time for an answer.
        if text.contains("10.244.1.1") { Ok(()) } else { Err(text) }
    });
    let waiting = bed.drain("pod=shop/web-1&timeout=60s");
    bed.rig.put("slice", &slice([STOPS, READY]));
    let output = waiting.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "drained\n");
    let rules = bed.rig.rules("iptables-nft-save", "nat");
    assert!(!rules.iter().any(|rule| rule.contains("10.244.1.1:8080")), "{rules:?}");
    // headgatectl asks a replica without an agent. The replica may still start.
    let question = ["--server=http://127.0.0.2:7444", "drain", "shop/web-1", "--uid=u1"];
    for question in [&question[..3], &question[..]] {
        eventually("the pod is drained", || match bed.rig.headgatectl(question)? {
            said if said == "drained\n" => Ok(()),
            said => Err(said),
        });
    }
    // The last endpoint keeps receiving connections, which the answer says at once.
    bed.rig.put("slice", &slice([STOPS, STOPS]));
    eventually("the pod is the last endpoint", || {
        let (is_over, text) = bed.drained("pod=shop/web-1&timeout=60s");
        if is_over && text.starts_with("last\n") { Ok(()) } else { Err(text) }
    });
    // A Node without an agent is waited for, and named.
    bed.rig.put("slice", &slice([STOPS, READY]));
    bed.rig.put("node-b", &node("node-b"));
    eventually("node-b is not confirmed", || {
        let (is_over, text) = bed.drained("pod=shop/web-1&timeout=60s&silent=300ms");
        if !is_over && text.ends_with("unconfirmed: 1\n") { Ok(()) } else { Err(text) }
    });
    let waiting = bed.drain("pod=shop/web-1&timeout=60s&silent=60s");
    bed.rig.remove("node-b");
    assert!(waiting.wait_with_output().unwrap().status.success(), "the deletion of the Node ends the wait");
    // A replica stops. The agent may have to move, and asks again.
    bed.second = None;
    assert_eq!(bed.drained("pod=shop/web-1&timeout=60s&silent=60s"), (true, "drained\n".into()));
    bed.first = None;
    let (is_over, text) = bed.drained("pod=shop/web-1&timeout=300ms");
    assert!(!is_over && text.starts_with("incomplete\n"), "{text}");
}

#[test]
fn a_client_that_may_not_ask_gets_the_remedy() {
    let bed = Bed::new();
    for (query, problem) in [
        ("", "add ?pod=NAMESPACE/NAME"),
        ("namespace=shop", "add ?pod=NAMESPACE/NAME"),
        ("pod=shop/web-2&timeout=60s&silent=60s", "ask the agent of its own node"),
        ("pod=shop/web-9&timeout=60s&silent=60s", "no endpoint belongs to pod shop/web-9"),
        ("pod=web-1", "pod=NAMESPACE/NAME"),
    ] {
        let (is_over, text) = bed.drained(query);
        assert!(!is_over && text.contains(problem), "{query}: {text}");
    }
}
