//! Forwarding continues without the agent, the control plane, or the disk. Real programs are
//! stopped and killed in a cluster of network namespaces.

mod disk;
mod node;
mod restarts;
