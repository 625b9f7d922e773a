//! Crates depend only in the allowed direction, and core depends on nothing that could do I/O. The
//! allowed direction is core ← proto ← {control-plane, node-agent, cli} ← tests, and netlink ←
//! {ipvs, ipset, nftables} ← node-agent; {control-plane, node-agent} ← headgate.

use std::collections::{BTreeMap, BTreeSet};

use super::metadata::Metadata;

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

#[test]
fn core_is_built_from_nothing_that_could_do_io() {
    let metadata = Metadata::read();
    let found = metadata.transitive("headgate-core");
    let new: Vec<_> = found.difference(&BTreeSet::from(CORE)).copied().collect();
    assert!(new.is_empty(), "headgate-core must stay free of I/O, and has new dependencies: {new:?}");
    // Check that the metadata contains the known dependencies.
    assert!(found.contains("sha2") && found.contains("ipnet"), "{found:?}");
}

#[test]
fn core_uses_no_io_of_the_standard_library() {
    let banned = [
        "std::fs",
        "std::net::Tcp",
        "std::net::Udp",
        "std::process",
        "std::thread",
        "std::time",
        "std::env",
        "std::os",
    ];
    for path in super::files() {
        if path.starts_with("core/src") && path.extension().is_some_and(|extension| extension == "rs") {
            let text = super::text(&path).unwrap();
            for (number, line) in text.lines().enumerate() {
                for word in banned {
                    assert!(!line.contains(word), "{}:{}: {word} is not allowed in core", path.display(), number + 1);
                }
            }
        }
    }
}

#[test]
fn packages_of_the_workspace_depend_only_in_the_allowed_direction() {
    let metadata = Metadata::read();
    let allowed = BTreeMap::from([
        ("headgate-core", BTreeSet::new()),
        ("headgate-proto", BTreeSet::from(["headgate-core"])),
        ("headgate-tls", BTreeSet::new()),
        ("headgate-settings", BTreeSet::from(["headgate-core"])),
        ("headgate-control-plane", BTreeSet::from(["headgate-core", "headgate-proto", "headgate-tls"])),
        ("headgate-netlink", BTreeSet::new()),
        ("ipvs-netlink", BTreeSet::from(["headgate-netlink"])),
        ("ipset-netlink", BTreeSet::from(["headgate-netlink"])),
        ("nftables-netlink", BTreeSet::from(["headgate-netlink"])),
        ("headgate-userspace", BTreeSet::new()),
        (
            "headgate-node-agent",
            BTreeSet::from([
                "headgate-core",
                "headgate-proto",
                "headgate-tls",
                "headgate-netlink",
                "headgate-settings",
                "headgate-userspace",
                "ipvs-netlink",
                "nftables-netlink",
                "ipset-netlink",
            ]),
        ),
        ("headgate", BTreeSet::from(["headgate-control-plane", "headgate-node-agent"])),
        ("headgatectl", BTreeSet::from(["headgate-proto", "headgate-settings", "headgate-tls"])),
        ("headgate-drain", BTreeSet::new()),
        (
            "headgate-tests",
            BTreeSet::from([
                "headgate-core",
                "headgate-proto",
                "headgate-tls",
                "headgate-netlink",
                "ipvs-netlink",
                "ipset-netlink",
                "nftables-netlink",
                "headgate-settings",
                "headgate-control-plane",
                "headgate-node-agent",
            ]),
        ),
    ]);
    let members = metadata.members();
    assert_eq!(members, allowed.keys().copied().collect());
    for (name, allowed) in &allowed {
        let found: BTreeSet<&str> = metadata.direct(name).intersection(&members).copied().collect();
        let wrong: Vec<_> = found.difference(allowed).collect();
        assert!(wrong.is_empty(), "{name} must not depend on {wrong:?}");
    }
}

#[test]
fn node_agents_have_no_client_of_the_api_server() {
    let metadata = Metadata::read();
    for name in ["headgate-node-agent", "headgatectl"] {
        let found = metadata.transitive(name);
        let wrong: Vec<_> = found.iter().filter(|name| name.starts_with("kube") || **name == "k8s-openapi").collect();
        assert!(wrong.is_empty(), "{name} depends on {wrong:?}");
    }
}
