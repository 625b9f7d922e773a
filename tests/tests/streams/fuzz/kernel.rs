//! Passes bytes to the code that reads what other programs of a node have written to its kernel:
//! rules of iptables, and names and comments in messages of netlink.

use std::collections::BTreeSet;

use headgate_core::{
    Family,
    iptables::{ExistingTables, RulesTable},
    view::LocalDetector,
};
use headgate_netlink::{Fields, attributes, netfilter_attributes, read_be32, read_be64, read_ip, read_text};
use headgate_oracle::iptables::{Rules, decode};

use super::fuzz;

/// Reads the output of `iptables-save` as the agent does, before it writes its rules and when it
/// verifies them. Returns whether a Service is forwarded.
fn iptables_save(text: &str) -> bool {
    let mut rules = Rules::default();
    text.lines().for_each(|line| rules.line(line));
    let detector = LocalDetector::Cidr("10.244.0.0/16".parse().unwrap());
    let table = decode(&rules, Family::V4, Some(&detector), &BTreeSet::new());
    let existing = ExistingTables::parse(text);
    for table in RulesTable::ALL {
        let existing = existing.get(table);
        assert!(existing.jumps_to_ours(table).all(|(chain, rule)| !chain.is_empty() && !rule.is_empty()));
    }
    !table.entries.is_empty()
}

/// Reads the attributes of a netfilter message with all readers, also the nested ones. Returns
/// whether the message is whole and contains a text.
fn netlink(message: &[u8]) -> bool {
    let Ok(bytes) = netfilter_attributes(message) else { return false };
    Fields::of(bytes).is_ok() && has_text(bytes, 0)
}

fn has_text(bytes: &[u8], depth: u8) -> bool {
    // The formats of the kernel nest less deeply.
    if depth == 8 {
        return false;
    }
    let mut found = false;
    for (_, value) in attributes(bytes) {
        let numbers = (read_be32(value).is_ok(), read_be64(value).is_ok(), read_ip(value).is_ok());
        assert!(!(numbers.0 && numbers.1), "a value has two lengths");
        let is_text = read_text(value).is_ok_and(|text| text.len() > 1);
        found |= is_text | nftables_netlink::comment_of(value).is_some() | has_text(value, depth + 1);
    }
    found
}

#[test]
fn mutated_rules_in_the_kernel_are_read_safely() {
    let words = [
        "-A KUBE-SERVICES ",
        "-j KUBE-SERVICES\n",
        "-j ",
        "! -s ",
        "\"",
        "\\\"",
        "*nat\n",
        "COMMIT\n",
        ":",
        "/33",
        " --dport ",
    ];
    fuzz("iptables_save", &words, |_, bytes| std::str::from_utf8(bytes).is_ok_and(iptables_save));
}

#[test]
fn mutated_netlink_messages_are_read_safely() {
    fuzz("netlink", &[], |_, bytes| netlink(bytes));
}
