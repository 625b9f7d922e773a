//! What Kubernetes promises, for every dataplane: each behaviour has one file.
//!
//! [`view`] puts the behaviours together: it computes what one node does for one service port in
//! one IP family, from the shared state and the node's [facts](crate::NodeFacts).

pub mod conntrack;
pub mod endpoint_choice;
pub mod health_check_port;
pub mod masquerade;
pub mod source_ranges;
pub mod topology;
pub mod view;
