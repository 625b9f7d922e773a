//! `/metrics`, `/healthz` and `/proxyMode`.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::{backend::proxy_mode, metrics::Metrics, reconcile::Progress, session::backoff::Backoff};

/// What the pages are made from.
#[derive(Debug, Clone)]
pub struct Pages {
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// What is programmed.
    pub progress: watch::Receiver<Progress>,
    /// The backend's name.
    pub backend: Arc<str>,
    /// Ways in which the backend runs below what was asked for.
    pub degraded: Arc<[String]>,
}

/// Serves until `shutdown`. An address that cannot be bound is logged and tried again: forwarding does not depend on it.
pub async fn serve(address: SocketAddr, pages: Pages, shutdown: CancellationToken) {
    let app = router(pages);
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
    while let Some(listener) = shutdown.run_until_cancelled(bind(address, &mut backoff)).await {
        let stopped = shutdown.clone().cancelled_owned();
        match axum::serve(listener, app.clone()).with_graceful_shutdown(stopped).await {
            Ok(()) => return,
            Err(error) => warn!(%error, %address, "serving metrics ended; starting again"),
        }
    }
}

async fn bind(address: SocketAddr, backoff: &mut Backoff) -> TcpListener {
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                info!(%address, "serving /metrics, /healthz and /proxyMode");
                backoff.reset();
                return listener;
            }
            Err(error) => {
                error!(%error, %address, "cannot serve metrics; trying again. Pass another --metrics-bind-address if it is taken");
                tokio::time::sleep(backoff.next_pause()).await;
            }
        }
    }
}

fn router(pages: Pages) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/proxyMode", get(mode))
        .with_state(pages)
}

async fn metrics(State(pages): State<Pages>) -> impl IntoResponse {
    match pages.metrics.encode() {
        Ok(text) => {
            let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            (StatusCode::OK, [(CONTENT_TYPE, content_type)], text)
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, [(CONTENT_TYPE, "text/plain")], error.to_string()),
    }
}

/// Always 200 while the process runs: without its control plane the agent is still healthy, since forwarding goes on.
async fn healthz(State(pages): State<Pages>) -> impl IntoResponse {
    let progress = pages.progress.borrow().clone();
    let programmed = progress.programmed.map(|programmed| programmed.target.version);
    Json(serde_json::json!({
        "connected": pages.metrics.connected.get() == 1,
        "version": pages.metrics.version_received.get(),
        "programmedVersion": programmed,
        "sourceAgeSeconds": pages.metrics.source_age().map(|age| age.as_secs_f64()),
        "backend": &*pages.backend,
        "degraded": &*pages.degraded,
        "lastError": progress.failure.map(|failure| failure.error),
    }))
}

async fn mode(State(pages): State<Pages>) -> String {
    proxy_mode(&pages.backend).to_owned()
}
