//! The control plane: watches the API server once and streams deltas to every node agent.
//!
//! [`source`] reads objects. [`model`] turns the objects into transactions, [`store`] holds
//! the state, and [`serve`] streams the state to the agents.

pub mod identity;
pub mod metrics;
pub mod model;
pub mod objects;
pub mod options;
pub mod run;
pub mod serve;
pub mod source;
pub mod store;
