//! What elements depend on besides state and node.

use crate::{behaviours::masquerade::MasqueradeConfig, model::Family};

/// The configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NftablesConfig {
    /// The family.
    pub family: Family,
    /// Masquerading. nftables mode uses no packet mark and ignores the bit.
    pub masquerade: MasqueradeConfig,
}

impl NftablesConfig {
    /// The defaults of a family: no detector of local pods.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self { family, masquerade: MasqueradeConfig::default() }
    }
}
