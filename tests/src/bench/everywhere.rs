//! `everywhere`: the time from the trigger of an endpoint change until the last of thousands of
//! agents has it. The bench measures this time itself, and compares it with what the replicas say:
//! with their histogram, and with the list of last changes.
//!
//! Simulated agents have no kernel. A change counts as programmed as soon as the agent has received
//! it, and ACKs state this moment. So the time has everything but the agent's own work, which
//! `nft-latency` measures.
//!
//! The stage is that of [`super::fleet`]. The source is a real API server if `KUBEBUILDER_ASSETS`
//! names its folder.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use headgate_proto::v1::{ChangeTime, GetStatusRequest, inspect_client::InspectClient};
use tokio::runtime;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::{
    fleet::{Load, SETTLING, apart, warn},
    report::Figure,
    workload,
};
use crate::fleet::{
    bare::{self, BareWrites},
    latency::Histogram,
    phase::Phase,
    source::{Source, Written},
    stage::Stage,
};

/// The goal for the p99 of the time, in milliseconds.
const GOAL_MS: f64 = 250.0;
/// How many buckets the histogram may be away from the times of the bench.
const BUCKETS_APART: f64 = 1.0;
/// How much a quantile of the listed times may differ from that of the bench, in percent.
const DEVIATION: f64 = 5.0;
/// A quantile that is shorter may differ as much as this one, in milliseconds: the list has
/// whole milliseconds, and an ACK is on its way for a moment.
const SHORT_MS: f64 = 100.0;
/// The triggers of a listed change and of the written one may differ by this number of
/// milliseconds.
const SAME_TRIGGER_MS: u64 = 50;
/// The number of changes that a replica lists (`GetStatusRequest.last_changes`).
const LISTED: u32 = 256;
/// Longest time until replicas have recorded the times of all changes.
const RECORD_LIMIT: Duration = Duration::from_secs(30);
const EVERYWHERE: &str = "headgate_fleet_programmed_everywhere_seconds";
const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("max", 1.0)];

/// A written change, and how long the last agent took to receive it.
struct Measured {
    written: Written,
    service: String,
    time: Duration,
}

/// The buckets of the replicas' histogram: upper bounds in seconds, and the number of times up to
/// each bound.
struct Buckets(Vec<(f64, u64)>);

/// What the replicas have recorded: the histogram, and the version of each replica.
struct Recorded {
    buckets: Buckets,
    versions: Vec<u64>,
}

/// Runs the bench.
///
/// # Errors
/// An agent does not receive everything or finds a violation of the contract, or a replica does not
/// record or list a change.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    apart(|| measure(load, services))
}

fn measure(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(5_000);
    ensure!((1..=agents).contains(&load.replicas), "--replicas must be between 1 and the number of agents");
    let mut stage = Stage::set_with(load.setup(agents, services), Source::start_from_environment)?;
    stage.start_joined_replicas(load.replicas)?;
    std::thread::sleep(SETTLING);
    let rounds = load.rate * u32::try_from(load.seconds)?;
    let bare = bare::measure(&stage.machines, agents, rounds, load.rate)?;
    let first = |replica: usize| agents * replica / load.replicas;
    for replica in 0..load.replicas {
        stage.join(first(replica), first(replica + 1) - first(replica), replica)?;
    }
    std::thread::sleep(SETTLING);
    let before = Recorded::of(&stage)?;
    let phase = Phase::run(&mut stage, load.time(), load.rate)?;
    let measured = measured(&stage.source, agents)?;
    let recorded = before.and_since(&stage)?;
    let listed = last_changes(&stage)?.into_iter().filter(|change| change.version > before.versions[0]).collect();
    let listed = pairs(listed, &measured, agents)?;
    warn(&phase, agents);
    println!("simulated agents have no kernel: a change counts as programmed when the agent has received it");
    let (server, replicas) = (stage.source.server_name(), load.replicas);
    let label = format!("{agents}x{}/s/{server}/{replicas}-replicas", load.rate);
    let mut figures = time_figures(&measured, &recorded, &bare, &label);
    figures.extend(list_figures(&listed, &label));
    figures.extend(cost_figures(&phase, &bare, &label));
    Ok(figures)
}

/// The times of all changes. Each agent must have received each of them once.
fn measured(source: &Source, agents: usize) -> Result<Vec<Measured>> {
    let time = |written: &Written| {
        let (receipts, last) = source.timetable().receipts(written.version);
        ensure!(receipts == agents as u64, "{receipts} of {agents} agents received {written:?}");
        let service = workload::key(written.service).to_string();
        Ok(Measured { written: *written, service, time: last.saturating_duration_since(written.at) })
    };
    source.written().iter().map(time).collect()
}

impl Buckets {
    fn total(&self) -> u64 {
        self.0.last().map_or(0, |(_, count)| *count)
    }

    /// The number of the bucket of a time.
    fn of_time(&self, seconds: f64) -> usize {
        self.0.partition_point(|(bound, _)| *bound < seconds)
    }

    /// The number of the bucket that has a quantile.
    fn of_quantile(&self, share: f64) -> usize {
        let wanted = (share * self.total() as f64).ceil().max(1.0) as u64;
        self.0.partition_point(|(_, count)| *count < wanted)
    }
}

impl Recorded {
    fn of(stage: &Stage) -> Result<Self> {
        let (mut buckets, mut versions): (Vec<(f64, u64)>, _) = (Vec::new(), Vec::new());
        for replica in &stage.replicas {
            let more = replica.buckets(&stage.machines, EVERYWHERE)?;
            buckets.resize_with(more.len(), Default::default);
            for (sum, (bound, count)) in buckets.iter_mut().zip(more) {
                *sum = (bound, sum.1 + count);
            }
            versions.push(replica.metric(&stage.machines, "headgate_store_version")? as u64);
        }
        Ok(Self { buckets: Buckets(buckets), versions })
    }

    /// What was recorded since `self`. Waits until one replica has recorded a time for each of its
    /// versions.
    fn and_since(&self, stage: &Stage) -> Result<Buckets> {
        let until = Instant::now() + RECORD_LIMIT;
        loop {
            let now = Self::of(stage)?;
            let total = now.buckets.total() - self.buckets.total();
            let new: Vec<u64> = now.versions.iter().zip(&self.versions).map(|(now, before)| now - before).collect();
            if total > 0 && new.contains(&total) {
                let pairs = now.buckets.0.iter().zip(&self.buckets.0);
                return Ok(Buckets(pairs.map(|((bound, now), (_, before))| (*bound, now - before)).collect()));
            }
            if Instant::now() > until {
                bail!("{total} times to everywhere are recorded, and the replicas made {new:?} changes");
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// The last changes that the first replica lists, on behalf of all replicas.
fn last_changes(stage: &Stage) -> Result<Vec<ChangeTime>> {
    let [ca, cert, key] = stage.reader_files()?;
    let read = |path: &Path| fs::read(path).with_context(|| format!("reading {}", path.display()));
    let identity = Identity::from_pem(read(&cert)?, read(&key)?);
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&ca)?)).identity(identity);
    let url = format!("https://{}", stage.replicas[0].inspect_address());
    let endpoint = Endpoint::from_shared(url)?.tls_config(tls)?;
    stage.machines.agents().run(move || {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut inspect = InspectClient::new(endpoint.connect().await.context("connecting to the replica")?);
            let request = GetStatusRequest { last_changes: LISTED, ..GetStatusRequest::default() };
            let status = inspect.get_status(request).await?.into_inner();
            Ok(status.fleet.context("the replica says nothing about the fleet")?.last_changes)
        })
    })
}

/// The listed and the measured time of each listed change, in milliseconds. A listed change may
/// stand for several written ones that arrived together: it has the time of the oldest one.
fn pairs(listed: Vec<ChangeTime>, measured: &[Measured], agents: usize) -> Result<Vec<(f64, f64)>> {
    let covered: u64 = listed.iter().map(|change| change.changed).sum();
    let wanted = measured.len().min(LISTED as usize);
    ensure!(covered >= wanted as u64, "{covered} changes are listed, expected {wanted}");
    let pair = |change: ChangeTime| {
        let is_good = change.state == "done" && change.nodes == agents as u64 && change.missing == 0;
        ensure!(is_good && change.trigger == "trigger annotation", "not everywhere: {change:?}");
        let trigger = change.unix_ms.saturating_sub(change.arrived_after_ms);
        let apart = |known: &&Measured| known.written.trigger_unix_ms.abs_diff(trigger);
        let nearest = measured.iter().filter(|known| known.service == change.service).min_by_key(apart);
        let known = nearest.filter(|known| apart(known) <= SAME_TRIGGER_MS);
        let known = known.with_context(|| format!("nobody wrote {change:?}"))?;
        Ok((change.everywhere_after_ms as f64, known.time.as_secs_f64() * 1e3))
    };
    listed.into_iter().map(pair).collect()
}

fn histogram(milliseconds: impl Iterator<Item = f64>) -> Histogram {
    let mut histogram = Histogram::default();
    milliseconds.for_each(|time| histogram.record((time * 1e3) as u64));
    histogram
}

fn name(what: &str, label: &str) -> String {
    format!("everywhere/{what}/{label}")
}

/// The times of the bench, and those of the replicas' histogram.
fn time_figures(measured: &[Measured], recorded: &Buckets, bare: &BareWrites, label: &str) -> Vec<Figure> {
    let times = histogram(measured.iter().map(|known| known.time.as_secs_f64() * 1e3));
    let mut figures = Vec::new();
    for (quantile, share) in QUANTILES {
        let (ms, anchor) = (times.quantile_ms(share), bare.last.quantile_ms(share));
        let what = format!("trigger-to-last-agent-without-kernel/{quantile}");
        let anchored = "bare writes until the last plain socket has its bytes";
        let figure = Figure::against(name(&what, label), ms, "ms", anchored, anchor);
        figures.push(if share == 0.99 { figure.with_goal(GOAL_MS) } else { figure });
        let (own, theirs) = (recorded.of_time(ms / 1e3), recorded.of_quantile(share));
        let bound = recorded.0.get(theirs).map_or(0.0, |(bound, _)| *bound);
        let what = format!("histogram/{quantile}-at-most");
        figures.push(Figure::alone(name(&what, label), bound * 1e3, "ms"));
        let what = format!("histogram/{quantile}-buckets-apart");
        figures.push(Figure::alone(name(&what, label), own.abs_diff(theirs) as f64, "").with_goal(BUCKETS_APART));
    }
    figures.push(Figure::alone(name("changes", label), measured.len() as f64, ""));
    figures.push(Figure::alone(name("histogram/times", label), recorded.total() as f64, ""));
    figures
}

/// The times of the listed changes, beside those of the bench for the same changes.
fn list_figures(pairs: &[(f64, f64)], label: &str) -> Vec<Figure> {
    let (theirs, own) = (histogram(pairs.iter().map(|pair| pair.0)), histogram(pairs.iter().map(|pair| pair.1)));
    let figure = |(quantile, share): (&str, f64)| {
        let (listed, measured) = (theirs.quantile_ms(share), own.quantile_ms(share));
        let apart = (listed - measured).abs() / measured.max(SHORT_MS) * 100.0;
        let figure =
            Figure::against(name(&format!("list/{quantile}"), label), listed, "ms", "the bench's own times", measured);
        let apart = Figure::alone(name(&format!("list/{quantile}-apart"), label), apart, "%");
        [figure, apart.with_goal(DEVIATION)]
    };
    let deviation = |(theirs, own): &(f64, f64)| (theirs - own).abs() / own.max(SHORT_MS) * 100.0;
    let worst = pairs.iter().map(deviation).fold(0.0, f64::max);
    let mut figures: Vec<Figure> = QUANTILES.into_iter().flat_map(figure).collect();
    figures.push(Figure::alone(name("list/changes", label), pairs.len() as f64, ""));
    // A replica handles the last ACK later than the agent sent it, so one change may differ more.
    figures.push(Figure::alone(name("list/worst-change-apart", label), worst, "%"));
    figures
}

fn cost_figures(phase: &Phase, bare: &BareWrites, label: &str) -> Vec<Figure> {
    let messages = phase.messages.max(1) as f64;
    let alone = |what: &str, value: f64, unit| Figure::alone(name(what, label), value, unit);
    let each = |what: &str, seconds: f64, anchor| {
        Figure::against(name(what, label), seconds * 1e6 / messages, "µs", "bare writes to plain sockets", anchor)
    };
    vec![
        each("server-cpu-per-message", phase.server.busy(), bare.cpu_us),
        each("server-cpu-per-message/with-interrupts", phase.server_seconds(), bare.cpu_with_interrupts_us),
        alone("messages", phase.messages as f64, ""),
        alone("bytes-per-message", phase.bytes as f64 / messages, "bytes"),
        alone("acks", phase.acks as f64, ""),
        alone("server-core-share", phase.server_seconds() / phase.seconds * 100.0, "%"),
        alone("load-core-share", phase.load_share() * 100.0, "%"),
        alone("foreign-share", phase.foreign_share() * 100.0, "%"),
        alone("stolen-share", phase.stolen_share() * 100.0, "%"),
        alone("seconds", phase.seconds, "s"),
    ]
}
