//! Rules and formats that the control plane, the agent and `headgatectl` share.

pub mod dialling;
pub mod dns_name;
pub mod errors;
pub mod exposition;
pub mod node_state;
pub mod plaintext;
pub mod printable;
pub mod reach;
pub mod turns;
