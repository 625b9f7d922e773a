//! One agent: the real session and reconcile loop, with a kernel that is only recorded.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result};
use headgate_core::digest::Digests;
use headgate_node_agent::{
    dataplane::fake::{Call, FakeControl, FakeDataplane},
    metrics::Metrics,
    reconcile::{Reconciler, Timing},
    session::{
        backoff::Backoff,
        client::{Session, SessionConfig},
        connect::ControlPlane,
    },
    shared::Shared,
};
use tokio_util::sync::CancellationToken;

/// See the module. Dropping it ends it.
pub struct Agent {
    kernel: FakeControl,
    metrics: Arc<Metrics>,
    shared: Arc<Shared>,
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
    /// Starts the agent of a node, which may use any of these replicas. It holds nothing.
    ///
    /// # Errors
    /// When a URL cannot be used.
    pub fn start(node: &str, replicas: &[String]) -> Result<Self> {
        let (backend, kernel) = FakeDataplane::new();
        let (shared, metrics) = (Arc::new(Shared::new(node)), Arc::new(Metrics::default()));
        let (reconciler, progress) =
            Reconciler::new(Box::new(backend), Arc::clone(&shared), Arc::clone(&metrics), Timing::default());
        let control_planes: Result<Vec<_>, _> = replicas.iter().map(|url| ControlPlane::parse(url, true)).collect();
        let config = SessionConfig {
            node_name: node.into(),
            control_planes: control_planes?,
            tls: None,
            backoff: Backoff::default(),
        };
        let session = Session::new(config, Arc::clone(&shared), Arc::clone(&metrics), progress);
        let shutdown = CancellationToken::new();
        tokio::spawn(session.run(shutdown.clone()));
        let thread = thread::Builder::new().name(format!("reconcile {node}"));
        let reconcile = thread.spawn(move || reconciler.run()).context("starting a reconcile loop")?;
        Ok(Self { kernel, metrics, shared, shutdown, reconcile: Some(reconcile) })
    }

    /// Digests of what was programmed last; `None` before the first.
    #[must_use]
    pub fn programmed(&self) -> Option<Digests> {
        self.kernel.calls().into_iter().rev().find_map(|call| match call {
            Call::Full(digests, _) | Call::Apply(_, digests) => Some(digests),
            Call::FindRefused(_) | Call::Verify | Call::Cleanup => None,
        })
    }

    /// Streams that were begun after the first one.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.metrics.reconnects.get()
    }
}
