//! Chooses the iptables variant that the node already uses. If the agent used the other variant,
//! the kernel would evaluate the rules of both variants, in an undefined order.

use headgate_core::{Family, iptables::RulesTable};

use super::{
    super::{DataplaneError, ErrorKind},
    programs::{Programs, Variant},
};

/// Chains that the kubelet creates to show which variant the node's software uses (KEP-3178).
const KUBELET_CHAINS: [&str; 2] = [":KUBE-IPTABLES-HINT", ":KUBE-KUBELET-CANARY"];

/// Returns the variant to use. For `Auto`: the only installed one, else the one with the kubelet's
/// chains, else the one with more rules, else nft. Errors: [`ErrorKind::Unavailable`] when its
/// programs are not installed.
pub(in crate::dataplane) fn choose(asked: Variant) -> Result<Variant, DataplaneError> {
    let is_installed = |variant| Programs::new(Family::V4, variant).are_installed();
    match asked {
        Variant::Auto => detect(is_installed(Variant::Legacy), is_installed(Variant::Nft)),
        variant if is_installed(variant) => Ok(variant),
        Variant::Legacy => Err(missing("iptables-legacy-restore")),
        Variant::Nft => Err(missing("iptables-nft-restore")),
    }
}

fn missing(program: &str) -> DataplaneError {
    DataplaneError::new(ErrorKind::Unavailable, format!("{program} is not installed; install the package iptables"))
}

fn detect(has_legacy: bool, has_nft: bool) -> Result<Variant, DataplaneError> {
    match (has_legacy, has_nft) {
        (false, false) => Err(missing("iptables-nft-restore")),
        (true, false) => Ok(Variant::Legacy),
        (false, true) => Ok(Variant::Nft),
        (true, true) => Ok(prefer(used(Variant::Legacy), used(Variant::Nft))),
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Use {
    by_kubelet: bool,
    rules: usize,
}

impl Use {
    fn count(&mut self, line: &str) {
        self.by_kubelet |= KUBELET_CHAINS.iter().any(|chain| line.starts_with(chain));
        self.rules += usize::from(line.starts_with('-'));
    }
}

/// Counts the rules of a variant in both families and in all tables that the agent uses. A table
/// that cannot be read counts as empty.
fn used(variant: Variant) -> Use {
    let mut used = Use::default();
    for programs in Family::BOTH.map(|family| Programs::new(family, variant)) {
        for table in RulesTable::ALL {
            if let Err(error) = programs.save(table, |line| used.count(line)) {
                tracing::debug!(%error, "cannot count the rules of an iptables variant");
            }
        }
    }
    used
}

fn prefer(legacy: Use, nft: Use) -> Variant {
    if nft.by_kubelet {
        Variant::Nft
    } else if legacy.by_kubelet || legacy.rules > nft.rules {
        Variant::Legacy
    } else {
        Variant::Nft
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variant_with_the_kubelets_chains_is_chosen_and_otherwise_the_variant_with_more_rules() {
        let used = |save: &str| {
            let mut used = Use::default();
            save.lines().for_each(|line| used.count(line));
            used
        };
        let hint = used("*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n");
        let rules = used("*nat\n-A POSTROUTING -j ACCEPT\n");
        let nothing = Use::default();
        assert_eq!(prefer(hint, rules), Variant::Legacy);
        assert_eq!(prefer(rules, hint), Variant::Nft);
        assert_eq!(prefer(rules, nothing), Variant::Legacy);
        assert_eq!(prefer(nothing, rules), Variant::Nft);
        assert_eq!(prefer(nothing, nothing), Variant::Nft);
    }
}
