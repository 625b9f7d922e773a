//! The behaviours of Kubernetes Services that every dataplane implements, one per file.
//!
//! [`view`] combines them. From the shared state and the node's [facts](crate::NodeFacts) it
//! computes what one node does for one service port in one IP family.

pub mod conntrack;
pub mod endpoint_choice;
pub mod health_check_port;
pub mod masquerade;
pub mod source_ranges;
pub mod topology;
pub mod view;
