//! The behaviours of Kubernetes Services that every dataplane implements, each decided once.
//!
//! [`view`] combines these behaviours. From the shared state and the [facts](crate::NodeFacts)
//! about a node, it computes the behaviour of this node for one service port in one IP family.

pub mod conntrack;
pub mod view;
