//! Runs a fuzz target: draws cases until a number or a time is over, and keeps what fails. The
//! targets themselves are in `tests/tests/streams/fuzz` and `tests/tests/programs/fuzz.rs`.

mod mutate;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use fastrand::Rng;
use nix::time::{ClockId, clock_gettime};

pub use mutate::{mutate, mutate_sequence};

/// After so many findings, a run ends.
const MOST_FINDINGS: u64 = 20;

/// The files of a folder of `tests/corpus`, by name.
///
/// # Panics
/// The folder cannot be read, or is empty.
#[must_use]
pub fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let read = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (name, fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    assert!(!files.is_empty(), "the corpus of {target} is empty");
    files.into_iter().map(read).collect()
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}: write a whole number, and not {text:?}")))
}

/// The CPU time of this process in seconds, 0 if unknown. A busy machine gives a run little of it.
fn cpu_seconds() -> f64 {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map_or(0.0, |time| Duration::from(time).as_secs_f64())
}

/// One run of a target.
///
/// `HEADGATE_FUZZ_SECONDS` sets the time, and `HEADGATE_FUZZ_CASES` the number of cases in its
/// place. `HEADGATE_FUZZ_SEED` sets the seed.
#[derive(Debug)]
pub struct Run {
    target: String,
    /// Draws the cases.
    pub rng: Rng,
    started: Instant,
    time: Option<Duration>,
    cases: u64,
    done: u64,
    valid: u64,
    findings: u64,
    /// The longest time for an input, and the size of this input in bytes.
    slowest: (Duration, usize),
}

impl Run {
    /// Begins a run with this number of cases, unless a variable says otherwise.
    #[must_use]
    pub fn new(target: &str, cases: u64) -> Self {
        Self {
            target: target.to_owned(),
            rng: Rng::with_seed(number("HEADGATE_FUZZ_SEED").unwrap_or(1)),
            started: Instant::now(),
            time: number("HEADGATE_FUZZ_SECONDS").map(Duration::from_secs),
            cases: number("HEADGATE_FUZZ_CASES").unwrap_or(cases),
            done: 0,
            valid: 0,
            findings: 0,
            slowest: (Duration::ZERO, 0),
        }
    }

    /// Whether another case follows.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        let is_over = match self.time {
            Some(time) => self.started.elapsed() >= time,
            None => self.done >= self.cases,
        };
        !is_over && self.findings < MOST_FINDINGS
    }

    /// Counts a case that began at `began`. `result` says whether a part of the input was valid, or
    /// what is wrong. An input with which something is wrong is written to `target/fuzz`.
    ///
    /// # Panics
    /// The input cannot be written.
    pub fn count(&mut self, input: &[u8], began: Instant, result: Result<bool, String>) {
        self.done += 1;
        self.slowest = self.slowest.max((began.elapsed(), input.len()));
        match result {
            Ok(is_valid) => self.valid += u64::from(is_valid),
            Err(problem) => self.keep(input, &problem),
        }
    }

    fn keep(&mut self, input: &[u8], problem: &str) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/fuzz").join(&self.target);
        let path = folder.join(format!("failed-{}", self.findings));
        let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, input));
        written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        self.findings += 1;
        println!("fuzz {}: {problem}; the input was written to {}", self.target, path.display());
    }

    /// Ends the run, and prints its figures.
    ///
    /// # Panics
    /// There are findings. Or nearly all inputs were valid or invalid: then the mutations change
    /// nothing, or only the first check is tested.
    pub fn finish(self) {
        let Self { target, started, done, valid, findings, slowest: (time, bytes), .. } = self;
        println!(
            "fuzz {target}: {done} inputs in {:.0} s ({:.0} s of CPU), {valid} of them valid in part, {findings} findings; the slowest input \
             ({bytes} bytes) took {:.1} ms",
            started.elapsed().as_secs_f64(),
            cpu_seconds(),
            time.as_secs_f64() * 1e3
        );
        assert_eq!(findings, 0, "fuzz {target}: inputs with findings are in target/fuzz/{target}");
        assert!(valid > done / 100 && valid < done, "fuzz {target}: {valid} of {done} inputs were valid");
    }
}
