//! Comparison of rules whose dispatch chains are divided into different groups.

use std::collections::BTreeMap;

/// Returns the rules with the rules of groups moved to their dispatch chains. The division into
/// groups depends on the addresses at the last full sync, so kernels with equal services may have
/// different groups. Each group of ClusterIPs has two rules that mark packets for masquerading. The
/// result contains these rules once.
pub(crate) fn flat(saves: &[String]) -> Vec<String> {
    let is_group = |name: &str| ["KUBE-SVC-G-", "KUBE-EXT-G-", "KUBE-HPS-"].iter().any(|kind| name.starts_with(kind));
    let mut flat = Vec::new();
    for save in saves {
        let jump_to_group = |rule: &str| {
            let (chain, target) = (rule.split(' ').nth(1)?, rule.rsplit_once(" -j ")?.1);
            is_group(target).then(|| (target.to_owned(), chain.to_owned()))
        };
        let dispatch_chains: BTreeMap<String, String> = save.lines().filter_map(jump_to_group).collect();
        for line in save.lines().filter(|line| jump_to_group(line).is_none() && !line.starts_with(':')) {
            let mut words: Vec<&str> = line.split(' ').collect();
            if let Some(dispatch_chain) = words.get(1).and_then(|chain| dispatch_chains.get(*chain)) {
                words[1] = dispatch_chain;
            }
            flat.push(words.join(" "));
        }
    }
    flat.sort_unstable();
    let marks = |rule: &str| rule.ends_with("-j KUBE-MARK-MASQ") || rule.contains(" -j MARK ");
    flat.dedup_by(|rule, before| rule == before && marks(rule));
    flat
}
