//! Listening sockets.

use std::{io, net::SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

/// The maximum number of connections that wait to be accepted. Further clients lose a second,
/// because they have to send their SYN again.
const BACKLOG: i32 = 1024;

/// Which families a socket at an IPv6 address serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Families {
    /// IPv6 only.
    Own,
    /// IPv6, and also IPv4 if the address is unspecified (`::`).
    Both,
}

/// Listens on a TCP address. The caller must be in a tokio runtime.
/// Errors: the error of the system call that failed, such as `EADDRINUSE`.
pub fn listen(address: SocketAddr, families: Families) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(families == Families::Own)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}
