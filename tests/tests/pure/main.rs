//! Tests that need no socket, program or network namespace. No group in `.config/nextest.toml`
//! limits how many of them run at a time.

#![allow(clippy::unwrap_used, missing_docs)]

mod tidy;
mod wire;
