//! Asks the pages of another service proxy.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use super::Synced;
use crate::http::AGENT_HEADER;

/// How long a proxy may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest page that is read: the metrics of a large cluster.
const MAX_BYTES: u64 = 8 << 20;
/// kube-proxy's metric, with a line for each IP family that has synced, and in older versions with
/// one line for all.
const LAST_SYNC: &str = "kubeproxy_sync_proxy_rules_last_timestamp_seconds";

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
    stream.take(MAX_BYTES).read_to_string(&mut answer)?;
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

/// True if a program that is not Headgate listens where kube-proxy serves health checks.
pub(super) fn is_serving_health(address: SocketAddr) -> bool {
    ask(address, "/healthz", |_| None::<()>).is_some()
}

/// Of which of these IP families kube-proxy has written its rules, as its metrics say; `None` if
/// they cannot be read. Its health page answers with success before it has written any, and it
/// writes one family after the other.
pub(super) fn synced(address: SocketAddr, families: &[&str]) -> Option<Synced> {
    let is_synced = |line: &str, family: &str| {
        let (labels, at) = line.strip_prefix(LAST_SYNC)?.rsplit_once(' ')?;
        Some((labels.is_empty() || labels.contains(family)) && at.parse::<f64>().is_ok_and(|at| at > 0.0))
    };
    let read = |page: Page| {
        let has = |family: &&str| page.body.lines().any(|line| is_synced(line, family) == Some(true));
        let count = families.iter().filter(|family| has(family)).count();
        page.is_ok().then_some(match count {
            0 => Synced::None,
            count if count < families.len() => Synced::Some,
            _ => Synced::All,
        })
    };
    ask(address, "/metrics", read).flatten()
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
    use std::{net::TcpListener, thread, time::Instant};

    use super::*;
    use crate::tests::ReservedPort;

    /// What `ask` returns if a program answers this. On a slow machine, an answer may come too
    /// late: then it asks again.
    fn answered<T>(answer: &'static str, ask: impl Fn(SocketAddr) -> T) -> T {
        for _ in 0..20 {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let server = thread::spawn(move || -> io::Result<()> {
                let (mut stream, _) = listener.accept()?;
                let mut request = [0; 4];
                stream.read_exact(&mut request)?;
                stream.write_all(answer.as_bytes())?;
                // Otherwise closing the socket would reset the connection before the answer is
                // read.
                stream.shutdown(std::net::Shutdown::Write)?;
                stream.read_to_end(&mut Vec::new()).map(drop)
            });
            let began = Instant::now();
            let result = ask(address);
            let is_in_time = began.elapsed() < ANSWER_TIMEOUT / 2;
            let served = server.join().unwrap();
            if is_in_time {
                served.unwrap();
                return result;
            }
        }
        panic!("no answer came in time");
    }

    #[test]
    fn a_program_at_the_addresses_of_kube_proxy_counts_unless_it_is_headgate() {
        let page = "HTTP/1.0 200 OK\r\nDate: now\r\n\r\niptables";
        assert_eq!(answered(page, mode), Some(Some("iptables".to_owned())));
        assert!(answered(page, is_serving_health));
        let ours = "HTTP/1.0 200 OK\r\nX-Headgate-Agent: 1\r\n\r\niptables";
        assert_eq!((answered(ours, mode), answered(ours, is_serving_health)), (None, false));
        for answer in ["HTTP/1.0 404 Not Found\r\n\r\nnone", "HTTP/1.0 200 OK\r\n\r\n<html>", "", "220 ready\r\n"] {
            assert_eq!(answered(answer, mode), Some(None), "{answer:?}");
        }
        assert!(answered("HTTP/1.0 503 Service Unavailable\r\n\r\n", is_serving_health));
        let reserved = ReservedPort::reserve().unwrap();
        let closed = reserved.address();
        assert_eq!((mode(closed), is_serving_health(closed), synced(closed, &[])), (None, false, None));
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_serving_health(silent.local_addr().unwrap()));
    }

    #[test]
    fn the_metrics_say_whether_kube_proxy_has_written_its_rules() {
        for (metrics, expected) in [
            (
                "# TYPE kubeproxy_sync_proxy_rules_last_timestamp_seconds gauge\nkubeproxy_sync_proxy_rules_last_timestamp_seconds 1.7e+09\n",
                Some(Synced::All),
            ),
            ("kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} 1.7e+09\n", Some(Synced::Some)),
            (
                "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} 1.7e+09\nkubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"} 1.7e+09\n",
                Some(Synced::All),
            ),
            (
                "# HELP kubeproxy_sync_proxy_rules_last_timestamp_seconds text 7\nkubeproxy_sync_proxy_rules_last_timestamp_seconds 0\n",
                Some(Synced::None),
            ),
            ("process_start_time_seconds 1\n", Some(Synced::None)),
        ] {
            let answer: &'static str = format!("HTTP/1.0 200 OK\r\n\r\n{metrics}").leak();
            assert_eq!(answered(answer, |address| synced(address, &["IPv4", "IPv6"])), expected, "{metrics}");
        }
        assert_eq!(answered("HTTP/1.0 404 Not Found\r\n\r\n", |address| synced(address, &["IPv4"])), None);
    }
}
