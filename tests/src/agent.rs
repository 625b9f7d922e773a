//! An agent inside the test's process: the real session and reconcile loop over a dataplane that records what is programmed.

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
        tls::AgentTls,
    },
    shared::Shared,
};
use headgate_tls::Files;
use tokio_util::sync::CancellationToken;

/// See the module. Dropping it ends it.
pub struct Agent {
    /// What the dataplane was asked, and what it answers.
    pub kernel: FakeControl,
    /// The state that the session has received.
    pub shared: Arc<Shared>,
    metrics: Arc<Metrics>,
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
    /// Starts the agent of a node without any state. It may use any of these replicas, by plain HTTP if `tls` is `None`.
    ///
    /// # Errors
    /// A URL cannot be used.
    pub fn start(node: &str, replicas: &[String], tls: Option<Files>, backoff: fn() -> Backoff) -> Result<Self> {
        let (backend, kernel) = FakeDataplane::new();
        let (shared, metrics) = (Arc::new(Shared::new(node)), Arc::new(Metrics::default()));
        let timing = Timing { backoff: backoff(), ..Timing::default() };
        let (reconciler, progress) =
            Reconciler::new(Box::new(backend), Arc::clone(&shared), Arc::clone(&metrics), timing);
        let parse = |url: &String| ControlPlane::parse(url, tls.is_none());
        let control_planes: Result<Vec<_>, _> = replicas.iter().map(parse).collect();
        let config = SessionConfig {
            node_name: node.into(),
            control_planes: control_planes?,
            tls: tls.map(|files| AgentTls::new(files, Arc::clone(&metrics))),
            backoff: backoff(),
        };
        let session = Session::new(config, Arc::clone(&shared), Arc::clone(&metrics), progress);
        let shutdown = CancellationToken::new();
        tokio::spawn(session.run(shutdown.clone()));
        let thread = thread::Builder::new().name(format!("reconcile {node}"));
        let reconcile = thread.spawn(move || reconciler.run()).context("starting a reconcile loop")?;
        Ok(Self { kernel, shared, metrics, shutdown, reconcile: Some(reconcile) })
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
