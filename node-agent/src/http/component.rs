//! Pages of every Kubernetes component: `/healthz` with the check `ping`, and `/metrics/slis`
//! (KEP-3466). They show only that the process answers; see [`super::health`].

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use axum::{
    Router,
    extract::{Query, State},
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use headgate_listener::in_format;
use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use crate::metric_registry::Labels;

const PING: &str = "ping";
const CHECK: Labels<2> = [("name", PING), ("type", "healthz")];
const TEXT: [(HeaderName, &str); 2] =
    [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];

/// The number of successes of `ping`, which never fails.
type Pings = Arc<AtomicU64>;

pub(super) fn router() -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/healthz/ping", get((StatusCode::OK, TEXT, "ok")))
        .route("/metrics/slis", get(slis).delete(reset))
        .with_state(Pings::default())
}

/// Serves `/healthz`. `?verbose` lists the checks, and `?exclude=ping` skips the check.
async fn healthz(State(pings): State<Pings>, Query(query): Query<Vec<(String, String)>>) -> impl IntoResponse {
    let excluded = query.iter().filter(|(key, _)| key == "exclude").map(|(_, name)| &**name);
    let mut excluded: BTreeSet<&str> = excluded.collect();
    let mut body = if excluded.remove(PING) {
        "[+]ping excluded: ok\n".to_owned()
    } else {
        pings.fetch_add(1, Relaxed);
        "[+]ping ok\n".to_owned()
    };
    if !excluded.is_empty() {
        let names: Vec<String> = excluded.iter().map(|name| format!("{name:?}")).collect();
        let _ = writeln!(body, "warn: some health checks cannot be excluded: no matches for {}", names.join(","));
    }
    body.push_str("healthz check passed\n");
    let is_verbose = query.iter().any(|(key, _)| key == "verbose");
    (StatusCode::OK, TEXT, if is_verbose { body } else { "ok".to_owned() })
}

/// Serves `/metrics/slis`: the results of `ping`, named as Kubernetes' indicators.
async fn slis(State(pings): State<Pings>, request: HeaderMap) -> impl IntoResponse {
    let (last, all) = (Family::<Labels<2>, Gauge>::default(), Family::<Labels<3>, Counter>::default());
    let pings = pings.load(Relaxed);
    if pings > 0 {
        let [name, kind] = CHECK;
        last.get_or_create(&CHECK).set(1);
        all.get_or_create(&[name, kind, ("status", "success")]).inc_by(pings);
    }
    let mut registry = Registry::with_prefix("kubernetes");
    registry.register("healthcheck", "The last result of a health check: 1 for success", last);
    registry.register("healthchecks", "Results of health checks", all);
    let mut out = String::new();
    // Formatting into a string does not fail.
    let _ = text::encode(&mut out, &registry);
    in_format(&request, out)
}

/// Serves `DELETE /metrics/slis`: resets the counts.
async fn reset(State(pings): State<Pings>) -> impl IntoResponse {
    pings.store(0, Relaxed);
    (StatusCode::OK, TEXT, "metrics reset\n")
}
