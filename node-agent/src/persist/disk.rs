//! The folder in which the files of the state are.

use std::{
    fmt::Debug,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, BufWriter, Write},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

/// A random id that the kernel draws at each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The folder that holds an agent's state across restarts, and the machine's boot. What `lasts`
/// survives a loss of power once the call has returned. Anything else may survive.
pub trait Disk: Debug + Send {
    /// Where the folder is, for messages.
    fn path(&self) -> &Path;

    /// Locks the folder until this value is dropped, unless this value has locked it. Creates the
    /// folder if necessary.
    /// Errors: another agent has locked the folder, or the folder cannot be created or locked.
    fn lock(&mut self) -> io::Result<()>;

    /// Reads a file of the folder. Errors: the kind is `InvalidInput` if there is something else
    /// than a file, which a read may wait for.
    fn read(&self, name: &str) -> io::Result<Vec<u8>>;

    /// Writes what `content` writes to a new file. Replaces the last file with this name. Returns
    /// the size in bytes.
    /// Errors: the file cannot be written, or `content` fails. No part of the file stays.
    fn write(
        &self,
        name: &str,
        lasts: bool,
        content: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<u64>;

    /// Renames a file. It replaces the file with the new name in one step.
    /// Errors: the file does not exist, or cannot be renamed.
    fn rename(&self, from: &str, to: &str, lasts: bool) -> io::Result<()>;

    /// Removes a file, if it exists. Errors: the file cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// A random id of the present boot of the machine. Errors: the kernel does not tell the id.
    fn boot_id(&self) -> io::Result<String>;
}

/// A folder of the file system.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The folder, which is open and locked while this agent may write.
    lock: Option<File>,
}

impl Folder {
    /// Names a folder. Does not access the disk.
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), lock: None }
    }
}

impl Disk for Folder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn lock(&mut self) -> io::Result<()> {
        if self.lock.is_some() {
            return Ok(());
        }
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        let folder = created.and_then(|()| File::open(&self.path)).map_err(|error| at(&self.path, &error))?;
        folder.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other(format!(
                "{} is in use by another agent; stop that agent, or pass another --state-dir",
                self.path.display()
            )),
            TryLockError::Error(error) => at(&self.path, &error),
        })?;
        self.lock = Some(folder);
        Ok(())
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let path = self.path.join(name);
        // Opening a named pipe would wait for a writer.
        if !fs::metadata(&path)?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        fs::read(path)
    }

    fn write(
        &self,
        name: &str,
        lasts: bool,
        content: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<u64> {
        self.remove(name)?;
        let path = self.path.join(name);
        let mut output = BufWriter::new(OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?);
        let written = content(&mut output).and_then(|()| {
            let file = output.into_inner().map_err(io::IntoInnerError::into_error)?;
            if lasts {
                file.sync_all()?;
            }
            Ok(file.metadata()?.len())
        });
        written.inspect_err(|_| {
            // A part of a state only takes up space, which a full disk lacks.
            let _ = fs::remove_file(&path);
        })
    }

    fn rename(&self, from: &str, to: &str, lasts: bool) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))?;
        self.lock.as_ref().filter(|_| lasts).map_or(Ok(()), File::sync_all)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let removed = fs::remove_file(self.path.join(name));
        removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
    }

    fn boot_id(&self) -> io::Result<String> {
        Ok(fs::read_to_string(BOOT_ID)?.trim_end().to_owned())
    }
}

pub(super) fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::other(format!("{}: {error}", path.display()))
}
