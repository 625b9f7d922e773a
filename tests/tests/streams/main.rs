//! Tests of parts of Headgate's programs in the test's own process, most over loopback sockets.

#![allow(clippy::unwrap_used, missing_docs)]

mod attacks;
mod barrier;
mod client;
mod everywhere;
mod files_source;
mod fleet;
mod fuzz;
mod identity;
mod migrate;
mod overview;
mod query_node;
mod ready_everywhere;
mod replica;
mod sink;
mod sync_connection;
mod sync_stream;
mod verify_nodes;
mod wait;
mod watch;
