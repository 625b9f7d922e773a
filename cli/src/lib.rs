//! `headgatectl` shows what a control plane replica knows and what its agents have programmed, for
//! people and programs.
//!
//! [`args`] defines the commands, [`client`] connects to replicas, [`render`] formats answers as
//! tables. [`run`] runs the commands. [`certs`] creates certificates without contacting a server.

mod agents;
mod answer;
pub mod args;
pub mod certs;
pub mod client;
pub mod render;
mod run;
pub mod units;
mod wait;

pub use answer::Failure;
pub use run::run;
