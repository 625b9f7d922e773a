//! Finds the addresses and ports of replicas and API servers, and of the name servers that lead to
//! them. No Service gets these.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use headgate_core::{Endpoint, Protocol, ServiceKey};
use headgate_listener::name_servers;
use tokio::time::{sleep, timeout};

use super::replicas::CONNECT_TIMEOUT;
use crate::serve::context::Context;

/// The pause between two looks at names, and at the endpoints of Services.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum number of addresses and ports that are reserved. Those of replicas come first.
const MAX_RESERVED: usize = 1_000;

/// Tells the store where replicas and API servers are: as options and names say, and as the
/// endpoints of their Services. If there are names, the name servers follow from them. A name that
/// cannot be resolved keeps its addresses. Never returns.
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
        let has_names = peers.iter().chain(&settings.api_server).any(|(host, _)| host.parse::<IpAddr>().is_err());
        let of_names = if has_names { name_servers() } else { BTreeSet::new() };
        let all = of_replicas.chain(of_servers).map(|at| (Protocol::Tcp, at)).chain(of_names);
        let all = all.map(|(by, at)| (by, SocketAddr::new(at.ip().to_canonical(), at.port())));
        // Every machine has the other addresses for itself.
        let all = all.filter(|(_, at)| !(at.ip().is_loopback() || at.ip().is_unspecified()));
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

#[cfg(test)]
mod tests {
    use headgate_core::frontends::Frontend;
    use headgate_proto::reserved_to_wire;

    use super::*;
    use crate::{
        metrics::Metrics,
        serve::context::Settings,
        store::{Limits, Store},
    };

    /// Waits until `expected` is reserved for a replica with this API server.
    async fn until_reserved(api_server: &str, expected: BTreeSet<Frontend>) {
        let api_server = Some((api_server.to_owned(), 6443));
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let settings = Settings { api_server, listen: Vec::new(), ..Settings::default() };
        let following = tokio::spawn(follow(Context::new(Arc::clone(&store), metrics, settings)));
        while store.reserved() != reserved_to_wire(&expected) {
            sleep(Duration::from_millis(5)).await;
        }
        following.abort();
    }

    /// Whoever takes the name server of replicas keeps them from finding each other and the API
    /// server.
    #[tokio::test]
    async fn name_servers_are_reserved_if_there_are_names() {
        let is_elsewhere = |at: &SocketAddr| !(at.ip().is_loopback() || at.ip().is_unspecified());
        let servers = name_servers().into_iter().filter(|(_, at)| is_elsewhere(at));
        // The name leads to this machine, which reserves nothing.
        until_reserved("localhost", servers.map(|(by, at)| Frontend::Address(at.ip(), by, at.port())).collect()).await;
        let address = Frontend::Address([192, 0, 2, 7].into(), Protocol::Tcp, 6443);
        until_reserved("192.0.2.7", [address].into()).await;
    }
}
