//! Creates, enters and removes network namespaces.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};

use super::spawn;

const NAMESPACES: &str = "/run/netns";
const PREFIX: &str = "hg";

/// One network namespace. Dropping this value removes the namespace.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    handle: File,
}

/// A prefix of namespace names that is unique for each testbed: the process id and a number.
pub(crate) fn unique_prefix() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("{PREFIX}{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Checks that this process can create namespaces. Call this function before creating the first
/// namespace.
///
/// # Errors
/// The process is not root, or the program `ip` is missing. The error names the remedy.
pub fn check_prerequisites() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the testbed makes network namespaces and needs root: run the tests as root (`sudo make test`)");
    }
    let version = Command::new("ip").arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !version.is_ok_and(|status| status.success()) {
        bail!("the testbed needs `ip` (Debian package iproute2): run `make setup`");
    }
    Ok(())
}

/// Removes namespaces that dead test processes left behind. A namespace that cannot be removed does
/// not prevent a test: the function prints a warning.
pub fn sweep_stale() -> Result<()> {
    if !Path::new(NAMESPACES).exists() {
        return Ok(());
    }
    for entry in std::fs::read_dir(NAMESPACES).with_context(|| format!("listing {NAMESPACES}"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Some(process) = owner(&name) else { continue };
        if !Path::new(&format!("/proc/{process}")).exists()
            && let Err(error) = remove(&name)
        {
            eprintln!("warning: a namespace of an earlier run stays: {error:#}");
        }
    }
    Ok(())
}

/// The process id in a name such as `hg4711-0-node-a`.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split_once('-')?.0.parse().ok()
}

impl Namespace {
    /// Creates a namespace called `name`, as `ip netns add` does, without starting a program.
    pub fn create(name: String) -> Result<Self> {
        prepare_folder().with_context(|| format!("preparing {NAMESPACES}"))?;
        let path: PathBuf = Path::new(NAMESPACES).join(&name);
        let context = || format!("creating the network namespace {name}");
        OpenOptions::new().write(true).create_new(true).open(&path).with_context(context)?;
        // The bind mount keeps the namespace after the thread has ended.
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET)?;
            mount(Some("/proc/thread-self/ns/net"), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        };
        let made = std::thread::scope(|scope| scope.spawn(make).join());
        let made = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if let Err(error) = made {
            std::fs::remove_file(&path).with_context(context)?;
            return Err(error).with_context(context);
        }
        let handle = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
        Ok(Self { name, handle })
    }

    /// Creates a namespace for a test, whose name is unique among all processes.
    ///
    /// # Errors
    /// The process is not root, or `ip` is missing or fails.
    pub fn for_test(name: &str) -> Result<Self> {
        check_prerequisites()?;
        sweep_stale()?;
        Self::create(format!("hg{}-{name}", std::process::id()))
    }

    /// The full name, for `ip netns exec`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The open handle of the namespace.
    pub(super) fn handle(&self) -> &File {
        &self.handle
    }

    /// Runs `ip` commands, one per line, inside the namespace. Stops at the first failure.
    pub fn ip_batch(&self, commands: &str) -> Result<()> {
        ip(&["-n", &self.name, "-batch", "-"], commands)
    }

    /// Runs `work` on a new thread inside the namespace, and waits until it ends. Sockets that
    /// `work` creates stay in the namespace, also when other threads use them later.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let doorway = self.doorway()?;
            let thread = scope.spawn(move || {
                doorway.enter()?;
                work()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// A handle with which another thread can enter the namespace.
    pub(crate) fn doorway(&self) -> Result<Doorway> {
        let handle = self.handle.try_clone().with_context(|| format!("cloning the handle of {}", self.name))?;
        Ok(Doorway { name: self.name.clone(), handle })
    }

    /// Writes kernel settings of this namespace, given as paths below `/proc/sys/net` and values.
    pub fn set_sysctls(&self, settings: &[(&str, &str)]) -> Result<()> {
        self.run(|| {
            for (key, value) in settings {
                let path = format!("/proc/sys/net/{key}");
                std::fs::write(&path, value).with_context(|| format!("writing {value} to {path}"))?;
            }
            Ok(())
        })
    }

    /// Starts a program inside the namespace. The kernel kills the program when this process ends.
    /// The caller may end the program earlier.
    pub fn spawn(&self, command: Command) -> Result<Child> {
        let program = command.get_program().to_string_lossy().into_owned();
        let handle = self.handle.try_clone().context("cloning a namespace handle")?;
        spawn::spawn_in(handle, command).with_context(|| format!("starting {program} in {}", self.name))
    }

    /// Runs a program with these arguments like [`Self::output`].
    ///
    /// # Errors
    /// As [`Self::output`].
    pub fn tool(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        command.args(arguments);
        self.output(command)
    }

    /// Runs a program inside the namespace, waits for its end, and returns its standard output.
    ///
    /// # Errors
    /// The program cannot be started, or it fails. The error includes the program's standard error.
    pub fn output(&self, mut command: Command) -> Result<String> {
        let shown = format!("{command:?}");
        command.stdin(Stdio::null());
        // A thread enters the namespace, and not the child before it becomes the program. The child
        // therefore needs no copy of this process's memory, which is slow inside User-Mode Linux.
        let output = self.run(|| command.output().with_context(|| format!("running {shown}")))?;
        if !output.status.success() {
            bail!("{shown} in {}: {}: {}", self.name, output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        String::from_utf8(output.stdout).with_context(|| format!("output of {shown}"))
    }
}

/// A handle with which a thread enters a namespace. The handle keeps the namespace alive, but not
/// its name.
#[derive(Debug)]
pub(crate) struct Doorway {
    name: String,
    handle: File,
}

impl Doorway {
    /// Moves the calling thread into the namespace, until the thread enters another namespace or
    /// ends.
    pub(crate) fn enter(&self) -> Result<()> {
        setns(&self.handle, CloneFlags::CLONE_NEWNET)
            .with_context(|| format!("entering the network namespace {}", self.name))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.name) {
            eprintln!("warning: the namespace {} cannot be removed: {error:#}", self.name);
        }
    }
}

/// Makes the folder a shared mount of its own, as `ip netns add` does with the same lock. If `ip`
/// did this later, its mount would hide the namespaces that exist by then, and nobody could remove
/// them.
fn prepare_folder() -> Result<()> {
    std::fs::create_dir_all(NAMESPACES)?;
    let folder = File::open(NAMESPACES)?;
    folder.lock()?;
    let change = |flags| mount(Some(NAMESPACES), NAMESPACES, None::<&str>, flags | MsFlags::MS_REC, None::<&str>);
    match change(MsFlags::MS_SHARED) {
        // The folder is not a mount yet.
        Err(Errno::EINVAL) => {
            change(MsFlags::MS_BIND)?;
            Ok(change(MsFlags::MS_SHARED)?)
        }
        result => Ok(result?),
    }
}

/// Removes the name of a namespace. The kernel removes the namespace itself when no socket, process
/// or handle uses it any more. Several test processes may remove the same name at the same time.
fn remove(name: &str) -> Result<()> {
    let path = Path::new(NAMESPACES).join(name);
    match umount2(&path, MntFlags::MNT_DETACH) {
        // Another process has unmounted the file (EINVAL), or removed it too (ENOENT).
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(error) => return Err(error).with_context(|| format!("unmounting {}", path.display())),
    }
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Runs `ip` with `input` on its standard input.
fn ip(arguments: &[&str], input: &str) -> Result<()> {
    let mut child = Command::new("ip")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("running `ip` (Debian package iproute2; `make setup` installs it)")?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).context("writing to `ip`")?;
    }
    let output = child.wait_with_output().context("waiting for `ip`")?;
    if !output.status.success() {
        bail!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
