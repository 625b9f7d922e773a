//! Tests of the agent as a process: configuration, health, metrics, kernel parameters, and rules
//! that follow the node. The node is a network namespace. The control plane in this namespace reads
//! a folder of manifests.

mod all_in_one;
mod attacks;
mod config;
mod counters;
mod degraded;
mod drain;
mod health;
mod metrics;
mod mistakes;
mod node;
mod proxy;
mod refused;
mod rig;
mod settings;
mod stale;
mod standby;
mod sync;
mod unheard;
mod verify;
