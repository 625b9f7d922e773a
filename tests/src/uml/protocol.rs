//! A test process on the host and its User-Mode Linux machine exchange messages through small files
//! in the folder of the machine's slot. [`super`] explains slots. The writer renames each file into
//! place when it is complete.
//!
//! The kernel's hostfs looks up a name on each access, so each side sees the other side's files at
//! once.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The file with a request. The test writes this file. The machine accepts the request by renaming
/// the file to [`TAKEN`].
pub(super) const REQUEST: &str = "request.json";
/// The file with the request that the machine runs or has run last.
pub(super) const TAKEN: &str = "taken.json";
/// A file that the test touches while it waits.
pub(super) const HEARTBEAT: &str = "heartbeat";
/// The output of the kernel and of process 1. The file is locked while the machine runs.
pub(super) const CONSOLE: &str = "console.log";
/// The environment variable that tells process 1 the path of the slot's folder.
pub(super) const SLOT_VARIABLE: &str = "HEADGATE_UML_SLOT";
/// The environment variable that is set only for a test inside the machine. The value is the path
/// of the mark that the test creates when it begins.
pub(super) const ENTERED_VARIABLE: &str = "HEADGATE_UML_ENTERED";

/// A request to run one test.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    /// An identifier that is unique in the slot.
    pub(super) id: String,
    /// The path of the test program.
    pub(super) program: PathBuf,
    /// The full name of the test, or a name for the run of another program.
    pub(super) test: String,
    /// The program's arguments.
    pub(super) arguments: Vec<String>,
    /// The program's working directory.
    pub(super) directory: PathBuf,
    /// The program's environment.
    pub(super) environment: Vec<(String, String)>,
    /// The time after which the program is killed.
    pub(super) time_limit_seconds: u64,
}

impl Request {
    /// The name of the file in the slot with the test's standard output and standard error.
    pub(super) fn output(&self) -> String {
        format!("output-{}.log", self.id)
    }

    /// The name of the file in the slot with the outcome.
    pub(super) fn outcome(&self) -> String {
        format!("outcome-{}.json", self.id)
    }

    /// The name of the mark in the slot. The mark is a file that the test itself creates.
    pub(super) fn entered(&self) -> String {
        format!("entered-{}", self.id)
    }

    /// The name of the folder in the slot with the files of a failed test's `TMPDIR`.
    pub(super) fn kept(&self) -> String {
        format!("kept-{}", self.id)
    }
}

/// The outcome of a request.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Outcome {
    /// The test program ended with status 0.
    Passed,
    /// The test program failed or was killed.
    Failed {
        /// The reason.
        how: String,
        /// Whether files of the test were kept in [`Request::kept`].
        kept: bool,
    },
}

/// Writes a file as JSON. Readers see the complete file or no file.
pub(super) fn write<T: Serialize>(folder: &Path, name: &str, value: &T) -> io::Result<()> {
    let draft = folder.join(format!("{name}.draft"));
    let mut file = std::fs::File::create(&draft)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    drop(file);
    std::fs::rename(draft, folder.join(name))
}

/// Reads a file that [`write()`] wrote. Returns `None` if the file does not exist.
pub(super) fn read<T: DeserializeOwned>(folder: &Path, name: &str) -> io::Result<Option<T>> {
    match std::fs::read(folder.join(name)) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
