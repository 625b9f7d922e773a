//! The control plane: watches the API server once and streams deltas to every node agent.
//!
//! [`source`] → [`model`] → [`transaction`] → [`store`] → [`serve`].

pub mod transaction;
