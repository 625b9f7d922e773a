//! Placeholder head.

pub mod apiserver;
pub mod bench;
pub mod cases;
pub mod testbed;
