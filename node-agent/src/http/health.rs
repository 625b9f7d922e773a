//! The pages `/healthz` and `/livez`, with the same answers as kube-proxy.

use std::{
    collections::BTreeMap,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use headgate_core::Family;
use serde::Serialize;

use super::Pages;
use crate::{
    metrics::kube_proxy::AnswersByCode,
    state::progress::{FamilyHealth, Health},
};

pub(super) fn router(pages: Pages) -> Router {
    Router::new().route("/healthz", get(healthz)).route("/livez", get(livez)).with_state(pages)
}

/// The pages of an agent in standby. It is ready, because the node has a service proxy.
pub(super) fn in_standby(other: &str) -> Router {
    let text = format!("standby: {other} runs\n");
    let page = || {
        let text = text.clone();
        get(move || std::future::ready(text))
    };
    Router::new().route("/healthz", page()).route("/livez", page())
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct HealthPage {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    /// The families that have been programmed at least once, by name. Those of the node.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    status: BTreeMap<String, FamilyPage>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyPage {
    last_updated: String,
    healthy: bool,
}

/// Serves `/healthz`: 503 when programming is late, and when load balancers should send nothing
/// new, because the node is going away or has no rules yet.
async fn healthz(State(pages): State<Pages>) -> impl IntoResponse {
    let health = pages.backlog.health(pages.patience);
    let is_healthy = health.is_serving();
    answer(&pages.metrics.kube_proxy.healthz, is_healthy, page(health, is_healthy, Some(health.is_node_eligible)))
}

/// Serves `/livez`. The answer is 503 only when a restart of the agent may help.
async fn livez(State(pages): State<Pages>) -> impl IntoResponse {
    let health = pages.backlog.health(pages.patience);
    answer(&pages.metrics.kube_proxy.livez, health.is_alive(), page(health, health.is_alive(), None))
}

fn answer(answers: &AnswersByCode, is_healthy: bool, page: HealthPage) -> impl IntoResponse + use<> {
    let code = if is_healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    answers.get_or_create(&[("code", code.as_u16())]).inc();
    (code, [(header::X_CONTENT_TYPE_OPTIONS, "nosniff")], Json(page))
}

/// Builds the body. `healthy` covers only the families; `is_ok` may also cover the node's
/// eligibility, and then makes `lastUpdated` the current time, as in kube-proxy.
fn page(health: Health, is_ok: bool, node_eligible: Option<bool>) -> HealthPage {
    let now = SystemTime::now();
    let programmed = |(family, FamilyHealth { is_healthy, synced_at }): (Family, FamilyHealth)| {
        synced_at?;
        Some((family.to_string(), FamilyPage { last_updated: rfc3339(synced_at), healthy: is_healthy }))
    };
    let newest = health.families.iter().filter_map(|family| family.synced_at).max();
    HealthPage {
        last_updated: rfc3339(if is_ok { Some(now) } else { newest }),
        current_time: rfc3339(Some(now)),
        node_eligible,
        healthy: health.is_alive(),
        status: Family::BOTH.into_iter().zip(health.families).filter_map(programmed).collect(),
    }
}

/// Formats a time in UTC (RFC 3339, nanoseconds) like Go's JSON. `None` gives Go's zero time.
pub(super) fn rfc3339(time: Option<SystemTime>) -> String {
    let elapsed = |time: SystemTime| Some((time, time.duration_since(UNIX_EPOCH).ok()?));
    let Some((time, since_epoch)) = time.and_then(elapsed) else { return "0001-01-01T00:00:00Z".to_owned() };
    let fraction = format!(".{:09}", since_epoch.subsec_nanos());
    let fraction = fraction.trim_end_matches('0').trim_end_matches('.');
    format!("{}{fraction}Z", headgate_tls::date(time).trim_end_matches('Z'))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_have_the_format_of_go() {
        let at = |seconds: u64, nanoseconds: u32| rfc3339(Some(UNIX_EPOCH + Duration::new(seconds, nanoseconds)));
        assert_eq!(at(0, 0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399, 500_000_000), "2000-02-28T23:59:59.5Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00Z");
        assert_eq!(at(4_107_542_400, 1), "2100-03-01T00:00:00.000000001Z");
        assert_eq!(at(1_704_067_199, 0), "2023-12-31T23:59:59Z");
        assert_eq!(rfc3339(None), "0001-01-01T00:00:00Z");
    }
}
