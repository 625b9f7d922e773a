//! What a tenant and a frozen node can do to pods that stop.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr},
};

use headgate_tests::apiserver::objects::{endpoint_slice, service};
use serde_json::json;
use socket2::{Domain, Socket, Type};

use super::*;

/// How long a pod is ready to wait for its answer, in seconds.
const PATIENCE: u32 = 600;
/// How long the test waits for all pods together. If each pod waited for a frozen node anew, the
/// pods of the test would wait for 300 seconds.
const ANSWERS_GUARD: Duration = Duration::from_secs(180);
const ATTACKED: Ipv4Addr = Ipv4Addr::new(10, 96, 9, 9);

impl World {
    /// Asks the agent of the pod's node whether the pod is drained. The question comes from the
    /// pod's address, and allows the agent to wait for `seconds`. The test waits until `until`.
    fn ask_as(&self, pod: &Pod, seconds: u32, query: &str, until: Instant) -> Result<String> {
        let query = format!("timeout={seconds}&silent={seconds}&settle=0&{query}");
        let node = SocketAddr::from(([192, 0, 2, 11 + u8::try_from(pod.node)?], 10_261));
        let mut answer = String::new();
        self.control.run(|| {
            let mut socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.bind(&SocketAddr::from((pod.address, 0)).into())?;
            socket.connect(&node.into())?;
            // A time limit of zero would be an error.
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
            socket.set_read_timeout(Some(left))?;
            write!(socket, "GET /v1/drain?{query} HTTP/1.0\r\n\r\n")?;
            Ok(socket.read_to_string(&mut answer)?)
        })?;
        let (_, body) = answer.split_once("\r\n\r\n").with_context(|| format!("not HTTP: {answer:?}"))?;
        Ok(body.to_owned())
    }

    /// A Service of another tenant leads to the address of a pod, and claims to be the pod.
    fn claim_to_be(&self, pod: &Pod) -> Result<()> {
        let refused = |failure| anyhow::anyhow!("the API server refuses the attack: {failure:?}");
        let attack = service("evil", "attack").cluster_ip(&ATTACKED.to_string()).port("", "TCP", 80, 8080);
        self.api.apply(attack.build()).map_err(refused)?;
        for (number, (name, uid)) in [("attack", ""), (&pod.name, &format!("uid-{}", pod.name))].iter().enumerate() {
            let slice = endpoint_slice("evil", &format!("attack-{number}"), "attack").port("", "TCP", 8080);
            let endpoint = json!({
                "addresses": [pod.address.to_string()], "nodeName": NODES[pod.node],
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "targetRef": {"kind": "Pod", "namespace": "evil", "name": name, "uid": uid},
            });
            self.api.apply(slice.endpoint_json(endpoint).build()).map_err(refused)?;
        }
        eventually("all nodes forward as the attacker says", || {
            let leads = |kernel: Forwarding| kernel.get(&ATTACKED).is_some_and(|found| found.contains(&pod.address));
            Ok((0..NODES.len()).all(|node| self.read(node).is_ok_and(leads)))
        })
    }
}

#[test]
fn a_tenant_and_a_frozen_node_do_not_hold_up_pods_that_stop() {
    in_a_world(attack);
}

fn attack(world: &mut World) -> Result<()> {
    let mut pods: Vec<usize> = (0..6).map(|_| world.source.add(&world.api, 0, &[1], Phase::Ready)).collect();
    pods.iter().for_each(|pod| world.source.hold(*pod));
    world.settle()?;

    let until = Instant::now() + ANSWERS_GUARD;
    // The answer to a pod depends only on the objects of its own namespace.
    let index = pods.pop().context("no pod")?;
    let victim = world.source.pods[index].clone();
    world.claim_to_be(&victim)?;
    world.source.set(&world.api, index, Phase::Stopping);
    for query in [format!("namespace={NAMESPACE}"), format!("namespace={NAMESPACE}&uid=uid-{}", victim.name)] {
        let said = world.ask_as(&victim, PATIENCE, &query, until)?;
        ensure!(said.starts_with("drained\n"), "{query}: {said}");
        world.judge("the pod asks: drained", &victim, |is_found, _| is_found)?;
    }
    let said = world.ask_as(&victim, 1, &format!("namespace=evil&uid=uid-{}", victim.name), until)?;
    ensure!(
        said.starts_with("incomplete\n") && !said.contains(NAMESPACE),
        "the endpoint of the attacker is ready: {said}"
    );

    // A node that confirms nothing delays pods for a limited time, and not each pod anew.
    world.agents[&1].signal(Signal::SIGSTOP)?;
    for index in pods {
        world.source.set(&world.api, index, Phase::Stopping);
        let said = world.ask_as(&world.source.pods[index], PATIENCE, &format!("namespace={NAMESPACE}"), until)?;
        ensure!(said.starts_with("incomplete\n") && said.contains("unconfirmed: 1\n"), "{said}");
        let names = NODES.iter().copied().chain(["evil"]);
        ensure!(names.into_iter().all(|name| !said.contains(name)), "a pod learns names: {said}");
    }
    world.agents[&1].signal(Signal::SIGCONT)?;
    world.settle()
}
