//! Removes kernel modules from a machine until a value is dropped.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// The kernel parameter with the program that loads modules.
pub(super) const LOADER: &str = "/proc/sys/kernel/modprobe";
/// Longest wait until a module is unused. The kernel removes the previous test's namespaces in the
/// background, and these namespaces may still use the module.
const USED_LIMIT: Duration = Duration::from_secs(60);

/// While this value exists, the given modules are removed and the kernel loads no modules.
#[derive(Debug)]
pub struct WithoutModules<'a> {
    modules: &'a [&'a str],
    loader: String,
}

impl<'a> WithoutModules<'a> {
    /// Removes the modules in `modules` that are loaded, and turns off automatic loading of
    /// modules.
    ///
    /// # Errors
    /// A module is still in use after 60 seconds, or automatic loading cannot be turned off.
    pub fn new(modules: &'a [&'a str]) -> Result<Self> {
        let loader = std::fs::read_to_string(LOADER)?.trim().to_owned();
        // If a step below fails, dropping this value loads the removed modules again.
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
            eprintln!("warning: {LOADER} cannot be restored: {error}");
        }
        let loaded = Command::new(&self.loader).arg("-a").args(self.modules).status();
        if !loaded.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("warning: {:?} cannot be loaded again: {loaded:?}", self.modules);
        }
    }
}
