//! Slots. A slot is a folder with one machine, and a test holds one slot while it runs.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, bail};

use super::machine;
use super::protocol::CONSOLE;

/// The largest number of slots, far above the number of tests that run at a time.
const MAX_SLOTS: usize = 64;
/// The number of earlier runs whose files are kept.
const KEPT_RUNS: usize = 4;

/// One slot. Dropping this value releases the slot.
#[derive(Debug)]
pub struct Slot {
    folder: PathBuf,
    number: usize,
    _lock: File,
}

impl Slot {
    /// Acquires the first slot of this test run that no other test holds.
    ///
    /// # Errors
    /// Files cannot be created under `target`, all slots are taken, or the path contains blanks or
    /// quotes, which the kernel's command line does not allow.
    pub fn acquire() -> Result<Self> {
        let all = all_runs()?;
        if all.to_string_lossy().contains(|letter: char| letter.is_whitespace() || letter == '"') {
            bail!(
                "{}: the kernel's command line allows no path with blanks or quotes: use another target folder",
                all.display()
            );
        }
        let run = all.join(run_id());
        for number in 0..MAX_SLOTS {
            let folder = run.join(number.to_string());
            std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
            let path = folder.join("lock");
            let lock = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
            match lock.try_lock() {
                Ok(()) => return Ok(Self { folder, number, _lock: lock }),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error).context("locking a slot"),
            }
        }
        bail!("all {MAX_SLOTS} slots of {} are taken", run.display())
    }

    /// The slot's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The slot's number, from 0.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The file with the kernel's output.
    pub fn console(&self) -> PathBuf {
        self.folder.join(CONSOLE)
    }
}

/// Removes the files of earlier runs, except the files of the newest [`KEPT_RUNS`] earlier runs.
pub(super) fn sweep() -> Result<()> {
    let mut runs = Vec::new();
    for entry in std::fs::read_dir(all_runs()?)? {
        let entry = entry?;
        if entry.file_name() != run_id().as_str() {
            runs.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    runs.sort();
    runs.reverse();
    for (_, run) in runs.into_iter().skip(KEPT_RUNS) {
        let is_used = std::fs::read_dir(&run)?.flatten().any(|slot| machine::is_running(&slot.path()));
        // The removal may fail because another run removes the folder at the same time, so a
        // failure is only a warning.
        if !is_used && let Err(error) = std::fs::remove_dir_all(&run) {
            eprintln!("warning: {} cannot be removed: {error}", run.display());
        }
    }
    Ok(())
}

/// The path of `target/uml`, derived from the path of the running program.
fn all_runs() -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding the running program")?;
    // target/<profile>/deps/<test>, or target/<profile>/<program>.
    let is_test = own.parent().is_some_and(|folder| folder.ends_with("deps"));
    let target = own.ancestors().nth(if is_test { 3 } else { 2 });
    let target = target.with_context(|| format!("{} is not in a target folder", own.display()))?;
    Ok(target.join("uml"))
}

/// An identifier of the test run, which all tests of the run share.
fn run_id() -> String {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| {
        std::env::var("NEXTEST_RUN_ID").unwrap_or_else(|_| {
            let now = UNIX_EPOCH.elapsed().unwrap_or_default().as_millis();
            format!("process-{}-{now}", std::process::id())
        })
    })
    .clone()
}

/// Opens a file for appending.
pub(super) fn open_for_appending(path: &Path) -> Result<File> {
    OpenOptions::new().create(true).append(true).open(path).with_context(|| format!("opening {}", path.display()))
}
