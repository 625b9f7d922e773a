//! Connections: limits, TLS, and HTTP/2.
//!
//! There are two gRPC ports. On the port for agents, [`sync_connection`] carries one stream on each
//! connection. On the other port, the *general server*, [`general_connection`], answers everything
//! else. This module does not depend on the services of the general server.

mod budget;
mod connection_limits;
mod general_connection;
mod handshakes;
mod listener;
mod page_listener;
mod server;
mod stalled_responses;
mod sync_connection;
pub mod tls;

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    time::sleep,
};

pub(crate) use self::{listener::Listener, page_listener::serve_pages, server::serve};

/// If a client sends nothing for this time, the server sends a ping. If the client then sends
/// nothing for the same time again, the server closes the connection. Agents apply the same rule to
/// the server.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// The pause after an accept that failed, for example because there are too many open files.
/// Without the pause, the next accept would usually fail too.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// How long a connection may take to write the rest of its bytes after its stream has ended.
const LINGER: Duration = Duration::from_secs(1);

/// Accepts the next connection. After an error, calls `failed` and pauses.
pub(crate) async fn accept(listener: &TcpListener, failed: impl Fn(io::Error)) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => failed(error),
        }
        sleep(ACCEPT_RETRY).await;
    }
}
