//! The backends that the packet cases are run for.

use std::fmt;

use super::iptables::Variant;

/// How an agent programs the kernel: a parameter of every packet case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backend {
    /// iptables, by the kernel's old table interface, laid out as kube-proxy does.
    IptablesLegacy,
    /// iptables, by nftables, laid out as kube-proxy does.
    IptablesNft,
    /// iptables, by the kernel's old table interface, in the layout of large clusters.
    IptablesLegacyCompact,
    /// iptables, by nftables, in the layout of large clusters.
    IptablesNftCompact,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::IptablesLegacy, Self::IptablesNft, Self::IptablesLegacyCompact, Self::IptablesNftCompact];

    /// The agent's flags that choose it.
    pub fn agent_arguments(self) -> Vec<&'static str> {
        let variant = if self.variant() == Variant::Legacy { "legacy" } else { "nft" };
        let layout = if self.is_compact() { "compact" } else { "classic" };
        vec!["--proxy-mode", "iptables", "--iptables-variant", variant, "--iptables-layout", layout]
    }

    /// The program that is called iptables.
    pub fn variant(self) -> Variant {
        match self {
            Self::IptablesLegacy | Self::IptablesLegacyCompact => Variant::Legacy,
            Self::IptablesNft | Self::IptablesNftCompact => Variant::Nft,
        }
    }

    /// Laid out as for a large cluster.
    pub fn is_compact(self) -> bool {
        matches!(self, Self::IptablesLegacyCompact | Self::IptablesNftCompact)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::IptablesLegacy => "iptables-legacy",
            Self::IptablesNft => "iptables-nft",
            Self::IptablesLegacyCompact => "iptables-legacy, compact",
            Self::IptablesNftCompact => "iptables-nft, compact",
        })
    }
}
