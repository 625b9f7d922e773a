//! The configuration of nftables mode.

use crate::{behaviours::masquerade::MasqueradeConfig, model::Family};

/// The configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NftablesConfig {
    /// The family.
    pub family: Family,
    /// Masquerading. nftables mode uses no packet mark, so it ignores [`MasqueradeConfig::bit`].
    pub masquerade: MasqueradeConfig,
}

impl NftablesConfig {
    /// Returns the defaults of a family: no detector of local pods.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self { family, masquerade: MasqueradeConfig::default() }
    }
}
