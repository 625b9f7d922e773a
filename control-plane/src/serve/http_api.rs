//! `/metrics`, `/healthz` and `/readyz`.

use std::sync::Arc;

use axum::{Router, http::StatusCode, http::header::CONTENT_TYPE, response::IntoResponse, routing::get};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{Lifecycle, Shared};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves until `stopped` is cancelled.
pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>, stopped: CancellationToken) {
    let metrics = Arc::clone(&shared.metrics);
    let router = Router::new()
        .route("/metrics", get(move || async move { ([(CONTENT_TYPE, OPEN_METRICS)], metrics.render()) }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(move || async move { ready(&shared) }));
    tokio::select! {
        result = async { axum::serve(listener, router).await } => {
            if let Err(error) = result {
                tracing::error!(%error, "serving metrics failed");
            }
        }
        () = stopped.cancelled() => {}
    }
}

/// Ready once every kind has been listed, until the replica drains.
fn ready(shared: &Shared) -> impl IntoResponse + use<> {
    if *shared.lifecycle.borrow() != Lifecycle::Serving {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n");
    }
    match shared.store.is_synced() {
        true => (StatusCode::OK, "ok\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "the source has not been listed yet\n"),
    }
}
