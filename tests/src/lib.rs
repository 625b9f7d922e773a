//! Placeholder head.

pub mod apiserver;
pub mod cases;
pub mod testbed;
