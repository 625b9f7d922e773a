//! The agent's side of the delta stream.
//!
//! [`machine`] decides what a message means and touches nothing; [`held`] is what the agent holds, and how a step changes it;
//! [`client`] does the input and output: connects, reads, answers, comes back. [`tls`] has certificates and keys.

pub mod backoff;
pub mod client;
pub mod connect;
pub mod held;
pub mod machine;
mod others;
mod outbox;
mod rejected;
pub mod replicas;
pub mod stay;
#[cfg(test)]
pub(crate) mod testing;
pub mod tls;
