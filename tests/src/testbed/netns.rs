//! Network namespaces: made, entered, and removed.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};

use super::spawn;

const NAMESPACES: &str = "/run/netns";
const PREFIX: &str = "hg";

/// One network namespace, removed when dropped.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    handle: File,
}

/// What makes one testbed's namespaces differ from those of all others: process id and a number.
pub(crate) fn unique_prefix() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("{PREFIX}{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Says what is missing to make namespaces, and what to do about it; call before the first one.
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

/// Removes namespaces whose process has died without doing so itself.
pub fn sweep_stale() -> Result<()> {
    if !Path::new(NAMESPACES).exists() {
        return Ok(());
    }
    for entry in std::fs::read_dir(NAMESPACES).with_context(|| format!("listing {NAMESPACES}"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Some(process) = owner(&name) else { continue };
        if !Path::new(&format!("/proc/{process}")).exists() {
            // Another test process may sweep at the same moment; whoever comes second finds nothing
            // to remove.
            let removed = remove(&name);
            if removed.is_err() && Path::new(NAMESPACES).join(&name).exists() {
                removed?;
            }
        }
    }
    Ok(())
}

/// Process id in a name such as `hg4711-0-node-a`.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split_once('-')?.0.parse().ok()
}

impl Namespace {
    /// Makes a namespace called `name`, as `ip netns add` does, without starting a program.
    pub fn create(name: String) -> Result<Self> {
        std::fs::create_dir_all(NAMESPACES).with_context(|| format!("making {NAMESPACES}"))?;
        let path: PathBuf = Path::new(NAMESPACES).join(&name);
        let context = || format!("making the network namespace {name}");
        OpenOptions::new().write(true).create_new(true).open(&path).with_context(context)?;
        // A thread that ends takes its namespace along, unless something is mounted on it.
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

    /// Full name, as `ip netns exec` takes it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` commands, one a line, inside the namespace, stopping at the first that fails.
    pub fn ip_batch(&self, commands: &str) -> Result<()> {
        ip(&["-n", &self.name, "-batch", "-"], commands)
    }

    /// Runs `work` on a thread of its own inside the namespace, and waits for it. Sockets made
    /// there stay in the namespace wherever they are used afterwards.
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

    /// What a thread needs to enter the namespace, free of borrows.
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

    /// Starts a program inside the namespace. It is killed when this process dies; ending it
    /// earlier is up to the caller.
    pub fn spawn(&self, command: Command) -> Result<Child> {
        let program = command.get_program().to_string_lossy().into_owned();
        let handle = self.handle.try_clone().context("cloning a namespace handle")?;
        spawn::spawn_in(handle, command).with_context(|| format!("starting {program} in {}", self.name))
    }

    /// Runs a program inside the namespace to its end; its standard output, or an error that
    /// carries its standard error.
    pub fn output(&self, mut command: Command) -> Result<String> {
        let shown = format!("{command:?}");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = self.spawn(command)?.wait_with_output().with_context(|| format!("waiting for {shown}"))?;
        if !output.status.success() {
            bail!("{shown} in {}: {}: {}", self.name, output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        String::from_utf8(output.stdout).with_context(|| format!("output of {shown}"))
    }
}

/// The way into a namespace. Holding one keeps the namespace itself alive, though not its name.
#[derive(Debug)]
pub(crate) struct Doorway {
    name: String,
    handle: File,
}

impl Doorway {
    /// Moves the calling thread into the namespace, until it enters another or ends.
    pub(crate) fn enter(&self) -> Result<()> {
        setns(&self.handle, CloneFlags::CLONE_NEWNET)
            .with_context(|| format!("entering the network namespace {}", self.name))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.name) {
            eprintln!("warning: the namespace {} stays behind: {error:#}", self.name);
        }
    }
}

/// Removes the name of a namespace. The namespace itself goes with the last socket and process in
/// it.
fn remove(name: &str) -> Result<()> {
    let path = Path::new(NAMESPACES).join(name);
    umount2(&path, MntFlags::MNT_DETACH).with_context(|| format!("unmounting {}", path.display()))?;
    std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))
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

#[cfg(test)]
mod tests {
    use super::owner;

    #[test]
    fn only_names_of_testbeds_have_an_owner() {
        assert_eq!(owner("hg4711-0-node-a"), Some(4711));
        assert_eq!(owner("hg-node-a"), None);
        assert_eq!(owner("hgx1-0-node-a"), None);
        assert_eq!(owner("cni-1234"), None);
    }
}
