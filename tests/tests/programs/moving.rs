//! Replicas of the control plane move to other addresses, with real programs and TLS: agents need
//! one seed, and find all others by what replicas announce (discovery.proto, section 22).
//!
//! ```text
//!   control: replicas 192.0.2.1 to 192.0.2.6, three at a time; one folder of manifests
//!      └── br0 ── node-a 192.0.2.11, node-b 192.0.2.12
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use headgate_tests::testbed::{
    Namespace, page,
    process::{Process, output, program},
};
use tempfile::TempDir;

use crate::commands;

/// The longest time that an agent may be without a stream, and guard against hanging.
const GUARD: Duration = Duration::from_secs(90);
const NODES: [&str; 2] = ["node-a", "node-b"];
const REPLICAS: &str = "headgate-system/headgate-control-plane";

fn eventually(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + GUARD;
    while !is_so().with_context(|| what.to_owned())? {
        ensure!(Instant::now() < until, "not seen in time: {what}");
        sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Everything. The fields are dropped in order.
struct World {
    replicas: BTreeMap<u8, Process>,
    agents: Vec<Process>,
    nodes: Vec<Namespace>,
    control: Namespace,
    folder: TempDir,
}

impl World {
    fn new() -> Result<Self> {
        let control = Namespace::for_test("moving-control")?;
        let addresses: String = (1..=6).map(|last| format!("addr add 192.0.2.{last}/32 dev br0\n")).collect();
        control.ip_batch(&format!(
            "link set lo up\nlink add br0 type bridge\naddr add 192.0.2.254/24 dev br0\n{addresses}link set br0 up\n"
        ))?;
        let mut nodes = Vec::new();
        for (index, name) in NODES.iter().enumerate() {
            let node = Namespace::for_test(&format!("moving-{name}"))?;
            control.ip_batch(&format!(
                "link add {name} type veth peer name eth0 netns {}\nlink set {name} master br0 up\n",
                node.name()
            ))?;
            let address = 11 + index;
            node.ip_batch(&format!(
                "link set lo up\naddr add 192.0.2.{address}/24 dev eth0\nlink set eth0 up\nroute add default via 192.0.2.254\n"
            ))?;
            nodes.push(node);
        }
        let folder = tempfile::tempdir()?;
        fs::create_dir(folder.path().join("manifests"))?;
        let world = Self { replicas: BTreeMap::new(), agents: Vec::new(), nodes, control, folder };
        // The certificate names no address: replicas move, and it stays.
        let command = program("headgatectl")?;
        let command = command.to_str().context("the path of headgatectl")?;
        let arguments = ["--server-name", "headgate.example", "--node", &NODES.join(","), "--reader", "me"];
        output(command, &[&["certs", "--out", &world.path("certs")][..], &arguments].concat());
        Ok(world)
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn put(&self, name: &str, text: &str) -> Result<()> {
        fs::write(self.path("draft"), text)?;
        Ok(fs::rename(self.path("draft"), self.path(&format!("manifests/{name}.yaml")))?)
    }

    /// Writes the endpoints of the replicas, as Kubernetes does for their pods.
    fn put_endpoints(&self, replicas: &BTreeSet<u8>) -> Result<()> {
        let endpoints = replicas.iter().map(|last| format!("- {{addresses: [192.0.2.{last}]}}\n")).collect::<String>();
        self.put(
            "replicas",
            &format!(
                "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  namespace: headgate-system\n  name: replicas\n  \
                 labels: {{kubernetes.io/service-name: headgate-control-plane}}\naddressType: IPv4\n\
                 ports: [{{name: inspect, port: 7444}}]\nendpoints:\n{endpoints}"
            ),
        )
    }

    fn start_replica(&mut self, last: u8) -> Result<()> {
        let name = format!("replica-{last}");
        let mut command = commands::replica(self.folder.path(), &name, &format!("192.0.2.{last}"))?;
        command.arg(format!("--source=files:{}", self.path("manifests"))).arg(format!("--peers=service:{REPLICAS}"));
        let process = Process::start(&name, &self.control, command, &self.folder.path().join(&name))?;
        self.replicas.insert(last, process);
        Ok(())
    }

    /// Starts the agent of a node. Its only seed is the first replica.
    fn start_agent(&self, node: usize) -> Result<Process> {
        let name = NODES[node];
        let mut command = commands::agent(self.folder.path(), name)?;
        command.arg("--control-plane=https://192.0.2.1:7443");
        Process::start(name, &self.nodes[node], command, &self.folder.path().join(name))
    }

    fn is_connected(&self, node: usize) -> bool {
        let metrics = page::of_agent(&self.nodes[node], "/metrics").unwrap_or_default();
        page::sample::<u64>(&metrics, "headgate_agent_connected") == 1
    }

    /// Waits until each agent has a stream, and these replicas are on its disk.
    fn until_known(&self, replicas: &BTreeSet<u8>) -> Result<()> {
        let list: String = replicas.iter().map(|last| format!("192.0.2.{last}:7443\n")).collect();
        for (node, name) in NODES.iter().enumerate() {
            eventually(&format!("{name} has a stream"), || Ok(self.is_connected(node)))?;
            eventually(&format!("{name} knows {replicas:?}"), || {
                let found = fs::read_to_string(self.path(&format!("state-{name}/replicas"))).unwrap_or_default();
                Ok(found == list && self.is_connected(node))
            })?;
        }
        Ok(())
    }

    /// What a replica says of itself and the others.
    fn status(&self, replica: u8) -> Result<String> {
        let mut command = Command::new(program("headgatectl")?);
        command.arg(format!("--server=https://192.0.2.{replica}:7444")).arg("--tls-server-name=headgate.example");
        for (option, file) in [("ca", "ca.crt"), ("cert", "readers/me.crt"), ("key", "readers/me.key")] {
            command.arg(format!("--tls-{option}={}", self.path(&format!("certs/{file}"))));
        }
        command.arg("status");
        self.control.output(command)
    }

    /// Waits until the kernel of each node has the ClusterIP 10.96.0.`last`.
    fn until_programmed(&self, last: u8) -> Result<()> {
        self.put(
            "web",
            &format!(
                "apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\n\
                 spec: {{clusterIP: 10.96.0.{last}, ports: [{{port: 80, targetPort: 8080}}]}}\n"
            ),
        )?;
        let address = format!("10.96.0.{last} ");
        self.nodes.iter().try_for_each(|node| {
            eventually(&format!("{} has {address}", node.name()), || {
                Ok(node.tool("nft", &["list", "table", "ip", "headgate"]).is_ok_and(|rules| rules.contains(&address)))
            })
        })
    }
}

#[test]
fn all_replicas_move_one_after_the_other() {
    let mut world = World::new().unwrap();
    if let Err(error) = move_all(&mut world) {
        let logs = world.replicas.values().chain(&world.agents).map(Process::log_tail);
        panic!("{error:#}\n{}", logs.collect::<Vec<_>>().join("\n\n"));
    }
}

fn move_all(world: &mut World) -> Result<()> {
    world.put(
        "service",
        "apiVersion: v1\nkind: Service\nmetadata: {name: headgate-control-plane, namespace: headgate-system}\n\
         spec: {clusterIP: 10.96.0.200, ports: [{name: inspect, port: 7444}]}\n",
    )?;
    let mut places: BTreeSet<u8> = (1..=3).collect();
    world.put_endpoints(&places)?;
    places.iter().try_for_each(|last| world.start_replica(*last))?;
    world.agents = (0..NODES.len()).map(|node| world.start_agent(node)).collect::<Result<_>>()?;
    world.until_known(&places)?;
    world.until_programmed(1)?;

    for (old, new) in [(1, 4), (2, 5), (3, 6)] {
        places.insert(new);
        world.put_endpoints(&places)?;
        world.start_replica(new)?;
        world.until_known(&places)?;
        let replica = world.replicas.remove(&old).context("no replica")?;
        // A node that is drained, and nodes that crash. The address has gone as well.
        if old == 1 {
            replica.terminate().map(drop)?;
        } else {
            replica.kill()?;
        }
        world.control.ip_batch(&format!("addr del 192.0.2.{old}/32 dev br0\n"))?;
        places.remove(&old);
        world.put_endpoints(&places)?;
        world.until_known(&places)?;
        world.until_programmed(new)?;
    }
    world.agents.iter_mut().try_for_each(Process::check_running)?;
    let status = world.status(4)?;
    ensure!(!status.contains("replica-1") && !status.contains("never joined"), "replica-1 said goodbye: {status}");

    // The seed has gone, and the agent finds the others by the list on its disk.
    world.agents.remove(1).kill()?;
    let agent = world.start_agent(1)?;
    world.agents.push(agent);
    world.until_known(&places)?;
    world.until_programmed(9)
}
