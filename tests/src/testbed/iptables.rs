//! Reads and writes a machine's iptables rules from a test.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::netns::Namespace;
use super::plan::Family;

/// The two variants of iptables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// `iptables-legacy`, over the legacy kernel interface.
    Legacy,
    /// `iptables-nft`, over nftables.
    Nft,
}

impl Variant {
    /// Both variants.
    pub const BOTH: [Self; 2] = [Self::Legacy, Self::Nft];

    fn program(self, family: Family, suffix: &str) -> String {
        let family = if family == Family::V4 { "iptables" } else { "ip6tables" };
        let variant = if self == Self::Legacy { "legacy" } else { "nft" };
        format!("{family}-{variant}{suffix}")
    }
}

/// Runs iptables in `machine` with the given arguments. `lock` is the machine's lock file, which
/// all programs of the machine share.
pub fn run(machine: &Namespace, variant: Variant, family: Family, lock: &Path, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(variant.program(family, ""));
    command.arg("--wait").args(arguments).env("XTABLES_LOCKFILE", lock);
    machine.output(command).map(drop)
}

/// Runs `iptables-restore --noflush` in `machine` with the script in the file `script`.
pub fn restore(machine: &Namespace, variant: Variant, family: Family, lock: &Path, script: &Path) -> Result<()> {
    let mut command = Command::new(variant.program(family, "-restore"));
    command.args(["--noflush", "-w", "60"]).arg(script).env("XTABLES_LOCKFILE", lock);
    machine.output(command).map(drop)
}

/// The rules of one variant and family, as `iptables-save` prints them. Comments, packet counters
/// and untouched tables are left out. A table is untouched if it has only empty built-in chains
/// that accept. Such tables appear when a program first lists them.
pub fn save(machine: &Namespace, variant: Variant, family: Family, lock: &Path) -> Result<String> {
    let mut command = Command::new(variant.program(family, "-save"));
    command.env("XTABLES_LOCKFILE", lock);
    Ok(normalised(&machine.output(command)?))
}

/// The rules of both variants and families, like [`save`], each under a heading.
pub fn save_all(machine: &Namespace, lock: &Path) -> Result<String> {
    let mut all = String::new();
    for variant in Variant::BOTH {
        for family in Family::BOTH {
            all.push_str(&format!("== {}\n", variant.program(family, "")));
            all.push_str(&save(machine, variant, family, lock)?);
        }
    }
    Ok(all)
}

fn normalised(saved: &str) -> String {
    let mut result = String::new();
    let mut table: Vec<&str> = Vec::new();
    for line in saved.lines().filter(|line| !line.starts_with('#')) {
        let line = if line.starts_with(':') { line.split(" [").next().unwrap_or(line) } else { line };
        table.push(line);
        if line == "COMMIT" {
            // The lines between the table's name and COMMIT are built-in chains that accept.
            let untouched =
                table[1..table.len() - 1].iter().all(|line| line.ends_with(" ACCEPT") && line.starts_with(':'));
            if !untouched {
                table.iter().for_each(|line| {
                    result.push_str(line);
                    result.push('\n');
                });
            }
            table.clear();
        }
    }
    result
}
