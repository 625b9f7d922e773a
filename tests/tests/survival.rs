//! Forwarding outlives the agent, the control plane, and the disk: real programs, stopped and killed, on a cluster of namespaces.
#![allow(missing_docs, clippy::unwrap_used)]

mod survival {
    mod disk;
    mod node;
    mod restarts;
}
