//! Desired iptables rules of a node, and the restore scripts that bring a kernel to them.
//!
//! Names, hashes and rule text are kube-proxy's, so that existing knowledge and tools keep working. Every rule is rendered exactly as
//! `iptables-save` prints it back: what is read from a kernel can be compared with what is wanted without parsing it.
//!
//! [`service`] renders one service's own chains and its lines in the [`dispatch`] chains; [`fixed`] the chains that depend on
//! configuration alone, and [`beside_ipvs`] those that IPVS has in their place; [`ledger`] remembers what is programmed and writes [`script`]s with only what differs.

pub mod beside_ipvs;
pub mod config;
pub mod dispatch;
pub mod existing;
#[doc(hidden)]
pub mod fake_kernel;
pub mod fixed;
pub mod ledger;
mod line;
pub mod names;
pub mod script;
pub mod service;
pub mod tally;

pub use config::{Layout, NodePortAddresses, RenderConfig};
pub use existing::{Existing, ExistingReader, ExistingTables, RulesHash};
pub use ledger::Ledger;
pub use script::Script;
pub use tally::Tally;

use std::fmt;

/// The tables that Headgate writes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// Holds only the canary, whose disappearance shows that somebody flushed the tables.
    Mangle,
    /// DNAT and masquerading.
    Nat,
    /// Refusals and drops.
    Filter,
}

impl Table {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Mangle, Self::Nat, Self::Filter];

    /// The name that iptables knows it by.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mangle => "mangle",
            Self::Nat => "nat",
            Self::Filter => "filter",
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
