//! What passes between a test outside and the machine: small files in the slot, each renamed into
//! place when it is whole.
//!
//! The kernel's hostfs looks a name up anew each time, so that each side sees what the other has
//! written as soon as it asks.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Written by the test; the machine takes it by renaming it to [`TAKEN`].
pub(super) const REQUEST: &str = "request.json";
/// The request that the machine runs, or ran last.
pub(super) const TAKEN: &str = "taken.json";
/// Touched by the test as long as it waits.
pub(super) const HEARTBEAT: &str = "heartbeat";
/// Everything that the kernel and process 1 print. Locked as long as the machine lives.
pub(super) const CONSOLE: &str = "console.log";
/// Variable that tells process 1 its slot.
pub(super) const SLOT_VARIABLE: &str = "HEADGATE_UML_SLOT";
/// Variable that tells a test that it is inside, and which file to make when it begins.
pub(super) const ENTERED_VARIABLE: &str = "HEADGATE_UML_ENTERED";

/// One test to be run.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    /// Differs from that of every other request of the slot.
    pub(super) id: String,
    /// The test program.
    pub(super) program: PathBuf,
    /// Full name of the test in it, or what the program is run for.
    pub(super) test: String,
    /// The program's arguments.
    pub(super) arguments: Vec<String>,
    /// Its working directory.
    pub(super) directory: PathBuf,
    /// Its environment.
    pub(super) environment: Vec<(String, String)>,
    /// After this it is killed.
    pub(super) time_limit_seconds: u64,
}

impl Request {
    /// Standard output and error of the test, in the slot.
    pub(super) fn output(&self) -> String {
        format!("output-{}.log", self.id)
    }

    /// What became of it, in the slot.
    pub(super) fn outcome(&self) -> String {
        format!("outcome-{}.json", self.id)
    }

    /// The mark that the test makes itself, in the slot.
    pub(super) fn entered(&self) -> String {
        format!("entered-{}", self.id)
    }

    /// Folder in the slot for what a failing test leaves in `TMPDIR`.
    pub(super) fn kept(&self) -> String {
        format!("kept-{}", self.id)
    }
}

/// What became of a request.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Outcome {
    /// The test program ended well.
    Passed,
    /// It did not.
    Failed {
        /// In words.
        how: String,
        /// Whether there is anything in the folder for it.
        kept: bool,
    },
}

/// Writes a file that is there wholly or not at all.
pub(super) fn write<T: Serialize>(folder: &Path, name: &str, value: &T) -> io::Result<()> {
    let draft = folder.join(format!("{name}.draft"));
    let mut file = std::fs::File::create(&draft)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    drop(file);
    std::fs::rename(draft, folder.join(name))
}

/// Reads such a file; `None` if it is not there.
pub(super) fn read<T: DeserializeOwned>(folder: &Path, name: &str) -> io::Result<Option<T>> {
    match std::fs::read(folder.join(name)) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
