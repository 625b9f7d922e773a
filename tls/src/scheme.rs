//! Whether the two ends have taken each other for one without TLS, or with.

use std::{
    io::{self, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs},
    time::Duration,
};

use rustls::Error;

/// For connecting, and for the answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The first byte of a TLS alert (RFC 8446, 5.1).
const ALERT: u8 = 21;

/// True when the error of a handshake says that the other end does not speak TLS at all.
#[must_use]
pub fn is_not_tls(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
    matches!(error, Some(Error::InvalidMessage(_)))
}

/// Asks in plaintext, and looks whether the answer is a TLS alert: how a URL with http:// is told that should have https://. What the client of a protocol sees of
/// the alert depends on chance. Blocks the thread for some seconds at the most. False when nobody answers.
#[must_use]
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
