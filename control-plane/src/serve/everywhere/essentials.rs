//! Finds the addresses and ports of replicas and API servers, which no Service gets.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use headgate_core::{Endpoint, ServiceKey};
use tokio::{
    net::lookup_host,
    time::{sleep, timeout},
};

use super::replicas::{CONNECT_TIMEOUT, Replicas};
use crate::serve::context::Context;

/// The pause between two looks at addresses.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum number of addresses and ports that are reserved. Those of replicas come first.
const MAX_RESERVED: usize = 1_000;

/// Tells the store where replicas and API servers are: as options and names say, and as the
/// endpoints of their Services. A name that cannot be resolved keeps its addresses. Never returns.
pub(super) async fn follow(context: Arc<Context>, replicas: Option<Arc<Replicas>>) {
    let (settings, store) = (&context.settings, &context.store);
    let enrolment = settings.enrolment.as_ref().map(|enrolment| enrolment.listen);
    let own: Vec<SocketAddr> = [settings.ports.agents, settings.ports.inspect].into_iter().chain(enrolment).collect();
    let kubernetes = ServiceKey::new("default", "kubernetes");
    let endpoints = |key: &ServiceKey| store.endpoints(key).into_iter().map(|(endpoint, _)| endpoint);
    let ports_of = |Endpoint { address, ports, .. }| {
        (0..ports.len()).map(move |index| SocketAddr::new(address, ports[index].port))
    };
    let mut api_servers: Vec<SocketAddr> = Vec::new();
    loop {
        if let Some((host, port)) = &settings.api_server
            && let Ok(Ok(found)) = timeout(CONNECT_TIMEOUT, lookup_host((host.as_str(), *port))).await
        {
            api_servers = found.collect();
        }
        let others = replicas.as_ref().map(|replicas| replicas.addresses()).unwrap_or_default();
        let of_service = settings.balance_service.iter().flat_map(endpoints).map(|endpoint| endpoint.address);
        let hosts = own.iter().chain(&others).map(SocketAddr::ip).chain(of_service);
        let of_replicas = hosts.flat_map(|host| own.iter().map(move |own| SocketAddr::new(host, own.port())));
        let of_servers = api_servers.iter().copied().chain(endpoints(&kubernetes).flat_map(ports_of));
        let all = of_replicas.chain(of_servers).map(|at| SocketAddr::new(at.ip().to_canonical(), at.port()));
        // Every machine has the other addresses for itself.
        let all = all.filter(|at| !(at.ip().is_loopback() || at.ip().is_unspecified()));
        store.reserve(&all.take(MAX_RESERVED).collect());
        sleep(LOOK_INTERVAL).await;
    }
}
