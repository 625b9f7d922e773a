//! Tests inside User-Mode Linux: a whole kernel as one ordinary process, with the modules that the
//! host's kernel may lack.
//!
//! A test says [`inside`] and is otherwise like any other. Run by the outer test run, it asks a
//! machine to run the very same test program and test inside, and takes over its output and result:
//!
//! ```text
//!   nextest ─► test process ─► slot ─► linux.uml ─► uml-init (process 1) ─► the same test, inside
//!                    ▲  request.json, heartbeat │                                 │
//!                    └── outcome, output ◄──────┴─────────────────────────────────┘
//! ```
//!
//! - A **slot** ([`slot`]) is a folder under `target/uml/<run>/` and one machine. A test has a slot
//!   for itself while it runs, so a run boots as many machines as tests run at a time, not one a
//!   test. A machine boots when a test finds its slot without one, and turns itself off when nobody
//!   has asked for a while.
//! - Nothing is stale: a slot belongs to one test run, every request is executed anew, and its
//!   outcome carries its number and is believed only if the test itself has left its mark.
//! - A panic or an end of the kernel, a test beyond its time limit, a kernel that does not answer
//!   and missing programs are failures of the test that sees them; the next one gets a new machine.
//!   The kernel's log stays in the slot, and failures name it.
//! - **Inside** ([`guest`]), the host's files are there, read-only but for the slot. A test starts
//!   in a network namespace of its own, where `lo` is up, with an empty `TMPDIR` that is kept in
//!   the slot if it fails, and leaves no process behind.
//!
//! What to know of this kernel (Debian's package, 6.1): one CPU; a process start costs some 15 ms;
//! clocks and sleeps run at the host's pace, in ticks of 10 ms; nf_tables knows neither IPv4 nor
//! IPv6 tables, so iptables exists in its legacy variant only.

pub mod guest;
mod host;
mod machine;
pub mod modules;
mod protocol;
pub mod slot;

use std::time::Duration;

pub use host::Failure;

/// Longest that a test may take inside. Below the time at which nextest ends it from outside, so
/// that it fails with its output.
pub const TIME_LIMIT: Duration = Duration::from_secs(500);

/// Runs `test`, the body of a test function, inside User-Mode Linux; its output goes to standard
/// output.
///
/// # Panics
/// The test fails inside, or cannot be run there; the message says why, and where the kernel's log
/// is.
pub fn inside(test: impl FnOnce()) {
    if let Some(Err(failure)) = try_inside(TIME_LIMIT, test) {
        panic!("{failure}");
    }
}

/// As [`inside`], with a time limit of its own, and without panicking: what became of the test.
/// Inside, where there is nothing to say yet, it is `None`.
pub fn try_inside(time_limit: Duration, test: impl FnOnce()) -> Option<Result<(), Failure>> {
    if guest::is_here() {
        guest::mark_entered();
        test();
        return None;
    }
    Some(run_inside(&own_name(), time_limit))
}

/// Runs another test of the running program inside, by its full name.
///
/// # Errors
/// It failed, or could not be run.
pub fn run_inside(test: &str, time_limit: Duration) -> Result<(), Failure> {
    host::run(test, time_limit)
}

/// Runs the running program once more, inside, with other arguments; its output. There it has to
/// call [`guest::mark_entered`].
///
/// # Errors
/// It failed, whereupon its output has been printed, or could not be run.
pub fn run_program_inside(name: &str, arguments: &[&str], time_limit: Duration) -> Result<String, Failure> {
    let (output, result) = host::run_program(name, arguments, time_limit)?;
    if let Err(failure) = result {
        print!("{output}");
        return Err(failure);
    }
    Ok(output)
}

/// Name of the running test: nextest says it, and libtest names the test's thread.
fn own_name() -> String {
    std::env::var("NEXTEST_TEST_NAME")
        .ok()
        .or_else(|| std::thread::current().name().map(str::to_owned))
        .filter(|name| name != "main")
        .expect("the test's name is not to be had: run it by `cargo nextest run`")
}
