//! iptables mode: rules translate, masquerade, reject and drop packets.
//!
//! [`ruleset()`] returns the rules of the configuration, and how the rules of a service are
//! rendered. The [`RulesLedger`](super::rules::RulesLedger) programs them.

mod ruleset;
mod service_rules;

pub use self::ruleset::{has_localnet_guard, localnet_guard_script, ruleset};
pub use super::rules::*;

#[cfg(test)]
mod tests;
