//! Rules that the control plane, the agent and `headgatectl` share, each defined once.

pub mod dns_name;
pub mod exposition;
pub mod node_state;
pub mod plaintext;
