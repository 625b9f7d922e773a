//! Detection of connections where only one side uses TLS.

use std::{
    io::{self, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs},
    time::Duration,
};

use rustls::Error;

/// The timeout of the connection, and the timeout of the answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The first byte of a TLS alert (RFC 8446, 5.1).
const ALERT: u8 = 21;

/// Returns whether a handshake failed because the other side does not use TLS.
pub fn is_not_tls(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
    matches!(error, Some(Error::InvalidMessage(_)))
}

/// Returns whether a server uses TLS: it answers plaintext with an alert, which HTTP/2 clients do
/// not report reliably. False without an answer. Blocks for up to a few seconds.
pub fn speaks_tls(address: impl ToSocketAddrs) -> bool {
    let ask = |address| -> io::Result<u8> {
        let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut first = [0];
        stream.read_exact(&mut first)?;
        Ok(first[0])
    };
    let mut addresses = address.to_socket_addrs().into_iter().flatten();
    addresses.any(|address| ask(address).is_ok_and(|first| first == ALERT))
}
