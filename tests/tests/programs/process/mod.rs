//! The agent as a process: configuration, health, metrics, kernel parameters, and rules that follow
//! the node. A network namespace is the node. The control plane in it reads a folder of manifests.

mod config;
mod counters;
mod degraded;
mod health;
mod metrics;
mod mistakes;
mod node;
mod refused;
mod rig;
mod settings;
mod stale;
mod sync;
mod truth;
