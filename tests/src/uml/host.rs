//! The host's side: asks a machine to run the test, and waits for the outcome.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

use super::machine;
use super::protocol::{self, HEARTBEAT, Outcome, REQUEST, Request};
use super::slot::Slot;

/// Longest wait until a machine takes a request. Booting takes about three seconds, and
/// much longer while other machines boot.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// After the test's time limit, the machine has this time to report that it has killed the test.
const REPORT_GRACE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// The largest number of machines that one request boots. If the first machine turns itself off
/// before it takes the request, the next machine takes the request.
const MAX_BOOTS: u32 = 2;
const CONSOLE_LINES: usize = 40;

/// Why a test did not pass inside User-Mode Linux.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The test failed, and its output was printed.
    #[error("failed inside User-Mode Linux: {how}\nkernel's log: {console}{kept}", console = .console.display(), kept = shown(.kept.as_deref()))]
    Failed {
        /// The reason: an exit status, a signal or a time limit.
        how: String,
        /// The kernel's log.
        console: PathBuf,
        /// A copy of the test's `TMPDIR`, if it was not empty.
        kept: Option<PathBuf>,
    },
    /// The program inside ended with status 0 without running the test.
    #[error("{program} has no test called {test} that calls uml::inside", program = .program.display())]
    NotRun {
        /// The test program.
        program: PathBuf,
        /// The name of the test.
        test: String,
    },
    /// The machine ended before the test did.
    #[error("User-Mode Linux ended {when}; the end of the kernel's log ({console}):\n{tail}", console = .console.display())]
    Ended {
        /// When the machine ended, such as "during the test".
        when: &'static str,
        /// The kernel's log.
        console: PathBuf,
        /// The last lines of the kernel's log.
        tail: String,
    },
    /// The machine was killed because it did not answer.
    #[error("User-Mode Linux {what} within {limit:?} and was killed; the end of the kernel's log ({console}):\n{tail}", console = .console.display())]
    Hung {
        /// What the machine failed to do, such as "has not taken the test".
        what: &'static str,
        /// The time limit.
        limit: Duration,
        /// The kernel's log.
        console: PathBuf,
        /// The last lines of the kernel's log.
        tail: String,
    },
    /// The request could not be made.
    #[error("cannot run tests inside User-Mode Linux: {0:#}")]
    Unusable(#[from] anyhow::Error),
}

fn shown(kept: Option<&Path>) -> String {
    kept.map(|path| format!("\nfiles of the test: {}", path.display())).unwrap_or_default()
}

/// Runs a test inside User-Mode Linux. [`super::run_inside`] describes the arguments.
pub(super) fn run(test: &str, time_limit: Duration) -> Result<(), Failure> {
    let arguments = ["--exact", test, "--nocapture", "--include-ignored"];
    let (output, result) = run_program(test, &arguments, time_limit)?;
    print!("{output}");
    result
}

/// Runs the current program inside User-Mode Linux with these arguments. Returns the program's
/// output and result.
pub(super) fn run_program(
    name: &str,
    arguments: &[&str],
    time_limit: Duration,
) -> Result<(String, Result<(), Failure>), Failure> {
    let slot = Slot::acquire()?;
    let request = request(name, arguments, time_limit)?;
    protocol::write(slot.folder(), REQUEST, &request).context("writing the request")?;
    let outcome = wait(&slot, &request);
    let output = output(&slot, &request);
    Ok((output, outcome.and_then(|outcome| judge(&slot, request, outcome))))
}

fn judge(slot: &Slot, request: Request, outcome: Outcome) -> Result<(), Failure> {
    let was_entered = slot.folder().join(request.entered()).exists();
    match outcome {
        Outcome::Passed if was_entered => {
            tidy(slot, &request)?;
            Ok(())
        }
        Outcome::Passed => Err(Failure::NotRun { program: request.program, test: request.test }),
        Outcome::Failed { how, kept } => Err(Failure::Failed {
            how,
            console: slot.console(),
            kept: kept.then(|| slot.folder().join(request.kept())),
        }),
    }
}

fn request(test: &str, arguments: &[&str], time_limit: Duration) -> Result<Request> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    Ok(Request {
        id: format!("{}-{now}", std::process::id()),
        program: std::env::current_exe().context("finding the running program")?,
        test: test.to_owned(),
        arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        directory: std::env::current_dir().context("finding the working directory")?,
        environment: std::env::vars_os().filter_map(text).collect(),
        time_limit_seconds: time_limit.as_secs(),
    })
}

fn wait(slot: &Slot, request: &Request) -> Result<Outcome, Failure> {
    let failure = |what: &'static str, limit: Duration| {
        let (console, tail) = (slot.console(), machine::console_tail(slot, CONSOLE_LINES));
        machine::kill(slot)?;
        Err(Failure::Hung { what, limit, console, tail })
    };
    let ended =
        |when| Failure::Ended { when, console: slot.console(), tail: machine::console_tail(slot, CONSOLE_LINES) };
    let time_limit = Duration::from_secs(request.time_limit_seconds) + REPORT_GRACE;
    let (asked, mut taken, mut boots) = (Instant::now(), None, 0);
    let mut last_heartbeat = None;
    loop {
        if last_heartbeat.is_none_or(|last: Instant| last.elapsed() >= HEARTBEAT_INTERVAL) {
            beat(slot.folder())?;
            last_heartbeat = Some(Instant::now());
        }
        // Check `is_running` before reading the outcome, because a machine may write the outcome
        // and then end.
        let is_running = machine::is_running(slot.folder());
        let is_taken = !slot.folder().join(REQUEST).exists();
        if let Some(outcome) = protocol::read(slot.folder(), &request.outcome()).context("reading the outcome")? {
            return Ok(outcome);
        }
        if is_taken {
            let since = *taken.get_or_insert_with(Instant::now);
            if !is_running {
                return Err(ended("during the test"));
            }
            if since.elapsed() > time_limit {
                return failure("has not ended the test", time_limit);
            }
        } else if !is_running {
            if boots == MAX_BOOTS {
                return Err(ended("before it took the test"));
            }
            boots += 1;
            machine::boot(slot)?;
        } else if asked.elapsed() > BOOT_LIMIT {
            return failure("has not taken the test", BOOT_LIMIT);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Touches the heartbeat file. The changed modification time shows the machine that the test
/// process on the host still waits.
fn beat(folder: &Path) -> Result<()> {
    let path = folder.join(HEARTBEAT);
    let touch = || File::create(&path)?.set_modified(SystemTime::now());
    touch().with_context(|| format!("writing {}", path.display()))
}

/// The test's output. Invalid UTF-8 is replaced.
fn output(slot: &Slot, request: &Request) -> String {
    match std::fs::read(slot.folder().join(request.output())) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        // The machine has not started the test.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => format!("warning: the test's output cannot be read: {error}\n"),
    }
}

fn tidy(slot: &Slot, request: &Request) -> Result<()> {
    for name in [request.output(), request.outcome(), request.entered()] {
        let path = slot.folder().join(name);
        std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}
