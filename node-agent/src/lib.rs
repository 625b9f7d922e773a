//! The node agent: keeps one node's kernel at the state that a control plane streams to it.
//!
//! [`session`] writes the [`state`], [`reconcile`] reads it and programs the kernel through the
//! [`dataplane`], and the session acknowledges what the [`progress`] says. When the agent stops or
//! loses its control plane, the rules stay in the kernel.
//!
//! These are the layers, from the lowest to the highest. A module imports only lower layers, or
//! modules above it in its own layer.
//!
//! 1. Foundation
//!    - [`backoff`]: pauses between attempts.
//!    - [`control_planes`]: URLs of control planes.
//!    - [`metric_registry`]: registers and describes metrics.
//!    - [`packet_counters`]: the kernel's counters that rules count packets into.
//!    - [`progress`]: what the reconcile loop has programmed.
//!    - [`settings`]: kube-proxy's settings, from flags or a file.
//!    - [`node_inputs`]: what rules depend on besides the state, resolved from settings and Node.
//!    - [`sysctl`]: kernel parameters that are set once.
//!    - `bisect` finds the items at fault in a batch, `listen` opens listening sockets, `memory`
//!      returns memory to the system.
//! 2. [`state`]: what the agent holds, shared by the session and the reconcile loop.
//! 3. [`dataplane`]: programs the kernel.
//! 4. [`observers`]: follow what is programmed: stale UDP flows, health-check node ports, endpoint
//!    checks.
//! 5. [`reconcile`]: the loop that programs the state, and its quarantine.
//! 6. Around the loop
//!    - [`persist`]: the state on disk.
//!    - [`session`]: the stream from the control plane.
//!    - [`metrics`]: all metrics, registered and encoded.
//!    - [`http`]: the pages.
//! 7. The program
//!    - [`options`]: the command line.
//!    - [`dataplane_choice`]: chooses, configures and cleans up dataplanes.
//!    - `run` starts, connects and stops the parts, [`fuzz`] feeds bytes to what takes input.

pub mod backoff;
mod bisect;
pub mod control_planes;
pub mod dataplane;
pub mod dataplane_choice;
#[doc(hidden)]
pub mod fuzz;
pub mod http;
mod listen;
mod memory;
pub mod metric_registry;
pub mod metrics;
pub mod node_inputs;
pub mod observers;
pub mod options;
pub mod packet_counters;
pub mod persist;
pub mod progress;
pub mod reconcile;
mod run;
pub mod session;
pub mod settings;
pub mod state;
pub mod sysctl;

pub use run::{AgentError, prepare, run, run_with};

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
