//! Runs the real `headgatectl` against the real control plane, which reads a folder of manifests.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use headgate_tests::apiserver::objects::endpoint_slice;
use headgate_tests::testbed::{
    control_plane,
    process::{KilledOnDrop, program},
};
use serde_json::Value;

/// A guard against hanging.
const TIMEOUT: Duration = Duration::from_secs(60);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A control plane that reads a copy of `docs/examples/web.yaml`.
pub(crate) struct ControlPlane {
    program: control_plane::ControlPlane,
    folder: tempfile::TempDir,
}

impl ControlPlane {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let manifests = folder.path().join("manifests");
        std::fs::create_dir(&manifests).unwrap();
        std::fs::copy(root().join("docs/examples/web.yaml"), manifests.join("web.yaml")).unwrap();
        let source = format!("--source=files:{}", manifests.display());
        let options = [source, "--insecure-loopback".to_owned(), "--replica-name=example".to_owned()];
        let control_plane =
            Self { program: control_plane::ControlPlane::start(folder.path(), &options).unwrap(), folder };
        control_plane.wait_for("the first listing", |this| {
            let status = this.headgatectl(&["status", "-o", "json"]).ok()?;
            serde_json::from_str::<Value>(&status).ok()?["synced"].as_bool()?.then_some(())
        });
        control_plane
    }

    fn wait_for<T>(&self, what: &str, look: impl Fn(&Self) -> Option<T>) -> T {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            if Instant::now() > deadline {
                panic!("{what} does not happen; the log:\n{}", self.program.log().unwrap());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The URL of its server.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.program.inspect)
    }

    fn manifests(&self) -> PathBuf {
        self.folder.path().join("manifests")
    }

    /// Replaces a manifest atomically.
    fn write(&self, name: &str, content: &str) {
        let draft = self.folder.path().join("draft");
        std::fs::write(&draft, content).unwrap();
        std::fs::rename(draft, self.manifests().join(name)).unwrap();
    }

    /// Returns standard output, or standard error if the command fails.
    fn headgatectl(&self, arguments: &[&str]) -> Result<String, String> {
        run(Command::new(program("headgatectl").unwrap()).args(["--server", &self.url()]).args(arguments))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.headgatectl(&[arguments, &["-o", "json"]].concat()).unwrap()).unwrap()
    }
}

fn run(command: &mut Command) -> Result<String, String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{command:?}: {error}: run `make setup`"));
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[test]
fn headgatectl_shows_the_objects_of_the_manifests() {
    let control_plane = ControlPlane::start();
    let services = control_plane.json(&["services"]);
    let [service] = &services.as_array().unwrap()[..] else { panic!("{services}") };
    assert_eq!((&service["namespace"], &service["name"]), (&"shop".into(), &"web".into()));
    assert_eq!(service["cluster_ips"], serde_json::json!(["10.96.0.10"]));
    assert_eq!(service["ports"][0]["node_port"], 30080);
    assert_eq!((&service["ready_endpoints"], &service["endpoints"]), (&2.into(), &2.into()));

    let endpoints = control_plane.json(&["endpoints", "shop/web"]);
    let addresses: Vec<_> = endpoints.as_array().unwrap().iter().map(|endpoint| &endpoint["address"]).collect();
    assert_eq!(addresses, ["10.244.1.10", "10.244.2.10"]);
    assert_eq!(endpoints[0]["ports"], serde_json::json!(["http 8080/TCP"]));
    assert_eq!(endpoints[1]["node"], "node-b");

    let table = control_plane.headgatectl(&["services", "-n", "shop"]).unwrap();
    assert!(table.lines().nth(1).unwrap().contains("80:30080/TCP"), "{table}");
    let agents = control_plane.headgatectl(&["agents"]).unwrap();
    assert!(agents.lines().nth(1).unwrap().starts_with("node-a  no agent  "), "{agents}");
    assert!(agents.ends_with("\nfleet: 0 of 1 node up to date, 1 without an agent\n"), "{agents}");
}

#[test]
fn headgatectl_shows_a_row_for_each_port_with_its_own_readiness() {
    let control_plane = ControlPlane::start();
    let slice = |name: &str, port: u16, ready: bool| {
        let endpoint =
            serde_json::json!({"addresses": ["192.0.2.7"], "conditions": {"ready": ready, "serving": ready}});
        endpoint_slice("shop", name, "web").port("http", "TCP", port).endpoint_json(endpoint).build()
    };
    control_plane.write("host.yaml", &format!("{}\n---\n{}", slice("web-1", 8080, false), slice("web-2", 8081, true)));
    let rows = control_plane.wait_for("the endpoint", |this| {
        let endpoints = this.json(&["endpoints", "shop/web"]);
        let rows = endpoints.as_array()?.iter().filter(|endpoint| endpoint["address"] == "192.0.2.7");
        Some(rows.cloned().collect::<Vec<_>>()).filter(|rows| !rows.is_empty())
    });
    let states: Vec<_> = rows.iter().map(|row| (row["ports"][0].as_str().unwrap(), row["ready"] == true)).collect();
    assert_eq!(states, [("http 8080/TCP", false), ("http 8081/TCP", true)]);
    assert_eq!(rows[0]["version"], rows[1]["version"]);
    let service = &control_plane.json(&["services"])[0];
    assert_eq!(
        (&service["ready_endpoints"], &service["endpoints"]),
        (&3.into(), &3.into()),
        "the Service does not count each address once"
    );
}

#[test]
fn status_shows_an_invalid_manifest_and_the_others_are_served() {
    let control_plane = ControlPlane::start();
    assert_eq!(control_plane.json(&["status"])["problems"], serde_json::json!([]));
    control_plane.write("broken.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: [}\n");
    let problem = control_plane.wait_for("the problem", |this| {
        let problems = this.json(&["status"])["problems"].clone();
        problems.as_array()?.first().cloned()
    });
    assert!(problem["origin"].as_str().unwrap().contains("broken.yaml"), "{problem}");
    assert!(!problem["message"].as_str().unwrap().is_empty());
    assert!(control_plane.headgatectl(&["status"]).unwrap().contains("broken.yaml"));
    assert_eq!(control_plane.json(&["services"]).as_array().unwrap().len(), 1);

    std::fs::remove_file(control_plane.manifests().join("broken.yaml")).unwrap();
    control_plane.wait_for("the end of the problem", |this| {
        this.json(&["status"])["problems"].as_array()?.is_empty().then_some(())
    });
}

#[test]
fn watch_shows_an_edit() {
    let control_plane = ControlPlane::start();
    let mut watch = Command::new(program("headgatectl").unwrap())
        .args(["--server", &control_plane.url(), "watch", "shop/web", "-o", "json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let (sender, events) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if sender.send(serde_json::from_str::<Value>(&line).unwrap()).is_err() {
                break;
            }
        }
    });
    let watch = KilledOnDrop(watch);

    // A watch shows only changes after its start, and does not report when it has started. So the
    // test edits the manifest until the watch shows a change.
    let example = std::fs::read_to_string(root().join("docs/examples/web.yaml")).unwrap();
    let first = control_plane.wait_for("a removal or an addition", |this| {
        let without = example.split("  - addresses: [10.244.2.10]").next().unwrap();
        for content in [without, example.as_str()] {
            this.write("web.yaml", content);
            let expected = if content == example { 2 } else { 1 };
            this.wait_for("the edit", |this| {
                (this.json(&["endpoints", "shop/web"]).as_array()?.len() == expected).then_some(())
            });
        }
        events.recv_timeout(Duration::from_millis(200)).ok()
    });
    drop(watch);
    reader.join().unwrap();
    let seen: Vec<Value> = std::iter::once(first).chain(events.try_iter()).collect();
    let of_endpoint = |event: &&Value| event["endpoint"]["address"] == "10.244.2.10";
    assert!(seen.iter().any(|event| of_endpoint(&event)), "{seen:?}");
    let known = ["changed", "removed"];
    assert!(seen.iter().all(|event| known.iter().any(|action| event["action"] == *action)), "{seen:?}");
}
