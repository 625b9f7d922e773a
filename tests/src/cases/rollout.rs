//! Rollouts: pods stop one after the other while clients open connections. Before it stops, a pod
//! asks the drain barrier, as its `preStop` hook does.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::live;
use crate::testbed::client::ANSWER_TIMEOUT;
use crate::testbed::iptables::{self, Variant};
use crate::testbed::manifests::{Endpoint, NAMESPACE, Service, Via};
use crate::testbed::plan::{self, LINE_PORT, NODES};
use crate::testbed::{AgentSetup, Family, Outcome, Testbed};

/// The Service whose pods are replaced.
const SERVICE: &str = "rolling";
/// The port at which agents answer pods that stop.
const DRAIN_PORT: u16 = 10261;
/// The clients: pods of two nodes, a node, and a machine outside of the cluster.
const CLIENTS: [(&str, Via); 4] = [
    ("a3", Via::ClusterIp),
    ("b3", Via::ClusterIp),
    ("node-c", Via::ClusterIp),
    ("outside-1", Via::NodePort("node-a")),
];

/// What a pod does between its deletion and its end.
#[derive(Debug, Clone, Copy)]
pub enum Wait {
    /// It asks the barrier.
    Barrier,
    /// It sleeps.
    Sleep(Duration),
}

/// What clients and pods saw.
#[derive(Debug)]
pub struct Seen {
    /// The requests of the clients.
    pub requests: usize,
    /// The requests that were not answered, each with its client.
    pub failed: Vec<String>,
    /// The times from the deletions of pods until their ends.
    pub waits: Vec<Duration>,
}

/// Starts the control plane and agents that answer pods, and waits until the Service with these
/// pods is programmed. `tools` returns the folder that is put in front of the `PATH` of a node's
/// agent, if any.
///
/// # Errors
/// A program does not start, or does not program the Service.
pub fn start(bed: &Testbed, pods: &[&str], tools: impl Fn(&str) -> Option<PathBuf>) -> Result<()> {
    bed.write(|manifests| manifests.add(Service::new(SERVICE, pods)))?;
    bed.start_control_plane()?;
    for node in &NODES {
        let setup = AgentSetup::with(&[&format!("--drain-address=[::]:{DRAIN_PORT}")]);
        bed.start_agent_with(node.name, &AgentSetup { tools: tools(node.name), ..setup })?;
    }
    bed.wait_programmed()
}

/// Replaces all pods `rolls` times, one batch after the other: the old pods of a batch wait and
/// stop, and after all nodes have removed them, the new pods start at the same addresses. Clients
/// open connections meanwhile.
///
/// # Errors
/// A program fails, or the barrier does not answer `drained`.
pub fn roll(bed: &Testbed, batches: &[&[&str]], rolls: usize, wait: Wait) -> Result<Seen> {
    let targets: Vec<(&str, SocketAddr)> = Family::BOTH
        .into_iter()
        .flat_map(|family| CLIENTS.map(|(from, via)| Ok((from, bed.address(SERVICE, via, family, "tcp")?))))
        .collect::<Result<_>>()?;
    let mut waits = Vec::new();
    let outcomes = live::outcomes_while_asking(bed, &targets, ANSWER_TIMEOUT, || {
        for _ in 0..rolls {
            for pods in batches {
                waits.extend(replace(bed, pods, wait).with_context(|| format!("replacing {pods:?}"))?);
            }
        }
        Ok(())
    })?;
    let requests = outcomes.iter().map(Vec::len).sum();
    let failed = |((from, to), outcomes): (&(&str, SocketAddr), Vec<Outcome>)| {
        let failed = outcomes.into_iter().filter(|outcome| !matches!(outcome, Outcome::Answered(_)));
        failed.map(|outcome| format!("{from} asks {to}: {outcome}")).collect::<Vec<_>>()
    };
    Ok(Seen { requests, failed: targets.iter().zip(outcomes).flat_map(failed).collect(), waits })
}

/// Replaces pods at the same time, and returns how long each old pod took to stop.
fn replace(bed: &Testbed, pods: &[&str], wait: Wait) -> Result<Vec<Duration>> {
    let mut incarnations = Vec::new();
    set(bed, |endpoints| {
        for pod in pods {
            let old = endpoints.iter_mut().find(|endpoint| endpoint.name == *pod).context("the pod is no endpoint")?;
            incarnations.push(old.incarnation);
            *old = Endpoint { incarnation: old.incarnation, ..Endpoint::terminating(pod) };
        }
        Ok(())
    })?;
    let deleted = Instant::now();
    let waited = std::thread::scope(|scope| {
        let stop = |pod: &str| {
            match wait {
                Wait::Barrier => drain(bed, pod)?,
                Wait::Sleep(pause) => std::thread::sleep(pause),
            }
            let waited = deleted.elapsed();
            fail(bed, pod, true, REFUSES)?;
            Ok(waited)
        };
        let threads: Vec<_> = pods.iter().map(|pod| scope.spawn(move || stop(pod))).collect();
        let joined = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined.map(|stopped| stopped.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect::<Result<_>>()
    })?;
    // A cluster does not give the address to a new pod at once. So connections to the old pod fail
    // until the last node has removed it.
    bed.update_service(SERVICE, |service| {
        service.endpoints.retain(|endpoint| !pods.contains(&endpoint.name.as_str()));
    })?;
    pods.iter().try_for_each(|pod| fail(bed, pod, false, REFUSES))?;
    // The next pods are deleted as soon as these pods are ready, as in the rollout of a Deployment.
    set(bed, |endpoints| {
        let new = pods.iter().zip(incarnations);
        endpoints.extend(new.map(|(pod, old)| Endpoint { incarnation: old + 1, ..Endpoint::ready(pod) }));
        Ok(())
    })?;
    Ok(waited)
}

/// Changes the endpoints, without waiting for agents.
fn set(bed: &Testbed, change: impl FnOnce(&mut Vec<Endpoint>) -> Result<()>) -> Result<()> {
    bed.write(|manifests| change(&mut manifests.service_mut(SERVICE)?.endpoints))
}

/// The `preStop` hook of a pod.
fn drain(bed: &Testbed, pod: &str) -> Result<()> {
    let node = plan::node_of(pod).context("the pod has no node")?;
    let address = plan::address(node.name).context("the node has no address")?.v4;
    let url = format!("http://{address}:{DRAIN_PORT}/v1/drain?timeout=60s&namespace={NAMESPACE}");
    let answer = bed.machines().machine(pod)?.tool("curl", &["-sS", "--max-time", "90", &url])?;
    ensure!(answer == "drained\n", "the barrier answered: {answer}");
    Ok(())
}

/// How a pod treats new connections that it does not accept, as a target of iptables.
pub(super) const REFUSES: &[&str] = &["REJECT", "--reject-with", "tcp-reset"];
/// The pod answers nothing, as if its node had failed.
pub(super) const SILENT: &[&str] = &["DROP"];

/// Makes a pod treat new connections in this way, or accept them again.
pub(super) fn fail(bed: &Testbed, pod: &str, fails: bool, how: &[&str]) -> Result<()> {
    let (machine, lock, port) = (bed.machines().machine(pod)?, bed.machines().xtables_lock(pod), LINE_PORT.to_string());
    let what = if fails { "-A" } else { "-D" };
    Family::BOTH.into_iter().try_for_each(|family| {
        let rule = [what, "INPUT", "-p", "tcp", "--syn", "--dport", &port, "-j"];
        let rule: Vec<&str> = rule.into_iter().chain(how.iter().copied()).collect();
        iptables::run(machine, Variant::Legacy, family, &lock, &rule)
    })
}

/// Pods that ask the barrier stop at once when it answers, and no client notices.
pub fn pods_that_ask_before_they_stop_lose_no_connection(bed: &Testbed) -> Result<()> {
    let pods = ["a1", "b1", "c1"];
    start(bed, &pods, |_| None)?;
    let batches = pods.each_ref().map(std::slice::from_ref);
    let seen = roll(bed, &batches, 2, Wait::Barrier)?;
    ensure!(seen.failed.is_empty(), "{} of {} requests failed: {:?}", seen.failed.len(), seen.requests, seen.failed);
    ensure!(seen.requests > 100, "only {} requests were sent", seen.requests);
    Ok(())
}
