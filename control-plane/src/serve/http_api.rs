//! `/metrics`, `/healthz` and `/readyz`.

use std::sync::Arc;

use axum::{Router, http::StatusCode, http::header::CONTENT_TYPE, response::IntoResponse, routing::get};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{Lifecycle, Shared};
use crate::metrics::kind_name;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves until `stopped` is cancelled.
pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>, stopped: CancellationToken) {
    let (scraped, healthy) = (Arc::clone(&shared), Arc::clone(&shared));
    let router = Router::new()
        .route("/metrics", get(move || async move { ([(CONTENT_TYPE, OPEN_METRICS)], scrape(&scraped)) }))
        .route("/healthz", get(move || async move { health(&healthy) }))
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

fn scrape(shared: &Shared) -> String {
    shared.agents.fleet().refresh_metrics();
    for (kind, age) in shared.store.source_ages() {
        shared.metrics.set_source_age(kind, age);
    }
    shared.metrics.render()
}

/// The process lives; and how long ago each kind of the source was heard. Its age fails no probe: without the API server every replica grows
/// stale, and agents are better off with a stale one than with none.
fn health(shared: &Shared) -> String {
    let mut text = "ok\n".to_owned();
    for (kind, age) in shared.store.source_ages() {
        text.push_str(&format!("{} heard {} s ago\n", kind_name(kind), age.as_secs()));
    }
    text
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
