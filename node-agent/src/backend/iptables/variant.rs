//! Which iptables a node uses. Rules in the other one would be evaluated too, in an order that nobody chose.

use headgate_core::{Family, iptables::Table};

use super::{
    super::{BackendError, ErrorKind},
    Variant,
    command::Programs,
};

/// Chains by which the kubelet shows which variant the node's own software uses (KEP-3178).
const KUBELET_CHAINS: [&str; 2] = [":KUBE-IPTABLES-HINT", ":KUBE-KUBELET-CANARY"];

/// The variant to use: the one asked for, or, for `Auto`, the one that the kubelet used, else the one with more rules, else nft where
/// it is installed.
///
/// # Errors
/// [`ErrorKind::Unavailable`] when the programs are not installed.
pub(super) fn choose(asked: Variant) -> Result<Variant, BackendError> {
    let is_installed = |variant| Programs::new(Family::V4, variant).are_installed();
    match asked {
        Variant::Auto => detect(is_installed(Variant::Legacy), is_installed(Variant::Nft)),
        variant if is_installed(variant) => Ok(variant),
        Variant::Legacy => Err(missing("iptables-legacy-restore")),
        Variant::Nft => Err(missing("iptables-nft-restore")),
    }
}

fn missing(program: &str) -> BackendError {
    BackendError::new(ErrorKind::Unavailable, format!("{program} is not installed; install the package iptables"))
}

fn detect(has_legacy: bool, has_nft: bool) -> Result<Variant, BackendError> {
    match (has_legacy, has_nft) {
        (false, false) => Err(missing("iptables-nft-restore")),
        (true, false) => Ok(Variant::Legacy),
        (false, true) => Ok(Variant::Nft),
        (true, true) => {
            let nft = saved(Variant::Nft);
            let legacy = saved(Variant::Legacy);
            Ok(prefer(&legacy, &nft))
        }
    }
}

/// All rules of both families, in the tables that we look at. A table that cannot be read has no rules to speak for its variant.
fn saved(variant: Variant) -> String {
    let programs = Family::BOTH.map(|family| Programs::new(family, variant));
    let saves = programs.iter().flat_map(|programs| Table::ALL.map(|table| programs.save(table).unwrap_or_default()));
    saves.collect()
}

fn prefer(legacy: &str, nft: &str) -> Variant {
    let kubelet_used = |save: &str| save.lines().any(|line| KUBELET_CHAINS.iter().any(|chain| line.starts_with(chain)));
    let rules = |save: &str| save.lines().filter(|line| line.starts_with('-')).count();
    if kubelet_used(nft) {
        Variant::Nft
    } else if kubelet_used(legacy) || rules(legacy) > rules(nft) {
        Variant::Legacy
    } else {
        Variant::Nft
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kubelets_chains_decide_then_the_number_of_rules() {
        let hint = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n";
        let rules = "*nat\n-A POSTROUTING -j ACCEPT\n";
        assert_eq!(prefer(hint, rules), Variant::Legacy);
        assert_eq!(prefer(rules, hint), Variant::Nft);
        assert_eq!(prefer(rules, ""), Variant::Legacy);
        assert_eq!(prefer("", rules), Variant::Nft);
        assert_eq!(prefer("", ""), Variant::Nft);
    }
}
