//! `barrier`: the drain barrier with thousands of simulated agents at three replicas, which share
//! one core.
//!
//! The first part removes endpoints while their pods ask. It compares the time until the answer
//! `drained` with the time until the last agent has received the removal. In the second part,
//! nothing changes while many pods wait. The third part has an agent that reads nothing. The bench
//! fails if an answer is wrong, or if the answer does not name the silent node.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use headgate_proto::v1::{
    BarrierAnswer, DrainPodRequest, barrier_answer::Result as Outcome, inspect_client::InspectClient,
};
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

use super::{
    fleet::{Load, SETTLING, apart},
    report::{Figure, median},
};
use crate::fleet::{
    Fault,
    rig::{CpuTime, Replica},
    stage::Stage,
};

const REPLICAS: usize = 3;
/// The number of removals. Each removal concerns another Service.
const REMOVALS: u32 = 20;
/// The number of pods that wait.
const WAITING: u32 = 1_000;
/// The number of requests on a connection, of which a replica allows 64.
const REQUESTS: usize = 50;
/// The time of each measurement of CPU time, in seconds.
const MEASURED_SECONDS: u64 = 20;
/// Before a removal, every replica learns that a pod waits.
const ASKED_BEFORE: Duration = Duration::from_millis(500);
/// Longer than the bench takes.
const LONG: Duration = Duration::from_secs(3_600);
/// How long the barrier waits for a silent node.
const SILENT: Duration = Duration::from_secs(2);
const SILENT_NODE: usize = 0;

/// Runs the bench.
///
/// # Errors
/// A program does not start, or an answer of the barrier is wrong.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    apart(|| measure(load, services.unwrap_or(10_000)))
}

fn measure(load: &Load, services: u32) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(5_000);
    let waiting = WAITING.min(services.saturating_sub(REMOVALS + 1));
    ensure!(waiting > 0, "the bench needs more than {} Services", REMOVALS + 1);
    let mut stage = load.stage(agents, Some(services))?;
    let names: Vec<String> = (0..agents).map(Stage::node_name).collect();
    stage.source.add_nodes(names.iter().map(String::as_str))?;
    let peers: Vec<String> =
        (0..REPLICAS).map(|number| stage.address_of(number).map(|a| a.to_string())).collect::<Result<_>>()?;
    let peers = format!("--peers={}", peers.join(","));
    for _ in 0..REPLICAS {
        stage.start_replica(&[&peers])?;
    }
    let share = agents.div_ceil(REPLICAS);
    for replica in 0..REPLICAS {
        let first = (share * replica).min(agents);
        stage.join(first, share.min(agents - first), replica)?;
    }
    let runtime = stage.machines.agents().run(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().context("creating a runtime")
    })?;
    // The runtime's threads are in the namespace, because the thread that creates them is.
    let mut bench = Bench { stage, runtime, agents, waiting };
    let mut figures = bench.removals()?;
    figures.extend(bench.waiting_pods()?);
    figures.extend(bench.silent_node()?);
    Ok(figures)
}

struct Bench {
    stage: Stage,
    runtime: tokio::runtime::Runtime,
    agents: usize,
    /// The number of pods that wait.
    waiting: u32,
}

/// Asks for the first pod of a Service, which must be the only pod of its name.
async fn drain(channel: Channel, service: u32, silent: Duration) -> Result<BarrierAnswer> {
    let (namespace, name) = crate::fleet::source::pod_name(service, 0);
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let (timeout_ms, silent_ms) = (milliseconds(LONG), milliseconds(silent));
    let request = DrainPodRequest { namespace, name, timeout_ms, silent_ms, ..DrainPodRequest::default() };
    let mut answers = InspectClient::new(channel).drain_pod(request).await?.into_inner();
    answers.message().await?.context("the replica did not answer")
}

impl Bench {
    fn channel(&self, tls: &ClientTlsConfig, replica: usize) -> Result<Channel> {
        let endpoint = Endpoint::from_shared(format!("https://{}", self.stage.replicas[replica].inspect_address()))?;
        let endpoint = endpoint.tls_config(tls.clone())?;
        // Only the threads of the runtime are in the namespace of the agents.
        let connected = self.runtime.spawn(async move { endpoint.connect().await });
        self.runtime.block_on(connected).context("a task panicked")?.context("connecting to a replica")
    }

    fn name(&self, what: &str) -> String {
        format!("barrier/{what}/{}", self.agents)
    }

    fn removals(&mut self) -> Result<Vec<Figure>> {
        let tls = self.stage.reader()?;
        let channels: Vec<Channel> = (0..REPLICAS).map(|replica| self.channel(&tls, replica)).collect::<Result<_>>()?;
        let (mut drained, mut received) = (Vec::new(), Vec::new());
        for service in 0..REMOVALS {
            let channel = channels[service as usize % REPLICAS].clone();
            let asked = self.runtime.spawn(async move {
                let answer = drain(channel, service, LONG).await?;
                Ok::<_, anyhow::Error>((answer, Instant::now()))
            });
            std::thread::sleep(ASKED_BEFORE);
            self.stage.fleet.ask(|worker| worker.record(true))?;
            let start = Instant::now();
            self.stage.source.toggle(service)?;
            let (answer, at) = self.runtime.block_on(asked).context("a task panicked")??;
            let deliveries = self.stage.fleet.ask(|worker| worker.record(false))?;
            ensure!(answer.result() == Outcome::Drained, "removal {service}: {answer:?}");
            ensure!(answer.not_covered.is_empty(), "removal {service}: {answer:?}");
            let count = deliveries.count();
            ensure!(count == self.agents as u64, "{count} agents had removal {service} when its pod got the answer");
            drained.push(at.duration_since(start).as_secs_f64() * 1e3);
            received.push(deliveries.max() as f64 / 1e3);
        }
        let longest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        let anchor = "the last agent has the removal";
        let max = Figure::against(self.name("until-drained-max"), longest(&drained), "ms", anchor, longest(&received));
        let p50 = Figure::against(self.name("until-drained-p50"), median(drained), "ms", anchor, median(received));
        Ok(vec![p50, max])
    }

    /// The share of a core that each replica uses while nothing changes, in percent.
    fn shares(&mut self) -> Result<Vec<f64>> {
        std::thread::sleep(SETTLING);
        let cpu = |bench: &Self| bench.stage.replicas.iter().map(Replica::cpu).collect::<Result<Vec<_>>>();
        let (start, before) = (Instant::now(), cpu(self)?);
        std::thread::sleep(Duration::from_secs(MEASURED_SECONDS));
        let (seconds, after) = (start.elapsed().as_secs_f64(), cpu(self)?);
        self.stage.replicas.iter_mut().try_for_each(Replica::check_running)?;
        let share = |(after, before): (&CpuTime, &CpuTime)| after.since(before).busy() / seconds * 100.0;
        Ok(after.iter().zip(&before).map(share).collect())
    }

    fn resident_bytes(&self) -> Result<Vec<u64>> {
        self.stage.replicas.iter().map(Replica::resident_bytes).collect()
    }

    /// Starts the requests of the waiting pods, at all replicas in turn.
    fn ask_all(&self, silent: Duration) -> Result<Vec<tokio::task::JoinHandle<Result<BarrierAnswer>>>> {
        let tls = self.stage.reader()?;
        let mut asked = Vec::new();
        let services: Vec<u32> = (REMOVALS..REMOVALS + self.waiting).collect();
        for (number, services) in services.chunks(REQUESTS).enumerate() {
            let channel = self.channel(&tls, number % REPLICAS)?;
            asked.extend(services.iter().map(|service| self.runtime.spawn(drain(channel.clone(), *service, silent))));
        }
        Ok(asked)
    }

    fn compared(&self, what: &str, shares: &[f64], idle: &[f64]) -> Vec<Figure> {
        let figure = |(number, (share, idle)): (usize, (&f64, &f64))| {
            let name = format!("barrier/{what}/replica-{number}/{}", self.waiting);
            Figure::against(name, *share, "%", "no pod waits", *idle)
        };
        shares.iter().zip(idle).enumerate().map(figure).collect()
    }

    fn waiting_pods(&mut self) -> Result<Vec<Figure>> {
        let idle = self.shares()?;
        let asked = self.ask_all(LONG)?;
        let shares = self.shares()?;
        ensure!(asked.iter().all(|task| !task.is_finished()), "a pod that does not stop got an answer");
        asked.iter().for_each(tokio::task::JoinHandle::abort);
        Ok(self.compared("cpu-while-pods-wait-for-their-removal", &shares, &idle))
    }

    fn silent_node(&mut self) -> Result<Vec<Figure>> {
        let node = Stage::node_name(SILENT_NODE);
        let silent = node.clone();
        self.stage.fleet.ask(move |worker| {
            worker.set_fault(Fault::NeverRead, |client| client.member().node == silent);
        })?;
        // One pod gets the answer with the name of the node after the bounded time.
        let service = REMOVALS + self.waiting;
        let channel = self.channel(&self.stage.reader()?, 0)?;
        let asked = self.runtime.spawn(drain(channel, service, SILENT));
        std::thread::sleep(ASKED_BEFORE);
        let start = Instant::now();
        self.stage.source.toggle(service)?;
        let answer = self.runtime.block_on(asked).context("a task panicked")??;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        ensure!(answer.result() == Outcome::Incomplete && answer.unconfirmed == [node], "{answer:?}");
        let mut figures = vec![Figure::against(
            self.name("answer-that-names-a-silent-node"),
            ms,
            "ms",
            "the bound for silent nodes",
            SILENT.as_secs_f64() * 1e3,
        )];
        // All pods are removed, and wait for the node.
        let idle = self.shares()?;
        let asked = self.ask_all(LONG)?;
        let before = self.resident_bytes()?;
        let mut position = 0;
        for service in REMOVALS..service {
            position = self.stage.source.toggle(service)?;
        }
        // The other agents have the removals, and their ACKs arrive before the measurement.
        self.stage.wait_for_all(position)?;
        let shares = self.shares()?;
        for (number, (now, before)) in self.resident_bytes()?.into_iter().zip(before).enumerate() {
            let name = format!("barrier/memory-of-pods-that-wait-for-a-silent-node/replica-{number}/{}", self.waiting);
            figures.push(Figure::alone(name, now.saturating_sub(before) as f64 / 1e6, "MB"));
        }
        ensure!(asked.iter().all(|task| !task.is_finished()), "a pod got an answer before the silent node confirmed");
        figures.extend(self.compared("cpu-while-pods-wait-for-a-silent-node", &shares, &idle));
        // The node reads again, and every pod gets its answer.
        self.stage.fleet.ask(|worker| worker.set_fault(Fault::None, |_| true))?;
        let start = Instant::now();
        for task in asked {
            let answer = self.runtime.block_on(task).context("a task panicked")??;
            ensure!(answer.result() == Outcome::Drained, "{answer:?}");
        }
        let ms = start.elapsed().as_secs_f64() * 1e3;
        figures.push(Figure::alone(format!("barrier/answers-to-all-pods/{}", self.waiting), ms, "ms"));
        Ok(figures)
    }
}
