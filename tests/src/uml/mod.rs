//! Runs tests inside User-Mode Linux: a Linux kernel that runs as an ordinary process, with modules
//! that the host's kernel may lack.
//!
//! A test wraps its body in [`inside`]. When the test runs outside, [`inside`] asks a machine to
//! run this test program again, with only this test. The test then reports the output and the
//! result of the run inside:
//!
//! ```text
//!   nextest ─► test process ─► slot ─► linux.uml ─► uml-init (process 1) ─► the same test, inside
//!                    ▲  request.json, heartbeat │                                 │
//!                    └── outcome, output ◄──────┴─────────────────────────────────┘
//! ```
//!
//! - A **slot** ([`slot`]) is a folder under `target/uml/<run>/` with one machine. A test holds a
//!   slot while it runs. A test run therefore boots only as many machines as tests run at the same
//!   time. If a test finds no machine in its slot, the test boots a machine. A machine turns itself
//!   off when it has been idle for 10 seconds.
//! - Results cannot be stale: a slot belongs to one test run, and the name of an outcome contains
//!   the identifier of its request. An outcome counts only if the test itself has created a mark.
//! - The present test fails if the kernel ends, panics or does not answer. It also fails if it
//!   exceeds its time limit or if a program is missing. The next test gets a new machine. The
//!   kernel's log stays in the slot, and failures name it.
//! - **Inside** ([`guest`]), the host's files are visible. Only the slot is writable. Each test
//!   gets its own network namespace, in which `lo` is up, and an empty `TMPDIR`. If the test fails,
//!   the files in `TMPDIR` are copied to the slot. All processes of a test are killed at its end.
//!
//! Properties of this kernel (Debian's package, 6.1): it has one CPU. A system call takes about
//! 20 µs, a page fault 110 µs, and a process start 15 ms and more. Clocks and sleeps follow the
//! host's time, in ticks of 10 ms. The kernel's nf_tables supports neither IPv4 nor IPv6 tables, so
//! only the legacy variant of iptables works.

pub mod guest;
mod host;
mod machine;
pub mod modules;
mod protocol;
pub mod slot;

use std::time::Duration;

pub use host::Failure;

/// The time limit of a test inside. It is below the time limit of nextest, so that a failing test
/// still prints its output.
pub const TIME_LIMIT: Duration = Duration::from_secs(500);

/// Runs `test`, the body of a test function, inside User-Mode Linux. Prints the test's output on
/// standard output.
///
/// # Panics
/// The test fails inside, or cannot run inside. The message names the reason and the kernel's log.
pub fn inside(test: impl FnOnce()) {
    if let Some(Err(failure)) = try_inside(TIME_LIMIT, test) {
        panic!("{failure}");
    }
}

/// Runs `test` like [`inside`], with the given time limit, and returns the result instead of
/// panicking. When the calling process runs inside the machine, this function runs `test` and
/// returns `None`.
pub fn try_inside(time_limit: Duration, test: impl FnOnce()) -> Option<Result<(), Failure>> {
    if guest::is_here() {
        guest::mark_entered();
        test();
        return None;
    }
    Some(run_inside(&own_name(), time_limit))
}

/// Runs another test of the running program inside User-Mode Linux. `test` is the test's full name.
///
/// # Errors
/// The test failed or could not run.
pub fn run_inside(test: &str, time_limit: Duration) -> Result<(), Failure> {
    host::run(test, time_limit)
}

/// Runs the current program inside User-Mode Linux with other arguments, and returns its output.
/// Inside, the program must call [`guest::mark_entered`].
///
/// # Errors
/// The program failed, and its output has been printed; or the program could not run.
pub fn run_program_inside(name: &str, arguments: &[&str], time_limit: Duration) -> Result<String, Failure> {
    let (output, result) = host::run_program(name, arguments, time_limit)?;
    if let Err(failure) = result {
        print!("{output}");
        return Err(failure);
    }
    Ok(output)
}

/// The name of the running test. nextest sets an environment variable to the name. libtest names
/// the test's thread after the test.
fn own_name() -> String {
    std::env::var("NEXTEST_TEST_NAME")
        .ok()
        .or_else(|| std::thread::current().name().map(str::to_owned))
        .filter(|name| name != "main")
        .expect("the test's name is unknown: run the test with `cargo nextest run`")
}
