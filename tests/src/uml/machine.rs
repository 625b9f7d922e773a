//! Starts and ends machines. A machine is a kernel that runs as a process of the host.

use std::fs::{File, TryLockError};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::{Signal, killpg};
use nix::sys::statvfs::statvfs;
use nix::unistd::Pid;

use super::protocol::{CONSOLE, SLOT_VARIABLE};
use super::slot::{self, Slot};
use crate::testbed::process::program;

/// The memory of a machine. The machine uses host memory only for pages that it touches.
const MEMORY_MIB: u64 = 1024;
/// The host's folder for a machine's memory, if it has enough space.
const SHARED_MEMORY: &str = "/dev/shm";
const XSTATE_SOURCE: &str = include_str!("xstate.c");
const PID: &str = "pid";

/// Starts the kernel in `slot`. The kernel continues to run after this process ends.
pub(super) fn boot(slot: &Slot) -> Result<()> {
    slot::sweep()?;
    let console = slot::open_for_appending(&slot.console())?;
    // The lock belongs to the open file, which the kernel's process inherits. The lock therefore
    // lasts until the kernel ends.
    console.try_lock().with_context(|| format!("{} is locked: a machine runs", slot.console().display()))?;
    let init = program("uml-init")?;
    let mut command = Command::new("linux.uml");
    command
        .args(["rootfstype=hostfs", "rootflags=/", "rw"])
        .arg(format!("init={}", init.display()))
        .arg(format!("mem={MEMORY_MIB}M"))
        .arg(format!("uml_dir={}/", slot.folder().display()))
        .args(["con=null", "con0=null,fd:1", "ssl=null", "panic=-1"])
        .arg(format!("{SLOT_VARIABLE}={}", slot.folder().display()))
        .env("TMPDIR", memory_folder(slot.folder())?)
        .env("LD_PRELOAD", xstate_library(slot.folder())?)
        .stdin(Stdio::null())
        .stdout(console.try_clone().context("cloning the console")?)
        .stderr(console)
        .process_group(0);
    let child = on_one_processor(slot, || command.spawn())?.context(
        "starting `linux.uml` (Debian package user-mode-linux, for amd64): run `make setup`, which installs it",
    )?;
    let pid = slot.folder().join(PID);
    std::fs::write(&pid, child.id().to_string()).with_context(|| format!("writing {}", pid.display()))
}

/// Starts a child on one of this process's processors, which the slot's number selects. The kernel
/// and the processes inside never run at the same time: they wake each other at each system call
/// and page fault, which is much faster on one processor.
fn on_one_processor<T>(slot: &Slot, start: impl FnOnce() -> T) -> Result<T> {
    let own = Pid::from_raw(0);
    let all = sched_getaffinity(own).context("reading the processors of this process")?;
    let usable: Vec<usize> = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or(false)).collect();
    let mut one = CpuSet::new();
    one.set(usable[slot.number() % usable.len()]).context("choosing a processor")?;
    sched_setaffinity(own, &one).context("moving to one processor")?;
    let started = start();
    sched_setaffinity(own, &all).context("moving back to all processors")?;
    Ok(started)
}

/// Whether a machine runs in the slot with this folder.
pub(super) fn is_running(folder: &Path) -> bool {
    let Ok(console) = File::open(folder.join(CONSOLE)) else { return false };
    matches!(console.try_lock_shared(), Err(TryLockError::WouldBlock))
}

/// Kills the machine in `slot`, if a machine runs there.
pub(super) fn kill(slot: &Slot) -> Result<()> {
    if !is_running(slot.folder()) {
        return Ok(());
    }
    let path = slot.folder().join(PID);
    let pid = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let pid: i32 = pid.trim().parse().with_context(|| format!("{}: not a process id", path.display()))?;
    killpg(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("ending the machine {pid}"))
}

/// The last lines of the kernel's log.
pub(super) fn console_tail(slot: &Slot, lines: usize) -> String {
    match std::fs::read(slot.console()) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let all: Vec<&str> = text.lines().collect();
            all[all.len().saturating_sub(lines)..].join("\n")
        }
        Err(error) => format!("({} cannot be read: {error})", slot.console().display()),
    }
}

/// The folder for the file that holds the machine's memory: /dev/shm, or the slot's folder if
/// /dev/shm is too small. In many containers, /dev/shm is too small.
fn memory_folder(slot: &Path) -> Result<PathBuf> {
    let has_room = statvfs(SHARED_MEMORY)
        .is_ok_and(|stat| stat.blocks_available() * stat.fragment_size() / 1024 / 1024 >= 2 * MEMORY_MIB);
    Ok(if has_room { PathBuf::from(SHARED_MEMORY) } else { slot.to_owned() })
}

/// Compiles the library that the kernel needs on processors with many registers, once per slot. The
/// comment at the head of `xstate.c` explains the reason.
fn xstate_library(slot: &Path) -> Result<PathBuf> {
    let library = slot.join("xstate.so");
    if library.is_file() {
        return Ok(library);
    }
    let source = slot.join("xstate.c");
    std::fs::write(&source, XSTATE_SOURCE).with_context(|| format!("writing {}", source.display()))?;
    let output = Command::new("cc")
        .args(["-O2", "-Wall", "-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .output()
        .context("running `cc` (Debian packages gcc and libc6-dev): run `make setup`")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "compiling {}: {errors}", source.display());
    if !library.is_file() {
        bail!("cc has not created {}", library.display());
    }
    Ok(library)
}
