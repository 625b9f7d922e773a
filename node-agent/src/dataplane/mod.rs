//! Dataplanes: the ways to program one node's kernel. Each implements [`Dataplane`] for one IP
//! family; [`DualStack`] joins both families for [`crate::reconcile`], on whose thread they run. A
//! call returns after the kernel or a program such as `iptables-restore` has finished.

mod contract;
mod dual_stack;
pub(crate) mod firewalls;
mod first_services;
#[cfg(test)]
#[expect(unreachable_pub, reason = "the crate of tests also includes the files")]
#[path = "../../tests/in_memory/mod.rs"]
pub(crate) mod in_memory;
mod ip_sets;
pub mod iptables;
pub mod ipvs;
mod kernel_modules;
mod leftovers;
pub mod metrics;
pub mod nftables;
pub mod other_rules;
pub mod standby;
pub mod userspace;
pub(crate) mod xtables;

pub use contract::{
    ConnectionProxy, Dataplane, Degradation, FamilyStatistics, Fault, Finding, KernelHandle, ProxyCounts, Report,
    RulesDifferences, RulesVerification, Statistics, TableStatistics, TryWake, WakeLoop,
};
pub use contract::{DataplaneError, ErrorKind};
pub(crate) use dual_stack::with_names;
pub use dual_stack::{DualStack, NodeDataplane};
pub use leftovers::Leftover;

use headgate_core::explain::Mode;
pub use headgate_core::{FixedState, StateSource};

/// The proxy mode of a dataplane's name, as `/proxyMode` shows it: "iptables" for "iptables-nft".
pub fn proxy_mode(name: &str) -> &str {
    name.split('-').next().unwrap_or(name)
}

/// The mode of a dataplane's name, as explanations and verifications know it: mode userspace behind
/// rules of iptables is a mode of its own.
pub fn mode_of(name: &str) -> Option<Mode> {
    match proxy_mode(name) {
        "userspace" if name != "userspace" => Some(Mode::UserspaceIptables),
        // An agent in standby has a view of the node, and no mode of its own.
        standby::NAME => Some(Mode::Iptables),
        mode => Mode::parse(mode),
    }
}
