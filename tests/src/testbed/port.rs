//! A port of this machine that is free, and stays so until a program of the test listens at it.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use socket2::{Domain, Socket, Type};

/// A TCP port of 127.0.0.1. As long as it is held, the kernel gives it to nobody who asks for any
/// port, and who asks for this one and sets `SO_REUSEADDR`, as servers do, may listen. Until then
/// connections to it are refused.
#[derive(Debug)]
pub struct ReservedPort {
    address: SocketAddr,
    _socket: Socket,
}

impl ReservedPort {
    /// Reserves one.
    ///
    /// # Errors
    /// When there is none.
    pub fn reserve() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        let address = socket.local_addr()?.as_socket();
        let address = address.ok_or_else(|| io::Error::other("the kernel gave an address that is not IP"))?;
        Ok(Self { address, _socket: socket })
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its number.
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
    fn it_is_free_for_who_names_it_and_for_nobody_else() {
        let port = ReservedPort::reserve().unwrap();
        assert_eq!(TcpStream::connect(port.address()).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        // So many that some would be the same if the kernel gave them away.
        let others: Vec<_> = (0..500).map(|_| ReservedPort::reserve().unwrap()).collect();
        let numbers: BTreeSet<u16> = others.iter().chain([&port]).map(ReservedPort::number).collect();
        assert_eq!(numbers.len(), 501);
        let _listener = TcpListener::bind(port.address()).unwrap();
        TcpStream::connect(port.address()).unwrap();
    }
}
