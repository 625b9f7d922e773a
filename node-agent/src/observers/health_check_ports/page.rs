//! The HTTP answer at one health-check node port.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{
    Json,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use headgate_core::ServiceKey;

use crate::state::backlog::Backlog;

/// The header with the number of local endpoints. Load balancers may use this number as the node's
/// weight.
const WEIGHT_HEADER: &str = "x-load-balancing-endpoint-weight";

/// The page at one socket. It shows the number of local endpoints of one service in one family.
#[derive(Debug)]
pub(super) struct PortPage {
    pub(super) key: Arc<ServiceKey>,
    pub(super) local_endpoints: AtomicU32,
    /// The proxy as a whole works if no change in the backlog has waited for longer than
    /// `patience`. `/livez` uses the same test.
    pub(super) backlog: Arc<Backlog>,
    pub(super) patience: Duration,
}

impl PortPage {
    /// Answers every request. As in kube-proxy, method and path do not matter.
    pub(super) fn answer(&self) -> Response {
        let local_endpoints = self.local_endpoints.load(Ordering::Relaxed);
        let is_proxy_healthy = self.backlog.health(self.patience).is_alive();
        let body = serde_json::json!({
            "service": { "namespace": self.key.namespace.as_str(), "name": self.key.name.as_str() },
            "localEndpoints": local_endpoints,
            "serviceProxyHealthy": is_proxy_healthy,
        });
        let is_ok = local_endpoints > 0 && is_proxy_healthy;
        let status = if is_ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let weight = [(WEIGHT_HEADER, local_endpoints.to_string())];
        (status, [(header::X_CONTENT_TYPE_OPTIONS, "nosniff")], weight, Json(body)).into_response()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn status(local_endpoints: u32, is_healthy: bool) -> (StatusCode, String) {
        let key = Arc::new(ServiceKey::new("shop", "web"));
        let backlog = Arc::new(Backlog::default());
        backlog.queue_other();
        let patience = if is_healthy { Duration::from_secs(3_600) } else { Duration::ZERO };
        let response = PortPage { key, local_endpoints: local_endpoints.into(), backlog, patience }.answer();
        let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(header("content-type").as_deref(), Some("application/json"));
        assert_eq!(header("x-content-type-options").as_deref(), Some("nosniff"));
        (response.status(), header(WEIGHT_HEADER).unwrap())
    }

    #[test]
    fn the_answer_is_200_only_with_local_endpoints_and_a_healthy_proxy() {
        assert_eq!(status(2, true), (StatusCode::OK, "2".to_owned()));
        assert_eq!(status(0, true), (StatusCode::SERVICE_UNAVAILABLE, "0".to_owned()));
        assert_eq!(status(2, false), (StatusCode::SERVICE_UNAVAILABLE, "2".to_owned()));
    }
}
