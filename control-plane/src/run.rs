//! Starts the source, the store and the server, and stops them in order.

use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::{
    metrics::Metrics,
    model::Sink,
    options::{Options, OptionsError},
    serve::{self, Running, ServeError},
    source::{self, SourceError, SourceSpec},
    store::{Limits, Store},
};

/// Why the control plane could not start, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The options cannot be used.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The server cannot start.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The source cannot be read at all.
    #[error("--source: {0}")]
    Source(#[from] SourceError),
    /// A task panicked.
    #[error("the task of the source panicked: {0}; please report this")]
    Defect(#[from] tokio::task::JoinError),
}

/// A control plane that runs in this process.
pub struct ControlPlane {
    /// The server, with the addresses that it is bound to.
    pub running: Running,
    /// The store.
    pub store: Arc<Store>,
    source: JoinHandle<Result<(), SourceError>>,
    shutdown: CancellationToken,
}

impl ControlPlane {
    /// Starts the server and the source. Returns once the ports are bound; agents wait until the
    /// source has been listed. Fails when options or ports cannot be used.
    pub async fn start(options: &Options, shutdown: CancellationToken) -> Result<Self, RunError> {
        options.check_source()?;
        let security = options.security()?;
        let mut settings = options.settings();
        if options.source == SourceSpec::Kubernetes || settings.enrolment.is_some() {
            settings.api_server = source::api_server(options.kubeconfig.as_deref()).await;
        }
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let shutdown = shutdown.child_token();
        let running =
            serve::start(options.listen(), security, settings, Arc::clone(&store), metrics, shutdown.clone()).await?;
        let metrics = running.metrics_addr.map(tracing::field::display);
        let sockets = options.sockets.as_deref().map(|folder| tracing::field::display(folder.display()));
        tracing::info!(sockets, listen = %running.local_addr, inspect = %running.inspect_addr, metrics, source = %options.source, epoch = format!("{:016x}", store.epoch()), "control plane runs");
        let sink: Arc<dyn Sink> = Arc::<Store>::clone(&store);
        let run = source::run(options.source.clone(), options.source_settings(), sink, shutdown.clone());
        Ok(Self { running, store, source: tokio::spawn(run), shutdown })
    }

    /// Runs until `shutdown` is cancelled, when agents are asked to move to another replica. Fails
    /// with [`RunError::Source`] when the source cannot be read at all.
    pub async fn run(mut self) -> Result<(), RunError> {
        let source = tokio::select! {
            ended = &mut self.source => Some(ended),
            () = self.shutdown.cancelled() => None,
        };
        self.shutdown.cancel();
        self.running.join().await;
        match source {
            Some(ended) => Ok(ended??),
            None => {
                // The source may be waiting for an API server that does not answer.
                self.source.abort();
                Ok(())
            }
        }
    }
}

/// Starts a control plane and runs it until `shutdown` is cancelled. A retry after [`RunError`]
/// helps only after the cause is corrected.
pub async fn run(options: &Options, shutdown: CancellationToken) -> Result<(), RunError> {
    ControlPlane::start(options, shutdown).await?.run().await
}
