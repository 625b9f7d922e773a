//! `nft-latency`: the time from a change in the API server until the
//! kernel has the change. The stand-in API server, the control plane and the agent are real
//! programs in one namespace. The bench listens to the kernel's notifications: the kernel sends the
//! notification of the new generation when it has committed the transaction. The agent states the
//! end of the same commit in its ACK.
//!
//! The changes come after random pauses, as in a quiet cluster, so no change is merged with an
//! earlier one. The wait of ACKs (at least 150 ms apart) is not part of the time, because an ACK
//! states when its version was programmed.

use std::{
    fs,
    os::fd::{AsFd as _, OwnedFd},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use nftables_netlink::{Changed, Monitor, Observed};
use tokio::io::{Interest, unix::AsyncFd};

use super::{
    memory::{self, Mode, Page},
    nftables::percentile,
    report::Figure,
};
use crate::{
    fleet::source::Source,
    testbed::{
        netns::Namespace,
        process::{Process, program},
    },
};

const SIZES: [u32; 4] = [100, 1_000, 10_000, 50_000];
const ENDPOINTS: u32 = 10;
const CHANGES: u32 = 300;
/// The first changes are not measured: they add chains for new numbers of endpoints.
const WARM_UP: u32 = 10;
/// The most changes of [`path`].
const PATH_STEPS: u32 = 100;
const LONGEST_START: Duration = Duration::from_secs(600);
const LONGEST_CHANGE: Duration = Duration::from_secs(10);

/// Measures one size, or all sizes.
///
/// # Errors
/// A program does not start, or a change does not reach the kernel.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let sizes = services.map_or_else(|| SIZES.to_vec(), |services| vec![services]);
    let mut figures = Vec::new();
    let mut smallest: Option<Vec<f64>> = None;
    for services in sizes {
        let times = measure(services)?;
        let beside = smallest.get_or_insert_with(|| times.clone());
        for percent in [50, 99] {
            let name = format!("nft-latency/event-to-kernel-p{percent}/{services}x{ENDPOINTS}");
            let (value, before) = (percentile(&times, percent), percentile(beside, percent));
            figures.push(Figure::against(name, value, "ms", "the smallest size", before));
        }
    }
    Ok(figures)
}

/// Makes `count` changes one by one, or waits for the same time if it is 0. `make path` compares
/// what runs.
///
/// # Errors
/// As [`run`].
pub fn path(count: u32) -> Result<()> {
    with_programs(3, |_, source| {
        for step in 0..PATH_STEPS {
            if step < count {
                source.change()?;
            }
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    })
}

/// The times of all changes in milliseconds.
fn measure(services: u32) -> Result<Vec<f64>> {
    with_programs(services, changes)
}

/// Starts the programs, and runs `work` when the agent has programmed everything.
fn with_programs<T>(services: u32, work: impl FnOnce(&Namespace, &mut Source) -> Result<T>) -> Result<T> {
    let folder = tempfile::tempdir().context("creating a folder")?;
    let namespace = Namespace::create(format!("hg{}-bench-latency", std::process::id()))?;
    namespace.ip_batch("link set lo up\n")?;
    let mut source = Source::start(&namespace, Arc::default(), services, ENDPOINTS)?;
    let kubeconfig = folder.path().join("kubeconfig");
    fs::write(&kubeconfig, source.api().kubeconfig())?;
    let mut control_plane = Command::new(program("headgate-control-plane")?);
    control_plane.args(["--source", "kubernetes", "--kubeconfig"]).arg(kubeconfig);
    control_plane.args(["--listen", "127.0.0.1:7443", "--insecure-loopback", "--log", "warn"]);
    let log = folder.path().join("control-plane.log");
    let control_plane = Process::start("control plane", &namespace, control_plane, &log)?;
    let mut agent = memory::start_agent(&namespace, folder.path(), Mode::Nftables)?;
    let done = wait_for_rules(&namespace, &mut agent, services).and_then(|()| work(&namespace, &mut source));
    let logs = [control_plane.log_tail(), agent.log_tail()];
    agent.terminate()?;
    control_plane.terminate()?;
    done.with_context(|| format!("the logs end with:\n{}", logs.join("\n")))
}

fn wait_for_rules(namespace: &Namespace, agent: &mut Process, services: u32) -> Result<()> {
    let started = Instant::now();
    // `make path` compares two starts, so few Services are there at the first look at the page.
    std::thread::sleep(Duration::from_secs(2));
    while !Page::of(namespace).is_some_and(|page| page.is_programmed(services, ENDPOINTS)) {
        agent.check_running()?;
        ensure!(started.elapsed() < LONGEST_START, "{services} Services were not programmed in time");
        std::thread::sleep(Duration::from_millis(100));
    }
    // The end of the first sync, such as the return of memory, does not belong to a change.
    std::thread::sleep(Duration::from_secs(2));
    Ok(())
}

fn changes(namespace: &Namespace, source: &mut Source) -> Result<Vec<f64>> {
    namespace.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut monitor = Monitor::open(1 << 20)?;
            let readable = readiness(&monitor)?;
            let mut times = Vec::new();
            for i in 0..WARM_UP + CHANGES {
                tokio::time::sleep(Duration::from_micros(fastrand::u64(20_000..40_000))).await;
                if monitor.read()? != Observed::Nothing {
                    bail!("the agent changed the kernel without a change in the source");
                }
                let start = Instant::now();
                source.change()?;
                let committed = commit(&mut monitor, &readable);
                tokio::time::timeout(LONGEST_CHANGE, committed)
                    .await
                    .context("a change did not reach the kernel")??;
                if i >= WARM_UP {
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                }
            }
            Ok(times)
        })
    })
}

#[allow(unsafe_code)]
fn readiness(monitor: &Monitor) -> Result<AsyncFd<OwnedFd>> {
    let descriptor = monitor.as_fd().try_clone_to_owned()?;
    // SAFETY: the descriptor is open. The `AsyncFd` owns the descriptor, and nothing closes or
    // replaces the descriptor before the `AsyncFd` is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?)
}

/// Waits for the end of a transaction.
async fn commit(monitor: &mut Monitor, readable: &AsyncFd<OwnedFd>) -> Result<()> {
    loop {
        match monitor.read()? {
            Observed::Nothing => readable.readable().await?.clear_ready(),
            Observed::Lost => bail!("the kernel dropped notifications"),
            Observed::Events(events) => {
                if events.iter().any(|event| matches!(event.what, Changed::Generation(_))) {
                    return Ok(());
                }
            }
        }
    }
}
