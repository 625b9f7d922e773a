//! The simulated clock and the random numbers of this thread. The binary `simulate` answers the
//! functions of libc for clocks and random bytes from here, so that the standard library, tokio and
//! all other crates are deterministic on a thread that simulates.
//!
//! All times are nanoseconds since the start of the simulation.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use fastrand::Rng;

/// A monotonic clock of Linux begins at the start of the machine.
const UPTIME_NS: u64 = 1_000_000_000_000;
/// 2026-01-01 in UTC.
const CALENDAR_NS: u64 = 1_767_225_600_000_000_000;

thread_local! {
    static IS_SIMULATED: Cell<bool> = const { Cell::new(false) };
    /// The time of the driver.
    static NOW: Cell<u64> = const { Cell::new(0) };
    /// What the calendar of the present process is ahead.
    static CALENDAR_STEP: Cell<i64> = const { Cell::new(0) };
    static ORIGIN: Cell<Option<Instant>> = const { Cell::new(None) };
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

/// Makes this thread simulate from now on, with this seed. It must not have used a `HashMap`
/// before: their keys stay those of the first one.
pub fn begin(seed: u64) {
    IS_SIMULATED.set(true);
    BYTES.set(seed ^ 0x9e37_79b9_7f4a_7c15);
    fastrand::seed(seed);
    ORIGIN.set(Some(Instant::now()));
}

/// Whether this thread simulates.
#[must_use]
pub fn is_simulated() -> bool {
    IS_SIMULATED.get()
}

/// The time of the driver.
#[must_use]
pub fn now() -> u64 {
    NOW.get()
}

pub(super) fn set(now: u64) {
    NOW.set(now);
}

/// Sets what the calendar of the present process is ahead.
pub(super) fn set_calendar_step(step: i64) {
    CALENDAR_STEP.set(step);
}

/// The time of the present process: that of its runtime, which goes on within a turn.
#[must_use]
pub fn local() -> u64 {
    let is_nested = IS_ASKING.replace(true);
    let now = match ORIGIN.get() {
        // Without a runtime, tokio asks the clock of the standard library.
        Some(origin) if !is_nested && tokio::runtime::Handle::try_current().is_ok() => {
            let since = tokio::time::Instant::now().into_std().saturating_duration_since(origin);
            u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
        }
        _ => NOW.get(),
    };
    IS_ASKING.set(is_nested);
    now
}

/// Seconds and nanoseconds of a clock of libc.
#[must_use]
pub fn reading(is_calendar: bool) -> Duration {
    let now = local();
    Duration::from_nanos(match is_calendar {
        true => (CALENDAR_NS + now).saturating_add_signed(CALENDAR_STEP.get()),
        false => UPTIME_NS + now,
    })
}

/// Fills `bytes` with random bytes, which follow from the seed.
pub fn fill(bytes: &mut [u8]) {
    let mut rng = Rng::with_seed(BYTES.get());
    rng.fill(bytes);
    BYTES.set(rng.get_seed().wrapping_add(1));
}
