//! Finds out whether somebody has written rules of kube-proxy since the last look.

use std::{
    collections::BTreeMap,
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use crate::dataplane::{DataplaneError, nftables, xtables};

/// The rules of kube-proxy: for each mode, the sum of the hashes of its lines.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct KubeProxyRules(BTreeMap<&'static str, u64>);

impl KubeProxyRules {
    /// True if there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The mode of the rules that somebody has written since `last`. Rules that were removed, and
    /// nothing else, are none.
    pub(super) fn fresh(&self, last: &Self) -> Option<&'static str> {
        self.0.iter().rev().find(|(mode, sum)| last.0.get(*mode) != Some(*sum)).map(|(mode, _)| *mode)
    }

    fn add(&mut self, mode: &'static str, line: &str) {
        let mut hasher = DefaultHasher::new();
        line.hash(&mut hasher);
        let sum = self.0.entry(mode).or_default();
        *sum = sum.wrapping_add(hasher.finish());
    }
}

/// Reads the tables of kube-proxy's mode nftables, and its chains of iptables or virtual servers of
/// IPVS if wanted. Programs and modules that this machine lacks have none. Errors: rules cannot be
/// read now.
pub(super) fn read(chains: bool, virtual_servers: bool) -> Result<KubeProxyRules, DataplaneError> {
    let mut rules = KubeProxyRules::default();
    if chains {
        xtables::kube_proxys_chains(&mut |line| rules.add("iptables", line))?;
    }
    nftables::kube_proxys_objects(&mut |line| rules.add("nftables", line))?;
    let has_device = || fs::read_to_string("/proc/self/net/dev").is_ok_and(|devices| devices.contains("kube-ipvs0:"));
    if virtual_servers && has_device() {
        let servers = fs::read_to_string("/proc/net/ip_vs").unwrap_or_default();
        // The last two columns of a destination count its connections.
        let fixed = |line: &str| line.split_whitespace().take(4).collect::<Vec<_>>().join(" ");
        servers.lines().for_each(|line| rules.add("ipvs", &fixed(line)));
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_fresh_if_somebody_has_written_any() {
        let rules = |lines: &[(&'static str, &str)]| {
            let mut rules = KubeProxyRules::default();
            lines.iter().for_each(|(mode, line)| rules.add(mode, line));
            rules
        };
        let (a, b, c) = (("iptables", "-A KUBE-A"), ("iptables", "-A KUBE-B"), ("nftables", "chain c"));
        for (now, last, expected) in [
            (rules(&[a, b]), rules(&[b, a]), None),
            (rules(&[a, b]), rules(&[a]), Some("iptables")),
            (rules(&[a]), rules(&[a, b]), Some("iptables")),
            (rules(&[a, c]), rules(&[a]), Some("nftables")),
            (rules(&[a]), rules(&[a, c]), None),
            (rules(&[]), rules(&[a, c]), None),
        ] {
            assert_eq!(now.fresh(&last), expected, "{now:?} {last:?}");
        }
    }
}
