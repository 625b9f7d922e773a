//! The iptables dataplane.

pub use super::rules::*;

#[cfg(test)]
mod tests;
