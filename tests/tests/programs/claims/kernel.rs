//! What the kernel of a node forwards, from the tools of the distribution.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
};

use anyhow::{Context as _, Result, bail};
use headgate_tests::{simulate::source::Forwarding, testbed::Namespace};
use serde_json::Value;

/// How the agents program the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backend {
    Nftables,
    /// A variant of iptables.
    Iptables(&'static str),
}

impl Backend {
    pub(super) fn by_name(name: &str) -> Self {
        match name {
            "nftables" => Self::Nftables,
            "iptables-nft" => Self::Iptables("nft"),
            "iptables-legacy" => Self::Iptables("legacy"),
            other => panic!("HEADGATE_CLAIMS_MODE={other}: write nftables, iptables-nft or iptables-legacy"),
        }
    }

    pub(super) fn options(self) -> Vec<String> {
        match self {
            Self::Nftables => vec!["--proxy-mode=nftables".into()],
            Self::Iptables(variant) => vec!["--proxy-mode=iptables".into(), format!("--iptables-variant={variant}")],
        }
    }

    /// Deletes the entries of a ClusterIP from the kernel.
    pub(super) fn forget(self, node: &Namespace, address: Ipv4Addr) -> Result<()> {
        match self {
            Self::Nftables => {
                let element = format!("{{ {address} . tcp . 80 }}");
                node.tool("nft", &["delete", "element", "ip", "headgate", "services", &element]).map(drop)
            }
            Self::Iptables(variant) => {
                let rules = node.tool(&format!("iptables-{variant}-save"), &["-t", "nat"])?;
                let destination = format!(" -d {address}/32 ");
                for rule in rules.lines().filter(|rule| rule.starts_with("-A") && rule.contains(&destination)) {
                    let delete = format!("iptables-{variant} -w 5 -t nat {}", rule.replacen("-A", "-D", 1));
                    node.tool("sh", &["-c", &delete])?;
                }
                Ok(())
            }
        }
    }

    /// Reads the kernel.
    pub(super) fn read(self, node: &Namespace) -> Result<Forwarding> {
        match self {
            Self::Nftables => match node.tool("nft", &["-j", "list", "table", "ip", "headgate"]) {
                Ok(text) => of_nftables(&serde_json::from_str(&text).context("the output of nft")?),
                Err(error) if format!("{error:#}").contains("No such file") => Ok(Forwarding::new()),
                Err(error) => Err(error),
            },
            Self::Iptables(variant) => {
                Ok(of_iptables(&node.tool(&format!("iptables-{variant}-save"), &["-t", "nat"])?))
            }
        }
    }
}

/// Reads the maps `services` (address, protocol, port → timeout, selection, number of endpoints,
/// port, group) and `endpoints` (group, slot → address, port).
fn of_nftables(listing: &Value) -> Result<Forwarding> {
    let elements = |name: &str| -> Result<Vec<[&Vec<Value>; 2]>> {
        let all = listing["nftables"].as_array().context("no list")?;
        let map = all.iter().find(|object| object["map"]["name"] == name).with_context(|| format!("no map {name}"))?;
        let elements = map["map"]["elem"].as_array().map(Vec::as_slice).unwrap_or_default();
        let side = |side: &Value| -> Option<()> { side["concat"].as_array().map(drop) };
        let mut found = Vec::new();
        for element in elements {
            let (Some(()), Some(())) = (side(&element[0]), side(&element[1])) else { bail!("unknown: {element}") };
            found.push([&element[0]["concat"], &element[1]["concat"]].map(|side| side.as_array().unwrap()));
        }
        Ok(found)
    };
    let address = |value: &Value| value.as_str().context("no address")?.parse::<Ipv4Addr>().context("an address");
    let mut slots = BTreeMap::new();
    for [key, endpoint] in elements("endpoints")? {
        slots.insert((key[0].as_u64(), key[1].as_u64()), address(&endpoint[0])?);
    }
    let mut forwarding = Forwarding::new();
    for [frontend, target] in elements("services")? {
        let endpoints = forwarding.entry(address(&frontend[0])?).or_default();
        for slot in 0..target[2].as_u64().context("no number of endpoints")? {
            let endpoint = slots.get(&(target[4].as_u64(), Some(slot)));
            endpoints.insert(*endpoint.with_context(|| format!("no slot {slot} of {target:?}"))?);
        }
    }
    Ok(forwarding)
}

/// Follows the jumps from each rule that matches a destination.
fn of_iptables(saved: &str) -> Forwarding {
    let mut rules: BTreeMap<&str, Vec<Vec<&str>>> = BTreeMap::new();
    for line in saved.lines() {
        if let Some((chain, rule)) = line.strip_prefix("-A ").and_then(|rule| rule.split_once(' ')) {
            rules.entry(chain).or_default().push(rule.split(' ').collect());
        }
    }
    let after = |rule: &[&str], option: &str| -> Option<String> {
        Some(rule.iter().skip_while(|word| **word != option).nth(1)?.to_string())
    };
    let mut forwarding = Forwarding::new();
    for rule in rules.get("KUBE-SERVICES").into_iter().flatten() {
        let address = after(rule, "-d").and_then(|to| to.trim_end_matches("/32").parse::<Ipv4Addr>().ok());
        let (Some(address), Some(chain)) = (address, after(rule, "-j").or_else(|| after(rule, "-g"))) else { continue };
        let (mut found, mut seen) = (BTreeSet::new(), BTreeSet::new());
        let mut todo = vec![chain];
        while let Some(chain) = todo.pop() {
            if !seen.insert(chain.clone()) {
                continue;
            }
            for rule in rules.get(chain.as_str()).into_iter().flatten() {
                let endpoint = after(rule, "--to-destination");
                found.extend(endpoint.and_then(|to| to.split(':').next()?.parse::<Ipv4Addr>().ok()));
                todo.extend(after(rule, "-j").or_else(|| after(rule, "-g")));
            }
        }
        forwarding.entry(address).or_default().extend(found);
    }
    forwarding
}
