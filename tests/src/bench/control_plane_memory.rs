//! `control-plane-memory`: the memory of a control plane for each endpoint, for 1,000 to 50,000
//! Services × 10 endpoints. The source is a folder of manifests or the stand-in API server. The
//! bench compares this memory with the memory of an agent that has the same state. The bench runs
//! real programs. The agent uses the nft variant of iptables.

use std::{
    fs,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use super::{
    memory::{ENDPOINTS, Mode, Page, start_agent, status_mb, write_manifests},
    report::Figure,
};
use crate::{
    fleet::source::Source,
    testbed::{
        netns::Namespace,
        process::{Process, program},
    },
};

/// The numbers of Services, unless the command line sets a number.
const SERVICES: [u32; 4] = [1_000, 10_000, 25_000, 50_000];
/// The goal applies from this number of Services on. The fixed memory of the process is negligible
/// in such clusters.
const LARGE: u32 = 50_000;
/// The goal for a large cluster: memory of the process divided by the number of endpoints, in
/// bytes.
const MOST_BYTES: f64 = 600.0;
const LONGEST_SYNC: Duration = Duration::from_secs(300);
/// The time from the end of the first sync until memory is measured.
const REST: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum From {
    Files,
    Kubernetes,
}

/// Resident memory in megabytes.
struct Seen {
    control_plane: f64,
    /// The peak of the control plane.
    highest: f64,
    agent: f64,
}

/// Runs the bench.
///
/// # Errors
/// A program does not start, the first sync does not end in time, or a large cluster uses more
/// memory than the goal.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let sizes = services.map_or_else(|| SERVICES.to_vec(), |services| vec![services]);
    let mut figures = Vec::new();
    for (from, source) in [(From::Files, "files"), (From::Kubernetes, "kubernetes")] {
        let empty = measure(from, 0)?;
        for services in &sizes {
            let seen = measure(from, *services)?;
            let name = |what: &str| format!("control-plane-memory/{source}/{what}/{services}x{ENDPOINTS}");
            let per_endpoint = |mb: f64| mb * 1e6 / f64::from(services * ENDPOINTS);
            let (all, grown) =
                (per_endpoint(seen.control_plane), per_endpoint(seen.control_plane - empty.control_plane));
            let agent = "an agent with the same state";
            figures.extend([
                Figure::against(name("resident"), seen.control_plane, "MB", agent, seen.agent),
                Figure::against(name("peak"), seen.highest, "MB", "an empty control plane", empty.highest),
                Figure::against(name("per-endpoint"), all, "bytes", agent, per_endpoint(seen.agent)),
                Figure::against(
                    name("growth-per-endpoint"),
                    grown,
                    "bytes",
                    agent,
                    per_endpoint(seen.agent - empty.agent),
                ),
            ]);
            ensure!(
                *services < LARGE || all <= MOST_BYTES,
                "{source}: {all:.0} bytes for each of {} endpoints, more than the goal of {MOST_BYTES}",
                services * ENDPOINTS
            );
        }
    }
    Ok(figures)
}

fn measure(from: From, services: u32) -> Result<Seen> {
    println!("measuring {services} Services, source {from:?}");
    let folder = tempfile::tempdir().context("creating a folder")?;
    let namespace = Namespace::create(format!("hg{}-bench-cpmem", std::process::id()))?;
    namespace.ip_batch("link set lo up\n")?;
    // The API server must run as long as the control plane watches it.
    let mut source = None;
    let mut control_plane = Command::new(program("headgate-control-plane")?);
    match from {
        From::Files => {
            let manifests = folder.path().join("manifests");
            fs::create_dir(&manifests)?;
            write_manifests(&manifests, services, ENDPOINTS)?;
            control_plane.arg("--source").arg(format!("files:{}", manifests.display()));
        }
        From::Kubernetes => {
            let started = Source::start(&namespace, Arc::default(), services, ENDPOINTS)?;
            let kubeconfig = folder.path().join("kubeconfig");
            fs::write(&kubeconfig, started.api().kubeconfig())?;
            control_plane.args(["--source", "kubernetes", "--kubeconfig"]).arg(kubeconfig);
            source = Some(started);
        }
    }
    control_plane.args(["--listen", "127.0.0.1:7443", "--insecure-loopback", "--log", "warn"]);
    let log = folder.path().join("control-plane.log");
    let mut control_plane = Process::start("control plane", &namespace, control_plane, &log)?;
    let mut agent = start_agent(&namespace, folder.path(), Mode::Iptables("nft"))?;
    let seen = watch(&namespace, &mut control_plane, &mut agent, services);
    let logs = [control_plane.log_tail(), agent.log_tail()];
    agent.kill()?;
    control_plane.kill()?;
    drop(source);
    seen.with_context(|| format!("the logs end with:\n{}", logs.join("\n")))
}

fn watch(namespace: &Namespace, control_plane: &mut Process, agent: &mut Process, services: u32) -> Result<Seen> {
    let started = Instant::now();
    let mut settled: Option<Instant> = None;
    loop {
        control_plane.check_running()?;
        agent.check_running()?;
        if settled.is_none() && Page::of(namespace).is_some_and(|page| page.is_programmed(services, ENDPOINTS)) {
            settled = Some(Instant::now());
        }
        if settled.is_some_and(|at| at.elapsed() > REST) {
            return Ok(Seen {
                control_plane: status_mb(control_plane.id(), "VmRSS")?,
                highest: status_mb(control_plane.id(), "VmHWM")?,
                agent: status_mb(agent.id(), "VmRSS")?,
            });
        }
        if started.elapsed() > LONGEST_SYNC {
            bail!("{services} Services were not programmed within {} s", LONGEST_SYNC.as_secs());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
