//! The node agent: keeps one node's kernel at the state that a control plane streams to it.
//!
//! [`session`] → [`shared`] (the state, held once) → [`reconcile`] → [`backend`] → kernel, and back as an ACK.
//! Forwarding outlives all of it: an agent that stops, or loses its control plane, leaves the rules in place.

pub mod backend;
pub mod http;
pub mod metrics;
pub mod options;
pub mod reconcile;
pub mod session;
pub mod shared;

use std::{sync::Arc, thread};

use headgate_proto::v1;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    backend::{Backend, BackendError},
    http::Pages,
    metrics::Metrics,
    options::{Options, OptionsError},
    reconcile::{Reconciler, Timing},
    session::{
        backoff::Backoff,
        client::{Session, SessionConfig},
    },
    shared::Shared,
};

/// Why the agent could not start, or ended although nobody asked it to. An unreachable control plane is never the reason.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The options contradict each other.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// This machine cannot run the backend.
    #[error("cannot program this node: {0}")]
    Backend(#[from] BackendError),
    /// The system gives us no thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
    /// A defect: the reconcile loop ended. The rules stay; starting again repairs.
    #[error("the reconcile loop ended unexpectedly; this is a defect of the agent")]
    ReconcileEnded,
}

/// Runs the agent until `shutdown`, with the backend that the options ask for. The rules stay in the kernel.
///
/// # Errors
/// The agent cannot start as configured. Nothing that happens later on the stream ends it.
pub async fn run(options: Options, shutdown: CancellationToken) -> Result<(), AgentError> {
    let backend = backend::build(&options)?;
    run_with(options, backend, shutdown).await
}

/// The same, with a backend of the caller's.
///
/// # Errors
/// As [`run`].
pub async fn run_with(
    options: Options,
    backend: Box<dyn Backend>,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let node_name = options.node_name()?;
    let (control_planes, tls) = options.control_planes()?;
    let degraded = backend.degraded();
    for sentence in &degraded {
        warn!("{sentence}");
    }
    let status = v1::AgentStatus { backend: backend.name().to_owned(), degraded: degraded.clone() };
    info!(node = %node_name, backend = status.backend, version = env!("CARGO_PKG_VERSION"), "starting");

    let backend_name: Arc<str> = backend.name().into();
    let shared = Arc::new(Shared::new(&node_name));
    let metrics = Arc::new(Metrics::default());
    let Options { min_sync_period, sync_period, .. } = options;
    let timing = Timing { min_sync_period, sync_period, backoff: Backoff::default() };
    let (reconciler, progress) = Reconciler::new(backend, Arc::clone(&shared), Arc::clone(&metrics), timing);
    let config = SessionConfig { node_name, control_planes, tls, status, backoff: Backoff::default() };
    let session = Session::new(config, Arc::clone(&shared), Arc::clone(&metrics), progress.clone());
    let pages = Pages { metrics, progress, backend: backend_name, degraded: degraded.into() };

    let (ended, reconcile_ended) = oneshot::channel::<()>();
    let thread = thread::Builder::new().name("reconcile".into()).spawn(move || {
        // Dropped on the way out, also by a panic: then the receiver wakes.
        let _ended = ended;
        reconciler.run();
    })?;
    // Ends what was started here, however this function ends.
    let running = shutdown.child_token();
    let _stops = running.clone().drop_guard();
    let stop_thread = StopOnDrop(Arc::clone(&shared));
    tokio::spawn(http::serve(options.metrics_bind_address, pages, running.clone()));
    let unexpected = tokio::select! {
        () = session.run(running) => false,
        _ = reconcile_ended => true,
    };
    drop(stop_thread);
    // What the kernel is at is finished: rules are written whole or not at all.
    let joined = tokio::task::spawn_blocking(move || thread.join()).await;
    let panicked = joined.map_or(true, |joined: thread::Result<()>| joined.is_err());
    if unexpected || panicked {
        return Err(AgentError::ReconcileEnded);
    }
    info!("stopped; the rules stay in the kernel");
    Ok(())
}

/// Ends the reconcile loop, also when its owner is dropped in mid-flight.
struct StopOnDrop(Arc<Shared>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[cfg(test)]
mod tests;
