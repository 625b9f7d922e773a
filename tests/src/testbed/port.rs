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
        self.address.port()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        collections::BTreeSet,
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[test]
    fn only_a_server_that_names_the_port_gets_it() {
        let port = ReservedPort::reserve().unwrap();
        assert_eq!(TcpStream::connect(port.address()).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        // With 500 ports, a duplicate is likely if the kernel hands out reserved ports.
        let others: Vec<_> = (0..500).map(|_| ReservedPort::reserve().unwrap()).collect();
        let numbers: BTreeSet<u16> = others.iter().chain([&port]).map(ReservedPort::number).collect();
        assert_eq!(numbers.len(), 501);
        let _listener = TcpListener::bind(port.address()).unwrap();
        TcpStream::connect(port.address()).unwrap();
    }
}
