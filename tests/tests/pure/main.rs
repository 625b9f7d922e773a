//! Tests that need no socket, program or network namespace. They start first and wait for no group
//! of tests.

#![allow(clippy::unwrap_used, missing_docs)]

mod lagging;
mod tidy;
mod wire;
