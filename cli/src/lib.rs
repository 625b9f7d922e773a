//! `headgatectl` shows people and programs the state of control plane replicas and of their agents.
//!
//! [`args`] defines the commands, [`client`] connects to replicas, [`render`] formats answers as
//! tables. [`run`] runs the commands. [`certs`] creates certificates without contacting a server.

mod agents;
mod answer;
pub mod args;
pub mod certs;
pub mod client;
mod dashboard;
mod drain;
mod explain;
mod migrate;
mod node;
pub mod render;
mod run;
mod shadow;
pub mod units;
mod verify;
mod wait;

pub use answer::Failure;
pub use run::run;
