//! Rules of iptables: the text of rules, scripts for `iptables-restore`, and what is programmed.
//!
//! A dataplane passes its rules as a [`Ruleset`]: fixed chains, jumps, and a function that renders
//! the rules of a service from the parts in [`service`]. The [`Ledger`] remembers what is
//! programmed and writes [`Script`]s with only what differs; [`dispatch`] holds the chains in which
//! many services have lines.
//!
//! Names, hashes and rule text are kube-proxy's, so that existing knowledge and tools keep working.
//! Rules are rendered exactly as `iptables-save` prints them: what a kernel has is compared with
//! what is wanted without parsing it.

pub mod config;
pub mod dispatch;
pub mod existing;
#[doc(hidden)]
pub mod fake_kernel;
pub mod ledger;
pub(super) mod line;
pub mod names;
pub(super) mod ruleset;
pub mod script;
pub mod service;
pub mod tally;

pub use config::{Layout, NodePortAddresses, RenderConfig};
pub use existing::{Existing, ExistingReader, ExistingTables, RulesHash};
pub use ledger::Ledger;
pub use ruleset::{FixedChain, Jump, Ruleset};
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
