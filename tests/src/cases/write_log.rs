//! Records what agents write to their kernels.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A log of kernel writes. Wrappers around the iptables-restore programs write the log. A wrapper
/// logs each call and the script of the call, and then runs the real program.
#[derive(Debug)]
pub(crate) struct WriteLog {
    /// The folder of the wrappers, for [`AgentSetup::tools`](crate::testbed::AgentSetup::tools).
    pub(crate) tools: PathBuf,
    log: PathBuf,
    scripts: PathBuf,
}

impl WriteLog {
    pub(crate) fn create(folder: &Path) -> Result<Self> {
        let (tools, log) = (folder.join("tools"), folder.join("kernel-writes.log"));
        let scripts = folder.join("kernel-writes.scripts");
        std::fs::create_dir(&tools).context("creating a folder for tools")?;
        wrap_restore(&tools, &["iptables", "ip6tables"], |name, program| {
            format!(
                "echo \"{name} $*\" >> '{}'\ntee -a '{}' | '{}' \"$@\"\n",
                log.display(),
                scripts.display(),
                program.display()
            )
        })?;
        Ok(Self { tools, log, scripts })
    }

    /// All scripts so far, in order.
    pub(crate) fn scripts(&self) -> Result<String> {
        match std::fs::read_to_string(&self.scripts) {
            Ok(text) => Ok(text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
            Err(error) => Err(error).with_context(|| format!("reading {}", self.scripts.display())),
        }
    }

    /// The number of calls so far that write to the kernel.
    pub(crate) fn count(&self) -> Result<usize> {
        match std::fs::read_to_string(&self.log) {
            // Calls with `--test` or `--version` write nothing.
            Ok(text) => Ok(text.lines().filter(|l| !l.contains("--test") && !l.contains("--version")).count()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error).with_context(|| format!("reading {}", self.log.display())),
        }
    }
}

/// Writes wrappers around the restore programs of `families` into the folder `tools`. `script`
/// returns the shell script of a wrapper, from the name and the path of the wrapped program.
pub(crate) fn wrap_restore(tools: &Path, families: &[&str], script: impl Fn(&str, &Path) -> String) -> Result<()> {
    for family in families {
        for variant in ["-legacy", "-nft", ""] {
            let name = format!("{family}{variant}-restore");
            let Some(program) = find_program(&name) else { continue };
            let path = tools.join(&name);
            std::fs::write(&path, format!("#!/bin/sh\n{}", script(&name, &program)))
                .with_context(|| format!("writing {}", path.display()))?;
            std::fs::set_permissions(&path, Permissions::from_mode(0o755)).context("making a tool executable")?;
        }
    }
    Ok(())
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|candidate| candidate.is_file())
}
