//! Connections: who may have one, how it is secured, which server it goes to, and how bytes of a
//! stream are carried. It knows nothing of the services that the general server answers.

mod budget;
mod connection_limits;
mod connections;
mod first_request;
mod general_connection;
mod handshakes;
mod listener;
mod page_listener;
mod server;
mod stalled_responses;
mod sync_connection;
pub mod tls;

use std::time::Duration;

pub(crate) use self::{page_listener::BoundedListener, server::serve};

/// Both sides probe a connection on which nothing is heard, and give it up after the same time
/// again.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// What a connection gets after its stream has ended, to write what is left.
const LINGER: Duration = Duration::from_secs(1);
