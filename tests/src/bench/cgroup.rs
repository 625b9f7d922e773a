//! A memory control group for one process. The kernel charges the memory of nftables sets to the
//! group of the process that writes them (since Linux 5.18). The resident memory of the process
//! does not contain this memory.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

/// The mount point of control groups.
const ROOT: &str = "/sys/fs/cgroup";

/// A control group. Dropping this value removes the group, if no process is in it.
pub(super) struct Cgroup {
    folder: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Cgroup {
    /// Creates a group, of version 2 if the memory controller of version 2 is available, else of
    /// version 1.
    ///
    /// # Errors
    /// The machine has no memory controller, or the group cannot be created.
    pub(super) fn create() -> Result<Self> {
        let controllers = fs::read_to_string(Path::new(ROOT).join("cgroup.controllers")).unwrap_or_default();
        let has_memory = controllers.split_whitespace().any(|controller| controller == "memory");
        let (version, parent) = if has_memory { (Version::Two, "") } else { (Version::One, "memory") };
        if version == Version::Two {
            fs::write(Path::new(ROOT).join("cgroup.subtree_control"), "+memory").context("enabling memory groups")?;
        }
        let folder = Path::new(ROOT).join(parent).join(format!("headgate-bench-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("creating the control group {}", folder.display()))?;
        Ok(Self { folder, version })
    }

    /// The file that [`Self::current_mb`] reads.
    pub(super) fn source(&self) -> &'static str {
        match self.version {
            Version::One => "memory.usage_in_bytes of cgroup v1",
            Version::Two => "memory.current of cgroup v2",
        }
    }

    /// Moves a process into the group. Only memory that the process allocates later is charged to
    /// the group.
    pub(super) fn add(&self, process: u32) -> Result<()> {
        let path = self.folder.join("cgroup.procs");
        fs::write(&path, process.to_string()).with_context(|| format!("writing {}", path.display()))
    }

    /// All memory that is charged to the group, in megabytes of 1,000,000 bytes. The memory
    /// contains the page cache of files that the process was first to read.
    pub(super) fn current_mb(&self) -> Result<f64> {
        self.bytes(if self.version == Version::One { "memory.usage_in_bytes" } else { "memory.current" })
    }

    /// The memory that the kernel allocated for the group, in megabytes.
    pub(super) fn kernel_mb(&self) -> Result<f64> {
        if self.version == Version::One {
            return self.bytes("memory.kmem.usage_in_bytes");
        }
        let stat = fs::read_to_string(self.folder.join("memory.stat")).context("reading memory.stat")?;
        let line = stat.lines().find_map(|line| line.strip_prefix("kernel "));
        Ok(line.context("memory.stat has no line kernel")?.parse::<f64>()? / 1e6)
    }

    fn bytes(&self, file: &str) -> Result<f64> {
        let path = self.folder.join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(text.trim().parse::<f64>().with_context(|| format!("the number in {}", path.display()))? / 1e6)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.folder) {
            eprintln!("warning: the control group {} cannot be removed: {error}", self.folder.display());
        }
    }
}
