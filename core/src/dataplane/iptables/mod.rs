//! iptables mode: chains of rules translate, masquerade, reject and drop.
//!
//! [`ruleset()`] gives the rules that depend on configuration alone, and renders services. The
//! [`Ledger`](super::rules::Ledger) of rules programs them.

mod ruleset;
mod service_rules;

pub use self::ruleset::{has_localnet_guard, ruleset};
pub use super::rules::*;

#[cfg(test)]
mod tests;
