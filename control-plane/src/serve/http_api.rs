//! `/metrics`, `/healthz` and `/readyz`.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::IntoResponse,
    routing::get,
};
use headgate_core::exposition;
use tokio::{
    net::TcpListener,
    sync::Mutex,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{Shared, http_listener::BoundedListener};
use crate::metrics::kind_name;

/// Between two pages of metrics, each of which takes the time of a hundred messages to agents: everybody may ask for one.
const SCRAPE_PAUSE: Duration = Duration::from_millis(20);

/// Serves until `stopped` is cancelled.
pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>, stopped: CancellationToken) {
    let (scraped, healthy) = (Arc::clone(&shared), Arc::clone(&shared));
    let turn = Arc::new(Mutex::new(Instant::now()));
    let router = Router::new()
        .route("/metrics", get(move |request| async move { in_format(&request, scrape(&scraped, &turn).await) }))
        .route("/healthz", get(move || async move { health(&healthy) }))
        .route("/readyz", get(move || async move { ready(&shared) }));
    tokio::select! {
        result = async { axum::serve(BoundedListener::new(listener), router).await } => {
            if let Err(error) = result {
                tracing::error!(%error, "serving metrics failed");
            }
        }
        () = stopped.cancelled() => {}
    }
}

async fn scrape(shared: &Shared, turn: &Mutex<Instant>) -> String {
    let mut next = turn.lock().await;
    sleep_until(*next).await;
    *next = Instant::now() + SCRAPE_PAUSE;
    shared.agents.fleet().refresh_metrics();
    for (kind, age) in shared.store.source_ages() {
        shared.metrics.set_source_age(kind, age);
    }
    shared.metrics.render()
}

/// A page of metrics in the format that the request asks for.
fn in_format(request: &HeaderMap, open_metrics: String) -> impl IntoResponse + use<> {
    let accepted = request.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let (content_type, text) = exposition::page(accepted, open_metrics);
    ([(CONTENT_TYPE, content_type)], text)
}

/// The process lives; and how long ago each kind of the source was heard. A replica that is cut off from its source stays
/// alive and serves what it has: to start it anew would lose that.
fn health(shared: &Shared) -> String {
    let mut text = "ok\n".to_owned();
    for (kind, age) in shared.store.source_ages() {
        text.push_str(&format!("{} heard {} s ago\n", kind_name(kind), age.as_secs()));
    }
    text
}

/// Ready while the source is followed, until the replica drains.
fn ready(shared: &Shared) -> impl IntoResponse + use<> {
    match shared.unready_reason() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    }
}
