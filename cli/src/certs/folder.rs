//! Files that are written together. [`Folder`] first collects and checks all contents. It then
//! writes each file under a temporary name and renames the file to its final path.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use super::{CertsError, bad_file};

/// The kind of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A private key, readable only by its owner.
    Key,
    /// A certificate.
    Certificate,
    /// An authority's certificate. Copies of the certificate may already exist.
    Authority,
}

/// A folder and the files to write into it.
pub(super) struct Folder {
    root: PathBuf,
    force: bool,
    files: Vec<(PathBuf, Kind, String)>,
}

impl Folder {
    /// Opens a folder. The folder need not exist yet.
    pub(super) fn open(root: &Path, force: bool) -> Result<Self, CertsError> {
        if root.exists() && !root.is_dir() {
            return Err(bad_file(root, "is not a folder: pass another --out"));
        }
        Ok(Self { root: root.to_owned(), force, files: Vec::new() })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Returns the content of a file, or `None` if the file does not exist.
    pub(super) fn read(&self, name: &str) -> Result<Option<String>, CertsError> {
        let path = self.path(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(bad_file(&path, format!("cannot be read: {error}"))),
        }
    }

    /// Adds a file. Fails if a different file exists and may not be replaced.
    pub(super) fn add(&mut self, name: &str, kind: Kind, text: &str) -> Result<(), CertsError> {
        let path = self.path(name);
        // Symlinks are not followed: a dangling link also counts as an existing file.
        let exists = fs::symlink_metadata(&path).is_ok();
        if exists && kind == Kind::Authority && self.read(name)?.as_deref() == Some(text) {
            return Ok(());
        }
        if exists && !self.force {
            let problem = if kind == Kind::Authority {
                "belongs to another authority; pass --force to replace it, or another --out"
            } else {
                "exists already; pass --force to renew it, or request only new certificates"
            };
            return Err(bad_file(&path, problem));
        }
        self.files.push((path, kind, text.to_owned()));
        Ok(())
    }

    /// Writes all files and returns their paths.
    pub(super) fn write(self) -> Result<Vec<String>, CertsError> {
        let written = self.files.iter().map(|(path, kind, text)| {
            write(path, *kind, text).map_err(|error| bad_file(path, format!("cannot be written: {error}")))?;
            Ok(path.display().to_string())
        });
        written.collect()
    }
}

fn write(path: &Path, kind: Kind, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    // The temporary file is in the same folder, so that the rename is atomic.
    let beside = path.with_extension(if kind == Kind::Key { "key.new" } else { "crt.new" });
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mode = if kind == Kind::Key { 0o600 } else { 0o644 };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, path)
}
