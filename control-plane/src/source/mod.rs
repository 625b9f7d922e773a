//! Where objects come from.

pub mod objects;
