//! Forwarding outlives the agent, the control plane, and the disk: real programs, stopped and
//! killed, on a cluster of namespaces.

mod disk;
mod node;
mod restarts;
