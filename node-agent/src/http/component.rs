//! Pages that every Kubernetes component serves on its metrics port: `/healthz` with the check
//! `ping`, and `/metrics/slis` with the results of this check (KEP-3466). These pages show only
//! that the process answers. [`super::health`] shows whether programming works.

use std::{fmt::Write as _, sync::Arc};

use axum::{
    Router,
    extract::{Query, State},
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::in_format;
use crate::metric_registry::Labels;

const PING: &str = "ping";
/// The labels of `ping`, the only check.
const CHECK: Labels<2> = [("name", PING), ("type", "healthz")];
const TEXT: [(HeaderName, &str); 2] =
    [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];

/// Results of health checks, with the metric names of Kubernetes' service level indicators.
#[derive(Debug)]
struct Indicators {
    registry: Registry,
    healthcheck: Family<Labels<2>, Gauge>,
    healthchecks: Family<Labels<3>, Counter>,
}

impl Default for Indicators {
    fn default() -> Self {
        let (healthcheck, healthchecks) = (Family::default(), Family::default());
        let mut registry = Registry::with_prefix("kubernetes");
        registry.register(
            "healthcheck",
            "The last result of a health check: 1 for success",
            Family::clone(&healthcheck),
        );
        registry.register("healthchecks", "Results of health checks", Family::clone(&healthchecks));
        Self { registry, healthcheck, healthchecks }
    }
}

impl Indicators {
    /// Records a success of `ping`, which never fails.
    fn pinged(&self) {
        let [name, kind] = CHECK;
        self.healthcheck.get_or_create(&CHECK).set(1);
        self.healthchecks.get_or_create(&[name, kind, ("status", "success")]).inc();
    }
}

/// Returns the router of the pages.
pub(super) fn router() -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/healthz/ping", get((StatusCode::OK, TEXT, "ok")))
        .route("/metrics/slis", get(slis).delete(reset))
        .with_state(Arc::new(Indicators::default()))
}

/// Serves `/healthz`. `?verbose` lists the checks, and `?exclude=ping` skips the check.
async fn healthz(
    State(indicators): State<Arc<Indicators>>,
    Query(query): Query<Vec<(String, String)>>,
) -> impl IntoResponse {
    let mut excluded: Vec<&str> = query.iter().filter(|(key, _)| key == "exclude").map(|(_, name)| &**name).collect();
    excluded.sort_unstable();
    excluded.dedup();
    let mut body = String::new();
    if excluded.contains(&PING) {
        excluded.retain(|name| *name != PING);
        body.push_str("[+]ping excluded: ok\n");
    } else {
        indicators.pinged();
        body.push_str("[+]ping ok\n");
    }
    if !excluded.is_empty() {
        let names: Vec<String> = excluded.iter().map(|name| format!("{name:?}")).collect();
        let _ = writeln!(body, "warn: some health checks cannot be excluded: no matches for {}", names.join(","));
    }
    body.push_str("healthz check passed\n");
    let is_verbose = query.iter().any(|(key, _)| key == "verbose");
    (StatusCode::OK, TEXT, if is_verbose { body } else { "ok".to_owned() })
}

async fn slis(State(indicators): State<Arc<Indicators>>, request: HeaderMap) -> impl IntoResponse {
    let mut out = String::new();
    // Formatting into a string does not fail.
    let _ = text::encode(&mut out, &indicators.registry);
    in_format(&request, out)
}

/// Serves `DELETE /metrics/slis`: resets the counts.
async fn reset(State(indicators): State<Arc<Indicators>>) -> impl IntoResponse {
    indicators.healthcheck.clear();
    indicators.healthchecks.clear();
    (StatusCode::OK, TEXT, "metrics reset\n")
}
