//! `apiserver-load`: the load on the API server with one agent, with a hundred agents and with
//! thousands of agents. The numbers of watches, requests and bytes must not depend on the number of
//! agents. The bench compares the load with the load of an equal number of kube-proxies, each of
//! which has its own watches.

use anyhow::{Context as _, Result, ensure};

use super::{
    fleet::{Load, apart},
    report::Figure,
};
use crate::{
    apiserver::Options,
    fleet::{phase::Phase, stage::Stage},
};

/// The numbers of agents, unless the command line sets a number.
const AGENTS: [usize; 3] = [1, 100, 5_000];
/// A phase lasts `--seconds` divided by this number. Short phases suffice, because the counts per
/// change do not depend on the length.
const PHASES: u32 = 6;
/// The largest relative difference of bytes between phases. Small differences occur when a version
/// gets another digit.
const SAME: f64 = 0.01;

/// The load on the API server in a phase.
#[derive(Debug, Clone, Copy)]
struct Seen {
    agents: usize,
    watches: usize,
    requests: usize,
    connections: u64,
    bytes: u64,
    /// The bytes that one kube-proxy would have received.
    kube_proxy_bytes: u64,
    changes: u32,
}

/// Runs the bench.
///
/// # Errors
/// The load on the API server depends on the number of agents.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let counts = load.agents.map_or_else(|| AGENTS.to_vec(), |agents| vec![1, agents.div_ceil(50), agents]);
    let most = counts.iter().copied().max().context("no number of agents")?;
    let (seen, initial_bytes) = apart(|| {
        let mut stage = load.stage(most, services)?;
        let seen = measure(&mut stage, &counts, load)?;
        Ok((seen, stage.source.initial_bytes()))
    })?;
    check(&seen)?;
    let mut figures = Vec::new();
    for Seen { agents, watches, requests, bytes, kube_proxy_bytes, changes, .. } in seen {
        let name = |what: &str| format!("apiserver-load/{what}/{agents}");
        let proxies = format!("{agents} kube-proxies");
        let per_change = |bytes: u64| bytes as f64 / f64::from(changes);
        figures.extend([
            // Each kube-proxy watches Services, EndpointSlices, Nodes and ServiceCIDRs.
            Figure::against(name("watches"), watches as f64, "", &proxies, 4.0 * agents as f64),
            Figure::alone(name("requests-during-changes"), requests as f64, ""),
            Figure::against(
                name("bytes-per-change"),
                per_change(bytes),
                "bytes",
                &proxies,
                per_change(kube_proxy_bytes) * agents as f64,
            ),
            Figure::against(
                name("initial-bytes"),
                initial_bytes as f64 / 1e6,
                "MB",
                &proxies,
                initial_bytes as f64 / 1e6 * agents as f64,
            ),
        ]);
    }
    Ok(figures)
}

fn measure(stage: &mut Stage, counts: &[usize], load: &Load) -> Result<Vec<Seen>> {
    // Bookmarks are turned off, because a bookmark in only one phase would change the number of
    // bytes of this phase.
    let rarely = std::time::Duration::from_secs(3_600);
    stage.source.api().set_options(|options: &mut Options| options.bookmark_interval = rarely);
    stage.start_replica(&[])?;
    let mut seen = Vec::new();
    let mut joined = 0;
    for agents in counts.iter().copied() {
        println!("{agents} agents of {} connect and receive everything", counts.iter().max().unwrap_or(&0));
        stage.join(joined, agents.saturating_sub(joined), 0)?;
        joined = joined.max(agents);
        let api = stage.source.api();
        let (requests, connections, bytes) = (api.recorded().len(), api.connections(), api.bytes_sent());
        let events = stage.source.event_bytes();
        let phase = Phase::run(stage, 0, load.time() / PHASES, load.rate)?;
        let api = stage.source.api();
        seen.push(Seen {
            agents,
            watches: api.open_watches(None),
            requests: api.recorded().len() - requests,
            connections: api.connections() - connections,
            bytes: api.bytes_sent() - bytes,
            kube_proxy_bytes: stage.source.event_bytes() - events,
            changes: phase.changes,
        });
    }
    stage.compare_digests()?;
    Ok(seen)
}

fn check(seen: &[Seen]) -> Result<()> {
    let first = *seen.first().context("nothing was measured")?;
    ensure!(first.watches == 4 && first.bytes > first.kube_proxy_bytes, "no events were measured: {first:?}");
    for other in seen {
        let is_same = (other.watches, other.requests, other.connections, other.changes)
            == (first.watches, first.requests, first.connections, first.changes);
        let bytes = other.bytes as f64 / first.bytes as f64;
        ensure!(
            is_same && (bytes - 1.0).abs() < SAME,
            "the load on the API server depends on the number of agents: {first:?}, then {other:?}"
        );
    }
    Ok(())
}
