//! Identity, roles, renewal and resumption, over real sockets.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "identity/agent.rs"]
mod agent;
#[path = "identity/authority.rs"]
mod authority;
#[path = "identity/certs.rs"]
mod certs;
#[path = "identity/client.rs"]
mod client;
#[path = "identity/program.rs"]
mod program;
#[path = "identity/refusals.rs"]
mod refusals;
#[path = "identity/reload.rs"]
mod reload;
#[path = "identity/resumption.rs"]
mod resumption;
#[path = "identity/roles.rs"]
mod roles;
#[path = "identity/server.rs"]
mod server;
