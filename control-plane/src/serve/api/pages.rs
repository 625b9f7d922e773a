//! The HTTP pages `/metrics`, `/healthz` and `/readyz`.

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

use crate::{
    metrics::{kind_name, level},
    serve::{context::Context, everywhere::Absence, stream::Streams, transport::serve_pages},
};

/// Pause between two pages of metrics. A page takes as much time as a hundred messages to agents,
/// and any client may request the page.
const SCRAPE_PAUSE: Duration = Duration::from_millis(20);

/// Serves the pages until `stopped` is cancelled.
pub(crate) async fn serve(listener: TcpListener, streams: Arc<Streams>, stopped: CancellationToken) {
    let (healthy, ready) = (Arc::clone(&streams.context), Arc::clone(&streams.context));
    let next_scrape = Arc::new(Mutex::new(Instant::now()));
    let router = Router::new()
        .route("/metrics", get(move |request| async move { in_format(&request, scrape(&streams, &next_scrape).await) }))
        .route("/healthz", get(move || async move { health(&healthy) }))
        .route("/readyz", get(move || async move { readiness(&ready) }));
    stopped.run_until_cancelled(serve_pages(listener, router)).await;
}

async fn scrape(streams: &Streams, next_scrape: &Mutex<Instant>) -> String {
    let mut next = next_scrape.lock().await;
    sleep_until(*next).await;
    *next = Instant::now() + SCRAPE_PAUSE;
    let context = &streams.context;
    streams.fleet.progress().refresh_metrics();
    let absent = streams.everywhere.look().absent;
    for reason in Absence::REASONS {
        let count = absent.values().filter(|absence| absence.reason() == reason).count();
        context.metrics.absent.of([reason]).set(level(count));
    }
    for (kind, age) in context.store.source_ages() {
        context.metrics.source_ages.of([kind_name(kind)]).set(level(age.as_secs()));
    }
    context.metrics.render()
}

/// Returns a page of metrics in the format that the request's headers select.
fn in_format(request: &HeaderMap, open_metrics: String) -> impl IntoResponse + use<> {
    let accepted = request.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let (content_type, text) = exposition::page(accepted, open_metrics);
    ([(CONTENT_TYPE, content_type)], text)
}

/// Reports that the process is alive, and how long ago the last message about each kind arrived
/// from the source. A replica that is cut off from its source is alive too: it serves its state,
/// which a restart would lose.
fn health(context: &Context) -> String {
    let mut text = "ok\n".to_owned();
    for (kind, age) in context.store.source_ages() {
        text.push_str(&format!("{}: last message from the source {} s ago\n", kind_name(kind), age.as_secs()));
    }
    text
}

/// Reports ready while the replica follows its source and does not drain.
fn readiness(context: &Context) -> impl IntoResponse + use<> {
    match context.unready_reason() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    }
}
