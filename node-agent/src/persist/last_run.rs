//! Whether the rules in the kernel may be newer than the state on disk.
//!
//! The rules of the last run are at least as new as the file. But chains and jumps do not prove
//! that the rules are of the last run: a distribution restores saved rules at boot, and a program
//! may restore them while no agent runs. So the agent also records the boot in which it has
//! programmed the kernel, and whether the file then held everything that the kernel had.

use std::{fs, io, path::Path};

use tracing::warn;

/// The name of the file with the record: the id of the boot, and [`SAVED`] or `running`.
pub(super) const FILE: &str = "run";
/// The agent has ended, and the state on disk is the state that it had programmed.
const SAVED: &str = "saved";
/// A random id that the kernel draws at each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns true if the rules in the kernel may be newer than the state in the folder: an agent
/// programmed the kernel since the boot, and did not save its last state. Forgets that the state is
/// saved, because the rules soon become newer.
pub(super) fn may_have_newer_rules(folder: &Path) -> bool {
    let path = folder.join(FILE);
    let record = fs::read_to_string(&path).unwrap_or_default();
    let (boot, state) = record.trim_end().split_once(' ').unwrap_or_default();
    let is_saved = state == SAVED;
    if is_saved && let Err(error) = fs::remove_file(&path) {
        warn!(path = %path.display(), %error, "cannot remove the record of the last run");
    }
    !is_saved && fs::read_to_string(BOOT_ID).is_ok_and(|current| current.trim_end() == boot)
}

/// Records that the kernel has rules of this agent. `is_saved` is true if the agent ends and its
/// state is saved.
///
/// # Errors
/// The file cannot be written. Without it, the next run takes the rules for older than the state.
pub(super) fn record(folder: &Path, is_saved: bool) -> io::Result<()> {
    let state = if is_saved { SAVED } else { "running" };
    let boot = fs::read_to_string(BOOT_ID)?;
    fs::write(folder.join(FILE), format!("{} {state}\n", boot.trim_end()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rules_may_be_newer_only_after_a_crash_in_the_same_boot() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert!(!may_have_newer_rules(folder), "no agent has run");
        record(folder, false).unwrap();
        assert!(may_have_newer_rules(folder) && may_have_newer_rules(folder), "the agent crashes again");
        record(folder, true).unwrap();
        assert!(!may_have_newer_rules(folder), "the state is saved");
        record(folder, false).unwrap();
        let record = fs::read_to_string(folder.join(FILE)).unwrap();
        fs::write(folder.join(FILE), format!("0{record}")).unwrap();
        assert!(!may_have_newer_rules(folder), "the machine has rebooted");
        for damaged in ["", "running", "\u{0}\u{1}"] {
            fs::write(folder.join(FILE), damaged).unwrap();
            assert!(!may_have_newer_rules(folder), "{damaged:?}");
        }
    }
}
