//! Health-check node ports (`spec.healthCheckNodePort`): an external load balancer asks each
//! node at this port whether the node has local endpoints for a Service.
//!
//! [`headgate_core::view`] decides what a port answers. Ports open and close after the
//! rules are in place. If a port cannot be bound, the server retries and continues with the other
//! ports.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use headgate_core::{
    Family, Service, ServiceKey,
    iptables::NodePortAddresses,
    view::{HealthCheckPort, health_check_port},
};
use headgate_listener::{Families, HttpConnections, listen, open_files};
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use tokio::{sync::watch, task::JoinHandle, time::interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Changes, Follower, Mailbox};
use crate::{
    metric_registry::{AGENT, metrics},
    node_inputs::NodeInputs,
    state::progress::Backlog,
};

metrics! {
    /// Metrics of the health-check node ports.
    pub struct HealthCheckMetrics {}
    AGENT {
        pub listening: Gauge = "health_check_listeners", "Sockets that listen at health-check node ports";
        pub bind_failures: Counter = "health_check_bind_failures",
            "Attempts to listen at a health-check node port that failed";
    }
}

/// The observer that sends the wanted ports to the server.
pub type HealthCheckPorts = Follower<HealthCheckPort>;

/// Returns the observer, and the server. The caller runs the server on the async runtime.
///
/// `inputs` provides the addresses that answer. If a change in `backlog` has waited for longer than
/// `patience`, the proxy as a whole does not work, and every port answers 503. The ports share the
/// limits of `connections`.
pub fn new(
    metrics: HealthCheckMetrics,
    inputs: watch::Receiver<NodeInputs>,
    backlog: Arc<Backlog>,
    patience: Duration,
    connections: Arc<HttpConnections>,
) -> (HealthCheckPorts, PortServer) {
    let (ports, mailbox) = Follower::new(Service::has_health_check_node_port, health_check_port);
    let (wanted, open, failed) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    (ports, PortServer { mailbox, metrics, inputs, backlog, patience, connections, wanted, open, failed })
}

// The HTTP answer at one health-check node port.

/// The header with the number of local endpoints. Load balancers may weigh by it.
const WEIGHT_HEADER: &str = "x-load-balancing-endpoint-weight";

/// The page at one socket. It shows the number of local endpoints of one service in one family.
#[derive(Debug)]
struct PortPage {
    key: Arc<ServiceKey>,
    local_endpoints: AtomicU32,
    /// The proxy as a whole works if no change in the backlog has waited for longer than
    /// `patience`. `/livez` uses the same test.
    backlog: Arc<Backlog>,
    patience: Duration,
}

impl PortPage {
    /// Answers every request. As in kube-proxy, method and path do not matter.
    fn answer(&self) -> Response {
        let local_endpoints = self.local_endpoints.load(Ordering::Relaxed);
        let is_proxy_healthy = self.backlog.health(self.patience).is_alive();
        let body = serde_json::json!({
            "service": { "namespace": self.key.namespace.as_str(), "name": self.key.name.as_str() },
            "localEndpoints": local_endpoints,
            "serviceProxyHealthy": is_proxy_healthy,
        });
        let is_ok = local_endpoints > 0 && is_proxy_healthy;
        let status = if is_ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let weight = [(WEIGHT_HEADER, local_endpoints.to_string())];
        (status, [(header::X_CONTENT_TYPE_OPTIONS, "nosniff")], weight, Json(body)).into_response()
    }
}

// The server that opens and closes the sockets as the wanted ports change.

/// Time between two attempts to open a socket, and two checks of the node's addresses.
const RETRY_PERIOD: Duration = Duration::from_secs(5);

/// The sockets take at most this part of the limit of open files.
const PART_OF_OPEN_FILES: u64 = 8;

type Socket = (Arc<ServiceKey>, SocketAddr);

/// Serves all health-check node ports of this node.
#[derive(Debug)]
pub struct PortServer {
    mailbox: Mailbox<HealthCheckPort>,
    metrics: HealthCheckMetrics,
    inputs: watch::Receiver<NodeInputs>,
    backlog: Arc<Backlog>,
    patience: Duration,
    connections: Arc<HttpConnections>,
    wanted: BTreeMap<Arc<ServiceKey>, HealthCheckPort>,
    open: BTreeMap<Socket, PortListener>,
    /// The last error for each wanted socket that is not open.
    failed: BTreeMap<Socket, String>,
}

#[derive(Debug)]
struct PortListener {
    page: Arc<PortPage>,
    task: JoinHandle<()>,
}

impl Drop for PortListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PortServer {
    /// Serves until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut retry = interval(RETRY_PERIOD);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                changes = self.mailbox.take() => self.take(changes),
                _ = retry.tick() => {}
            }
            self.update_sockets().await;
        }
        self.metrics.listening.set(0);
    }

    fn take(&mut self, changes: Changes<HealthCheckPort>) {
        for (key, port) in changes {
            match port {
                Some(port) => drop(self.wanted.insert(key, port)),
                None => drop(self.wanted.remove(&key)),
            }
        }
    }

    /// Opens and closes sockets, and tries failed ones again. Closes first, so that a service can
    /// get a port that another one had.
    async fn update_sockets(&mut self) {
        let wanted = self.sockets();
        let (keep, close): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.open).into_iter().partition(|(socket, _)| wanted.contains_key(socket));
        self.open = keep;
        for ((key, address), mut listener) in close {
            listener.task.abort();
            // The socket is closed once the task has ended. The result of the task is not needed.
            let _ = (&mut listener.task).await;
            info!(service = %key, %address, "closed a health-check node port");
        }
        self.failed.retain(|socket, _| wanted.contains_key(socket));
        for (socket, local_endpoints) in wanted {
            match self.open.get(&socket) {
                Some(listener) => listener.page.local_endpoints.store(local_endpoints, Ordering::Relaxed),
                None => self.open(socket, local_endpoints),
            }
        }
        self.metrics.listening.set(i64::try_from(self.open.len()).unwrap_or(i64::MAX));
    }

    fn open(&mut self, socket: Socket, local_endpoints: u32) {
        let (key, address) = &socket;
        let most = open_files::limit() / PART_OF_OPEN_FILES;
        // As in kube-proxy, each family has its own socket.
        let listening = match self.open.len() as u64 {
            open if open < most => listen(*address, Families::Own),
            _ => {
                Err(io::Error::other(format!("the limit of open files (ulimit -n) allows only {most} of these ports")))
            }
        };
        match listening {
            Ok(listening) => {
                info!(service = %key, %address, "opened a health-check node port");
                let (backlog, patience) = (Arc::clone(&self.backlog), self.patience);
                let local_endpoints = local_endpoints.into();
                let page = Arc::new(PortPage { key: Arc::clone(key), local_endpoints, backlog, patience });
                let answering = Arc::clone(&page);
                let pages = Router::new().fallback(move || async move { answering.answer() });
                let connections = Arc::clone(&self.connections);
                let task = tokio::spawn(connections.serve("health_check_node_port", listening, pages));
                self.failed.remove(&socket);
                self.open.insert(socket, PortListener { page, task });
            }
            Err(error) => {
                self.metrics.bind_failures.inc();
                let error = error.to_string();
                if self.failed.get(&socket) != Some(&error) {
                    warn!(
                        service = %key, %address, error,
                        "cannot listen at the service's healthCheckNodePort, so load balancers consider this node unhealthy; \
                         the agent tries again. Free the port, or give the service another healthCheckNodePort"
                    );
                    self.failed.insert(socket, error);
                }
            }
        }
    }

    /// The wanted sockets, each with the number of local endpoints that the socket reports. Their
    /// number does not grow with that of the other Services.
    fn sockets(&self) -> BTreeMap<Socket, u32> {
        let (mut sockets, inputs) = (BTreeMap::new(), self.inputs.borrow());
        for family in Family::BOTH {
            let everywhere = [unspecified(family)];
            let addresses = match inputs.node_ports(family) {
                NodePortAddresses::All => &everywhere[..],
                NodePortAddresses::Only(addresses) => addresses,
            };
            for (key, port) in &self.wanted {
                let Some(count) = port.local_endpoints[family as usize] else { continue };
                let at = |address: &IpAddr| (Arc::clone(key), SocketAddr::new(*address, port.port));
                sockets.extend(addresses.iter().map(|address| (at(address), count)));
            }
        }
        sockets
    }
}

fn unspecified(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}
