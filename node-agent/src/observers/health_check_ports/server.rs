//! The server that opens and closes the sockets as the wanted ports change.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::Router;
use headgate_core::{Family, ServiceKey, health_check_port::HealthCheckPort, iptables::NodePortAddresses};
use headgate_listener::{Families, HttpConnections, listen, open_files};
use tokio::{sync::watch, task::JoinHandle, time::interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{HealthCheckMetrics, page::PortPage};
use crate::{
    node_inputs::NodeInputs,
    observers::{Changes, Mailbox},
    state::backlog::Backlog,
};

/// Time between two attempts to open a socket. Also the time between two checks for changed
/// addresses of the node.
const RETRY_PERIOD: Duration = Duration::from_secs(5);

/// The sockets take at most this part of the limit of open files.
const PART_OF_OPEN_FILES: u64 = 8;

/// A wanted socket: a service, and the address and port.
type Socket = (Arc<ServiceKey>, SocketAddr);

/// Serves all health-check node ports of this node.
#[derive(Debug)]
pub struct PortServer {
    pub(super) mailbox: Mailbox<HealthCheckPort>,
    pub(super) metrics: HealthCheckMetrics,
    pub(super) inputs: watch::Receiver<NodeInputs>,
    pub(super) backlog: Arc<Backlog>,
    pub(super) patience: Duration,
    pub(super) connections: Arc<HttpConnections>,
    pub(super) wanted: BTreeMap<Arc<ServiceKey>, HealthCheckPort>,
    pub(super) open: BTreeMap<Socket, PortListener>,
    /// The last error for each wanted socket that is not open.
    pub(super) failed: BTreeMap<Socket, String>,
}

#[derive(Debug)]
pub(super) struct PortListener {
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

    /// Opens and closes sockets, and tries again to open those that failed: their ports may be free
    /// now. Closes the unwanted sockets before it opens new sockets, so that a service can get a
    /// port that another service had.
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
