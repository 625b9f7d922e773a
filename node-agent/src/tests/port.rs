//! Ports that are free until a test's own program listens at them.

use std::net::SocketAddr;

use socket2::{Domain, Socket, Type};

/// A TCP port of 127.0.0.1 that the kernel gives to nobody who asks for any port, and to whoever asks for this one with `SO_REUSEADDR`, as listeners do.
/// Until then connections to it are refused.
pub(crate) struct ReservedPort(Socket);

/// Reserves one.
pub(crate) fn reserve_port() -> ReservedPort {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    ReservedPort(socket)
}

impl ReservedPort {
    pub(crate) fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap().as_socket().unwrap()
    }

    pub(crate) fn port(&self) -> u16 {
        self.address().port()
    }
}
