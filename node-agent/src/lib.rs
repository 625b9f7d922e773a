//! The node agent: programs one node's kernel with the state that a control plane streams to it.
//!
//! [`session`] writes the [`state`]. [`reconcile`] reads the state, programs the kernel through the
//! [`dataplane`], and publishes its progress, which the session acknowledges to the control
//! plane. When the agent stops or loses its control plane, the rules stay in the kernel.
//!
//! This list shows the layers from the lowest to the highest. A module imports only modules of
//! lower layers, and modules that its own layer lists before it.
//!
//! 1. Foundation
//!    - [`backoff`]: pauses between attempts.
//!    - [`control_planes`]: URLs of control planes.
//!    - [`metric_registry`]: registers and describes metrics.
//!    - [`packet_counters`]: the kernel's packet counters that rules use.
//!    - [`settings`]: kube-proxy's settings, from flags or a file.
//!    - [`interfaces`]: follows the addresses of the node's interfaces.
//!    - [`node_inputs`]: local pods and NodePort addresses, resolved from settings and Node.
//!    - [`sysctl`]: kernel parameters.
//!    - `bisect` finds the faulty items of a batch, `memory` returns memory to the system.
//! 2. [`state`]: what the agent holds, shared by the session and the reconcile loop, what waits,
//!    and
//!    what is programmed.
//! 3. [`dataplane`]: programs the kernel.
//! 4. [`observers`]: the work after each sync. Observers delete stale UDP flows, serve health-check
//!    node ports, and check endpoints.
//! 5. [`reconcile`]: the loop that programs the state, and quarantines Services whose rules the
//!    kernel rejects.
//! 6. Around the loop
//!    - [`persist`]: the state on disk.
//!    - [`session`]: the stream from the control plane.
//!    - [`metrics`]: all metrics, registered and encoded.
//!    - [`http`]: the HTTP pages, such as `/healthz` and `/metrics`.
//! 7. The program
//!    - [`options`]: the command line.
//!    - [`dataplane_choice`]: chooses, configures and cleans up dataplanes.
//!    - `other_proxy` finds another service proxy on the node, and decides whether the agent stands
//!      by.
//!    - `run` starts, connects and stops the parts. [`program`] has the log, signals and tasks of
//!      programs.

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
pub mod memory;
pub mod metric_registry;
pub mod metrics;
pub mod node_inputs;
mod node_queries;
pub mod observers;
pub mod options;
mod other_proxy;
pub mod packet_counters;
pub mod persist;
pub mod program;
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
