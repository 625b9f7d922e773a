//! Dataplanes: the ways to bring one node's kernel to the state.
//!
//! Each implements [`Dataplane`] for one IP family; [`DualStack`] makes of it what the reconcile
//! loop drives. Dataplanes are synchronous (the kernel works inside the system call, or inside the
//! program that is waited for) and run on the thread of [`crate::reconcile`].

mod contract;
mod dual_stack;
mod error;
#[doc(hidden)]
pub mod in_memory;
pub mod iptables;
pub mod ipvs;
mod leftovers;
mod retries;
pub(crate) mod xtables;

pub use contract::{
    Dataplane, Degradation, FamilyStatistics, Fault, FindFaults, KernelHandle, Maintain, Report, Statistics,
    TableStatistics,
};
pub use dual_stack::{DualStack, NodeDataplane};
pub use error::{DataplaneError, ErrorKind};
pub use leftovers::Leftover;

pub use crate::state::source::{FixedState, StateSource};

/// The mode that a dataplane's name stands for, as `/proxyMode` shows it: "iptables" for
/// "iptables-nft".
#[must_use]
pub fn proxy_mode(name: &str) -> &str {
    name.split('-').next().unwrap_or(name)
}
