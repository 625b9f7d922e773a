//! One agent: the real session and reconcile loop, with a kernel that is only recorded.

use std::{
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
};

use headgate_core::{ServiceKey, State, digest::Digests};
use headgate_node_agent::{
    dataplane::fake::{Call, FakeControl, FakeDataplane},
    metrics::Metrics,
    reconcile::{Reconciler, Timing},
    session::{
        backoff::Backoff,
        client::{Session, SessionConfig},
        connect::ControlPlane,
        tls::AgentTls,
    },
    shared::Shared,
};
use headgate_tls::{Files, Side};
use tokio_util::sync::CancellationToken;

use super::certificates::{Certificates, Holder};

pub(crate) struct Agent {
    pub(crate) shared: Arc<Shared>,
    pub(crate) kernel: FakeControl,
    shutdown: CancellationToken,
    reconcile: Option<JoinHandle<()>>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.shutdown.cancel();
        self.shared.stop();
        if let Some(reconcile) = self.reconcile.take() {
            let ended = reconcile.join();
            assert!(ended.is_ok() || thread::panicking(), "the reconcile loop panicked");
        }
    }
}

impl Agent {
    /// Starts the agent of a node, which may use any of these replicas.
    pub(crate) fn start(node: &str, replicas: &[String], folder: &Path, certificates: &mut Certificates) -> Self {
        let tls = folder.join(node);
        certificates.folder(&tls, Holder::Node(node.to_owned()));
        let (backend, kernel) = FakeDataplane::new();
        let (shared, metrics) = (Arc::new(Shared::new(node)), Arc::new(Metrics::default()));
        let timing = Timing { backoff: quick(), ..Timing::default() };
        let (reconciler, progress) =
            Reconciler::new(Box::new(backend), Arc::clone(&shared), Arc::clone(&metrics), timing);
        let [cert, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| tls.join(name));
        let files = Files { side: Side::Client, cert, key, ca };
        let config = SessionConfig {
            node_name: node.into(),
            control_planes: replicas.iter().map(|url| ControlPlane::parse(url, false).unwrap()).collect(),
            tls: Some(AgentTls::new(files, Arc::clone(&metrics))),
            backoff: quick(),
        };
        let session = Session::new(config, Arc::clone(&shared), metrics, progress);
        let shutdown = CancellationToken::new();
        tokio::spawn(session.run(shutdown.clone()));
        let reconcile = thread::spawn(move || reconciler.run());
        Self { shared, kernel, shutdown, reconcile: Some(reconcile) }
    }

    /// Digests of what was programmed last.
    pub(crate) fn programmed(&self) -> Option<Digests> {
        self.kernel.calls().into_iter().rev().find_map(|call| match call {
            Call::Full(digests, _) | Call::Apply(_, digests) => Some(digests),
            Call::FindRefused(_) | Call::Verify | Call::Cleanup => None,
        })
    }

    /// The port of the only endpoint of the service that counts the source's steps; `None` before it is known.
    pub(crate) fn clock(&self, key: &ServiceKey) -> Option<u16> {
        let port = |state: &State| Some(state.entry(key)?.endpoints().values().next()?.ports.first()?.port);
        self.shared.with_state(port)
    }
}

/// Short pauses: there are few agents, and much is to go wrong in little time.
fn quick() -> Backoff {
    Backoff::new(std::time::Duration::from_millis(20), std::time::Duration::from_millis(400))
}
