//! A port that stays free until a program of the test listens on it.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use socket2::{Domain, Socket, Type};

/// A reserved TCP port of 127.0.0.1. While this value exists, the kernel does not assign the port
/// to sockets that bind to port 0. A server that binds to this port with `SO_REUSEADDR` may listen
/// on it. Until a server listens, connections to the port are refused.
#[derive(Debug)]
pub struct ReservedPort {
    address: SocketAddr,
    _socket: Socket,
}

impl ReservedPort {
    /// Reserves a port.
    ///
    /// # Errors
    /// No port is free, or a socket cannot be created.
    pub fn reserve() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        let address = socket.local_addr()?.as_socket();
        let address = address.ok_or_else(|| io::Error::other("the kernel returned an address that is not IP"))?;
        Ok(Self { address, _socket: socket })
    }

    /// The reserved address and port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The reserved port.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.address().port()
    }
}
