//! Finds firewalls that drop packets unless a rule of iptables accepts them. Mode nftables cannot
//! help: what one table accepts, a chain of another table can still drop.

use headgate_core::{Family, iptables::RulesTable};
use nftables_netlink::{Family as TableFamily, Hook, Nftables, NftablesError, Policy};

use super::{
    kernel_modules::NF_TABLES,
    xtables::{Variant, programs::Programs},
};

/// Returns a description of a chain that drops all forwarded packets that no rule accepts, or all
/// packets to the node. `None` if no such chain exists.
/// Errors: the chains cannot be read. The message names the reason.
pub(crate) fn dropping_chain() -> Result<Option<String>, String> {
    // Programs of the nft variant make the kernel load nftables.
    let has_nftables = NF_TABLES.is_present();
    let nft = has_nftables.then_some(Variant::Nft);
    for variant in [Variant::Legacy].into_iter().chain(nft) {
        for family in Family::BOTH {
            let programs = Programs::new(family, variant);
            if !programs.are_installed() {
                continue;
            }
            let mut found = None;
            let read = programs.save(RulesTable::Filter, |line| found = found.take().or_else(|| chain_of_line(line)));
            read.map_err(|error| error.message)?;
            if let Some(chain) = found {
                return Ok(Some(format!("the chain {chain} of table filter ({family})")));
            }
        }
    }
    if has_nftables { dropping_base_chain().map_err(|error| error.to_string()) } else { Ok(None) }
}

/// The built-in chain that drops or rejects all packets by this line of `iptables-save`.
fn chain_of_line(line: &str) -> Option<&'static str> {
    ["FORWARD", "INPUT"].into_iter().find(|chain| {
        let is_start_of = |start: String| line.starts_with(&start);
        [format!(":{chain} DROP"), format!("-A {chain} -j DROP"), format!("-A {chain} -j REJECT")]
            .into_iter()
            .any(is_start_of)
    })
}

/// A base chain of nftables at the hook `forward` with policy drop.
fn dropping_base_chain() -> Result<Option<String>, NftablesError> {
    let mut nftables = Nftables::open()?;
    for table in nftables.tables(None)? {
        let name = table.object.name;
        if ![TableFamily::Ip, TableFamily::Ip6, TableFamily::Inet].contains(&name.family) {
            continue;
        }
        let drops = |base: nftables_netlink::BaseChain| base.hook == Hook::Forward && base.policy == Policy::Drop;
        let chains = nftables.chains(&name)?;
        if let Some(chain) = chains.into_iter().find(|chain| chain.object.base.is_some_and(drops)) {
            return Ok(Some(format!("the chain {} of table {name}", chain.object.name)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_and_final_rules_drop_packets_and_conditional_rules_do_not() {
        assert_eq!(chain_of_line(":FORWARD DROP [12:720]"), Some("FORWARD"));
        assert_eq!(chain_of_line("-A FORWARD -j REJECT --reject-with icmp-host-prohibited"), Some("FORWARD"));
        assert_eq!(chain_of_line("-A INPUT -j DROP"), Some("INPUT"));
        for harmless in [":FORWARD ACCEPT [0:0]", "-A FORWARD -s 192.0.2.1/32 -j DROP", ":OUTPUT DROP [0:0]"] {
            assert_eq!(chain_of_line(harmless), None);
        }
    }
}
