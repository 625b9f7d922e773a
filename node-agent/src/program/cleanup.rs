//! `--cleanup-stay`: the cleanup of a DaemonSet, whose pods wait for another proxy, clean their
//! node, and stay.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tracing::info;

use crate::options::Options;

/// How long a pod waits for another proxy, before it ends with the reason. The kubelet starts it
/// again.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_secs(1);
/// The time between kube-proxy's rules of its first IP family and those of the other.
const OTHER_FAMILY: Duration = Duration::from_secs(10);
/// How long a proxy may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest page of metrics that is read.
const MAX_METRICS_BYTES: u64 = 8 << 20;
/// What the probe of the pod looks for.
const IS_CLEAN: &str = "/tmp/headgate-is-clean";

/// Waits until another proxy has written its rules. The error says that none has.
pub(super) fn until_replaced(options: &Options) -> anyhow::Result<()> {
    let address = options.configured()?.settings.metrics_bind_address;
    let address =
        address.context("--cleanup-stay: write the address of kube-proxy's metrics as --metrics-bind-address")?;
    let until = Instant::now() + PATIENCE;
    while !metrics(address).is_ok_and(|page| is_of_complete_proxy(&page)) {
        anyhow::ensure!(Instant::now() < until, "{}", nothing_else(address));
        thread::sleep(PAUSE);
    }
    thread::sleep(OTHER_FAMILY);
    Ok(())
}

/// Tells the probe that the node is clean, and returns only with an error.
pub(super) fn stay() -> anyhow::Result<()> {
    fs::write(IS_CLEAN, "").with_context(|| format!("--cleanup-stay: writing {IS_CLEAN}"))?;
    info!("this node is clean");
    loop {
        thread::park();
    }
}

fn nothing_else(address: SocketAddr) -> String {
    format!(
        "--cleanup-stay: no other service proxy has written its rules on this node (its metrics at {address} would say so), so Headgate's \
         rules stay, because nothing else would forward. Let kube-proxy return first (headgatectl migrate run --back), or remove them in \
         any case (--cleanup-stay=always)"
    )
}

fn metrics(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(format!("GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut page = String::new();
    stream.take(MAX_METRICS_BYTES).read_to_string(&mut page)?;
    Ok(page)
}

/// Whether a page of metrics belongs to another proxy, which has written its rules. kube-proxy's
/// health page answers before the first sync, and an agent of Headgate serves the same metrics.
fn is_of_complete_proxy(page: &str) -> bool {
    let synced = |line: &str| {
        let value = line.strip_prefix("kubeproxy_sync_proxy_rules_last_timestamp_seconds")?.rsplit(' ').next()?;
        value.parse::<f64>().ok().filter(|at| *at > 0.0)
    };
    !page.lines().any(|line| line.starts_with("headgate_")) && page.lines().any(|line| synced(line).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_proxy_that_has_written_its_rules_counts() {
        const METRIC: &str = "kubeproxy_sync_proxy_rules_last_timestamp_seconds";
        for (page, is_complete) in [
            (format!("HTTP/1.0 200 OK\r\n\r\n# TYPE {METRIC} gauge\n{METRIC} 1.7e+09\n"), true),
            (format!("{METRIC}{{ip_family=\"IPv4\"}} 0\n{METRIC}{{ip_family=\"IPv6\"}} 1.7e+09\n"), true),
            (format!("# HELP {METRIC} text 7\n{METRIC} 0\n"), false),
            (format!("{METRIC} 1.7e+09\nheadgate_agent_info 1\n"), false),
            ("HTTP/1.0 404 Not Found\r\n\r\n".to_owned(), false),
        ] {
            assert_eq!(is_of_complete_proxy(&page), is_complete, "{page}");
        }
    }
}
