//! Runs the fleet in simulated time: `make simulate SEEDS=1000`, or `make simulate SEED=7` for the
//! story of one seed.
//!
//! Each seed runs in a process of its own, because tokio counts its runtimes. This program answers
//! some functions of libc itself, on threads that simulate.
#![allow(unsafe_code)]

use std::{
    alloc::System,
    collections::BTreeMap,
    process::{Command, ExitCode},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use headgate_tests::simulate::{
    self, Outcome, Planned, clock,
    source::{Size, set_size, size},
    world::lock,
};
use peakmem_alloc::{INSTRUMENTED_SYSTEM, PeakMemAlloc, PeakMemAllocTrait as _};

/// Real replicas and agents in simulated time, whose answers are compared with their kernels
#[derive(Debug, Parser)]
struct Arguments {
    /// The number of seeds
    #[arg(long, value_name = "N", default_value_t = 1000)]
    seeds: u64,
    /// The first seed
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    first: u64,
    /// Run only this seed, and tell its story
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Run only these acts of the seed, by their numbers
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', requires = "seed")]
    acts: Option<Vec<usize>>,
    /// The number of replicas, 2 to 9
    #[arg(long, value_name = "N", default_value_t = 2)]
    replicas: usize,
    /// The number of nodes, 3 to 100
    #[arg(long, value_name = "N", default_value_t = 3)]
    nodes: usize,
    /// The number of Services, 6 to 150
    #[arg(long, value_name = "N", default_value_t = 20)]
    services: usize,
    /// Print the logs of the programs to stderr as well
    #[arg(long, requires = "seed")]
    logs: bool,
    /// Stop after this number of seeds with defects
    #[arg(long, value_name = "N", default_value_t = 5)]
    stop_after: u64,
    /// Print one line of JSON
    #[arg(long, hide = true, requires = "seed")]
    json: bool,
}

#[global_allocator]
static ALLOCATOR: &PeakMemAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The most memory that the world may hold for each replica and each agent.
const BYTES_OF_A_PROCESS: u64 = 3_000_000;

/// The time in logs, as in stories.
struct SimulatedTime;

impl tracing_subscriber::fmt::time::FormatTime for SimulatedTime {
    fn format_time(&self, to: &mut tracing_subscriber::fmt::format::Writer<'_>) -> std::fmt::Result {
        write!(to, "{:9.3}", clock::local() as f64 / 1e9)
    }
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let Arguments { replicas, nodes, services, .. } = arguments;
    set_size(Size { replicas, nodes, services }).map_err(anyhow::Error::msg)?;
    match arguments.seed {
        Some(seed) => one(seed, &arguments),
        None => many(&arguments),
    }
}

fn chosen(seed: u64, acts: Option<&[usize]>) -> Vec<Planned> {
    let plan = simulate::plan(seed).into_iter().enumerate();
    plan.filter(|(number, _)| acts.is_none_or(|acts| acts.contains(number))).map(|(_, planned)| planned).collect()
}

/// Runs one seed on this thread.
fn one(seed: u64, arguments: &Arguments) -> Result<ExitCode> {
    if arguments.logs {
        let log = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_writer(std::io::stderr);
        log.with_timer(SimulatedTime).with_ansi(false).init();
    }
    clock::begin(seed);
    let plan = chosen(seed, arguments.acts.as_deref());
    let mut outcome = simulate::run(seed, &plan)?;
    outcome.peak_bytes = ALLOCATOR.get_peak_memory() as u64;
    let most = BYTES_OF_A_PROCESS * (arguments.replicas + arguments.nodes) as u64;
    if outcome.peak_bytes > most {
        outcome.defects.push(format!("the world held {} bytes; at most {most}", outcome.peak_bytes));
    }
    let has_defects = !outcome.defects.is_empty();
    if arguments.json {
        println!("{}", serde_json::to_string(&outcome)?);
    } else {
        outcome.story.iter().for_each(|line| println!("{line}"));
        println!(
            "\n{:?}\n{:.1} simulated seconds, hash {:016x}",
            outcome.answers,
            outcome.simulated_ms as f64 / 1e3,
            outcome.hash
        );
        outcome.defects.iter().for_each(|defect| println!("DEFECT: {defect}"));
    }
    Ok(if has_defects { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs a seed in a process of its own.
fn seen(seed: u64, acts: Option<&[usize]>) -> Result<Outcome> {
    let mut command = Command::new(std::env::current_exe().context("finding this program")?);
    command.args(["--json", "--seed", &seed.to_string()]);
    let Size { replicas, nodes, services } = size();
    for (name, value) in [("--replicas", replicas), ("--nodes", nodes), ("--services", services)] {
        command.args([name, &value.to_string()]);
    }
    if let Some(acts) = acts {
        let acts: Vec<String> = acts.iter().map(ToString::to_string).collect();
        command.args(["--acts", &acts.join(",")]);
    }
    let output = command.output().context("running a seed")?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().last().map(serde_json::from_str) {
        Some(Ok(seen)) => Ok(seen),
        _ => bail!("seed {seed} ended without a result: {}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// Drops acts one by one while a defect stays.
fn shrink(seed: u64) -> Result<Vec<usize>> {
    let mut kept: Vec<usize> = (0..simulate::plan(seed).len()).collect();
    let mut at = kept.len();
    while at > 0 {
        at -= 1;
        let mut fewer = kept.clone();
        fewer.remove(at);
        let has_defects = || seen(seed, Some(&fewer)).map_or(true, |seen| !seen.defects.is_empty());
        if !fewer.is_empty() && has_defects() {
            kept = fewer;
        }
    }
    Ok(kept)
}

/// Runs many seeds on all processors, and prints what was found.
fn many(arguments: &Arguments) -> Result<ExitCode> {
    let (next, found) = (AtomicU64::new(arguments.first), AtomicU64::new(0));
    let (end, started) = (arguments.first + arguments.seeds, Instant::now());
    let answers: Mutex<BTreeMap<String, u64>> = Mutex::default();
    let (simulated_ms, ran, peak_bytes) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let work = || -> Result<()> {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end || found.load(Ordering::Relaxed) >= arguments.stop_after {
                return Ok(());
            }
            let defects = match seen(seed, None) {
                Ok(seen) => {
                    simulated_ms.fetch_add(seen.simulated_ms, Ordering::Relaxed);
                    peak_bytes.fetch_max(seen.peak_bytes, Ordering::Relaxed);
                    let mut all = lock(&answers);
                    seen.answers.into_iter().for_each(|(answer, count)| *all.entry(answer).or_default() += count);
                    seen.defects
                }
                Err(error) => vec![format!("{error:#}")],
            };
            ran.fetch_add(1, Ordering::Relaxed);
            if !defects.is_empty() {
                found.fetch_add(1, Ordering::Relaxed);
                let acts = shrink(seed)?;
                let numbers: Vec<String> = acts.iter().map(ToString::to_string).collect();
                let what: Vec<String> =
                    chosen(seed, Some(&acts)).iter().map(|planned| format!("{:?}", planned.act)).collect();
                println!(
                    "seed {seed}: {}\n  still with {}\n  make simulate SEED={seed} ACTS={}",
                    defects.join("\n  "),
                    what.join(", "),
                    numbers.join(",")
                );
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    for (answer, count) in &*lock(&answers) {
        println!("{count:>8}  {answer}");
    }
    let hours = simulated_ms.into_inner() as f64 / 3_600_000.0;
    let (ran, found) = (ran.into_inner(), found.into_inner());
    println!(
        "{ran} seeds, {hours:.1} simulated hours in {:.0} s, at most {:.1} MB; {found} seeds with defects",
        started.elapsed().as_secs_f64(),
        peak_bytes.into_inner() as f64 / 1e6
    );
    Ok(if found > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

// The functions of libc that make a program depend on more than its input. The linker prefers
// those of the program.

/// Replaces getrandom(2).
///
/// # Safety
/// `buffer` has `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(
    buffer: *mut libc::c_void,
    length: libc::size_t,
    flags: libc::c_uint,
) -> libc::ssize_t {
    if clock::is_simulated() {
        // SAFETY: the caller passes a buffer of this length.
        clock::fill(unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) });
        return length.cast_signed();
    }
    // SAFETY: the arguments are those of the caller.
    unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) as libc::ssize_t }
}

/// Replaces clock_gettime(2).
///
/// # Safety
/// `time` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    if clock::is_simulated() {
        let now = clock::reading(clock == libc::CLOCK_REALTIME);
        // SAFETY: the caller passes a valid pointer.
        unsafe {
            (*time).tv_sec = now.as_secs().cast_signed();
            (*time).tv_nsec = i64::from(now.subsec_nanos());
        }
        return 0;
    }
    // SAFETY: the arguments are those of the caller.
    unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) as libc::c_int }
}

/// Replaces getrusage(2): a simulated program needs no processor time.
///
/// # Safety
/// `usage` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrusage(who: libc::c_int, usage: *mut libc::rusage) -> libc::c_int {
    if clock::is_simulated() {
        // SAFETY: the caller passes a valid pointer, and zeros are valid.
        unsafe { usage.write(std::mem::zeroed()) };
        return 0;
    }
    // SAFETY: the arguments are those of the caller.
    unsafe { libc::syscall(libc::SYS_getrusage, who, usage) as libc::c_int }
}
