//! `headgatectl`: what a control plane replica knows and what its agents have programmed, for people and programs.
//!
//! [`args`] says what can be asked, [`client`] asks it, [`render`] makes tables of the answers and [`json`] makes JSON of
//! them, with the field names of `headgate.v1.Inspect`. [`run`] joins them. [`certs`] asks nobody: it makes certificates.

mod agents;
pub mod args;
pub mod certs;
pub mod client;
pub mod json;
pub mod render;
mod run;
pub mod units;
mod wait;

pub use run::{Failure, run};
