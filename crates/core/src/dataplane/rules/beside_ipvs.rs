//! What a cleanup removes while kube-proxy runs in mode ipvs on the node.
//!
//! In this mode kube-proxy uses some chains with the names of Headgate's, and writes all their
//! rules at each sync. It never removes the other chains, such as those with the rules that reject
//! packets in mode iptables.

use super::{
    ExistingTables, RulesTable, Script,
    existing::{is_ours, target},
    names::{
        FORWARD, IN_FILTER, LOAD_BALANCER, MARK_MASQ, NODE_PORT, OUT_FILTER, POSTROUTING, PROXY_FIREWALL, SERVICES,
        SOURCE_RANGES,
    },
};

/// The chains that kube-proxy uses in mode ipvs.
#[must_use]
pub fn chains(table: RulesTable) -> &'static [&'static str] {
    match table {
        RulesTable::Mangle => &[],
        RulesTable::Nat => &[SERVICES, POSTROUTING, NODE_PORT, LOAD_BALANCER, MARK_MASQ],
        RulesTable::Filter => &[FORWARD, NODE_PORT, PROXY_FIREWALL, SOURCE_RANGES, IN_FILTER, OUT_FILTER],
    }
}

/// Returns a script that removes the rules and chains of Headgate that kube-proxy does not use. The
/// tables must have been read with a reader that spares [`chains`].
///
/// # Errors
/// A rule in a chain of kube-proxy that leads to a chain of Headgate: kube-proxy has not written
/// its own rules yet. A retry helps after kube-proxy has written them.
pub fn cleanup(existing: &ExistingTables) -> Result<Script, String> {
    let mut script = Script::default();
    for table in RulesTable::ALL {
        let (existing, spared) = (existing.get(table), chains(table));
        let is_in_spared = |rule: &&String| rule.split(' ').next().is_some_and(|chain| spared.contains(&chain));
        if let Some(rule) = existing.referenced.values().find(is_in_spared) {
            return Err(rule.clone());
        }
        let rules = existing.base_rules.iter().filter_map(|rule| rule.split_once(' '));
        for (chain, rule) in rules {
            let Some(target) = target(rule).filter(|target| is_ours(table, target)) else { continue };
            // The jumps of kube-proxy have no condition in this mode.
            if !spared.contains(&target) || !rule.starts_with("-m comment ") {
                script.delete_rule(table, chain, rule);
            }
        }
        let mut names: Vec<&String> = existing.chains.keys().collect();
        names.sort_unstable();
        names.into_iter().for_each(|name| script.delete_chain(table, name));
    }
    Ok(script)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::dataplane::rules::ExistingReader;

    fn read(save: &str) -> ExistingTables {
        let mut tables = ExistingTables::default();
        for table in RulesTable::ALL {
            let mut reader = ExistingReader::sparing(table, chains(table));
            save.lines().for_each(|line| reader.line(line));
            tables.set(table, reader.finish());
        }
        tables
    }

    const NAT: &str = "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n\
        :KUBE-SVC-XPGD46QRK7WJZT7O - [0:0]\n\
        -A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n";

    #[test]
    fn only_what_kube_proxy_does_not_use_is_removed() {
        let filter = "COMMIT\n*filter\n:INPUT ACCEPT [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\n:KUBE-EXTERNAL-SERVICES - [0:0]\n\
            -A INPUT -m comment --comment \"kube-proxy firewall rules\" -j KUBE-PROXY-FIREWALL\n\
            -A INPUT -m conntrack --ctstate NEW -m comment --comment ours -j KUBE-PROXY-FIREWALL\n\
            -A INPUT -m conntrack --ctstate NEW -m comment --comment ours -j KUBE-EXTERNAL-SERVICES\n\
            -A INPUT -j KUBE-FIREWALL\nCOMMIT\n";
        let script = cleanup(&read(&(NAT.to_owned() + filter))).unwrap().to_string();
        assert_eq!(
            script,
            "*nat\n:KUBE-SVC-XPGD46QRK7WJZT7O - [0:0]\n:KUBE-NODEPORTS - [0:0]\n\
             -X KUBE-NODEPORTS\n-X KUBE-SVC-XPGD46QRK7WJZT7O\nCOMMIT\n\
             *filter\n:KUBE-EXTERNAL-SERVICES - [0:0]\n\
             -D INPUT -m conntrack --ctstate NEW -m comment --comment ours -j KUBE-PROXY-FIREWALL\n\
             -D INPUT -m conntrack --ctstate NEW -m comment --comment ours -j KUBE-EXTERNAL-SERVICES\n\
             -X KUBE-EXTERNAL-SERVICES\nCOMMIT\n"
        );
    }

    #[test]
    fn rules_that_still_forward_are_not_removed() {
        let foreign = "-A SOMEBODY -j KUBE-NODEPORTS\n";
        assert!(cleanup(&read(&format!("{NAT}{foreign}COMMIT\n"))).is_ok());
        let own = "KUBE-SERVICES -j KUBE-NODEPORTS";
        assert_eq!(cleanup(&read(&format!("{NAT}{foreign}-A {own}\nCOMMIT\n"))), Err(own.to_owned()));
    }
}
