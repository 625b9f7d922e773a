//! `ipvs`: the real backend on a real kernel's IPVS, inside User-Mode Linux, beside `ipvsadm` with the same table.
//!
//! The kernel there runs on one processor and makes system calls slowly, so that only ratios mean anything. What Headgate does includes what
//! `ipvsadm` does not do: planning, the services' addresses on the device, the sets, and the rules.

use std::{
    collections::BTreeSet,
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use headgate_core::{Change, Dirty, Family, State, view::NodeFacts};
use headgate_node_agent::backend::{
    Backend as _,
    iptables::Variant,
    ipvs::{Config, IpvsBackend},
};
use serde::{Deserialize, Serialize};

use super::{
    clock::wall_ms,
    report::{Figure, median},
    workload,
};
use crate::uml;

const SERVICES: u32 = 10_000;
const ENDPOINTS: u32 = 10;
const LOADS: usize = 3;
const CHANGES: u32 = 15;
/// Services that change at once.
const PIPELINED: u32 = 500;
const TIME_LIMIT: Duration = Duration::from_secs(1200);
/// Precedes what was measured in the output of the program inside.
const MARK: &str = "measured: ";

/// Milliseconds.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Measured {
    load: f64,
    load_again: f64,
    restore: f64,
    change: f64,
    command: f64,
    pipelined: f64,
}

/// Runs it, inside.
///
/// # Errors
/// When User-Mode Linux cannot be run, or something is not as it should be inside.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let services = services.unwrap_or(SERVICES);
    let count = services.to_string();
    let arguments = ["--only", "ipvs", "--inside", "--services", &count];
    let output = uml::run_program_inside("bench ipvs", &arguments, TIME_LIMIT)?;
    let line = output.lines().find_map(|line| line.strip_prefix(MARK)).context("nothing was measured inside")?;
    let measured: Measured = serde_json::from_str(line).context("reading what was measured inside")?;
    let size = format!("{services}x{ENDPOINTS}");
    Ok(vec![
        Figure::against(format!("ipvs/load/{size}"), measured.load, "ms", "ipvsadm -R", measured.restore),
        Figure::against(
            format!("ipvs/start-anew/{size}"),
            measured.load_again,
            "ms",
            "loading by ipvsadm -R",
            measured.restore,
        ),
        Figure::against(format!("ipvs/change/{size}"), measured.change, "ms", "one ipvsadm -a", measured.command),
        Figure::against(
            format!("ipvs/change-of-{PIPELINED}/{size}"),
            measured.pipelined,
            "ms",
            "a change alone",
            measured.change,
        ),
    ])
}

/// What [`run`] runs inside.
///
/// # Errors
/// When something fails, or a table is not what it should be.
pub fn measure_inside(services: Option<u32>) -> Result<()> {
    uml::guest::mark_entered();
    let services = services.unwrap_or(SERVICES);
    let measured = measure(services)?;
    println!("{MARK}{}", serde_json::to_string(&measured)?);
    Ok(())
}

fn measure(services: u32) -> Result<Measured> {
    let table = table(services);
    let mut state = workload::state(services, ENDPOINTS);
    let node = NodeFacts::named("node-000");
    let (mut loads, mut restores, mut commands) = (Vec::new(), Vec::new(), Vec::new());
    let mut ours = None;
    for load in 0..LOADS {
        let (ms, restored) = wall_ms(|| restore(&table));
        restored?;
        restores.push(ms);
        if load == 0 {
            expect(&table)?;
            for i in 0..CHANGES {
                let line = destination_line(services / 2 + i, ENDPOINTS);
                let (ms, output) = wall_ms(|| ipvsadm(&line.split(' ').collect::<Vec<_>>()));
                output?;
                commands.push(ms);
            }
        }
        ipvsadm(&["-C"])?;
        let mut backend = backend()?;
        let (ms, report) = wall_ms(|| backend.sync_full(&state, &node));
        report?;
        loads.push(ms);
        if load == 0 {
            expect(&table)?;
        }
        if load + 1 < LOADS {
            cleanup(&mut backend)?;
        }
        ours = Some(backend);
    }
    let mut ours = ours.context("nothing was loaded")?;
    let mut changes = Vec::new();
    for i in 0..CHANGES {
        let (ms, changed) = wall_ms(|| change(&mut ours, &mut state, &node, services / 2 + i..services / 2 + i + 1));
        changed?;
        changes.push(ms);
    }
    let (pipelined, changed) = wall_ms(|| change(&mut ours, &mut state, &node, 0..PIPELINED.min(services / 2)));
    changed?;
    let expected = services * ENDPOINTS + CHANGES + PIPELINED.min(services / 2);
    let found = lines_of_kernel()?.iter().filter(|line| line.starts_with("-a ")).count();
    ensure!(found == expected as usize, "{found} destinations are programmed, not {expected}");
    // An agent that starts anew finds everything as it should be.
    let mut anew =
        IpvsBackend::new(Config { variant: Variant::Legacy, families: vec![Family::V4], ..Config::default() })?;
    let (load_again, report) = wall_ms(|| anew.sync_full(&state, &node));
    let written = report?.objects_written;
    ensure!(written == 0, "an agent that started anew wrote {written} objects");
    Ok(Measured {
        load: median(loads),
        load_again,
        restore: median(restores),
        change: median(changes),
        command: median(commands),
        pipelined,
    })
}

fn backend() -> Result<IpvsBackend> {
    let config = Config { variant: Variant::Legacy, families: vec![Family::V4], ..Config::default() };
    Ok(IpvsBackend::new(config)?)
}

fn cleanup(backend: &mut IpvsBackend) -> Result<()> {
    backend.cleanup()?;
    let left = lines_of_kernel()?;
    ensure!(left.is_empty(), "{} lines are left after the cleanup", left.len());
    Ok(())
}

/// An endpoint comes to each of some services, all in one step.
fn change(
    backend: &mut IpvsBackend,
    state: &mut State,
    node: &NodeFacts,
    services: std::ops::Range<u32>,
) -> Result<()> {
    let count = services.end - services.start;
    let mut dirty = Dirty::default();
    for service in services {
        let added = workload::endpoint(service, ENDPOINTS);
        state.apply(Change::Endpoint(workload::key(service), added), &mut dirty);
    }
    let plan = backend.plan(state, node, &dirty);
    let report = backend.apply(plan)?;
    ensure!(report.services_planned == count, "{count} services changed, and {report:?}");
    Ok(())
}

fn destination_line(service: u32, endpoint: u32) -> String {
    let (address, of) = (workload::endpoint_ip(service, endpoint), workload::cluster_ip(service));
    format!("-a -t {of}:80 -r {address}:8080 -m -w 1")
}

/// As `ipvsadm -S` prints it.
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

/// The kernel has this table and nothing else.
fn expect(table: &str) -> Result<()> {
    let wanted: BTreeSet<String> = table.lines().map(str::to_owned).collect();
    let found = lines_of_kernel()?;
    let (missing, more) = (wanted.difference(&found).next(), found.difference(&wanted).next());
    ensure!(missing.is_none() && more.is_none(), "missing: {missing:?}; not wanted: {more:?}");
    Ok(())
}
