//! Everything that a service proxy writes on a node.

use std::{fs, io, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};

/// Rules, sets, devices, and parameters of the network, in the network namespace of the calling
/// thread, without counters and dates. A kernel without nftables has an error in its place, and one
/// without IPVS no virtual servers.
///
/// # Errors
/// A program or a parameter cannot be read.
pub fn here() -> Result<Vec<(String, String)>> {
    let tools: [(&str, &[&str]); 7] = [
        ("nft", &["--stateless", "list", "ruleset"]),
        ("iptables-legacy-save", &[]),
        ("iptables-nft-save", &[]),
        ("ip6tables-legacy-save", &[]),
        ("ip6tables-nft-save", &[]),
        ("ipset", &["list"]),
        ("ip", &["-d", "addr"]),
    ];
    let mut all = Vec::new();
    for (tool, arguments) in tools {
        let output = Command::new(tool).args(arguments).output().with_context(|| format!("starting {tool}"))?;
        let has_worked = output.status.success();
        ensure!(has_worked || tool == "nft" || tool.contains("-nft-"), "{tool}: {output:?}");
        let text = String::from_utf8_lossy(if has_worked { &output.stdout } else { &output.stderr });
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        // Counters of packets, and lifetimes.
        let plain: Vec<_> = lines.map(|line| line.split(" [").next().unwrap_or_default()).collect();
        all.push((tool.to_owned(), plain.join("\n")));
    }
    // Without the numbers of connections. ipvsadm would load the module.
    let servers = fs::read_to_string("/proc/thread-self/net/ip_vs").unwrap_or_default();
    let plain = |line: &str| line.split_whitespace().take(4).collect::<Vec<_>>().join(" ");
    all.push(("ip_vs".to_owned(), servers.lines().map(plain).collect::<Vec<_>>().join("\n")));
    parameters(Path::new("/proc/sys/net"), &mut all).context("reading kernel parameters")?;
    Ok(all)
}

fn parameters(folder: &Path, all: &mut Vec<(String, String)>) -> io::Result<()> {
    let mut entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    entries.sort();
    for path in entries {
        // A count that the kernel changes, and sizes that belong to the whole machine.
        if ["nf_conntrack_count", "nf_conntrack_max", "nf_conntrack_buckets"].iter().any(|name| path.ends_with(name)) {
            continue;
        }
        if path.is_dir() {
            parameters(&path, all)?;
        } else if let Ok(value) = fs::read_to_string(&path) {
            // Some parameters can only be written.
            all.push((path.display().to_string(), value));
        }
    }
    Ok(())
}
