//! Inside: process 1 of the machine, which prepares it and runs what is asked for, one test after
//! the other.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::modules::LOADER;
use super::protocol::{self, ENTERED_VARIABLE, HEARTBEAT, Outcome, REQUEST, Request, SLOT_VARIABLE, TAKEN};
use super::slot::open_for_appending;

/// A machine that nobody asks turns itself off.
const IDLE_LIMIT: Duration = Duration::from_secs(10);
/// Without a heartbeat for so long, whoever asked is gone.
const HEARTBEAT_LIMIT: Duration = Duration::from_secs(15);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const TEMPORARY: &str = "/run/tmp";
const NAMESPACES: &str = "/run/netns";
/// `modprobe -d` looks for `lib/modules/<version>` below this.
const MODULES_ROOT: &str = "/run/modules";
const MODULES: &str = "/usr/lib/uml/modules";
const MODPROBE: &str = "/run/modprobe";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Loaded before the first test: what IPVS, ipset and iptables need, every scheduler, and what the
/// testbed's links are made of. The kernel loads others by itself when they are first used, as on
/// any machine.
const WANTED_MODULES: &[&str] = &[
    "ip_vs",
    "ip_vs_rr",
    "ip_vs_wrr",
    "ip_vs_lc",
    "ip_vs_wlc",
    "ip_vs_lblc",
    "ip_vs_lblcr",
    "ip_vs_sh",
    "ip_vs_dh",
    "ip_vs_sed",
    "ip_vs_nq",
    "ip_vs_mh",
    "ip_vs_fo",
    "ip_vs_ovf",
    "ip_set",
    "ip_set_hash_ip",
    "ip_set_hash_ipport",
    "ip_set_hash_ipportip",
    "ip_set_hash_ipportnet",
    "ip_set_bitmap_port",
    "xt_set",
    "xt_ipvs",
    "nf_conntrack",
    "nf_conntrack_netlink",
    "nfnetlink",
    "nf_nat",
    "ip_tables",
    "ip6_tables",
    "iptable_nat",
    "iptable_filter",
    "iptable_mangle",
    "ip6table_nat",
    "ip6table_filter",
    "ip6table_mangle",
    "ipt_REJECT",
    "ip6t_REJECT",
    "xt_MASQUERADE",
    "xt_recent",
    "xt_statistic",
    "xt_comment",
    "xt_mark",
    "xt_addrtype",
    "xt_conntrack",
    "xt_nat",
    "xt_tcpudp",
    "dummy",
    "veth",
    "bridge",
    "ipv6",
];

/// Whether this process runs inside, as a test.
pub fn is_here() -> bool {
    std::env::var_os(ENTERED_VARIABLE).is_some()
}

/// Says that the test, or what else was asked for, has begun: without it, a program in which the
/// test does not exist would count as passed.
///
/// # Panics
/// The mark cannot be made.
pub fn mark_entered() {
    if let Some(path) = std::env::var_os(ENTERED_VARIABLE) {
        std::fs::write(&path, "").expect("a test inside can write to its slot");
    }
}

/// What `uml-init` does: serves the slot until nobody asks, and turns the machine off.
///
/// # Errors
/// Returns only if it is not process 1 of a machine that was booted by a test.
pub fn main() -> Result<()> {
    ensure!(std::process::id() == 1, "uml-init is started by the kernel of a test machine, as its first process");
    let slot = std::env::var_os(SLOT_VARIABLE).map(PathBuf::from).context("the kernel's command line names no slot")?;
    if let Err(error) = prepare(&slot).and_then(|()| serve(&slot)) {
        eprintln!("uml-init: {error:#}");
    }
    reboot(RebootMode::RB_POWER_OFF).context("turning the machine off").map(drop)
}

/// File systems, modules, and what else a machine has when it has come up.
fn prepare(slot: &Path) -> Result<()> {
    // The host's files are those of the machine's owner: only the slot can be written.
    bind(slot, slot, MsFlags::empty())?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>).context("making the host's files read-only")?;
    for (kind, place) in
        [("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run"), ("tmpfs", "/dev/shm"), ("devpts", "/dev/pts")]
    {
        if place.starts_with("/dev/") {
            std::fs::create_dir_all(place).with_context(|| format!("making {place}"))?;
        }
        mount(Some(kind), place, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mounting {place}"))?;
    }
    std::fs::create_dir_all(TEMPORARY)?;
    set("/proc/sys/kernel/hostname", "uml")?;
    // A kernel that has done something wrong must not go on as if nothing had happened.
    set("/proc/sys/kernel/panic_on_oops", "1")?;
    load_modules()?;
    // By its little memory this kernel would track 8,192 connections in a namespace, and drop
    // packets of all others; only here can that be changed.
    set("/proc/sys/net/netfilter/nf_conntrack_max", "262144")
}

fn bind(from: &Path, to: &Path, flags: MsFlags) -> Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | flags, None::<&str>)
        .with_context(|| format!("binding {} to {}", from.display(), to.display()))
}

fn set(path: &str, value: &str) -> Result<()> {
    std::fs::write(path, value).with_context(|| format!("writing {value} to {path}"))
}

/// The kernel's own modules, which are not where the host has its own.
fn load_modules() -> Result<()> {
    let version = std::fs::read_to_string("/proc/sys/kernel/osrelease").context("reading the kernel's version")?;
    let folder = Path::new(MODULES).join(version.trim());
    ensure!(folder.is_dir(), "{}: no modules for this kernel (Debian package user-mode-linux)", folder.display());
    std::fs::create_dir_all(format!("{MODULES_ROOT}/lib"))?;
    std::os::unix::fs::symlink(MODULES, format!("{MODULES_ROOT}/lib/modules")).context("linking to the modules")?;
    // What the kernel runs when it finds that it needs a module.
    let script = format!("#!/bin/sh\nPATH={PATH} exec modprobe -d {MODULES_ROOT} \"$@\"\n");
    std::fs::write(MODPROBE, script).with_context(|| format!("writing {MODPROBE}"))?;
    run(Command::new("chmod").args(["+x", MODPROBE]))?;
    load_wanted_modules()
}

fn load_wanted_modules() -> Result<()> {
    set(LOADER, MODPROBE)?;
    run(Command::new(MODPROBE).arg("-a").args(WANTED_MODULES))
        .context("loading modules (`modprobe` is in Debian package kmod)")
}

/// Runs a program to its end; what it prints is in the machine's console.
fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    let status = command.env("PATH", PATH).stdin(Stdio::null()).status().with_context(|| format!("running {shown}"))?;
    ensure!(status.success(), "{shown}: {status}");
    Ok(())
}

fn serve(slot: &Path) -> Result<()> {
    let mut idle_since = Instant::now();
    while idle_since.elapsed() < IDLE_LIMIT {
        if let Some(request) = take(slot)? {
            let outcome = run_test(slot, &request)?;
            println!("uml-init: {}: {outcome:?}", request.test);
            protocol::write(slot, &request.outcome(), &outcome).context("writing the outcome")?;
            idle_since = Instant::now();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    println!("uml-init: nobody asks");
    Ok(())
}

fn take(slot: &Path) -> Result<Option<Request>> {
    match std::fs::rename(slot.join(REQUEST), slot.join(TAKEN)) {
        Ok(()) => protocol::read(slot, TAKEN).context("reading the request"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context("taking the request"),
    }
}

fn run_test(slot: &Path, request: &Request) -> Result<Outcome> {
    // Virtual servers, sets, rules and links all belong to a namespace, so the last test's go with
    // the last namespace.
    unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
    run(Command::new("ip").args(["link", "set", "lo", "up"]))?;
    let output = open_for_appending(&slot.join(request.output()))?;
    println!("uml-init: {}", request.test);
    let child = Command::new(&request.program)
        .args(&request.arguments)
        .current_dir(&request.directory)
        .env_clear()
        .env("PATH", PATH)
        .envs(request.environment.iter().map(|(name, value)| (name, value)))
        .env("TMPDIR", TEMPORARY)
        // For programs that load modules themselves.
        .env("MODPROBE_OPTIONS", format!("-d {MODULES_ROOT}"))
        .env(ENTERED_VARIABLE, slot.join(request.entered()))
        .stdin(Stdio::null())
        .stdout(output.try_clone().context("cloning the output")?)
        .stderr(output)
        .process_group(0)
        .spawn();
    let failure = match child {
        Err(error) => Some(format!("starting {}: {error}", request.program.display())),
        Ok(child) => watch(slot, request, Pid::from_raw(i32::try_from(child.id()).context("a process id")?))?,
    };
    end_everything()?;
    let kept = failure.is_some() && keep_files(&slot.join(request.kept()))?;
    clean_up()?;
    if failure.is_some() {
        // It may have been killed while it did without some.
        load_wanted_modules()?;
    }
    Ok(failure.map_or(Outcome::Passed, |how| Outcome::Failed { how, kept }))
}

/// Waits for the test's process, and reaps those that have lost their parents meanwhile; how it
/// failed, if it did.
fn watch(slot: &Path, request: &Request, child: Pid) -> Result<Option<String>> {
    let limit = Duration::from_secs(request.time_limit_seconds);
    let started = Instant::now();
    let mut heartbeat = Heartbeat::new(slot);
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)).context("waiting for the test")? {
            WaitStatus::Exited(pid, 0) if pid == child => return Ok(None),
            WaitStatus::Exited(pid, code) if pid == child => return Ok(Some(format!("exit status {code}"))),
            WaitStatus::Signaled(pid, signal, _) if pid == child => return Ok(Some(format!("ended by {signal}"))),
            WaitStatus::StillAlive => std::thread::sleep(POLL_INTERVAL),
            _ => {}
        }
        if started.elapsed() > limit {
            return Ok(Some(format!("took longer than its time limit of {limit:?}, and was killed")));
        }
        if heartbeat.has_stopped() {
            return Ok(Some("nobody waits for it any more".to_owned()));
        }
    }
}

/// Whether the test outside still waits. Its clock and ours need not agree: a time that does not
/// change is enough.
struct Heartbeat {
    path: PathBuf,
    last: Option<SystemTime>,
    seen: Instant,
    looked: Instant,
}

impl Heartbeat {
    fn new(slot: &Path) -> Self {
        Self { path: slot.join(HEARTBEAT), last: None, seen: Instant::now(), looked: Instant::now() }
    }

    fn has_stopped(&mut self) -> bool {
        if self.looked.elapsed() >= Duration::from_secs(1) {
            self.looked = Instant::now();
            let now = std::fs::metadata(&self.path).and_then(|metadata| metadata.modified()).ok();
            if now != self.last {
                (self.last, self.seen) = (now, self.looked);
            }
        }
        self.seen.elapsed() > HEARTBEAT_LIMIT
    }
}

/// Kills and reaps every process but this one.
fn end_everything() -> Result<()> {
    match kill(Pid::from_raw(-1), Signal::SIGKILL) {
        Ok(()) | Err(nix::Error::ESRCH) => {}
        Err(error) => return Err(error).context("ending what the test left"),
    }
    loop {
        match waitpid(None, None) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(nix::Error::ECHILD) => return Ok(()),
            Err(error) => return Err(error).context("reaping what the test left"),
        }
    }
}

/// Copies what a failing test left to the host; whether there was anything.
fn keep_files(to: &Path) -> Result<bool> {
    if std::fs::read_dir(TEMPORARY).context("listing what the test left")?.next().is_none() {
        return Ok(false);
    }
    run(Command::new("cp").arg("-r").arg(TEMPORARY).arg(to))?;
    Ok(true)
}

/// Leaves nothing of a test to the next one.
fn clean_up() -> Result<()> {
    if Path::new(NAMESPACES).exists() {
        for entry in std::fs::read_dir(NAMESPACES).context("listing namespaces")? {
            let path = entry?.path();
            umount2(&path, MntFlags::MNT_DETACH).with_context(|| format!("unmounting {}", path.display()))?;
            std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    std::fs::remove_dir_all(TEMPORARY).with_context(|| format!("emptying {TEMPORARY}"))?;
    std::fs::create_dir(TEMPORARY).with_context(|| format!("making {TEMPORARY}"))
}
