//! Whether the rules in the kernel may be newer than the state on disk.
//!
//! The rules of the last run are at least as new as the file. But chains and jumps do not prove
//! that the rules are of the last run: a distribution restores saved rules at boot, and a program
//! may restore them while no agent runs. So the agent also records the boot in which it has
//! programmed the kernel, and the positions of its source, until it ends and the file holds
//! everything that the kernel has. The next run resumes with these positions, so that no replica
//! that is behind the rules replaces them by older ones.

use std::{fs, io, path::Path};

use headgate_proto::v1::SourcePosition;

/// The name of the file with the record: the id of the boot, and pairs of a kind and its position.
pub(super) const FILE: &str = "run";
pub(super) const TEMPORARY: &str = "run.new";
/// A random id that the kernel draws at each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns positions of the source if the rules in the kernel may be newer than the state in the
/// folder: an agent programmed the kernel since the boot, and did not save its last state.
pub(super) fn newer_rules(folder: &Path) -> Option<Vec<SourcePosition>> {
    let record = fs::read_to_string(folder.join(FILE)).unwrap_or_default();
    let mut words = record.split_whitespace();
    let boot = words.next()?;
    let is_this_boot = fs::read_to_string(BOOT_ID).is_ok_and(|current| current.trim_end() == boot);
    is_this_boot.then(|| words.filter_map(position).collect())
}

fn position(word: &str) -> Option<SourcePosition> {
    let (kind, position) = word.split_once(':')?;
    Some(SourcePosition { kind: kind.parse().ok()?, position: position.parse().ok()? })
}

/// Records that the kernel has rules of this agent, with the positions of the agent's state.
/// `None` removes the record: the agent ends and its state is saved.
///
/// The record only counts in this boot, so it need not reach the disk.
///
/// # Errors
/// The file cannot be written. Without it, the next run takes the rules for older than the state.
pub(super) fn record(folder: &Path, positions: Option<&[SourcePosition]>) -> io::Result<()> {
    let Some(positions) = positions else { return remove_file(&folder.join(FILE)) };
    let mut record = fs::read_to_string(BOOT_ID)?.trim_end().to_owned();
    positions.iter().for_each(|source| record.push_str(&format!(" {}:{}", source.kind, source.position)));
    record.push('\n');
    let temporary = folder.join(TEMPORARY);
    fs::write(&temporary, record)?;
    fs::rename(temporary, folder.join(FILE))
}

/// Removes a file, if it exists.
pub(super) fn remove_file(path: &Path) -> io::Result<()> {
    fs::remove_file(path).or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rules_may_be_newer_only_after_a_crash_in_the_same_boot() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert_eq!(newer_rules(folder), None, "no agent has run");
        record(folder, Some(&[])).unwrap();
        assert_eq!(newer_rules(folder), Some(Vec::new()));
        let positions = vec![SourcePosition { kind: 1, position: 7 }, SourcePosition { kind: 5, position: u64::MAX }];
        record(folder, Some(&positions)).unwrap();
        for _ in 0..2 {
            assert_eq!(newer_rules(folder).as_ref(), Some(&positions), "the agent crashes again");
        }
        record(folder, None).unwrap();
        assert_eq!(newer_rules(folder), None, "the state is saved");
        record(folder, Some(&positions)).unwrap();
        let record = fs::read_to_string(folder.join(FILE)).unwrap();
        fs::write(folder.join(FILE), format!("0{record}")).unwrap();
        assert_eq!(newer_rules(folder), None, "the machine has rebooted");
        for damaged in ["", "5:7", "\u{0}\u{1}"] {
            fs::write(folder.join(FILE), damaged).unwrap();
            assert_eq!(newer_rules(folder), None, "{damaged:?}");
        }
    }
}
