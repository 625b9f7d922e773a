//! A replica in the test's process, with a store that the test commits to.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use headgate_control_plane::{
    metrics::Metrics,
    serve::{self, CancellationToken, Listen, Running, Security, Settings},
    store::{Limits, Store},
    transaction::{Sink as _, SourceKind, Transaction, TriggeredChange},
};
use headgate_core::{Change, Endpoint, EndpointPort, Placement, Protocol, Service, ServiceKey, ServicePort};

pub(crate) struct Replica {
    pub(crate) store: Arc<Store>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) running: Running,
}

pub(crate) fn settings() -> Settings {
    Settings { replica_name: "replica-1".into(), drain_grace: Duration::from_millis(500), ..Settings::default() }
}

impl Replica {
    /// Starts a replica with an empty store whose source has been listed.
    pub(crate) async fn start() -> Self {
        let replica = Self::start_with(settings(), Security::Plaintext).await;
        replica.store.synced();
        replica
    }

    /// Starts a replica with an empty store whose source has not been listed.
    pub(crate) async fn start_with(settings: Settings, security: Security) -> Self {
        Self::start_limited(settings, security, Limits::default()).await
    }

    /// Starts a replica like [`Self::start_with`], with these limits of the store.
    pub(crate) async fn start_limited(settings: Settings, security: Security, limits: Limits) -> Self {
        Self::start_at((Ipv4Addr::LOCALHOST, 0).into(), settings, security, limits).await
    }

    /// Starts a replica like [`Self::start_limited`], at this address for agents.
    pub(crate) async fn start_at(address: SocketAddr, settings: Settings, security: Security, limits: Limits) -> Self {
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(limits, Arc::clone(&metrics)));
        let (serving, counting) = (Arc::clone(&store), Arc::clone(&metrics));
        let token = CancellationToken::new();
        let listen = Listen { metrics: Some((Ipv4Addr::LOCALHOST, 0).into()), ..Listen::at(address) };
        let running = serve::start(listen, security, settings, serving, counting, token).await.unwrap();
        Self { store, metrics, running }
    }

    pub(crate) fn put(&self, changes: impl IntoIterator<Item = Change>) {
        self.put_at(None, changes);
    }

    pub(crate) fn put_at(&self, position: Option<u64>, changes: impl IntoIterator<Item = Change>) {
        let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).collect();
        let positions = position.map(|position| (SourceKind::Services, position)).into_iter().collect();
        self.store.commit(Transaction { changes, positions, ..Transaction::default() });
    }

    /// The value of a sample in the metrics, or 0 if the sample is missing.
    pub(crate) fn metric(&self, sample: &str) -> u64 {
        let text = self.metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }
}

pub(crate) fn key(number: u16) -> ServiceKey {
    ServiceKey::new("default", &format!("service-{number}"))
}

pub(crate) fn service(number: u16, port: u16) -> Change {
    let [high, low] = number.to_be_bytes();
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port, node_port: 0 };
    Change::from(Service::new(key(number), vec![Ipv4Addr::new(10, 96, high, low).into()], vec![port]))
}

pub(crate) fn endpoint(service: u16, host: u8, port: u16) -> Change {
    let [high, low] = service.to_be_bytes();
    let ports = [EndpointPort::new("http", Protocol::Tcp, port)];
    let mut endpoint = Endpoint::new(Ipv4Addr::new(10, high, low, host).into(), Arc::new(ports));
    let placement = Placement { zone: Some("zone-a".into()), ..Placement::on(&format!("node-{}", host % 8)) };
    endpoint.placement = placement.into();
    Change::Endpoint(key(service), endpoint)
}

pub(crate) fn remove_endpoint(service: u16, host: u8) -> Change {
    let [high, low] = service.to_be_bytes();
    Change::RemoveEndpoint(key(service), Ipv4Addr::new(10, high, low, host).into())
}

pub(crate) fn remove_service(number: u16) -> Change {
    Change::RemoveService(key(number))
}

/// Services 1 to `count` with two endpoints each.
pub(crate) fn cluster(count: u16) -> impl Iterator<Item = Change> {
    (1..=count).flat_map(|number| [service(number, 80), endpoint(number, 1, 8080), endpoint(number, 2, 8080)])
}
