//! Identity, roles, renewal and session resumption, over real sockets.

mod agent;
mod attacks;
pub(crate) mod authority;
mod certs;
pub(crate) mod client;
mod enrolment;
mod peers;
mod program;
mod refusals;
mod reload;
mod resumption;
mod roles;
mod rotation;
mod server;
