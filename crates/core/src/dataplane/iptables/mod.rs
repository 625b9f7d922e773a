//! iptables mode: rules translate, masquerade, reject and drop packets.
//!
//! [`ruleset()`] returns the rules that depend only on the configuration, and the function that
//! renders the rules of a service. The [`RulesLedger`](super::rules::RulesLedger) programs them.

mod ruleset;
mod service_rules;

pub use self::ruleset::{has_localnet_guard, localnet_guard_script, ruleset};
pub use super::rules::*;

#[cfg(test)]
mod tests;
