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

/// Returns the router of the pages.
pub(super) fn router(pages: Pages) -> Router {
    Router::new().route("/healthz", get(healthz)).route("/livez", get(livez)).with_state(pages)
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct HealthPage {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    /// The families that have been programmed at least once, by name. A family that the node lacks
    /// is never programmed.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    status: BTreeMap<String, FamilyPage>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyPage {
    last_updated: String,
    healthy: bool,
}

/// Serves `/healthz`. The answer is 503 when programming is late. The answer is also 503 when load
/// balancers should send no new connections to this node, because the node is going away or has no
/// rules yet.
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

/// Counts an answer, and returns it.
fn answer(answers: &AnswersByCode, is_healthy: bool, page: HealthPage) -> impl IntoResponse + use<> {
    let code = if is_healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    answers.get_or_create(&[("code", code.as_u16())]).inc();
    (code, [(header::X_CONTENT_TYPE_OPTIONS, "nosniff")], Json(page))
}

/// Builds the body. `healthy` in the body covers only the families, whereas `is_ok`, the result of
/// the whole check, may also cover the node's eligibility for traffic. If `is_ok` is true,
/// `lastUpdated` is the current time, as in kube-proxy.
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

/// Formats a time in UTC by RFC 3339 with nanoseconds, as Go does in JSON. `None` gives Go's zero
/// time.
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

    // rows: 105
    #[test]
    fn row_105_the_body_has_the_fields_and_values_of_kube_proxy() {
        let synced_at = |second| Some(UNIX_EPOCH + Duration::from_secs(second));
        let (late, well) = (
            FamilyHealth { is_healthy: false, synced_at: synced_at(5) },
            FamilyHealth { is_healthy: true, synced_at: synced_at(6) },
        );
        let found = |families, is_live, node_eligible: Option<bool>| {
            let is_node_eligible = node_eligible.unwrap_or(true);
            let health = Health { families, is_node_eligible, has_programmed: true };
            serde_json::to_value(page(health, is_live, node_eligible)).unwrap_or_default()
        };
        let body = found([late, well], false, Some(true));
        let status = serde_json::json!({
            "IPv4": {"lastUpdated": "1970-01-01T00:00:05Z", "healthy": false},
            "IPv6": {"lastUpdated": "1970-01-01T00:00:06Z", "healthy": true},
        });
        let expected = serde_json::json!({
            "lastUpdated": "1970-01-01T00:00:06Z", "currentTime": body["currentTime"], "nodeEligible": true,
            "healthy": false, "status": status,
        });
        assert_eq!(body, expected);

        // The node is going away, but the proxy itself is healthy.
        let body = found([well, well], false, Some(false));
        assert_eq!((&body["healthy"], &body["nodeEligible"]), (&true.into(), &false.into()));
        assert_eq!(body["lastUpdated"], "1970-01-01T00:00:06Z");

        // One family has never been programmed, as on a node without IPv6. /livez does not contain
        // nodeEligible.
        let never = FamilyHealth { is_healthy: true, synced_at: None };
        let body = found([well, never], true, None);
        assert_eq!(body["lastUpdated"], body["currentTime"]);
        assert_eq!(body.get("nodeEligible"), None);
        let status = serde_json::json!({"IPv4": {"lastUpdated": "1970-01-01T00:00:06Z", "healthy": true}});
        assert_eq!(body["status"], status);
        let body = found([never, never], true, None);
        assert_eq!(body.get("status"), None, "no family is listed before the first sync");
    }
}
