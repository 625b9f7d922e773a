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
    /// IPVS, with rules by the kernel's old table interface.
    Ipvs,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::IptablesLegacy, Self::IptablesNft, Self::IptablesLegacyCompact, Self::IptablesNftCompact, Self::Ipvs];

    /// The agent's flags that choose it.
    pub fn agent_arguments(self) -> Vec<&'static str> {
        let variant = if self.variant() == Variant::Legacy { "legacy" } else { "nft" };
        let layout = if self.is_compact() { "compact" } else { "classic" };
        let mode = if self == Self::Ipvs { "ipvs" } else { "iptables" };
        vec!["--proxy-mode", mode, "--iptables-variant", variant, "--iptables-layout", layout]
    }

    /// The program that is called iptables.
    pub fn variant(self) -> Variant {
        match self {
            Self::IptablesLegacy | Self::IptablesLegacyCompact | Self::Ipvs => Variant::Legacy,
            Self::IptablesNft | Self::IptablesNftCompact => Variant::Nft,
        }
    }

    /// It takes a kernel of which the host need not have the like: its tests run inside User-Mode
    /// Linux.
    pub fn runs_in_uml(self) -> bool {
        self == Self::Ipvs
    }

    /// The services' addresses are the node's own, so that it refuses what it does not serve on
    /// them.
    pub fn binds_addresses(self) -> bool {
        self == Self::Ipvs
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
            Self::Ipvs => "ipvs",
        })
    }
}
