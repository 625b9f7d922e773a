//! Tests that need their own kernel. They run inside User-Mode Linux.

#![allow(clippy::unwrap_used, missing_docs)]

mod ipvs_client;
mod ipvs_rules;
mod links;
mod uml;

use std::{
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// Connects to an address, and tries again for half a minute. The kernel adds an IPv6 address
/// first and its route shortly afterwards.
fn connect_soon(address: SocketAddr) -> TcpStream {
    for _ in 0..3000 {
        if let Ok(stream) = TcpStream::connect(address) {
            return stream;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    TcpStream::connect(address).unwrap()
}
