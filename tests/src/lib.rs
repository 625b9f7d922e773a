//! Placeholder head.

pub mod apiserver;
pub mod testbed;
