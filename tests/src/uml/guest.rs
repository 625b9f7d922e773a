//! Process 1 of a machine. It prepares the machine and runs the requested tests one after the
//! other.

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

/// After this time without a request the machine turns itself off.
const IDLE_LIMIT: Duration = Duration::from_secs(10);
/// After this time without a heartbeat, the machine assumes that the test process on the host no
/// longer waits. On a busy machine, heartbeats may be seconds late.
const HEARTBEAT_LIMIT: Duration = Duration::from_secs(45);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const TEMPORARY: &str = "/run/tmp";
const NAMESPACES: &str = "/run/netns";
/// The folder for `modprobe -d`, which reads `lib/modules/<version>` in it.
const MODULES_ROOT: &str = "/run/modules";
const MODULES: &str = "/usr/lib/uml/modules";
const MODPROBE: &str = "/run/modprobe";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The modules that are loaded before the first test: modules for IPVS, ipset, iptables and the
/// testbed's links, and every scheduler of IPVS. The kernel loads other modules when they are first
/// used.
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

/// Whether this process is a test that runs inside a machine.
pub fn is_here() -> bool {
    std::env::var_os(ENTERED_VARIABLE).is_some()
}

/// Creates the mark which shows that the requested test or program has begun. Without the mark, a
/// test program in which the test does not exist would count as passed.
///
/// # Panics
/// The mark cannot be created.
pub fn mark_entered() {
    if let Some(path) = std::env::var_os(ENTERED_VARIABLE) {
        std::fs::write(&path, "").expect("a test inside cannot create the mark in its slot");
    }
}

/// The main function of `uml-init`. It serves the slot's requests until the machine has been idle
/// for 10 seconds, and then turns the machine off.
///
/// # Errors
/// The process is not process 1 of a test machine, or the machine cannot be turned off.
pub fn main() -> Result<()> {
    ensure!(std::process::id() == 1, "uml-init is started by the kernel of a test machine, as its first process");
    let slot = std::env::var_os(SLOT_VARIABLE).map(PathBuf::from).context("the kernel's command line names no slot")?;
    if let Err(error) = prepare(&slot).and_then(|()| serve(&slot)) {
        eprintln!("uml-init: {error:#}");
    }
    reboot(RebootMode::RB_POWER_OFF).context("turning the machine off").map(drop)
}

/// Mounts file systems, loads modules and sets kernel parameters.
fn prepare(slot: &Path) -> Result<()> {
    // Only the slot stays writable, to protect the host's files.
    bind(slot, slot, MsFlags::empty())?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>).context("making the host's files read-only")?;
    for (kind, place) in
        [("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run"), ("tmpfs", "/dev/shm"), ("devpts", "/dev/pts")]
    {
        if place.starts_with("/dev/") {
            std::fs::create_dir_all(place).with_context(|| format!("creating {place}"))?;
        }
        mount(Some(kind), place, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mounting {place}"))?;
    }
    std::fs::create_dir_all(TEMPORARY)?;
    set("/proc/sys/kernel/hostname", "uml")?;
    // After an oops the kernel must not continue with more tests.
    set("/proc/sys/kernel/panic_on_oops", "1")?;
    load_modules()?;
    // Because of its little memory, the kernel would track only 8,192 connections in a namespace,
    // and drop packets of further connections. Only the initial namespace can change this limit.
    set("/proc/sys/net/netfilter/nf_conntrack_max", "262144")
}

fn bind(from: &Path, to: &Path, flags: MsFlags) -> Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | flags, None::<&str>)
        .with_context(|| format!("binding {} to {}", from.display(), to.display()))
}

fn set(path: &str, value: &str) -> Result<()> {
    std::fs::write(path, value).with_context(|| format!("writing {value} to {path}"))
}

/// Makes modprobe use the modules of this kernel, and loads the wanted modules.
fn load_modules() -> Result<()> {
    let version = std::fs::read_to_string("/proc/sys/kernel/osrelease").context("reading the kernel's version")?;
    let folder = Path::new(MODULES).join(version.trim());
    ensure!(folder.is_dir(), "{}: no modules for this kernel (Debian package user-mode-linux)", folder.display());
    std::fs::create_dir_all(format!("{MODULES_ROOT}/lib"))?;
    std::os::unix::fs::symlink(MODULES, format!("{MODULES_ROOT}/lib/modules")).context("linking to the modules")?;
    // The kernel runs this script when it needs a module.
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

/// Runs a program and waits until it ends. The machine's console shows the program's output.
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
    println!("uml-init: no request for {IDLE_LIMIT:?}");
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
    // Virtual servers, sets, rules and links belong to a namespace. A new namespace therefore has
    // no objects of the previous test.
    unshare(CloneFlags::CLONE_NEWNET).context("creating a network namespace")?;
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
        // Programs that call modprobe themselves use this variable.
        .env("MODPROBE_OPTIONS", format!("-d {MODULES_ROOT}"))
        .env(ENTERED_VARIABLE, slot.join(request.entered()))
        .stdin(Stdio::null())
        .stdout(output.try_clone().context("cloning the output")?)
        .stderr(output)
        .process_group(0)
        .spawn();
    let failure = match child {
        Err(error) => Some(format!("starting {}: {error}", request.program.display())),
        Ok(child) => {
            watch(slot, request, Pid::from_raw(i32::try_from(child.id()).context("converting a process id")?))?
        }
    };
    end_everything()?;
    let kept = failure.is_some() && keep_files(&slot.join(request.kept()))?;
    clean_up()?;
    if failure.is_some() {
        // The test may have removed modules and ended before it loaded them again.
        load_wanted_modules()?;
    }
    Ok(failure.map_or(Outcome::Passed, |how| Outcome::Failed { how, kept }))
}

/// Waits for the test's process, and reaps orphaned processes while it waits. Returns the reason of
/// a failure, or `None` if the test passed.
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
            return Ok(Some("killed, because the test process on the host no longer waits".to_owned()));
        }
    }
}

/// Tells whether the test process on the host still waits. The test process touches a file, and
/// this value watches the modification time of the file for changes. This value does not compare
/// the modification time with a clock, so the clocks of the machine and of the host may differ.
struct Heartbeat {
    path: PathBuf,
    last: Option<SystemTime>,
    seen: Instant,
    checked: Instant,
}

impl Heartbeat {
    fn new(slot: &Path) -> Self {
        Self { path: slot.join(HEARTBEAT), last: None, seen: Instant::now(), checked: Instant::now() }
    }

    fn has_stopped(&mut self) -> bool {
        if self.checked.elapsed() >= Duration::from_secs(1) {
            self.checked = Instant::now();
            let now = std::fs::metadata(&self.path).and_then(|metadata| metadata.modified()).ok();
            if now != self.last {
                (self.last, self.seen) = (now, self.checked);
            }
        }
        self.seen.elapsed() > HEARTBEAT_LIMIT
    }
}

/// Kills and reaps all processes except this one.
fn end_everything() -> Result<()> {
    match kill(Pid::from_raw(-1), Signal::SIGKILL) {
        Ok(()) | Err(nix::Error::ESRCH) => {}
        Err(error) => return Err(error).context("killing processes of the test"),
    }
    loop {
        match waitpid(None, None) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(nix::Error::ECHILD) => return Ok(()),
            Err(error) => return Err(error).context("reaping processes of the test"),
        }
    }
}

/// Copies the temporary files of a failed test to the host. Returns false if there are no files.
fn keep_files(to: &Path) -> Result<bool> {
    if std::fs::read_dir(TEMPORARY).context("listing files of the test")?.next().is_none() {
        return Ok(false);
    }
    run(Command::new("cp").arg("-r").arg(TEMPORARY).arg(to))?;
    Ok(true)
}

/// Removes the named namespaces and temporary files of a test.
fn clean_up() -> Result<()> {
    if Path::new(NAMESPACES).exists() {
        for entry in std::fs::read_dir(NAMESPACES).context("listing namespaces")? {
            let path = entry?.path();
            umount2(&path, MntFlags::MNT_DETACH).with_context(|| format!("unmounting {}", path.display()))?;
            std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    std::fs::remove_dir_all(TEMPORARY).with_context(|| format!("emptying {TEMPORARY}"))?;
    std::fs::create_dir(TEMPORARY).with_context(|| format!("creating {TEMPORARY}"))
}
