//! The agent as a process: configuration, health, metrics, kernel parameters, and how its rules
//! follow the node. One namespace is the node; the control plane reads a folder beside it.

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
