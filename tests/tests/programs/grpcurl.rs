//! Runs grpcurl as an operator would, against the real control plane with a folder of manifests.

use std::{fs, path::Path, process::Command, thread, time::Duration};

use headgate_tests::testbed::{
    control_plane,
    process::{program, tool},
};
use serde_json::Value;

/// The only method on the port for agents. That port has no reflection.
const SYNC: &str = "headgate.v1.Discovery/Sync";

const MANIFESTS: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, creationTimestamp: '2026-01-01T00:00:00Z'}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  ipFamilies: [IPv4]
  ports: [{name: http, port: 80, targetPort: 8080, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints:
- {addresses: [10.1.0.1], conditions: {ready: true}, nodeName: n1}
- {addresses: [10.1.0.2], conditions: {ready: false}, nodeName: n2}
ports: [{name: http, port: 8080, protocol: TCP}]
";

/// A control plane that is killed when the test ends.
struct ControlPlane {
    program: control_plane::ControlPlane,
    /// The options with which grpcurl connects to the control plane.
    transport: Vec<String>,
    _logs: tempfile::TempDir,
}

impl ControlPlane {
    fn start(folder: &Path) -> Self {
        Self::start_with(folder, &["--insecure-loopback".into()], vec!["-plaintext".into()])
    }

    /// Starts a control plane with the certificates of a folder that `headgatectl certs` created.
    /// grpcurl presents the certificate of `who`.
    fn start_with_tls(folder: &Path, certs: &Path, who: Option<&str>) -> Self {
        let file = |name: &str| certs.join(name).display().to_string();
        let [cert, key, ca, node_ca] =
            ["control-plane/tls.crt", "control-plane/tls.key", "ca.crt", "node-ca.crt"].map(file);
        let options = [("--tls-cert", cert), ("--tls-key", key), ("--tls-client-ca", ca), ("--tls-node-ca", node_ca)];
        let options: Vec<String> = options.into_iter().map(|(option, file)| format!("{option}={file}")).collect();
        Self::start_with(folder, &options, Self::tls(certs, who))
    }

    fn tls(certs: &Path, who: Option<&str>) -> Vec<String> {
        let file = |name: &str| certs.join(name).display().to_string();
        let mut transport = vec!["-cacert".to_owned(), file("ca.crt")];
        if let Some(who) = who {
            transport.extend(["-cert".into(), file(&format!("{who}.crt")), "-key".into(), file(&format!("{who}.key"))]);
        }
        transport
    }

    fn start_with(folder: &Path, security: &[String], transport: Vec<String>) -> Self {
        let own = [format!("--source=files:{}", folder.display()), "--replica-name=replica-1".to_owned()];
        let logs = tempfile::tempdir().unwrap();
        let program = control_plane::ControlPlane::start(logs.path(), &[&own[..], security].concat()).unwrap();
        Self { program, transport, _logs: logs }
    }

    fn call(&self, arguments: &[&str], method: &[&str]) -> Result<String, String> {
        let control_plane::ControlPlane { address, inspect, .. } = self.program;
        let address = if method.contains(&SYNC) { address } else { inspect };
        let output = Command::new(tool("grpcurl"))
            .args(&self.transport)
            .args(["-connect-timeout", "20", "-max-time", "60"])
            .args(arguments)
            .arg(address.to_string())
            .args(method)
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    fn json(&self, method: &str, request: &str) -> Vec<Value> {
        let text = self.call(&["-d", request, "-emit-defaults"], &[method]).unwrap();
        serde_json::Deserializer::from_str(&text).into_iter().collect::<Result<_, _>>().unwrap()
    }

    /// Sends SIGTERM, and returns whether the program ended with success.
    fn stop(self) -> bool {
        self.program.stop().unwrap().success()
    }
}

/// The options with which grpcurl reads a file of the protocol in place of reflection.
fn protocol(file: &'static str) -> [&'static str; 4] {
    ["-import-path", concat!(env!("CARGO_MANIFEST_DIR"), "/../proto"), "-proto", file]
}

#[test]
fn grpcurl_lists_and_calls_the_services_of_the_control_plane() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("web.yaml"), MANIFESTS).unwrap();
    let control_plane = ControlPlane::start(folder.path());
    let health = || control_plane.json("grpc.health.v1.Health/Check", "{\"service\": \"headgate.v1.Discovery\"}");
    while health()[0]["status"] != "SERVING" {
        thread::sleep(Duration::from_millis(20));
    }

    let services = control_plane.call(&[], &["list"]).unwrap();
    let expected = ["grpc.health.v1.Health", "headgate.v1.Discovery", "headgate.v1.Inspect", "headgate.v1.Peers"];
    for service in expected {
        assert!(services.lines().any(|line| line == service), "{service} is not among\n{services}");
    }
    let methods = control_plane.call(&[], &["list", "headgate.v1.Inspect"]).unwrap();
    assert!(methods.contains("headgate.v1.Inspect.ListServices"), "{methods}");

    // A replica does not begin to serve while a document cannot be read.
    fs::write(folder.path().join("bad.yaml"), "kind: [").unwrap();
    let status = loop {
        let status = control_plane.json("headgate.v1.Inspect/GetStatus", "{}").swap_remove(0);
        if status["problems"].to_string().contains("bad.yaml") {
            break status;
        }
        thread::sleep(Duration::from_millis(20));
    };
    assert_eq!((&status["replica"], &status["synced"]), (&"replica-1".into(), &true.into()));
    assert_eq!((&status["services"], &status["endpoints"]), (&"1".into(), &"2".into()));

    let services = control_plane.json("headgate.v1.Inspect/ListServices", "{\"namespace\": \"shop\"}");
    assert_eq!(services.len(), 1);
    let service = &services[0];
    assert_eq!((&service["name"], &service["clusterIps"][0]), (&"web".into(), &"10.96.0.10".into()));
    assert_eq!((&service["endpoints"], &service["readyEndpoints"]), (&2.into(), &1.into()));
    let endpoints =
        control_plane.json("headgate.v1.Inspect/ListEndpoints", "{\"namespace\": \"shop\", \"name\": \"web\"}");
    assert_eq!((endpoints.len(), &endpoints[0]["ports"][0]), (2, &"http 8080/TCP".into()));

    let agent = |message: &str| {
        control_plane.call(&[&protocol("headgate/v1/discovery.proto")[..], &["-d", message]].concat(), &[SYNC])
    };
    let refused = agent("{\"ack\": {\"version\": 1}}").unwrap_err();
    assert!(refused.contains("InvalidArgument") && refused.contains("Hello"), "{refused}");
    let standing = agent("{\"standing\": {\"nodeName\": \"n1\"}}").unwrap();
    assert!(standing.contains("\"sourceState\": \"FOLLOWING\""), "{standing}");
    assert!(control_plane.stop(), "the program fails after SIGTERM");
}

/// Uses the certificates that `headgatectl certs` creates.
#[test]
fn over_tls_readers_may_inspect_and_other_clients_get_the_reason_of_their_refusal() {
    let folder = tempfile::tempdir().unwrap();
    let (manifests, certs) = (folder.path().join("manifests"), folder.path().join("certs"));
    fs::create_dir(&manifests).unwrap();
    fs::write(manifests.join("web.yaml"), MANIFESTS).unwrap();
    let made = Command::new(program("headgatectl").unwrap())
        .args(["certs", "--server-ip", "127.0.0.1", "--node", "node-a", "--reader", "me", "--out"])
        .arg(&certs)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));

    let mut control_plane = ControlPlane::start_with_tls(&manifests, &certs, Some("readers/me"));
    let health = || control_plane.json("grpc.health.v1.Health/Check", "{\"service\": \"headgate.v1.Discovery\"}");
    while health()[0]["status"] != "SERVING" {
        thread::sleep(Duration::from_millis(20));
    }
    let services = control_plane.call(&[], &["list"]).unwrap();
    assert!(services.lines().any(|line| line == "headgate.v1.Inspect"), "{services}");
    let services = control_plane.json("headgate.v1.Inspect/ListServices", "{\"namespace\": \"shop\"}");
    assert_eq!(services[0]["name"], "web");
    let hello = "{\"hello\": {\"nodeName\": \"node-a\"}}";
    let refused = control_plane
        .call(&[&protocol("headgate/v1/discovery.proto")[..], &["-d", hello]].concat(), &[SYNC])
        .unwrap_err();
    assert!(refused.contains("PermissionDenied") && refused.contains("headgate://node/node-a"), "{refused}");

    // The certificate of a node permits neither reflection nor inspection. Without reflection,
    // grpcurl needs the protocol's files.
    let files = protocol("headgate/v1/inspect.proto");
    control_plane.transport = ControlPlane::tls(&certs, Some("nodes/node-a"));
    let refused = control_plane.call(&files, &["headgate.v1.Inspect/GetStatus"]).unwrap_err();
    assert!(refused.contains("PermissionDenied") && refused.contains("headgate://reader/NAME"), "{refused}");
    let refused = control_plane.call(&[], &["list"]).unwrap_err();
    assert!(refused.contains("--nodes-may-inspect"), "{refused}");
    control_plane.transport = ControlPlane::tls(&certs, None);
    let refused = control_plane.call(&files, &["headgate.v1.Inspect/GetStatus"]).unwrap_err();
    assert!(!refused.contains("PermissionDenied"), "a client without a certificate reached the service: {refused}");
    assert!(control_plane.stop(), "the program fails after SIGTERM");
}
