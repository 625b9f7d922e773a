//! Dependencies are those that `deny.toml` allows. Core depends on nothing that could do I/O, and
//! the oracle does none.

use std::{collections::BTreeSet, fs, process::Command};

use headgate_tests::testbed::process::tool;

/// All dependencies of `core`, direct and indirect. None of these packages opens a socket, reads a
/// clock or starts a process. Before you add a package, check that the new package does none of
/// these things either.
const CORE: [&str; 23] = [
    "block-buffer",
    "castaway",
    "cfg-if",
    "compact_str",
    "cpufeatures",
    "crypto-common",
    "data-encoding",
    "digest",
    "hybrid-array",
    "ipnet",
    "itoa",
    "proc-macro2",
    "quote",
    "rustversion",
    "sha2",
    // compact_str needs serde: the control plane decodes names into CompactString.
    "serde",
    "serde_core",
    "serde_derive",
    "static_assertions",
    "syn",
    "typenum",
    "unicode-ident",
    "zmij",
];

/// Runs cargo in the top folder, without the network, and returns its standard output.
fn cargo(arguments: &[&str]) -> String {
    let command =
        Command::new(env!("CARGO")).args(arguments).args(["--locked", "--offline"]).current_dir(super::root()).output();
    let output = command.unwrap();
    assert!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn licences_bans_and_sources_are_those_of_deny_toml() {
    let folder = tempfile::tempdir().unwrap();
    let metadata = folder.path().join("metadata.json");
    // cargo-deny itself would ask for the packages of other platforms, which are not downloaded.
    let platform = format!("--filter-platform={}-unknown-linux-gnu", std::env::consts::ARCH);
    fs::write(&metadata, cargo(&["metadata", "--format-version=1", &platform])).unwrap();
    let mut deny = Command::new(tool("cargo-deny"));
    deny.arg("--offline").arg("--metadata-path").arg(&metadata).args(["check", "licenses", "bans", "sources"]);
    let output = deny.current_dir(super::root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn core_is_built_from_nothing_that_could_do_io() {
    let tree = cargo(&["tree", "--package=headgate-core", "--edges=normal", "--prefix=none"]);
    let found: BTreeSet<&str> = tree.lines().skip(1).filter_map(|line| line.split(' ').next()).collect();
    let new: Vec<_> = found.iter().filter(|name| !CORE.contains(name) && !name.is_empty()).collect();
    assert!(new.is_empty(), "headgate-core must stay free of I/O, and has new dependencies: {new:?}");
    assert!(found.contains("sha2") && found.contains("ipnet"), "{found:?}");
}

#[test]
fn core_and_the_oracle_use_no_io_of_the_standard_library() {
    let banned = ["fs", "net::Tcp", "net::Udp", "process", "thread", "time", "env", "os"];
    let is_pure = |path: &str| path.starts_with("crates/core/src") || path.starts_with("crates/oracle/src");
    for (path, text) in super::products().iter().filter(|(path, _)| is_pure(path)) {
        let found = banned.iter().find(|name| text.contains(&format!("std::{name}")));
        assert!(found.is_none(), "{path}: std::{} is not allowed here", found.unwrap());
    }
}
