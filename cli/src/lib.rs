//! `headgatectl` shows people and programs the state of control plane replicas and of their agents.
//!
//! [`args`] defines the commands, [`client`] connects to replicas, [`render`] formats answers as
//! tables. [`run`] runs the commands. [`certs`] creates certificates without contacting a server.

mod agents;
mod answer;
pub mod args;
pub mod certs;
mod cleanup;
pub mod client;
mod cluster;
mod complete;
mod dashboard;
mod drain;
mod explain;
mod list;
mod migrate;
mod node;
pub mod render;
mod run;
mod shadow;
pub mod units;
mod verify;
mod version;
mod wait;

pub use answer::Failure;
pub use complete::answer_shell;
pub use run::run;
