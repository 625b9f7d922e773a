//! Tests of parts of our programs inside the test's own process, over sockets of the loopback
//! interface.

#![allow(clippy::unwrap_used, missing_docs)]

mod apiserver;
mod client;
mod files_source;
mod fleet;
mod fuzz;
mod identity;
mod replica;
mod sink;
mod sync_connection;
mod sync_stream;
mod wait;
mod watch;
