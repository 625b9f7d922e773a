//! Modules that a machine is to lack for a while.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// What the kernel runs to load a module.
pub(super) const LOADER: &str = "/proc/sys/kernel/modprobe";
/// Longest wait for what still uses a module: the last test's namespaces go in the background.
const USED_LIMIT: Duration = Duration::from_secs(30);

/// A kernel without some modules, which cannot load any, until dropped.
#[derive(Debug)]
pub struct WithoutModules<'a> {
    modules: &'a [&'a str],
    loader: String,
}

impl<'a> WithoutModules<'a> {
    /// Removes modules that nothing uses, those that are loaded.
    ///
    /// # Errors
    /// One of them is used, or the kernel cannot be kept from loading it.
    pub fn new(modules: &'a [&'a str]) -> Result<Self> {
        let loader = std::fs::read_to_string(LOADER)?.trim().to_owned();
        // From here on what has been removed comes back.
        let without = Self { modules, loader };
        let deadline = Instant::now() + USED_LIMIT;
        let loaded = std::fs::read_to_string("/proc/modules").context("listing modules")?;
        let is_loaded = |module: &&&str| loaded.lines().any(|line| line.split(' ').next() == Some(**module));
        for module in modules.iter().filter(is_loaded) {
            loop {
                let output =
                    Command::new("rmmod").arg(module).output().context("running rmmod (Debian package kmod)")?;
                if output.status.success() {
                    break;
                }
                let error = String::from_utf8_lossy(&output.stderr);
                ensure!(Instant::now() < deadline, "rmmod {module}: {}", error.trim());
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        std::fs::write(LOADER, "/bin/false").context("turning the loading of modules off")?;
        Ok(without)
    }
}

impl Drop for WithoutModules<'_> {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(LOADER, &self.loader) {
            eprintln!("warning: {LOADER} stays turned off: {error}");
        }
        let loaded = Command::new(&self.loader).arg("-a").args(self.modules).status();
        if !loaded.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("warning: {:?} stay away: {loaded:?}", self.modules);
        }
    }
}
