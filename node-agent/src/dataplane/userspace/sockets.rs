//! The sockets of listeners.

use std::{io, net::SocketAddr};

use headgate_core::nftables::Lookup;
use headgate_userspace::Scope;
use socket2::{Domain, Socket, Type};

/// The scope of the listener that gets the connections or datagrams of a map.
pub(super) fn scope(lookup: Lookup) -> Scope {
    Scope(match lookup {
        Lookup::Service => 0,
        Lookup::Inside => 1,
        Lookup::NodePort => 2,
        Lookup::InsideNodePort => 3,
    })
}

/// A socket with an address that need not be an address of the node yet.
pub(super) fn bind(address: SocketAddr, kind: Type) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind, None)?;
    // A UDP socket with this option would share its port with other sockets.
    socket.set_reuse_address(kind == Type::STREAM)?;
    if address.is_ipv4() {
        socket.set_freebind_v4(true)?;
    } else {
        socket.set_freebind_v6(true)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}
