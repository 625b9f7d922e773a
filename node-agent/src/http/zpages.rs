//! `/statusz` and `/flagz` of Kubernetes components (KEP-4827, KEP-4828) as text for people. A
//! client that accepts only structured formats gets status 406.

use std::{
    sync::Arc,
    time::{Instant, SystemTime},
};

use axum::{
    Router,
    extract::State,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
    routing::get,
};

use super::health::rfc3339;
use headgate_settings::{Flags, Settings};

const COMPONENT: &str = "headgate-node-agent";
const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.";
/// The release of kube-proxy whose behaviour Headgate reproduces.
const EMULATED: &str = "1.36";
/// The other pages on the port, which `/statusz` lists.
const PATHS: &str = "/configz /flagz /healthz /metrics /proxyMode /status";

/// Returns the router of the pages that feature gates enable.
pub(super) fn router(settings: &Settings, flags: &Arc<Flags>) -> Router {
    let mut router = Router::new();
    if settings.serves_statusz {
        let started = (SystemTime::now(), Instant::now());
        router = router.route("/statusz", get(statusz).with_state(started));
    }
    if settings.serves_flagz {
        router = router.route("/flagz", get(flagz).with_state(Arc::clone(flags)));
    }
    router
}

async fn statusz(State((started, since)): State<(SystemTime, Instant)>, request: HeaderMap) -> Response {
    let up = since.elapsed().as_secs();
    let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
    let started = rfc3339(Some(started));
    let version = env!("CARGO_PKG_VERSION");
    let body = format!(
        "Started: {started}\nUp: {hours} hr {minutes:02} min {seconds:02} sec\nGo version: none\nBinary version: {version}\n\
         Emulation version: {EMULATED}\nPaths: {PATHS}\n"
    );
    answer("statusz", &format!("\n{body}"), &request)
}

async fn flagz(State(flags): State<Arc<Flags>>, request: HeaderMap) -> Response {
    let body: String = flags.iter().map(|(flag, value)| format!("{flag}={value}\n")).collect();
    answer("flagz", &body, &request)
}

fn answer(page: &str, body: &str, request: &HeaderMap) -> Response {
    let plain = [(CONTENT_TYPE, "text/plain; charset=utf-8")];
    if !accepts_text(request) {
        let sentence = format!("/{page} is served only as text/plain; the Accept header has to allow it\n");
        return (StatusCode::NOT_ACCEPTABLE, plain, sentence).into_response();
    }
    (StatusCode::OK, plain, format!("\n{COMPONENT} {page}\n{WARNING}\n{body}")).into_response()
}

/// True if the client accepts text. A request without an `Accept` header accepts everything.
fn accepts_text(request: &HeaderMap) -> bool {
    let accepted: Vec<&str> = request.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let mut types = accepted
        .iter()
        .flat_map(|value| value.split(','))
        .map(|part| part.split(';').next().unwrap_or_default().trim());
    accepted.iter().all(|value| value.trim().is_empty())
        || types.any(|kind| ["*/*", "text/*", "text/plain"].contains(&kind))
}
