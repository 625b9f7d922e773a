//! `ipvs`: the real dataplane on a real kernel's IPVS, inside User-Mode Linux, compared with
//! `ipvsadm`, which loads an equal table.
//!
//! The kernel of User-Mode Linux has one processor and slow system calls, so only the ratios are
//! meaningful. Headgate does more work than `ipvsadm`: it also plans its writes, and writes the
//! addresses of the device, the sets and the rules.

use std::{
    collections::BTreeSet,
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use headgate_core::{Change, Dirty, Family, NodeFacts, State};
use headgate_node_agent::dataplane::{
    FixedState, NodeDataplane as _,
    iptables::Variant,
    ipvs::{IpvsDataplane, IpvsOptions},
};
use serde::{Deserialize, Serialize};

use super::{
    clock::wall_ms,
    report::{Figure, median},
    workload,
};
use crate::{testbed::netns::Namespace, uml};

const SERVICES: u32 = 10_000;
const ENDPOINTS: u32 = 10;
const LOADS: usize = 3;
const CHANGES: u32 = 15;
/// The number of Services that change at the same time.
const PIPELINED: u32 = 500;
const TIME_LIMIT: Duration = Duration::from_secs(1200);
/// The prefix of the line with the measurements in the output of the program that runs inside
/// User-Mode Linux.
const MARK: &str = "measured: ";

/// Times in milliseconds.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Measured {
    load: f64,
    load_again: f64,
    restore: f64,
    change: f64,
    command: f64,
    pipelined: f64,
}

/// Runs the bench inside User-Mode Linux.
///
/// # Errors
/// User-Mode Linux cannot run, or the bench fails inside.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let services = services.unwrap_or(SERVICES);
    let count = services.to_string();
    eprintln!(
        "ipvs: Headgate and ipvsadm load {count} Services {LOADS} times each inside User-Mode Linux; this takes some minutes"
    );
    let arguments = ["--only", "ipvs", "--inside", "--services", &count];
    let output = uml::run_program_inside("bench ipvs", &arguments, TIME_LIMIT)?;
    let line = output
        .lines()
        .find_map(|line| line.strip_prefix(MARK))
        .context("the program inside User-Mode Linux printed no measurements")?;
    let measured: Measured = serde_json::from_str(line).context("reading the measurements")?;
    let size = format!("{services}x{ENDPOINTS}");
    Ok(vec![
        Figure::against(format!("ipvs/load/{size}"), measured.load, "ms", "ipvsadm -R", measured.restore),
        Figure::against(format!("ipvs/restart/{size}"), measured.load_again, "ms", "ipvsadm -R", measured.restore),
        Figure::against(format!("ipvs/change/{size}"), measured.change, "ms", "one ipvsadm -a", measured.command),
        Figure::against(
            format!("ipvs/change-of-{PIPELINED}/{size}"),
            measured.pipelined,
            "ms",
            "one change",
            measured.change,
        ),
    ])
}

/// Runs the measurements. [`run`] starts this function inside User-Mode Linux.
///
/// # Errors
/// A program fails, or a table in the kernel differs from the expected one.
pub fn measure_inside(services: Option<u32>) -> Result<()> {
    uml::guest::mark_entered();
    let services = services.unwrap_or(SERVICES);
    let measured = measure(services)?;
    println!("{MARK}{}", serde_json::to_string(&measured)?);
    Ok(())
}

/// Runs the measurements. Each load of the table has its own network namespace. The kernel keeps
/// removed real servers for two minutes, and searches all of them for each new real server
/// (`ip_vs_trash_get_dest`). A second load in the same namespace would therefore be slower.
fn measure(services: u32) -> Result<Measured> {
    let table = table(services);
    let (mut loads, mut restores) = (Vec::new(), Vec::new());
    let mut measured = Measured::default();
    for load in 0..LOADS {
        restores.push(in_namespace("anchor", || {
            let (ms, restored) = wall_ms(|| restore(&table));
            restored?;
            if load == 0 {
                expect(&table)?;
                measured.command = one_command(services)?;
            }
            Ok(ms)
        })?);
        loads.push(in_namespace("ours", || {
            let mut state = workload::state(services, ENDPOINTS);
            let mut backend = backend()?;
            let (ms, report) = wall_ms(|| backend.sync_full(&FixedState(&state, &node())));
            report?;
            if load == 0 {
                expect(&table)?;
                measure_changes(&mut backend, &mut state, services, &mut measured)?;
                measured.load_again = start_anew(&state)?;
            }
            cleanup(&mut backend)?;
            Ok(ms)
        })?);
    }
    Ok(Measured { load: median(loads), restore: median(restores), ..measured })
}

fn in_namespace<T: Send>(name: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let namespace = Namespace::create(format!("hg{}-bench-{name}", std::process::id()))?;
    // While the namespace has no address, it has no local routes, and IPVS rejects every real
    // server as a broadcast address.
    namespace.ip_batch("link set lo up\n")?;
    namespace.run(work)
}

/// The median time in which one `ipvsadm` process adds an endpoint.
fn one_command(services: u32) -> Result<f64> {
    let mut commands = Vec::new();
    for i in 0..CHANGES {
        let line = destination_line(services / 2 + i, ENDPOINTS);
        let (ms, output) = wall_ms(|| ipvsadm(&line.split(' ').collect::<Vec<_>>()));
        output?;
        commands.push(ms);
    }
    Ok(median(commands))
}

fn measure_changes(
    backend: &mut IpvsDataplane,
    state: &mut State,
    services: u32,
    measured: &mut Measured,
) -> Result<()> {
    let mut changes = Vec::new();
    for i in 0..CHANGES {
        let (ms, changed) = wall_ms(|| change(backend, state, services / 2 + i..services / 2 + i + 1));
        changed?;
        changes.push(ms);
    }
    let pipelined = PIPELINED.min(services / 2);
    let (ms, changed) = wall_ms(|| change(backend, state, 0..pipelined));
    changed?;
    (measured.change, measured.pipelined) = (median(changes), ms);
    let expected = services * ENDPOINTS + CHANGES + pipelined;
    let found = lines_of_kernel()?.iter().filter(|line| line.starts_with("-a ")).count();
    ensure!(found == expected as usize, "{found} destinations are programmed, expected {expected}");
    Ok(())
}

/// Starts a new dataplane, which must find the kernel's state correct and write nothing. Returns
/// the time of the dataplane's full sync in milliseconds.
fn start_anew(state: &State) -> Result<f64> {
    let mut anew = backend()?;
    let (ms, report) = wall_ms(|| anew.sync_full(&FixedState(state, &node())));
    let written = report?.objects_written;
    ensure!(written == 0, "a restarted dataplane wrote {written} objects");
    Ok(ms)
}

fn node() -> NodeFacts {
    NodeFacts::named("node-000")
}

fn backend() -> Result<IpvsDataplane> {
    let config = IpvsOptions { variant: Variant::Legacy, families: vec![Family::V4], ..IpvsOptions::default() };
    Ok(IpvsDataplane::new(config)?)
}

fn cleanup(backend: &mut IpvsDataplane) -> Result<()> {
    backend.cleanup()?;
    let left = lines_of_kernel()?;
    ensure!(left.is_empty(), "{} lines are left after the cleanup", left.len());
    Ok(())
}

/// Adds an endpoint to each of `services` in one step.
fn change(backend: &mut IpvsDataplane, state: &mut State, services: std::ops::Range<u32>) -> Result<()> {
    let count = services.end - services.start;
    let mut dirty = Dirty::default();
    for service in services {
        let added = workload::endpoint(service, ENDPOINTS);
        state.apply(Change::Endpoint(workload::key(service), added), &mut dirty);
    }
    backend.plan(state, &node(), &dirty);
    let report = backend.apply()?;
    ensure!(report.services_planned == count, "{count} Services changed, but the report is {report:?}");
    Ok(())
}

fn destination_line(service: u32, endpoint: u32) -> String {
    let (address, of) = (workload::endpoint_ip(service, endpoint), workload::cluster_ip(service));
    format!("-a -t {of}:80 -r {address}:8080 -m -w 1")
}

/// The table in the format of `ipvsadm -S`.
fn table(services: u32) -> String {
    let mut table = String::new();
    for service in 0..services {
        table += &format!("-A -t {}:80 -s rr\n", workload::cluster_ip(service));
        for endpoint in 0..ENDPOINTS {
            table += &destination_line(service, endpoint);
            table.push('\n');
        }
    }
    table
}

fn restore(table: &str) -> Result<()> {
    let mut child = Command::new("ipvsadm")
        .arg("-R")
        .stdin(Stdio::piped())
        .spawn()
        .context("starting ipvsadm (Debian package ipvsadm; `make setup` installs it)")?;
    child.stdin.take().context("no pipe")?.write_all(table.as_bytes())?;
    let status = child.wait()?;
    ensure!(status.success(), "ipvsadm -R: {status}");
    Ok(())
}

fn ipvsadm(arguments: &[&str]) -> Result<String> {
    let output = Command::new("ipvsadm").args(arguments).output().context("starting ipvsadm")?;
    ensure!(output.status.success(), "ipvsadm {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn lines_of_kernel() -> Result<BTreeSet<String>> {
    Ok(ipvsadm(&["-Sn"])?.lines().map(|line| line.trim_end().to_owned()).collect())
}

/// Checks that the kernel has exactly this table.
fn expect(table: &str) -> Result<()> {
    let wanted: BTreeSet<String> = table.lines().map(str::to_owned).collect();
    let found = lines_of_kernel()?;
    let (missing, more) = (wanted.difference(&found).next(), found.difference(&wanted).next());
    ensure!(missing.is_none() && more.is_none(), "missing: {missing:?}; unexpected: {more:?}");
    Ok(())
}
