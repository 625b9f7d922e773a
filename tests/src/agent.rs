//! An agent inside the test's process: the real session and reconcile loop, with a dataplane in
//! memory that records what it programs.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result};
use headgate_core::digest::Digests;
use headgate_listener::Carrier;
use headgate_node_agent::{
    backoff::Backoff,
    control_planes::ControlPlane,
    reconcile::{Reconciler, SyncMetrics, Timing},
    session::{
        client::{Session, SessionConfig},
        metrics::SessionMetrics,
        tls::AgentTls,
    },
    state::AgentState,
};
use headgate_tls::Files;
use tokio_util::sync::CancellationToken;

use crate::in_memory::{self, Call, Control};

/// An agent inside the test's process. Dropping this value stops the agent.
pub struct Agent {
    /// Records the dataplane's calls and sets their results.
    pub kernel: Control,
    /// The state that the session has received.
    pub shared: Arc<AgentState>,
    metrics: SessionMetrics,
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
    /// Starts the agent of a node with an empty state. The agent may use any of the URLs in
    /// `replicas`, over plain HTTP if `tls` is `None`, and over TCP if `carrier` is `None`.
    ///
    /// # Errors
    /// A URL is invalid, or the reconcile thread cannot be started.
    pub fn start(
        node: &str,
        replicas: &[String],
        tls: Option<Files>,
        backoff: fn() -> Backoff,
        carrier: Option<Arc<dyn Carrier>>,
    ) -> Result<Self> {
        let (backend, kernel) = in_memory::dataplane();
        let (shared, metrics) = (Arc::new(AgentState::new(node)), SessionMetrics::default());
        let timing = Timing { backoff: backoff(), ..Timing::default() };
        let (reconciler, progress) =
            Reconciler::new(Box::new(backend), Arc::clone(&shared), SyncMetrics::default(), timing);
        let parse = |url: &String| ControlPlane::parse(url, tls.is_none());
        let control_planes: Result<Vec<_>, _> = replicas.iter().map(parse).collect();
        let config = SessionConfig {
            node_name: node.into(),
            control_planes: control_planes.map_err(anyhow::Error::msg)?,
            tls: tls.map(|files| AgentTls::new(files, metrics.tls.clone())),
            backoff: backoff(),
            carrier,
        };
        let session = Session::new(config, Arc::clone(&shared), metrics.clone(), progress);
        let shutdown = CancellationToken::new();
        tokio::spawn(session.run(shutdown.clone()));
        let thread = thread::Builder::new().name(format!("reconcile {node}"));
        let reconcile = thread.spawn(move || reconciler.run()).context("starting a reconcile loop")?;
        Ok(Self { kernel, shared, metrics, shutdown, reconcile: Some(reconcile) })
    }

    /// The digests of the last programmed state, or `None` if the agent has programmed none so far.
    #[must_use]
    pub fn programmed(&self) -> Option<Digests> {
        self.kernel.calls().into_iter().rev().find_map(|call| match call {
            Call::Full(digests, _) | Call::Apply(_, digests) => Some(digests),
            Call::FindFaults(_) | Call::Check | Call::Verify | Call::Cleanup => None,
        })
    }

    /// The number of streams that the agent opened after its first stream.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.metrics.reconnects.get()
    }
}
