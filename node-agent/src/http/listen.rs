//! Serves pages on an address, and retries if the address is in use.

use std::{
    io,
    net::{Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::Router;
use headgate_listener::{Families, HttpConnections, listen};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::backoff::{Backoff, Jitter};

/// Listens on an address in the same way as Go's `net.Listen("tcp", …)`, which kube-proxy uses.
/// Both `0.0.0.0` and `[::]` mean all addresses of both families. On a host without IPv6, `0.0.0.0`
/// means all IPv4 addresses.
fn listen_as_go(address: SocketAddr) -> io::Result<TcpListener> {
    if address.is_ipv4() && address.ip().is_unspecified() {
        match listen((Ipv6Addr::UNSPECIFIED, address.port()).into(), Families::Both) {
            Err(error) if is_without_ipv6(&error) => {}
            listening => return listening,
        }
    }
    listen(address, Families::Both)
}

/// True if the error shows that the host has no IPv6, or no interface with IPv6.
fn is_without_ipv6(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAFNOSUPPORT) || error.kind() == io::ErrorKind::AddrNotAvailable
}

/// A server for some pages on one address.
#[derive(Debug)]
pub struct Server {
    /// The purpose of the port, for metrics.
    pub port: &'static str,
    /// The names of the pages for the log, such as "/healthz and /livez".
    pub what: &'static str,
    /// The setting that determines the address, for the log.
    pub setting: &'static str,
    /// The address.
    pub address: SocketAddr,
    /// The pages.
    pub app: Router,
    /// The connections among which those of this server count.
    pub connections: Arc<HttpConnections>,
    /// The socket; `None` until the server listens.
    pub listener: Option<TcpListener>,
}

impl Server {
    /// Binds the address without retries, for `--bind-address-hard-fail`.
    /// Errors: the address cannot be bound. The sentence names the remedy.
    pub fn bind_now(&mut self) -> Result<(), String> {
        let Self { what, setting, address, .. } = *self;
        let bound = listen_as_go(address).map_err(|error| {
            format!(
                "cannot serve {what} on {address}: {error}; free the address, pass another {setting}, or leave out --bind-address-hard-fail"
            )
        });
        self.listener = Some(bound?);
        Ok(())
    }

    /// Serves until `shutdown`. If the address cannot be bound, logs the error and retries.
    /// Forwarding does not depend on the pages.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let serve = async {
            let listener = self.bound().await;
            if let Ok(address) = listener.local_addr() {
                info!(%address, "serving {}", self.what);
            }
            self.connections.serve(self.port, listener, self.app).await;
        };
        shutdown.run_until_cancelled(serve).await;
    }

    async fn bound(&mut self) -> TcpListener {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30), Jitter::Full);
        loop {
            let Self { what, setting, address, .. } = *self;
            match self.listener.take().map_or_else(|| listen_as_go(address), Ok) {
                Ok(listener) => return listener,
                Err(error) => {
                    error!(%error, %address, "cannot serve {what}; trying again. Pass another {setting} if the address is taken");
                }
            }
            tokio::time::sleep(backoff.next_pause()).await;
        }
    }
}
