//! Tests that need nothing but a processor: no socket, no program, no namespace. They start first
//! and wait for nobody.

#![allow(clippy::unwrap_used, missing_docs)]

mod lagging;
mod tidy;
mod wire;
