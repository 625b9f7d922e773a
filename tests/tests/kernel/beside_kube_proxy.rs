//! Compares kube-proxy on one node with Headgate's agent on another node of one real API server.
//!
//! The two nodes mirror each other. Each random Service has a mirror image, in which node-b and its
//! pods take the places of node-a and its pods. A client of node-a sends requests to a Service, and
//! the mirrored client of node-b sends the same requests to the mirror image. Both clients must see
//! the same outcome. The clients are pods, the node itself, and machines outside.
//!
//! The tests need `kube-proxy` beside `etcd` and `kube-apiserver` in the folder that
//! `KUBEBUILDER_ASSETS` names. If `kube-proxy` is missing, the tests print a message and pass.

use std::{
    collections::BTreeSet,
    env, fmt,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use headgate_tests::{
    apiserver::{ASSETS_VARIABLE, Kind, RealApiServer},
    testbed::{
        Backend, Family, Machines, Manifests, Outcome, Request, Transport, client,
        manifests::{Endpoint, NAMESPACE, Service, ServiceType, Via},
        plan::{self, CLUSTER_CIDR, CONTROL, CONTROL_PORT},
        process::{Process, program},
    },
};
use http::Method;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};

/// The number of random Services. Each random Service also has a mirror image.
const PAIRS: usize = 24;

/// The number of requests that [`Question::ask`] sends at once. Endpoints are chosen at random, so
/// [`compare`] asks again while the sets of servers differ.
const ASKED_AT_ONCE: usize = 12;

/// The time for which a difference must last before the test fails. Both programs write their rules
/// much sooner.
const PATIENCE: Duration = Duration::from_secs(30);

/// The number of Services that are compared at the same time.
const THREADS: usize = 6;

/// The clients that send requests through node-a. The mirror images of these clients send requests
/// through node-b.
const CLIENTS: [&str; 4] = ["a3", "node-a", "outside-1", "c2"];

fn mirror(name: &str) -> &'static str {
    const PAIRS: [(&str, &str); 6] =
        [("a1", "b1"), ("a2", "b2"), ("a3", "b3"), ("node-a", "node-b"), ("outside-1", "outside-2"), ("c1", "c1")];
    let found = PAIRS.iter().find_map(|(a, b)| match name {
        name if name == *a => Some(*b),
        name if name == *b => Some(*a),
        _ => None,
    });
    match (found, name) {
        (Some(found), _) => found,
        (None, "c2") => "c2",
        (None, _) => "node-c",
    }
}

/// A Service with random endpoints, conditions, hints and policies.
fn random_service(number: usize, rng: &mut fastrand::Rng) -> Service {
    let has_hints = rng.u8(..4) == 0;
    let mut endpoints = Vec::new();
    for pod in ["a1", "a2", "b1", "b2", "c1", "node-c"] {
        if rng.bool() {
            continue;
        }
        let node = plan::node_of(pod).unwrap();
        let endpoint = match rng.u8(..8) {
            0 => Endpoint::not_ready(pod),
            1 | 2 => Endpoint::terminating(pod),
            3 => Endpoint::published(pod),
            _ if has_hints && rng.bool() => Endpoint::for_node(pod, node.name, node.zone),
            _ if has_hints => Endpoint::for_zone(pod, node.zone),
            _ => Endpoint::ready(pod),
        };
        endpoints.push(endpoint);
    }
    let service_type = match rng.u8(..6) {
        0 => ServiceType::ClusterIp,
        1 | 2 => ServiceType::NodePort,
        _ => ServiceType::LoadBalancer,
    };
    let is_external = service_type != ServiceType::ClusterIp;
    let source_ranges = match rng.u8(..4) {
        0 if service_type == ServiceType::LoadBalancer => {
            vec!["192.0.2.0/24".to_owned(), "2001:db8:0:1::/64".to_owned()]
        }
        1 if service_type == ServiceType::LoadBalancer => vec!["10.0.0.0/8".to_owned()],
        _ => Vec::new(),
    };
    let mut service = Service::new(&format!("s{number}"), &[]);
    service.endpoints = endpoints;
    service.service_type = service_type;
    service.external_local = is_external && rng.u8(..3) == 0;
    service.internal_local = rng.u8(..3) == 0;
    service.affinity_timeout_seconds = (rng.u8(..5) == 0).then_some(10_800);
    service.has_node_ports = service_type != ServiceType::LoadBalancer || rng.u8(..4) > 0;
    service.source_ranges = source_ranges;
    if service_type == ServiceType::LoadBalancer && service.external_local {
        // Without a fixed number, the API server may choose a health-check node port that a later
        // Service asks for.
        service.patch =
            Some(|service| json!({ "spec": { "healthCheckNodePort": 32_000 + u16::from(service.number) } }));
    }
    service
}

fn mirrored(service: &Service) -> Service {
    let endpoints = service.endpoints.iter().map(|endpoint| Endpoint {
        name: mirror(&endpoint.name).to_owned(),
        hint_nodes: endpoint.hint_nodes.iter().map(|node| mirror(node).to_owned()).collect(),
        ..endpoint.clone()
    });
    Service { name: format!("{}-mirrored", service.name), endpoints: endpoints.collect(), ..service.clone() }
}

/// One kind of request to a Service through node-a. [`Question::mirrored`] returns the mirror image
/// of the request, through node-b.
#[derive(Debug, Clone, Copy)]
struct Question {
    from: &'static str,
    via: Via,
    port: &'static str,
    family: Family,
}

fn questions(service: &Service, rng: &mut fastrand::Rng) -> Vec<Question> {
    let mut questions = Vec::new();
    for from in CLIENTS {
        // With policy Local, node-a does not masquerade requests of c2, a pod on another node. If
        // the endpoint is not on node-a, its answer does not pass through node-a, and c2 does not
        // recognise the answer. With affinity, c2 keeps one random endpoint, so chance decides the
        // outcome.
        if from == "c2" && service.affinity_timeout_seconds.is_some() {
            continue;
        }
        let mut ways = Vec::new();
        if from != "c2" {
            ways.extend([Via::ClusterIp, Via::ExternalIp]);
            if service.service_type == ServiceType::LoadBalancer {
                ways.push(Via::LoadBalancerIp);
            }
        }
        if service.service_type != ServiceType::ClusterIp && service.has_node_ports {
            ways.push(Via::NodePort("node-a"));
        }
        for via in ways {
            for port in ["tcp", "udp"] {
                let family = if rng.bool() { Family::V4 } else { Family::V6 };
                questions.push(Question { from, via, port, family });
            }
        }
    }
    questions
}

impl Question {
    fn mirrored(self) -> Self {
        let via = match self.via {
            Via::NodePort(node) => Via::NodePort(mirror(node)),
            via => via,
        };
        Self { from: mirror(self.from), via, ..self }
    }

    /// Sends the requests and returns the outcomes. If `is_mirrored`, servers have the names of
    /// their mirror images.
    fn ask(self, machines: &Machines, service: &Service, is_mirrored: bool) -> BTreeSet<Seen> {
        let to = service.socket_address(self.via, self.family, self.port).unwrap();
        let transport = if self.port == "udp" { Transport::Udp } else { Transport::Tcp };
        let request = Request::new(transport, to).expecting_silence();
        let own = plan::address(self.from).unwrap().of(self.family);
        let outcomes = client::ask_many(machines.machine(self.from).unwrap(), &request, ASKED_AT_ONCE).unwrap();
        let seen = |outcome| match outcome {
            Outcome::Answered(answer) => {
                let server = if is_mirrored { mirror(&answer.server).to_owned() } else { answer.server };
                Seen::Answered { server, port: answer.port, sees_client: answer.source.ip() == own }
            }
            Outcome::Refused => Seen::Refused,
            Outcome::TimedOut => Seen::TimedOut,
            other => Seen::Other(other.to_string()),
        };
        outcomes.into_iter().map(seen).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Seen {
    Answered { server: String, port: u16, sees_client: bool },
    Refused,
    TimedOut,
    Other(String),
}

/// The part of the outcomes that must be equal at both nodes. With affinity, each client keeps one
/// random server, so all answers are compared as equal.
fn comparable(seen: &BTreeSet<Seen>, has_affinity: bool) -> BTreeSet<Seen> {
    let of_any_server = |seen: &Seen| match seen {
        Seen::Answered { .. } if has_affinity => Seen::Answered { server: String::new(), port: 0, sees_client: true },
        other => other.clone(),
    };
    seen.iter().map(of_any_server).collect()
}

/// The result of one question at both nodes.
enum Compared {
    Alike,
    /// Headgate refuses a node's own connection to an external address without endpoints.
    /// kube-proxy in iptables mode has no rule for this connection, so the connection times out.
    RefusedToTheNode,
    /// A description of the difference.
    Different(String),
}

/// Sends the requests to both nodes until the outcomes are equal or [`PATIENCE`] has passed.
fn compare(machines: &Machines, service: &Service, image: &Service, question: Question) -> Compared {
    let until = Instant::now() + PATIENCE;
    let has_affinity = service.affinity_timeout_seconds.is_some();
    let (mut ours, mut theirs) = (BTreeSet::new(), BTreeSet::new());
    let mut round = 0;
    loop {
        // In the first rounds, the rules may not be complete, so each round discards the earlier
        // outcomes. Later rounds collect the outcomes, because more requests reach more of the
        // servers.
        if round < 3 {
            ours.clear();
            theirs.clear();
        }
        ours.extend(question.ask(machines, service, false));
        theirs.extend(question.mirrored().ask(machines, image, true));
        if comparable(&ours, has_affinity) == comparable(&theirs, has_affinity) {
            return Compared::Alike;
        }
        let is_own = question.from == "node-a" && matches!(question.via, Via::ExternalIp | Via::LoadBalancerIp);
        if is_own && ours == [Seen::Refused].into() && theirs == [Seen::TimedOut].into() {
            return Compared::RefusedToTheNode;
        }
        if Instant::now() > until {
            return Compared::Different(format!(
                "{} from {} via {:?}, {} over {}:\n  headgate   {ours:?}\n  kube-proxy {theirs:?}\n  {service:?}",
                service.name, question.from, question.via, question.port, question.family
            ));
        }
        round += 1;
        if round < 3 {
            thread::sleep(Duration::from_secs(1));
        }
    }
}

/// Creates objects at an API server. Call this function in the network namespace of the server.
async fn create(kubeconfig: &str, objects: Vec<Value>) {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).unwrap();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let client = kube::Client::try_from(config).unwrap();
    let send = async |method: Method, path: String, content_type: &str, body: &Value| {
        let request = http::Request::builder().method(method).uri(&path).header("content-type", content_type);
        let sent = client.request::<Value>(request.body(body.to_string().into_bytes()).unwrap()).await;
        sent.unwrap_or_else(|error| panic!("{path}: {error}: {body}"))
    };
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
    send(Method::POST, "/api/v1/namespaces".into(), "application/json", &namespace).await;
    for object in objects {
        let kind = Kind::of(&object).unwrap();
        send(Method::POST, kind.collection_path(Some(NAMESPACE)), "application/json", &object).await;
        // The API server ignores the status when it creates a Service, so a second request sets it.
        if let (Kind::Service, Some(status)) = (kind, object.get("status")) {
            let path = kind.object_path(NAMESPACE, object["metadata"]["name"].as_str().unwrap()) + "/status";
            send(Method::PATCH, path, "application/merge-patch+json", &json!({ "status": status })).await;
        }
    }
}

/// Returns the folder with all three binaries. If the variable is unset or `kube-proxy` is missing,
/// prints the reason and returns `None`.
fn assets() -> Option<PathBuf> {
    let Some(folder) = env::var_os(ASSETS_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from) else {
        println!("{ASSETS_VARIABLE} is unset: skipping the comparison with kube-proxy");
        return None;
    };
    if !folder.join("kube-proxy").is_file() {
        println!("{} is not a file: skipping the comparison with kube-proxy", folder.join("kube-proxy").display());
        return None;
    }
    Some(folder)
}

struct Programs {
    agent: Process,
    kube_proxy: Process,
    control_plane: Process,
    // Fields are dropped in order, so the API server stops last.
    _api: RealApiServer,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Programs").finish_non_exhaustive()
    }
}

impl Programs {
    fn start(machines: &Machines, assets: &Path, manifests: &Manifests, backend: Backend) -> Self {
        let control = machines.machine(CONTROL).unwrap();
        let address = plan::address(CONTROL).unwrap().v4;
        let api = control.run(|| Ok(RealApiServer::start_at(assets, address)?)).unwrap();
        let kubeconfig = api.kubeconfig();
        let objects = manifests.documents().unwrap();
        control
            .run(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(create(&kubeconfig, objects));
                Ok(())
            })
            .unwrap();
        let path = machines.folder().join("kubeconfig");
        std::fs::write(&path, &kubeconfig).unwrap();
        let start = |name: &str, machine: &str, command: Command| {
            let log = machines.folder().join(format!("{name}.log"));
            Process::start(name, machines.machine(machine).unwrap(), command, &log).unwrap()
        };
        let mut command = Command::new(program("headgate-control-plane").unwrap());
        command.arg("--source=kubernetes").arg("--kubeconfig").arg(&path);
        command.args(["--listen", &format!("{address}:{CONTROL_PORT}"), "--insecure-loopback"]);
        let control_plane = start("headgate-control-plane", CONTROL, command);
        let mut command = Command::new(program("headgate-node-agent").unwrap());
        command.args(["--node-name", "node-a", "--state-dir=", "--insecure-loopback", "--cluster-cidr", CLUSTER_CIDR]);
        command.args(["--control-plane", &format!("http://{address}:{CONTROL_PORT}")]);
        command.args(backend.agent_arguments());
        let agent = start("headgate-node-agent", "node-a", command);
        let mut command = Command::new(assets.join("kube-proxy"));
        command.arg("--kubeconfig").arg(&path).args(["--hostname-override=node-b", "--proxy-mode=iptables"]);
        command.args(["--cluster-cidr", CLUSTER_CIDR, "--detect-local-mode=ClusterCIDR"]);
        command.args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"]);
        command.arg("--conntrack-tcp-timeout-close-wait=0");
        command.env("XTABLES_LOCKFILE", machines.xtables_lock("node-b"));
        let kube_proxy = start("kube-proxy", "node-b", command);
        Self { agent, kube_proxy, control_plane, _api: api }
    }

    fn check_running(&mut self) {
        for process in [&mut self.agent, &mut self.kube_proxy, &mut self.control_plane] {
            process.check_running().unwrap();
        }
    }
}

#[test]
fn random_services_are_served_as_kube_proxy_serves_them() {
    compare_random_services(Backend::IptablesLegacy);
}

#[test]
fn random_services_are_served_as_kube_proxy_serves_them_in_the_compact_layout() {
    compare_random_services(Backend::IptablesNftCompact);
}

fn compare_random_services(backend: Backend) {
    let Some(assets) = assets() else { return };
    let seed = env::var("HEADGATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("HEADGATE_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut manifests = Manifests::default();
    // The API server assigns the first address of the range to the Service `kubernetes`. The first
    // Service of the test has no address, so no Service of the test requests the assigned address.
    let first = Service { service_type: ServiceType::ExternalName, ..Service::new("first", &[]) };
    manifests.add(first).unwrap();
    let mut names = Vec::new();
    for number in 0..PAIRS {
        let service = random_service(number, &mut rng);
        let image = mirrored(&service);
        names.push((service.name.clone(), image.name.clone()));
        manifests.add(service).unwrap();
        manifests.add(image).unwrap();
    }
    let machines = Machines::start().unwrap();
    let mut programs = Programs::start(&machines, &assets, &manifests, backend);
    let mut work = Vec::new();
    for (name, image) in &names {
        let (service, image) = (manifests.service(name).unwrap(), manifests.service(image).unwrap());
        for question in questions(service, &mut rng) {
            work.push((service, image, question));
        }
    }
    let asked = work.len();
    let (work, differences, refused) = (Mutex::new(work), Mutex::new(Vec::new()), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let next = work.lock().unwrap().pop();
                    let Some((service, image, question)) = next else { return };
                    match compare(&machines, service, image, question) {
                        Compared::Alike => {}
                        Compared::RefusedToTheNode => {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        Compared::Different(how) => differences.lock().unwrap().push(how),
                    }
                }
            });
        }
    });
    programs.check_running();
    let differences = differences.into_inner().unwrap();
    println!(
        "{backend}: {asked} questions about {PAIRS} Services; {} differences, and {} of the node's own connections refused",
        differences.len(),
        refused.into_inner()
    );
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
