//! The server that opens and closes the sockets as the wanted ports change.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use headgate_core::{Family, ServiceKey, health_check_port::HealthCheckPort, iptables::NodePortAddresses};
use tokio::{sync::watch, task::JoinHandle, time::interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    HealthCheckMetrics,
    page::{self, Health, Page},
};
use crate::{
    listen::{Families, listen},
    node_inputs::NodeInputs,
    observers::{Changes, Mailbox},
};

/// Time between two attempts to open a socket. Also the time between two checks for changed
/// addresses of the node.
const RETRY_PERIOD: Duration = Duration::from_secs(5);

/// Serves all health-check node ports of this node.
#[derive(Debug)]
pub struct Server {
    mailbox: Mailbox<HealthCheckPort>,
    metrics: HealthCheckMetrics,
    inputs: watch::Receiver<NodeInputs>,
    health: Health,
    wanted: BTreeMap<Arc<ServiceKey>, HealthCheckPort>,
    open: BTreeMap<Arc<ServiceKey>, BTreeMap<SocketAddr, Listener>>,
    // The last error for each wanted socket that is not open.
    failed: BTreeMap<(Arc<ServiceKey>, SocketAddr), String>,
    addresses: [NodePortAddresses; 2],
}

#[derive(Debug)]
struct Listener {
    page: Arc<Page>,
    task: JoinHandle<()>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub(super) fn new(
        mailbox: Mailbox<HealthCheckPort>,
        metrics: HealthCheckMetrics,
        inputs: watch::Receiver<NodeInputs>,
        health: Health,
    ) -> Self {
        let addresses = Family::BOTH.map(|family| inputs.borrow().node_ports(family).clone());
        let (wanted, open, failed) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { mailbox, metrics, inputs, health, wanted, open, failed, addresses }
    }

    /// Serves until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut retry = interval(RETRY_PERIOD);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                changes = self.mailbox.take() => self.take(changes).await,
                _ = retry.tick() => self.update_sockets(BTreeSet::new()).await,
            }
        }
        self.metrics.listening.set(0);
    }

    async fn take(&mut self, changes: Changes<HealthCheckPort>) {
        let keys: BTreeSet<Arc<ServiceKey>> = changes.keys().cloned().collect();
        for (key, port) in changes {
            match port {
                Some(port) => drop(self.wanted.insert(key, port)),
                None => drop(self.wanted.remove(&key)),
            }
        }
        self.update_sockets(keys).await;
    }

    /// Opens and closes the sockets of these services and of services with failed sockets. If the
    /// node's addresses changed, updates the sockets of all services. Closes the unwanted sockets
    /// before it opens new sockets, so that a service can get a port that another service had.
    async fn update_sockets(&mut self, mut keys: BTreeSet<Arc<ServiceKey>>) {
        let addresses = Family::BOTH.map(|family| self.inputs.borrow().node_ports(family).clone());
        if addresses != self.addresses {
            self.addresses = addresses;
            keys.extend(self.wanted.keys().cloned());
        }
        // Try again to open the sockets that failed: their ports may be free now.
        keys.extend(self.failed.keys().map(|(key, _)| Arc::clone(key)));
        for key in &keys {
            let wanted = self.sockets(key);
            let open = self.open.remove(key).unwrap_or_default();
            let (keep, close): (BTreeMap<_, _>, BTreeMap<_, _>) =
                open.into_iter().partition(|(address, _)| wanted.contains_key(address));
            for (address, mut listener) in close {
                listener.task.abort();
                // The socket is closed once the task has ended. The result of the task is not
                // needed.
                let _ = (&mut listener.task).await;
                info!(service = %key, %address, "closed a health-check node port");
            }
            if !keep.is_empty() {
                self.open.insert(Arc::clone(key), keep);
            }
            self.failed.retain(|(failed, address), _| failed != key || wanted.contains_key(address));
        }
        for key in &keys {
            for (address, local_endpoints) in self.sockets(key) {
                match self.open.get(key).and_then(|open| open.get(&address)) {
                    Some(listener) => listener.page.set_local_endpoints(local_endpoints),
                    None => self.open(key, address, local_endpoints),
                }
            }
        }
        let listening: usize = self.open.values().map(BTreeMap::len).sum();
        self.metrics.listening.set(i64::try_from(listening).unwrap_or(i64::MAX));
    }

    fn open(&mut self, key: &Arc<ServiceKey>, address: SocketAddr, local_endpoints: u32) {
        // As in kube-proxy, each family has its own socket.
        match listen(address, Families::Own) {
            Ok(socket) => {
                info!(service = %key, %address, "opened a health-check node port");
                let page = Arc::new(Page::new(Arc::clone(key), local_endpoints, self.health.clone()));
                let task = tokio::spawn(page::serve(socket, Arc::clone(&page)));
                self.open.entry(Arc::clone(key)).or_default().insert(address, Listener { page, task });
                self.failed.remove(&(Arc::clone(key), address));
            }
            Err(error) => {
                self.metrics.bind_failures.inc();
                let error = error.to_string();
                let before = self.failed.insert((Arc::clone(key), address), error.clone());
                if before.as_ref() != Some(&error) {
                    warn!(
                        service = %key, %address, error,
                        "cannot listen at the service's healthCheckNodePort, so load balancers consider this node unhealthy; \
                         the agent tries again. Free the port, or give the service another healthCheckNodePort"
                    );
                }
            }
        }
    }

    /// The wanted sockets of a service, each with the number of local endpoints that the socket
    /// reports.
    fn sockets(&self, key: &Arc<ServiceKey>) -> BTreeMap<SocketAddr, u32> {
        let Some(port) = self.wanted.get(key) else { return BTreeMap::new() };
        let mut sockets = BTreeMap::new();
        for (family, addresses) in Family::BOTH.into_iter().zip(&self.addresses) {
            let Some(count) = port.local_endpoints(family) else { continue };
            let everywhere = [unspecified(family)];
            let addresses = match addresses {
                NodePortAddresses::All => &everywhere[..],
                NodePortAddresses::Only(addresses) => addresses,
            };
            sockets.extend(addresses.iter().map(|address| (SocketAddr::new(*address, port.port), count)));
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
