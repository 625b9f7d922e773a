//! The programs under test as child processes: finds, starts and ends them, and reads their logs.

use std::fs::OpenOptions;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::netns::Namespace;

/// How long a program may take to end after SIGTERM. After this time the program receives SIGKILL.
const TERMINATION_TIMEOUT: Duration = Duration::from_secs(60);

/// The path of a program of this workspace: in the folder that `HEADGATE_PROGRAMS` names, if it is
/// there, else the one that was built with the profile of the running test. `make skew` and `make
/// roots` put another build of some programs in such a folder.
pub fn program(name: &str) -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("HEADGATE_PROGRAMS") {
        let replacement = Path::new(&folder).join(name);
        if replacement.is_file() {
            return Ok(replacement);
        }
    }
    let own = std::env::current_exe().context("finding the running program")?;
    // target/<profile>/deps/<test>, or target/<profile>/<program>.
    let candidates = own.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    for candidate in candidates {
        if candidate.is_file() {
            return Ok(candidate);
        }
    }
    bail!("{name} is not beside {}: run `cargo build --workspace` first (`make test` does)", own.display());
}

/// The path of a program that `make setup` fetches, such as grpcurl. The places are, in order: the
/// folders in `PATH`, and `target/tools`, where `make setup` installs it.
///
/// # Panics
/// The program is not found.
pub fn tool(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools");
    let found = std::env::split_paths(&path).chain([tools]).map(|folder| folder.join(name)).find(|file| file.is_file());
    found.unwrap_or_else(|| panic!("{name} is neither on PATH nor in target/tools: run `make setup`"))
}

/// The same command, for a program that gets the processor before other programs. A proxy in an
/// agent needs this: when it has not run for a second, the kernel's rules lead past it, and all
/// tests together may keep a machine that busy.
pub fn before_others(command: &Command) -> Command {
    let mut first = Command::new("nice");
    first.args(["-n", "-15"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => first.env(name, value),
            None => first.env_remove(name),
        };
    }
    first
}

/// Runs a program and returns its standard output.
///
/// # Panics
/// The program cannot be started, or it fails.
pub fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The non-empty lines of a text, without trailing blanks, sorted.
pub fn sorted_lines(text: &str) -> Vec<&str> {
    let mut lines: Vec<_> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    lines.sort_unstable();
    lines
}

/// The last 20 lines of a log, or the reason why it cannot be read.
pub fn log_tail(path: &Path) -> String {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(20)..].join("\n")
        }
        Err(error) => format!("({} cannot be read: {error})", path.display()),
    }
}

/// The addresses at which a control plane serves agents, Inspect and its pages, read from its log.
/// `None` if the log does not contain the line with these addresses yet.
pub(super) fn control_plane_addresses(log: &str) -> Option<[SocketAddr; 3]> {
    // A line without a newline may be incomplete.
    let (whole, _) = log.rsplit_once('\n')?;
    let line = whole.lines().find(|line| line.contains("control plane runs"))?;
    let address = |field: &str| line.split_once(field)?.1.split_whitespace().next()?.parse().ok();
    Some([address(" listen=")?, address(" inspect=")?, address(" metrics=")?])
}

/// A child process that is killed when this value is dropped.
#[derive(Debug)]
pub struct KilledOnDrop(pub Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running program. Dropping this value ends the program with SIGTERM, then SIGKILL.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    started_unix_ms: u64,
    exit: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` in `namespace`, and appends its output to `log`.
    pub fn start(name: &str, namespace: &Namespace, mut command: Command, log: &Path) -> Result<Self> {
        let open = || OpenOptions::new().create(true).append(true).open(log);
        let (out, err) = (open(), open());
        let context = || format!("opening {}", log.display());
        command.stdin(Stdio::null()).stdout(out.with_context(context)?).stderr(err.with_context(context)?);
        let started = SystemTime::now().duration_since(UNIX_EPOCH).context("reading the clock")?;
        let started_unix_ms = u64::try_from(started.as_millis()).context("reading the clock")?;
        let child = namespace.spawn(command)?;
        Ok(Self { name: name.to_owned(), child, log: log.to_owned(), started_unix_ms, exit: None })
    }

    /// The time just before the program was started.
    pub fn started_unix_ms(&self) -> u64 {
        self.started_unix_ms
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Checks that the program still runs.
    ///
    /// # Errors
    /// The program has ended. The error includes the end of the program's log.
    pub fn check_running(&mut self) -> Result<()> {
        if let Some(status) = self.exit()? {
            bail!("{} has ended ({status}); the end of its log:\n{}", self.name, self.log_tail());
        }
        Ok(())
    }

    /// The last lines of the program's log.
    pub fn log_tail(&self) -> String {
        log_tail(&self.log)
    }

    /// Ends the program with SIGTERM, or with SIGKILL if it does not end in time. Returns its exit
    /// status.
    pub fn terminate(mut self) -> Result<ExitStatus> {
        self.stop()
    }

    /// Ends the program with SIGKILL.
    pub fn kill(mut self) -> Result<()> {
        if self.exit()?.is_some() {
            return Ok(());
        }
        self.signal(Signal::SIGKILL)?;
        self.wait(TERMINATION_TIMEOUT)?.with_context(|| format!("{} survived SIGKILL", self.name)).map(drop)
    }

    fn stop(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.exit()? {
            return Ok(status);
        }
        self.signal(Signal::SIGTERM)?;
        if let Some(status) = self.wait(TERMINATION_TIMEOUT)? {
            return Ok(status);
        }
        eprintln!("warning: {} ignores SIGTERM and is killed", self.name);
        self.signal(Signal::SIGKILL)?;
        self.wait(TERMINATION_TIMEOUT)?.with_context(|| format!("{} survived SIGKILL", self.name))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let id = i32::try_from(self.child.id()).context("converting a process id")?;
        kill(Pid::from_raw(id), signal).with_context(|| format!("sending {signal} to {}", self.name))
    }

    /// The exit status; `None` while the program runs.
    pub fn exit(&mut self) -> Result<Option<ExitStatus>> {
        if self.exit.is_none() {
            self.exit = self.child.try_wait().with_context(|| format!("waiting for {}", self.name))?;
        }
        Ok(self.exit)
    }

    fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.exit()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("warning: {} cannot be ended: {error:#}", self.name);
        }
    }
}
