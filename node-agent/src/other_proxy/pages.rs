//! Asks the pages of another service proxy.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use crate::http::AGENT_HEADER;

/// How long a proxy may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

struct Page {
    status: String,
    is_ours: bool,
    body: String,
}

fn get(address: SocketAddr, path: &str) -> io::Result<Page> {
    // Linux connects 0.0.0.0 and [::] to the node itself.
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.take(4096).read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let is_ours = head.lines().any(|line| line.to_ascii_lowercase().starts_with(AGENT_HEADER));
    let status = head.lines().next().unwrap_or_default().to_owned();
    Ok(Page { status, is_ours, body: body.trim().to_owned() })
}

impl Page {
    fn is_ok(&self) -> bool {
        self.status.split(' ').nth(1) == Some("200")
    }
}

/// `Some` if a program that is not Headgate listens where kube-proxy serves its metrics: its mode,
/// if it tells one.
pub(super) fn mode(address: SocketAddr) -> Option<Option<String>> {
    let is_mode = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase());
    ask(address, "/proxyMode", |page| (page.is_ok() && is_mode(&page.body)).then_some(page.body))
}

/// `Some` if a program that is not Headgate listens where kube-proxy serves health checks: whether
/// it answers with success.
pub(super) fn health(address: SocketAddr) -> Option<bool> {
    ask(address, "/healthz", |page| page.is_ok().then_some(())).map(|answer| answer.is_some())
}

/// `None` if nobody listens, or an agent of Headgate.
fn ask<T>(address: SocketAddr, path: &str, read: impl FnOnce(Page) -> Option<T>) -> Option<Option<T>> {
    match get(address, path) {
        Ok(page) if page.is_ours => None,
        Ok(page) => Some(read(page)),
        Err(error) => (!is_absent(&error)).then_some(None),
    }
}

/// True if nobody listens. A program that listens and does not answer may be a proxy that hangs.
fn is_absent(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, ConnectionRefused, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), AddrNotAvailable | ConnectionRefused | HostUnreachable | NetworkUnreachable)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{net::TcpListener, thread};

    use super::*;

    fn answered<T>(answer: &'static str, ask: impl FnOnce(SocketAddr) -> T) -> T {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4];
            stream.read_exact(&mut request).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            // Otherwise closing the socket would reset the connection before the answer is read.
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            stream.read_to_end(&mut Vec::new()).unwrap();
        });
        let result = ask(address);
        server.join().unwrap();
        result
    }

    #[test]
    fn a_program_at_the_addresses_of_kube_proxy_counts_unless_it_is_headgate() {
        let page = "HTTP/1.0 200 OK\r\nDate: now\r\n\r\niptables";
        assert_eq!(answered(page, mode), Some(Some("iptables".to_owned())));
        assert_eq!(answered(page, health), Some(true));
        let ours = "HTTP/1.0 200 OK\r\nX-Headgate-Agent: 1\r\n\r\niptables";
        assert_eq!((answered(ours, mode), answered(ours, health)), (None, None));
        for answer in ["HTTP/1.0 404 Not Found\r\n\r\nnone", "HTTP/1.0 200 OK\r\n\r\n<html>", "", "220 ready\r\n"] {
            assert_eq!(answered(answer, mode), Some(None), "{answer:?}");
        }
        assert_eq!(answered("HTTP/1.0 503 Service Unavailable\r\n\r\n", health), Some(false));
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert_eq!((mode(closed), health(closed)), (None, None));
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(health(silent.local_addr().unwrap()), Some(false));
    }
}
