//! A node, its pods, and the programs under attack.
//!
//! ```text
//!   namespace node                                namespace pods
//!     stand-in API server, replica, agent           pods of all tenants, nodes that enrol,
//!     192.0.2.11, 10.244.0.1, 203.0.113.1  ── veth ── and a load balancer at 203.0.113.5
//! ```
//!
//! Each attack has a bed of its own, so that no attack profits from an earlier one.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::Value;
use tempfile::TempDir;

use super::{AttackMode, Attacks, enrolment::write_authorities, honest::connect_once, servers::PodServers};
use crate::{
    apiserver::{Token, objects},
    fleet::source::Source,
    testbed::{
        netns::Namespace,
        page,
        process::{Process, program},
    },
};

/// The node of the agent.
pub(super) const NODE: &str = "node-000";
/// The address in the status of [`NODE`].
pub(super) const NODE_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 11);
/// The address of the node towards its pods.
pub(super) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
/// The two pods between which the honest tenant's Service changes.
pub(super) const PODS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 244, 0, 11), Ipv4Addr::new(10, 244, 0, 12)];
/// A pod of the honest tenant whose endpoint is checked.
pub(super) const CHECKED_POD: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 13);
/// The number of [`CHECKED_POD`] among the servers.
pub(super) const CHECKED_SERVER: usize = 2;
/// Two pods of the honest tenant, of which the first stops.
pub(super) const STOPPING_PODS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 244, 0, 14), Ipv4Addr::new(10, 244, 0, 15)];
/// The pod that attacks.
pub(super) const ATTACKER: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 66);
/// Another pod that attacks, for attacks that an address cannot combine.
pub(super) const SECOND_ATTACKER: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 67);
/// The load balancer that probes health-check node ports.
pub(super) const LOAD_BALANCER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 5);
/// The address at which the load balancer reaches the node.
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// The ClusterIP of the honest tenant's Service.
pub(super) const HONEST: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 111, 0, 10)), 80);

pub(super) const HEALTH_PORT: u16 = 10256;
pub(super) const METRICS_PORT: u16 = 10249;
pub(super) const DRAIN_PORT: u16 = 10261;
pub(super) const HEALTH_NODE_PORT: u16 = 30_999;
pub(super) const STREAM_PORT: u16 = 7443;
pub(super) const ENROLMENT_PORT: u16 = 7445;

/// Endpoints of each Service of the cluster around the tenants.
const ENDPOINTS: u32 = 10;
/// The files that the replica and the agent may open.
const REPLICA_FILES: u32 = 16_384;
const AGENT_FILES: u32 = 4_096;
const LONGEST_START: Duration = Duration::from_secs(180);

/// Whether agents use TLS, and get their certificates by enrolment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Enrols {
    No,
    Yes,
}

/// The programs and their networks. The fields are dropped in order.
pub(super) struct Bed {
    pub(super) agent: Process,
    pub(super) replica: Process,
    pub(super) servers: PodServers,
    pub(super) source: Source,
    pub(super) pods: Namespace,
    pub(super) node: Namespace,
    pub(super) folder: TempDir,
    turn: AtomicUsize,
}

impl Bed {
    /// Starts everything, and waits until the honest tenant's Service answers.
    ///
    /// # Errors
    /// A program does not start, or the agent uses another mode.
    pub(super) fn start(mode: AttackMode, options: &Attacks, services: u32, enrols: Enrols) -> Result<Self> {
        let folder = tempfile::tempdir().context("creating a folder")?;
        let (node, pods) = networks()?;
        let source = Source::start(&node, Arc::default(), services, ENDPOINTS)?;
        let write = |object: Value| source.api().apply(object).map_err(|failure| anyhow!("{failure:?}"));
        write(
            objects::node(NODE)
                .address("InternalIP", &NODE_ADDRESS.to_string())
                .field("spec.podCIDR", "10.244.0.0/24")
                .field("spec.podCIDRs", vec!["10.244.0.0/24"])
                .build(),
        )?;
        honest_objects().into_iter().try_for_each(|object| write(object).map(drop))?;
        fs::write(folder.path().join("kubeconfig"), source.api().kubeconfig())?;
        if enrols == Enrols::Yes {
            write_authorities(folder.path())?;
            fs::write(folder.path().join("token"), source.api().issue_token(Token::of_agent(NODE)))?;
        }
        let servers = PodServers::start(&pods, &[PODS[0], PODS[1], CHECKED_POD])?;
        let start = |name: &str, open_files: u32, defaults: Vec<String>, extra: &[String]| {
            let mut command = Command::new("prlimit");
            command.arg(format!("--nofile={open_files}:{open_files}")).arg(program(name)?);
            command.args(arguments(defaults, extra, folder.path())).env("NO_COLOR", "1");
            Process::start(name, &node, command, &folder.path().join(format!("{name}.log")))
        };
        let replica = start(
            "headgate-control-plane",
            REPLICA_FILES,
            replica_arguments(enrols),
            &options.control_plane_arguments,
        )?;
        let agent = start("headgate-node-agent", AGENT_FILES, agent_arguments(mode, enrols), &options.agent_arguments)?;
        let mut bed = Self { agent, replica, servers, source, pods, node, folder, turn: AtomicUsize::new(0) };
        bed.until_programmed(mode).with_context(|| bed.logs())?;
        Ok(bed)
    }

    fn until_programmed(&mut self, mode: AttackMode) -> Result<()> {
        let started = Instant::now();
        while self.node.run(|| Ok(connect_once(HONEST)))?.is_err() {
            self.check_running()?;
            ensure!(started.elapsed() < LONGEST_START, "the honest Service was not programmed in time");
            std::thread::sleep(Duration::from_millis(50));
        }
        let used = page::of_agent(&self.node, "/proxyMode")?;
        ensure!(
            used.ends_with(mode.name()),
            "the agent does not use mode {}; the kernel may lack it: {used}",
            mode.name()
        );
        // The end of the first sync, such as the return of memory, does not belong to a phase.
        std::thread::sleep(Duration::from_secs(1));
        Ok(())
    }

    /// Checks that both programs still run.
    ///
    /// # Errors
    /// A program has ended.
    pub(super) fn check_running(&mut self) -> Result<()> {
        self.replica.check_running()?;
        self.agent.check_running()
    }

    /// The ends of the logs, for messages.
    pub(super) fn logs(&self) -> String {
        format!("the logs end with:\n{}\n{}", self.replica.log_tail(), self.agent.log_tail())
    }

    /// Writes an object.
    ///
    /// # Errors
    /// The API server refuses the object, which is a defect of the bench.
    pub(super) fn write(&self, object: Value) -> Result<()> {
        let written = self.source.api().apply(object);
        written.map(drop).map_err(|failure| anyhow!("the API server refuses an object of the bench: {failure:?}"))
    }

    /// Moves the honest tenant's Service to its other pod, and returns the number of this pod.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(super) fn move_honest_service(&self) -> Result<u8> {
        let number = (self.turn.fetch_add(1, Ordering::Relaxed) + 1) % PODS.len();
        self.write(honest_slice(number))?;
        Ok(u8::from(number == 1))
    }
}

fn networks() -> Result<(Namespace, Namespace)> {
    let [node, pods] = ["node", "pods"].map(|name| Namespace::for_test(&format!("attacked-{name}")));
    let (node, pods) = (node?, pods?);
    node.ip_batch(&format!(
        "link set lo up\naddr add {NODE_ADDRESS}/32 dev lo\n\
         link add pods0 type veth peer name eth0 netns {}\nlink set pods0 up\n\
         addr add {GATEWAY}/16 dev pods0\naddr add {OUTSIDE}/24 dev pods0\n",
        pods.name()
    ))?;
    let mut commands = String::from("link set lo up\nlink set eth0 up\naddr add 10.244.0.10/16 dev eth0\n");
    for address in [PODS[0], PODS[1], CHECKED_POD, STOPPING_PODS[0], STOPPING_PODS[1], ATTACKER, SECOND_ATTACKER] {
        commands.push_str(&format!("addr add {address}/16 dev eth0\n"));
    }
    // The nodes that enrol are also addresses of this namespace.
    commands.push_str(&format!(
        "addr add {LOAD_BALANCER}/24 dev eth0\nroute add local 10.244.1.0/24 dev lo\nroute add default via {GATEWAY}\n"
    ));
    pods.ip_batch(&commands)?;
    // The namespace of the pods does not forward, so it drops what is for 10.245.0.0/16.
    node.ip_batch("route add default via 10.244.0.10\n")?;
    pods.set_sysctls(&[("ipv4/ip_local_port_range", "1024 65000")])?;
    // Probes and polls must not exhaust what connection tracking remembers.
    node.set_sysctls(&[("ipv4/ip_local_port_range", "33000 65000")])?;
    Ok((node, pods))
}

/// The given arguments, and those defaults whose flags are not given. `{folder}` stands for the
/// folder of the bed.
fn arguments(defaults: Vec<String>, extra: &[String], folder: &Path) -> Vec<String> {
    let flag = |argument: &str| argument.split('=').next().unwrap_or_default().to_owned();
    let given: Vec<String> = extra.iter().map(|argument| flag(argument)).collect();
    let kept = defaults.into_iter().filter(|argument| !given.contains(&flag(argument)));
    let folder = folder.display().to_string();
    kept.chain(extra.iter().cloned()).map(|argument| argument.replace("{folder}", &folder)).collect()
}

fn replica_arguments(enrols: Enrols) -> Vec<String> {
    let common = [
        "--source=kubernetes",
        "--kubeconfig={folder}/kubeconfig",
        "--metrics-listen=127.0.0.1:7480",
        "--inspect-listen=127.0.0.1:7444",
        "--replica-name=replica-0",
        "--log=warn",
    ];
    let more: &[&str] = match enrols {
        Enrols::No => &["--listen=127.0.0.1:7443", "--insecure-loopback", "--peers=none"],
        Enrols::Yes => &[
            "--listen=0.0.0.0:7443",
            "--tls-cert={folder}/tls.crt",
            "--tls-key={folder}/tls.key",
            "--tls-client-ca={folder}/ca.crt",
            "--enrolment-listen=0.0.0.0:7445",
            "--tls-node-ca={folder}/nodes.crt",
            "--enrolment-ca-key={folder}/nodes.key",
        ],
    };
    common.iter().chain(more).map(|argument| (*argument).to_owned()).collect()
}

fn agent_arguments(mode: AttackMode, enrols: Enrols) -> Vec<String> {
    let common = [
        "--node-name=node-000",
        // Pods, and the addresses that hostile Services name.
        "--cluster-cidr=10.244.0.0/15",
        "--state-dir={folder}/state",
        "--healthz-bind-address=0.0.0.0:10256",
        "--metrics-bind-address=0.0.0.0:10249",
        "--drain-address=0.0.0.0:10261",
        "--nodeport-addresses=0.0.0.0/0",
        "--health-check-namespaces=*",
        "--log=warn",
    ];
    let more: &[&str] = match enrols {
        Enrols::No => &["--control-plane=http://127.0.0.1:7443", "--insecure-loopback"],
        Enrols::Yes => &[
            "--control-plane=https://192.0.2.11:7443",
            "--tls-ca={folder}/ca.crt",
            "--tls-cert={folder}/agent.crt",
            "--tls-key={folder}/agent.key",
            "--enrolment-address=192.0.2.11:7445",
            "--enrolment-token={folder}/token",
        ],
    };
    common.iter().chain(more).chain(mode.arguments()).map(|argument| (*argument).to_owned()).collect()
}

/// The objects of the honest tenant: `web` moves between two pods, `checked` has health checks,
/// `stops` has a pod that stops, and `balanced` has a health-check node port.
fn honest_objects() -> Vec<Value> {
    let service = |name: &str, host: u8| {
        let address = Ipv4Addr::new(10, 111, 0, host).to_string();
        objects::service("honest", name).cluster_ip(&address).port("http", "TCP", 80, 8080)
    };
    let mut checked = service("checked", 11).build();
    checked["metadata"]["annotations"] =
        serde_json::json!({"headgate.io/health-check": "tcp", "headgate.io/health-check-interval": "500ms"});
    let balanced = service("balanced", 13)
        .field("spec.type", "LoadBalancer")
        .field("spec.externalTrafficPolicy", "Local")
        .field("spec.healthCheckNodePort", HEALTH_NODE_PORT)
        .field("status.loadBalancer.ingress", vec![serde_json::json!({"ip": "203.0.113.77", "ipMode": "VIP"})]);
    let slice = |service: &str| {
        let slice = objects::endpoint_slice("honest", &format!("{service}-1"), service).port("http", "TCP", 8080);
        slice.endpoint(&CHECKED_POD.to_string(), NODE).build()
    };
    vec![
        service("web", 10).build(),
        honest_slice(0),
        checked,
        slice("checked"),
        service("stops", 12).build(),
        stopping_slice(false),
        balanced.build(),
        slice("balanced"),
    ]
}

fn honest_slice(number: usize) -> Value {
    let slice = objects::endpoint_slice("honest", "web-1", "web").port("http", "TCP", 8080);
    slice.endpoint(&PODS[number].to_string(), NODE).build()
}

/// The slice of the Service `stops`, whose first pod is ready, or stops.
pub(super) fn stopping_slice(stops: bool) -> Value {
    let pod = |number: usize| {
        let stops = stops && number == 0;
        serde_json::json!({
            "addresses": [STOPPING_PODS[number]], "nodeName": NODE,
            "conditions": {"ready": !stops, "serving": true, "terminating": stops},
            "targetRef": {"kind": "Pod", "namespace": "honest", "name": format!("stops-{number}"), "uid": format!("u{number}")},
        })
    };
    let slice = objects::endpoint_slice("honest", "stops-1", "stops").port("http", "TCP", 8080);
    slice.endpoint_json(pod(0)).endpoint_json(pod(1)).build()
}
