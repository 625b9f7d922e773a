//! The backends that the packet cases are run for.

use std::fmt;

/// How an agent programs the kernel: a parameter of every packet case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backend {
    /// iptables, by the kernel's old table interface.
    IptablesLegacy,
    /// iptables, by nftables.
    IptablesNft,
}

impl Backend {
    /// The agent's flags that choose it.
    pub fn agent_arguments(self) -> &'static [&'static str] {
        match self {
            Self::IptablesLegacy => &["--proxy-mode", "iptables", "--iptables-variant", "legacy"],
            Self::IptablesNft => &["--proxy-mode", "iptables", "--iptables-variant", "nft"],
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::IptablesLegacy => "iptables-legacy",
            Self::IptablesNft => "iptables-nft",
        })
    }
}
