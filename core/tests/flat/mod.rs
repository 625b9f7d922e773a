//! Comparing kernels whose dispatch chains were cut in different ways.

use std::collections::BTreeMap;

/// Rules as if dispatch chains had no groups. How those are cut depends on the addresses at the
/// last full sync. The two rules by which a group of ClusterIPs marks packets for masquerading are
/// the same in each, and stand here once.
pub(crate) fn flat(saves: &[String]) -> Vec<String> {
    let is_group = |name: &str| ["KUBE-SVC-G-", "KUBE-EXT-G-", "KUBE-HPS-"].iter().any(|kind| name.starts_with(kind));
    let mut flat = Vec::new();
    for save in saves {
        let lead = |rule: &str| {
            let (chain, target) = (rule.split(' ').nth(1)?, rule.rsplit_once(" -j ")?.1);
            is_group(target).then(|| (target.to_owned(), chain.to_owned()))
        };
        let led_from: BTreeMap<String, String> = save.lines().filter_map(lead).collect();
        for line in save.lines().filter(|line| lead(line).is_none() && !line.starts_with(':')) {
            let mut words: Vec<&str> = line.split(' ').collect();
            if let Some(from) = words.get(1).and_then(|chain| led_from.get(*chain)) {
                words[1] = from;
            }
            flat.push(words.join(" "));
        }
    }
    flat.sort_unstable();
    let marks = |rule: &str| rule.ends_with("-j KUBE-MARK-MASQ") || rule.contains(" -j MARK ");
    flat.dedup_by(|rule, before| rule == before && marks(rule));
    flat
}
