//! The simulated folder of an agent's state. It outlives the agent, and can fail.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Write},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use headgate_node_agent::persist::Disk;

/// The folder of a machine. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct SimulatedDisk(Arc<Mutex<Files>>);

#[derive(Debug, Default)]
struct Files {
    /// What each file holds now, and what it holds after a loss of power.
    files: BTreeMap<String, Vec<u8>>,
    lasting: BTreeMap<String, Vec<u8>>,
    boot: u64,
    is_full: bool,
}

impl SimulatedDisk {
    /// An empty folder, on a disk that may be full.
    #[must_use]
    pub fn new(is_full: bool) -> Self {
        Self(Arc::new(Mutex::new(Files { is_full, ..Files::default() })))
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes writes fail, or work again.
    pub fn set_full(&self, is_full: bool) {
        self.files().is_full = is_full;
    }

    /// The machine loses its power and boots again: what does not last may be lost.
    pub fn lose_power(&self, keeps_all: bool) {
        let mut files = self.files();
        files.boot += 1;
        if !keeps_all {
            files.files = files.lasting.clone();
        }
    }
}

impl Disk for SimulatedDisk {
    fn path(&self) -> &Path {
        Path::new("/simulated")
    }

    fn lock(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        self.files().files.get(name).cloned().ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn write(&self, name: &str, content: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> io::Result<u64> {
        let mut bytes = Vec::new();
        content(&mut bytes)?;
        let mut files = self.files();
        if files.is_full {
            files.files.remove(name);
            return Err(ErrorKind::StorageFull.into());
        }
        let size = bytes.len() as u64;
        files.lasting.insert(name.to_owned(), bytes.clone());
        files.files.insert(name.to_owned(), bytes);
        Ok(size)
    }

    fn overwrite(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let mut files = self.files();
        let held = files.files.get(name).map_or(0, Vec::len);
        if files.is_full && held < content.len() {
            files.files.entry(name.to_owned()).or_default();
            return Err(ErrorKind::StorageFull.into());
        }
        // After a loss of power, a part of the content may be there.
        files.lasting.insert(name.to_owned(), content[..content.len().min(20)].to_vec());
        files.files.insert(name.to_owned(), content.to_vec());
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut files = self.files();
        let moved = files.files.remove(from).ok_or(ErrorKind::NotFound)?;
        files.files.insert(to.to_owned(), moved);
        if let Some(moved) = files.lasting.remove(from) {
            files.lasting.insert(to.to_owned(), moved);
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.files().files.remove(name);
        Ok(())
    }

    fn boot_id(&self) -> io::Result<String> {
        Ok(format!("boot-{}", self.files().boot))
    }
}
