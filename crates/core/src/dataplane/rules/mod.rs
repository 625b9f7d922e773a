//! iptables rules: their text, scripts for `iptables-restore`, and a record of the programmed
//! rules.
//!
//! A dataplane passes its rules as a [`Ruleset`]: fixed chains, jumps, and a function that renders
//! the rules of a service with the help of [`service`]. The [`RulesLedger`] records which rules are
//! programmed and writes [`Script`]s with only the differences. [`dispatch`] manages the chains
//! that contain rules of many services.
//!
//! Names, hashes and rule text are the same as in kube-proxy, so existing knowledge and tools
//! apply. Rules are rendered exactly as `iptables-save` prints them. The rules of a kernel can
//! therefore be compared with the wanted rules as text, without a parser.

pub mod beside_ipvs;
pub mod config;
pub mod dispatch;
pub mod existing;
pub mod ledger;
pub(super) mod line;
pub mod names;
pub(super) mod ruleset;
pub mod script;
pub mod service;
pub mod tally;

pub use config::{Layout, NodePortAddresses, RenderConfig};
pub use existing::{ExistingReader, ExistingRules, ExistingTables, RulesHash};
pub use ledger::RulesLedger;
pub use ruleset::{FixedChain, Jump, Ruleset};
pub use script::Script;
pub use tally::Tally;

named! {
    /// The tables that Headgate writes to.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum RulesTable {
        /// The canary, an empty chain: if the canary is missing, another program has flushed the
        /// tables. In IPVS mode, also the rules for the source ranges of load balancer IPs.
        Mangle = "mangle",
        /// DNAT and masquerading of service traffic.
        Nat = "nat",
        /// Rules that reject, drop and accept packets.
        Filter = "filter",
    }
}
