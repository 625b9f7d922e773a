//! The configuration of nftables mode.

use crate::{behaviours::masquerade::MasqueradeConfig, model::Family};

/// The configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NftablesConfig {
    /// The family.
    pub family: Family,
    /// Masquerading. nftables mode uses no packet mark, so it ignores [`MasqueradeConfig::bit`].
    pub masquerade: MasqueradeConfig,
    /// True if rules can hash the client's address. Otherwise Services that select
    /// [`crate::model::LoadBalancing::ConsistentHash`] use random slots.
    pub can_hash: bool,
    /// True if the kernel counts the connections and the traffic of each frontend.
    pub counts_services: bool,
    /// True in mode userspace: a proxy carries TCP connections. Rules then send no connection
    /// straight to endpoints that expect the PROXY protocol, and refuse SCTP.
    pub has_proxy: bool,
}

impl NftablesConfig {
    /// Returns the defaults of a family: no detector of local pods, and rules that can hash.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self {
            family,
            masquerade: MasqueradeConfig::default(),
            can_hash: true,
            counts_services: false,
            has_proxy: false,
        }
    }
}
