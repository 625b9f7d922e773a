//! Rules and formats that the control plane, the agent and `headgatectl` share.

pub mod addresses;
pub mod errors;
pub mod exposition;
pub mod node_state;
pub mod printable;
pub mod turns;
