//! `waiting`: 1,250 pods ask the drain barrier about one Service with 5,000 endpoints, while other
//! endpoints of the Service change 50 times a second.
//!
//! Half of the pods are ready, so they wait for their source. The others are terminating and
//! serving, so each needs a ready endpoint beside it, and they wait for an agent that acknowledges
//! nothing. Rounds with and without these pods alternate. The bench fails if a pod gets an answer
//! before the agent acknowledges, or a wrong answer after it.

use std::{sync::Arc, thread::sleep, time::Duration, time::Instant};

use anyhow::{Context as _, Result, ensure};
use headgate_control_plane::{
    metrics::Metrics,
    objects::PodId,
    serve::{self, CancellationToken, Listen, PeerSettings, Security, Settings},
    store::{Limits, Store},
    transaction::{PodChange, Sink as _, SourceKind, Transaction, TriggeredChange},
};
use headgate_core::{Change, Conditions, Endpoint};
use headgate_proto::v1::{
    self, AgentMessage, BarrierAnswer, DrainPodRequest, agent_message::Body, barrier_answer::Result as Outcome,
    discovery_client::DiscoveryClient, inspect_client::InspectClient, server_message,
};
use tokio::{runtime::Runtime, sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use super::{clock::process_cpu, report::Figure, workload};

const ENDPOINTS: u32 = 5_000;
const WAITING: u32 = 1_250;
/// The number of requests on a connection, of which a replica allows 64.
const REQUESTS: usize = 50;
/// The number of rounds with waiting pods, and of rounds without.
const ROUNDS: u32 = 12;
const VERSIONS_OF_ROUND: u32 = 250;
const VERSIONS_PER_SECOND: u32 = 50;
/// In this time all requests begin to wait, or end.
const SETTLING: Duration = Duration::from_secs(2);
/// Longer than the bench takes.
const LONG_MS: u64 = 3_600_000;

/// Runs the bench.
///
/// # Errors
/// The replica does not start, or an answer of the barrier is wrong.
pub fn run() -> Result<Vec<Figure>> {
    let runtime = Runtime::new().context("creating a runtime")?;
    let bench = Bench::start(&runtime)?;
    let (mut with, mut without) = (Measured::default(), Measured::default());
    for round in 0..ROUNDS {
        // The order changes, so that a machine that becomes slower delays both kinds of rounds.
        for has_pods in [round % 2 == 0, round % 2 != 0] {
            let asked = if has_pods { bench.ask_all()? } else { Vec::new() };
            let line = format!("headgate_barrier_waiting {}\n", asked.len());
            ensure!(bench.metrics.render().contains(&line), "the replica does not show the line {line:?}");
            bench.measure(if has_pods { &mut with } else { &mut without });
            ensure!(asked.iter().all(|task| !task.is_finished()), "a pod got an answer while it had to wait");
            asked.iter().for_each(JoinHandle::abort);
            sleep(SETTLING);
        }
    }
    bench.check_answers()?;
    let name = |what: &str| format!("waiting/{what}/{WAITING}x{ENDPOINTS}");
    let [cpu, base] = [&with, &without].map(|rounds| rounds.cpu.as_secs_f64() / rounds.time.as_secs_f64() * 100.0);
    let mut figures = vec![
        Figure::against(name("cpu-of-replica-agent-and-commits"), cpu, "%", "no pod waits", base),
        Figure::against(name("cpu-of-waiting-pods"), cpu - base, "%", "the goal", 20.0),
    ];
    [&mut with, &mut without].into_iter().for_each(|rounds| rounds.commits_us.sort_by(f64::total_cmp));
    for (what, percent) in [("commit-p50", 50), ("commit-p99", 99)] {
        let [value, anchor] = [&with, &without].map(|all| all.commits_us[all.commits_us.len() * percent / 100]);
        figures.push(Figure::against(name(what), value, "µs", "no pod waits", anchor));
    }
    Ok(figures)
}

/// All rounds of a kind.
#[derive(Default)]
struct Measured {
    commits_us: Vec<f64>,
    cpu: Duration,
    time: Duration,
}

struct Bench<'a> {
    runtime: &'a Runtime,
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    address: String,
    agent: mpsc::Sender<AgentMessage>,
}

fn endpoint(number: u32, ready: bool, terminating: bool) -> Change {
    let conditions = Conditions { ready, serving: ready || terminating, terminating };
    Change::Endpoint(workload::key(0), Endpoint { conditions, ..workload::endpoint(0, number) })
}

impl<'a> Bench<'a> {
    /// Starts a replica, and an agent that has acknowledged the Service with all endpoints ready.
    fn start(runtime: &'a Runtime) -> Result<Self> {
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let peers = Some(PeerSettings { names: Vec::new(), tls: None });
        let settings = Settings { replica_name: "replica-1".into(), peers, ..Settings::default() };
        let (serving, counting, token) = (Arc::clone(&store), Arc::clone(&metrics), CancellationToken::new());
        let listen = Listen::at(([127, 0, 0, 1], 0).into());
        let started = serve::start(listen, Security::Plaintext, settings, serving, counting, token);
        let running = runtime.block_on(started).context("starting a replica")?;
        let (address, agents) = (format!("http://{}", running.inspect_addr), format!("http://{}", running.local_addr));
        let (agent, messages) = mpsc::channel(16);
        let bench = Self { runtime, store, metrics, address, agent };
        let pod = |number| {
            let pod = Some((PodId::new("", &format!("pod-{number}")), Some("node-a".into())));
            PodChange { service: workload::key(0), address: workload::endpoint_ip(0, number), pod }
        };
        bench.store.commit(Transaction { pods: (0..ENDPOINTS).map(pod).collect(), ..Transaction::default() });
        bench.commit(workload::changes(1, ENDPOINTS).collect());
        bench.store.synced();
        let hello = v1::Hello { node_name: "node-a".into(), ..v1::Hello::default() };
        bench.agent.blocking_send(AgentMessage { body: Some(Body::Hello(hello)) })?;
        let mut client = DiscoveryClient::new(bench.connect(&agents)?);
        runtime.block_on(async {
            let mut received = client.sync(ReceiverStream::new(messages)).await?.into_inner();
            let is_end = |body| matches!(body, Some(server_message::Body::SnapshotEnd(_)));
            while !is_end(received.message().await?.context("the agent's stream has ended")?.body) {}
            tokio::spawn(async move { while let Ok(Some(_)) = received.message().await {} });
            anyhow::Ok(())
        })?;
        bench.acknowledge()?;
        bench.commit((0..WAITING / 2).map(|number| endpoint(number, false, true)).collect());
        Ok(bench)
    }

    fn connect(&self, url: &str) -> Result<Channel> {
        self.runtime.block_on(Channel::from_shared(url.to_owned())?.connect()).context("connecting to the replica")
    }

    fn acknowledge(&self) -> Result<()> {
        let ack = v1::Ack { version: self.store.version(), ..v1::Ack::default() };
        self.agent.blocking_send(AgentMessage { body: Some(Body::Ack(ack)) }).context("the agent's stream has ended")
    }

    fn commit(&self, changes: Vec<Change>) -> Duration {
        let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).collect();
        let positions = vec![(SourceKind::EndpointSlices, self.store.version() + 1)];
        let transaction = Transaction { changes, positions, ..Transaction::default() };
        let start = Instant::now();
        self.store.commit(transaction);
        start.elapsed()
    }

    /// Changes endpoints of pods that do not wait: each becomes unready, and ready again.
    fn measure(&self, measured: &mut Measured) {
        let (start, cpu) = (Instant::now(), process_cpu());
        for step in 0..VERSIONS_OF_ROUND {
            let number = WAITING + measured.commits_us.len() as u32 / 2 % (ENDPOINTS - WAITING);
            measured.commits_us.push(self.commit(vec![endpoint(number, step % 2 != 0, false)]).as_secs_f64() * 1e6);
            let next = start + Duration::from_secs(1) / VERSIONS_PER_SECOND * (step + 1);
            sleep(next.saturating_duration_since(Instant::now()));
        }
        measured.cpu += process_cpu().saturating_sub(cpu);
        measured.time += start.elapsed();
    }

    /// Starts the requests of all waiting pods.
    fn ask_all(&self) -> Result<Vec<JoinHandle<Result<BarrierAnswer>>>> {
        let (mut asked, numbers) = (Vec::new(), (0..WAITING).collect::<Vec<_>>());
        for numbers in numbers.chunks(REQUESTS) {
            let channel = self.connect(&self.address)?;
            asked.extend(numbers.iter().map(|number| {
                let (namespace, name) = (workload::key(0).namespace.to_string(), format!("pod-{number}"));
                let (timeout_ms, silent_ms, uid) = (LONG_MS, LONG_MS, String::new());
                let request = DrainPodRequest { namespace, name, timeout_ms, silent_ms, uid };
                let mut client = InspectClient::new(channel.clone());
                self.runtime.spawn(async move {
                    let mut answers = client.drain_pod(request).await?.into_inner();
                    answers.message().await?.context("the replica did not answer")
                })
            }));
        }
        sleep(SETTLING);
        Ok(asked)
    }

    /// After the agent's ACK, exactly the pods that terminate get their answers.
    fn check_answers(&self) -> Result<()> {
        let mut asked = self.ask_all()?;
        let ready = asked.split_off(WAITING as usize / 2);
        self.acknowledge()?;
        for task in asked {
            let answer = self.runtime.block_on(task)??;
            ensure!(answer.result() == Outcome::Drained, "a pod that terminates got the answer {answer:?}");
        }
        ensure!(ready.iter().all(|task| !task.is_finished()), "a pod that is ready got an answer");
        Ok(())
    }
}
