//! Records what agents write to their kernels.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A log of kernel writes. Wrappers around the iptables-restore programs write the log. A wrapper
/// logs each call and the script of the call, and then runs the real program.
#[derive(Debug)]
pub struct WriteLog {
    /// The folder of the wrappers, for [`AgentSetup::tools`](crate::testbed::AgentSetup::tools).
    pub tools: PathBuf,
    log: PathBuf,
    scripts: PathBuf,
}

impl WriteLog {
    /// Writes the wrappers into a folder in `folder`.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn create(folder: &Path) -> Result<Self> {
        let (tools, log) = (folder.join("tools"), folder.join("kernel-writes.log"));
        let scripts = folder.join("kernel-writes.scripts");
        std::fs::create_dir(&tools).context("creating a folder for tools")?;
        wrap_restore(&tools, &["iptables", "ip6tables"], |name, program| {
            // Calls with `--test` or `--version` write nothing.
            format!(
                "case \"$*\" in *--version*|*--test*) exec '{2}' \"$@\";; esac\n\
                 echo \"{name} $*\" >> '{0}'\ntee -a '{1}' | '{2}' \"$@\"\n",
                log.display(),
                scripts.display(),
                program.display()
            )
        })?;
        Ok(Self { tools, log, scripts })
    }

    /// All scripts so far, in order.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn scripts(&self) -> Result<String> {
        read(&self.scripts)
    }

    /// The number of calls so far that write to the kernel.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn count(&self) -> Result<usize> {
        Ok(read(&self.log)?.lines().count())
    }
}

fn read(path: &Path) -> Result<String> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        text => text.with_context(|| format!("reading {}", path.display())),
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
