//! A control plane in the test's process, with files that the test replaces.

use std::{future::Future, net::Ipv4Addr, path::PathBuf, sync::Arc, time::Duration};

use headgate_control_plane::{
    metrics::Metrics,
    serve::{self, CancellationToken, Listen, Running, Security, Settings, tls::ServerTls},
    store::{Limits, Store},
    transaction::{Sink as _, SourceKind, Transaction, TriggeredChange},
};
use headgate_core::{Change, Protocol, Service, ServiceKey, ServicePort};
use tempfile::TempDir;

use super::authority::{Authority, Pair};

/// A guard against hanging. No test asserts on time.
pub(crate) const GUARD: Duration = Duration::from_secs(60);

pub(crate) struct Server {
    folder: TempDir,
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    pub(crate) running: Running,
}

impl Server {
    /// Starts a server that trusts `authority`. Its own certificate, for 127.0.0.1, comes from the
    /// same authority.
    pub(crate) async fn start(authority: &Authority) -> Self {
        Self::start_with(&authority.server(|_| {}), authority, Settings::default()).await
    }

    pub(crate) async fn start_with(own: &Pair, clients: &Authority, settings: Settings) -> Self {
        let folder = tempfile::tempdir().unwrap();
        own.write(folder.path(), &[clients]);
        Self::in_folder(folder, settings).await
    }

    /// Starts a server with the TLS files in `folder`.
    pub(crate) async fn in_folder(folder: TempDir, settings: Settings) -> Self {
        let [cert, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.path().join(name));
        let security = Security::Tls(ServerTls::load(cert, key, ca).unwrap());
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let settings = Settings { drain_grace: Duration::from_millis(100), ..settings };
        let listen = Listen::at((Ipv4Addr::LOCALHOST, 0).into());
        let (serving, counting) = (Arc::clone(&store), Arc::clone(&metrics));
        let running = serve::start(listen, security, settings, serving, counting, CancellationToken::new());
        let server = Self { folder, store, metrics, running: running.await.unwrap() };
        server.store.synced();
        server.put(1);
        server
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn url(&self) -> String {
        format!("https://{}", self.running.local_addr)
    }

    /// Commits a Service.
    pub(crate) fn put(&self, number: u8) {
        let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
        let key = ServiceKey::new("default", &format!("service-{number}"));
        let change = Change::from(Service::new(key, vec![Ipv4Addr::new(10, 96, 0, number).into()], vec![port]));
        let changes = vec![TriggeredChange { change, trigger_unix_ms: 0 }];
        let positions = vec![(SourceKind::Services, number.into())];
        self.commit(Transaction { changes, positions, ..Transaction::default() });
    }

    pub(crate) fn commit(&self, transaction: Transaction) {
        self.store.commit(transaction);
    }

    /// The value of a sample in the metrics, or 0 if the sample is missing.
    pub(crate) fn metric(&self, sample: &str) -> u64 {
        let text = self.metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }

    pub(crate) async fn until_metric(&self, sample: &str, value: u64) {
        eventually(sample, || async { self.metric(sample) == value }).await;
    }
}

/// Waits until a condition holds.
pub(crate) async fn eventually<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let holds = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(GUARD, holds).await.unwrap_or_else(|_| panic!("timed out waiting until {what}"));
}
