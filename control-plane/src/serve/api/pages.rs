//! The HTTP pages `/metrics`, `/healthz` and `/readyz`.

use std::sync::Arc;

use axum::{
    Router,
    http::{HeaderMap, StatusCode},
    response::IntoResponse,
    routing::get,
};
use headgate_listener::{HttpConnections, MetricsPage};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    metrics::{kind_name, level},
    serve::{context::Context, everywhere::Absence, fleet::Agent, stream::Streams},
};

/// Serves the pages until `stopped` is cancelled.
pub(crate) async fn serve(listener: TcpListener, streams: Arc<Streams>, stopped: CancellationToken) {
    let (healthy, ready) = (Arc::clone(&streams.context), Arc::clone(&streams.context));
    let closed = streams.context.metrics.http_closed.metrics.clone();
    let page = MetricsPage::default();
    let metrics = move |request: HeaderMap| async move { page.answer(&request, move || scrape(&streams)).await };
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(move || async move { health(&healthy) }))
        .route("/readyz", get(move || async move { readiness(&ready) }));
    let connections = HttpConnections::new(true, closed);
    stopped.run_until_cancelled(connections.serve("pages", listener, router)).await;
}

fn scrape(streams: &Streams) -> String {
    let context = &streams.context;
    streams.fleet.progress().refresh_metrics();
    let is_other = |agent: &&Arc<Agent>| agent.agent_version != env!("CARGO_PKG_VERSION");
    context.metrics.other_versions.set(level(streams.fleet.all().iter().filter(is_other).count()));
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
