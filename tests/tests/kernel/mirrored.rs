//! Two nodes that mirror each other. Each random Service has a mirror image, in which node-b and
//! its pods take the places of node-a and its pods. A client of node-a sends requests to a Service,
//! and the mirrored client of node-b sends the same requests to the mirror image. Both clients must
//! see the same outcome. The clients are pods, the node itself, and machines outside.

use std::{
    collections::BTreeSet,
    env,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use headgate_tests::testbed::{
    Family, Machines, Manifests, Outcome, Request, Transport, client,
    manifests::{Endpoint, Service, ServiceType, Via},
    plan,
};
use serde_json::json;

/// The number of requests that [`Question::ask`] sends at once. Endpoints are chosen at random, so
/// [`compare`] asks again while the sets of servers differ.
const ASKED_AT_ONCE: usize = 12;

/// The time for which a difference must last before the test fails. Both programs write their rules
/// much sooner.
const PATIENCE: Duration = Duration::from_secs(60);

/// The number of questions that are asked at the same time.
const THREADS: usize = 6;

/// A generator of random numbers. Prints its seed, which `HEADGATE_SEED` sets.
pub(crate) fn rng() -> fastrand::Rng {
    let seed = env::var("HEADGATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("HEADGATE_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

/// Adds random Services and their mirror images. Returns the names of each Service and its image.
pub(crate) fn add_pairs(manifests: &mut Manifests, pairs: usize, rng: &mut fastrand::Rng) -> Vec<(String, String)> {
    let add = |number| {
        let service = random_service(number, rng);
        let image = mirrored(&service);
        let names = (service.name.clone(), image.name.clone());
        manifests.add(service).unwrap();
        manifests.add(image).unwrap();
        names
    };
    (0..pairs).map(add).collect()
}

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
            Some(|service| json!({ "spec": { "healthCheckNodePort": 32_500 + u16::from(service.number) } }));
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
pub(crate) struct Question {
    pub(crate) from: &'static str,
    pub(crate) via: Via,
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
pub(crate) enum Seen {
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

/// A known difference between both nodes: returns true for the question and the outcomes at node-a
/// and node-b.
pub(crate) type IsKnown = fn(&Service, Question, &BTreeSet<Seen>, &BTreeSet<Seen>) -> bool;

/// The result of one question at both nodes.
enum Compared {
    Alike,
    Known,
    /// A description of the difference.
    Different(String),
}

/// Sends the requests to both nodes until the outcomes are equal or [`PATIENCE`] has passed.
fn compare(machines: &Machines, service: &Service, image: &Service, question: Question, is_known: IsKnown) -> Compared {
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
        if is_known(service, question, &ours, &theirs) {
            return Compared::Known;
        }
        if Instant::now() > until {
            return Compared::Different(format!(
                "{} from {} via {:?}, {} over {}:\n  node-a {ours:?}\n  node-b {theirs:?}\n  {service:?}",
                service.name, question.from, question.via, question.port, question.family
            ));
        }
        // A single time-out may have been a pause of a busy machine, and must be seen again.
        if ours.contains(&Seen::TimedOut) != theirs.contains(&Seen::TimedOut) {
            ours.remove(&Seen::TimedOut);
            theirs.remove(&Seen::TimedOut);
        }
        round += 1;
        if round < 3 {
            thread::sleep(Duration::from_secs(1));
        }
    }
}

/// Asks questions about all pairs of Services. Panics if both nodes differ, except where `is_known`
/// returns true.
pub(crate) fn compare_all(
    machines: &Machines,
    manifests: &Manifests,
    names: &[(String, String)],
    rng: &mut fastrand::Rng,
    is_known: IsKnown,
) {
    let mut work = Vec::new();
    for (name, image) in names {
        let (service, image) = (manifests.service(name).unwrap(), manifests.service(image).unwrap());
        for question in questions(service, rng) {
            work.push((service, image, question));
        }
    }
    let asked = work.len();
    let (work, differences, known) = (Mutex::new(work), Mutex::new(Vec::new()), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let next = work.lock().unwrap().pop();
                    let Some((service, image, question)) = next else { return };
                    match compare(machines, service, image, question, is_known) {
                        Compared::Alike => {}
                        Compared::Known => drop(known.fetch_add(1, Ordering::Relaxed)),
                        Compared::Different(how) => differences.lock().unwrap().push(how),
                    }
                }
            });
        }
    });
    let (differences, known) = (differences.into_inner().unwrap(), known.into_inner());
    println!(
        "{asked} questions about {} Services; {} differences and {known} known ones",
        names.len(),
        differences.len()
    );
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
