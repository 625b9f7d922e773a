//! Finds the addresses and ports of replicas and API servers, which no Service gets.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use headgate_core::{Endpoint, ServiceKey};
use tokio::time::{sleep, timeout};

use super::replicas::CONNECT_TIMEOUT;
use crate::serve::context::Context;

/// The pause between two looks at names, and at the endpoints of Services.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum number of addresses and ports that are reserved. Those of replicas come first.
const MAX_RESERVED: usize = 1_000;

/// Tells the store where replicas and API servers are: as options and names say, and as the
/// endpoints of their Services. A name that cannot be resolved keeps its addresses. Never returns.
pub(super) async fn follow(context: Arc<Context>) {
    let (settings, store) = (&context.settings, &context.store);
    let peers: Vec<_> = settings.peers.iter().flat_map(|peers| peers.names.clone()).collect();
    let ports: BTreeSet<u16> = settings.listen.iter().map(SocketAddr::port).collect();
    let kubernetes = ServiceKey::new("default", "kubernetes");
    let endpoints = |key: &ServiceKey| store.endpoints(key).into_iter().map(|(endpoint, _)| endpoint);
    let ports_of = |Endpoint { address, ports, .. }| {
        (0..ports.len()).map(move |index| SocketAddr::new(address, ports[index].port))
    };
    let (mut replicas, mut api_servers) = (BTreeMap::new(), BTreeMap::new());
    loop {
        resolve(&peers, &mut replicas).await;
        resolve(settings.api_server.as_slice(), &mut api_servers).await;
        let of_service = settings.balance_service.iter().flat_map(endpoints).map(|endpoint| endpoint.address);
        let hosts = settings.listen.iter().chain(replicas.values().flatten()).map(SocketAddr::ip).chain(of_service);
        let of_replicas = hosts.flat_map(|host| ports.iter().map(move |port| SocketAddr::new(host, *port)));
        let of_servers = api_servers.values().flatten().copied().chain(endpoints(&kubernetes).flat_map(ports_of));
        let all = of_replicas.chain(of_servers).map(|at| SocketAddr::new(at.ip().to_canonical(), at.port()));
        // Every machine has the other addresses for itself.
        let all = all.filter(|at| !(at.ip().is_loopback() || at.ip().is_unspecified()));
        store.reserve(&all.take(MAX_RESERVED).collect());
        sleep(LOOK_INTERVAL).await;
    }
}

/// Resolves names and ports.
async fn resolve<'a>(names: &'a [(String, u16)], known: &mut BTreeMap<&'a str, Vec<SocketAddr>>) {
    for (host, port) in names {
        if let Ok(Ok(found)) = timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((host.as_str(), *port))).await {
            known.insert(host, found.collect());
        }
    }
}
