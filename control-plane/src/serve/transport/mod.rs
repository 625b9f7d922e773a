//! Connections: limits, TLS, and HTTP/2.
//!
//! There are two gRPC ports. On the port for agents, [`sync_connection`] carries one stream on each
//! connection. On the other port, the *general server*, [`general_connection`], answers everything
//! else. This module does not depend on the services of the general server.

mod connection_limits;
mod general_connection;
mod handshakes;
mod listener;
mod server;
mod sync_connection;

use std::time::Duration;

pub(crate) use headgate_listener::{ACCEPT_RETRY, accept};

pub(crate) use self::{
    connection_limits::{Connections, hold},
    handshakes::{Handshake, Handshakes, Silent},
    listener::Listener,
    server::serve,
    sync_connection::serve as serve_stream,
};

/// If a client sends nothing for this time, the server sends a ping. If the client then sends
/// nothing for the same time again, the server closes the connection. Agents apply the same rule to
/// the server.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// How long a connection may take to write the rest of its bytes after its stream has ended.
const LINGER: Duration = Duration::from_secs(1);
