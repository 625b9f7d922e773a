//! Identity, roles, renewal and session resumption, over real sockets.

mod agent;
mod authority;
mod certs;
mod client;
mod enrolment;
mod peers;
mod program;
mod refusals;
mod reload;
mod resumption;
mod roles;
mod rotation;
mod server;
