//! The node agent: programs one node's kernel with the state that a control plane streams to it.
//!
//! [`session`] writes the [`state`]. [`reconcile`] reads the state, programs the kernel through the
//! [`dataplane`], and publishes its [`progress`], which the session acknowledges to the control
//! plane. When the agent stops or loses its control plane, the rules stay in the kernel.
//! ARCHITECTURE.md lists the layers. A module imports only modules of its own and of lower layers.

pub mod backoff;
mod bisect;
mod config_watch;
pub mod control_planes;
mod cpu_time;
pub mod dataplane;
pub mod dataplane_choice;
pub mod http;
mod instance;
pub mod interfaces;
mod memory;
pub mod metric_registry;
pub mod metrics;
pub mod node_inputs;
mod node_queries;
pub mod observers;
pub mod options;
pub mod packet_counters;
pub mod persist;
pub mod program;
pub mod progress;
pub mod reconcile;
mod run;
pub mod session;
pub mod state;
pub mod sysctl;

#[doc(hidden)]
pub use run::Parts;
pub use run::{AgentError, prepare, run, run_with};

// The dataplane in memory, which the crate of tests also uses, knows this crate by its name.
#[cfg(test)]
extern crate self as headgate_node_agent;
#[cfg(test)]
mod tests;
#[cfg(test)]
use tests::testing;
