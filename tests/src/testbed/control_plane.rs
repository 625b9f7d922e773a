//! A control plane on loopback, as a process.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::process::{KilledOnDrop, control_plane_addresses, log_tail, program};

/// Longest wait for a line in the log. Only a failing test waits this long.
const GUARD: Duration = Duration::from_secs(60);

/// A running control plane. Dropping it kills the process.
#[derive(Debug)]
pub struct ControlPlane {
    process: KilledOnDrop,
    log: PathBuf,
    /// The address for agents.
    pub address: SocketAddr,
    /// The address for Inspect.
    pub inspect: SocketAddr,
    /// The address of the pages.
    pub metrics: SocketAddr,
}

impl ControlPlane {
    /// Starts a control plane with these options, writes its output to a file `log` in `folder`,
    /// and waits until it listens. The kernel chooses the ports that no option sets.
    ///
    /// # Errors
    /// The control plane does not listen in time. The error has its log.
    pub fn start(folder: &Path, options: &[String]) -> Result<Self> {
        let log = folder.join("log");
        let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let mut command = Command::new(program("headgate-control-plane")?);
        for option in ["--listen=", "--metrics-listen="] {
            if !options.iter().any(|given| given.starts_with(option)) {
                command.arg(format!("{option}127.0.0.1:0"));
            }
        }
        command.args(options).env("NO_COLOR", "1").stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let process = KilledOnDrop(command.spawn().context("starting headgate-control-plane")?);
        let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut started = Self { process, log, address: unknown, inspect: unknown, metrics: unknown };
        started.until_logged("control plane runs")?;
        let addresses = control_plane_addresses(&started.log()?).context("the log has no addresses")?;
        [started.address, started.inspect, started.metrics] = addresses;
        Ok(started)
    }

    /// The whole output so far.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn log(&self) -> Result<String> {
        fs::read_to_string(&self.log).with_context(|| format!("reading {}", self.log.display()))
    }

    /// The end of the output, for messages.
    #[must_use]
    pub fn log_tail(&self) -> String {
        log_tail(&self.log)
    }

    /// Waits for a line with this text in the log, and returns the line.
    ///
    /// # Errors
    /// There is no such line in time.
    pub fn until_logged(&self, text: &str) -> Result<String> {
        let deadline = Instant::now() + GUARD;
        loop {
            let log = self.log()?;
            // A line is complete once its newline is written.
            let complete = log.rsplit_once('\n').map_or("", |(complete, _)| complete);
            if let Some(line) = complete.lines().find(|line| line.contains(text)) {
                return Ok(line.to_owned());
            }
            ensure!(Instant::now() < deadline, "{text:?} is not in the log:\n{log}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends SIGTERM, and waits until the program ends.
    ///
    /// # Errors
    /// The program has already ended.
    pub fn stop(mut self) -> Result<ExitStatus> {
        kill(Pid::from_raw(i32::try_from(self.process.0.id())?), Signal::SIGTERM)?;
        Ok(self.process.0.wait()?)
    }
}
