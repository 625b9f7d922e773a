//! The HTTP pages of the agent. One port serves `/metrics`, `/metrics/slis`, `/healthz`,
//! `/proxyMode`, `/configz`, `/flagz`, `/statusz` and `/status`. The other port serves `/healthz`
//! and `/livez` for load balancers and the kubelet.

mod component;
pub mod drain;
mod health;
pub mod listen;
mod zpages;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, HeaderValue},
    middleware::map_response,
    response::{IntoResponse, Response},
    routing::get,
};
use headgate_core::node_state::SourceState;
use headgate_listener::{HttpConnections, MetricsPage};
use headgate_settings::{Flags, Settings};
use tokio::sync::watch;

use crate::{
    dataplane::{ConnectionProxy, nftables::ServiceCounters, proxy_mode},
    http::listen::Server,
    interfaces::Interfaces,
    metrics::Metrics,
    state::progress::{Backlog, Progress},
};

/// The data that the pages show, and the connections of their ports.
#[derive(Debug, Clone)]
pub struct Pages {
    /// The connections of all HTTP ports of the agent, except those of the drain page.
    pub connections: Arc<HttpConnections>,
    /// All metrics.
    pub metrics: Arc<Metrics>,
    /// The addresses of the node. Nobody follows them if no part of the agent needs them.
    pub interfaces: Interfaces,
    /// The progress of the reconcile loop.
    pub progress: watch::Receiver<Progress>,
    /// The changes that wait to be programmed.
    pub backlog: Arc<Backlog>,
    /// Maximum time that a change may wait before the agent counts as unhealthy.
    pub patience: Duration,
    /// The configuration in use, as a `KubeProxyConfiguration`.
    pub configz: Arc<serde_json::Value>,
    /// The flags and their values, for `/flagz`.
    pub flags: Arc<Flags>,
    /// Reads the counters of Services; `None` if the kernel does not count them.
    pub service_counters: Option<Arc<ServiceCounters>>,
    /// The proxy of mode userspace.
    pub proxy: Option<Arc<dyn ConnectionProxy>>,
    /// True if each Service has metrics of its own in mode userspace.
    pub userspace_service_counters: bool,
}

impl Pages {
    /// Encodes all metrics as OpenMetrics text. The call may block for some 10 ms, because it reads
    /// the counters of Services from the kernel or from the proxy.
    pub(crate) fn encode_metrics(&self) -> String {
        if let Some(counters) = &self.service_counters {
            self.metrics.services.refresh(counters);
        }
        if let Some(proxy) = &self.proxy {
            self.metrics.userspace.refresh(&proxy.counts(), self.userspace_service_counters);
        }
        self.metrics.encode(&self.backlog.counts())
    }
}

/// Returns the servers that the settings enable.
pub fn servers(settings: &Settings, pages: &Pages) -> Vec<Server> {
    let mut servers = Vec::new();
    if let Some(address) = settings.healthz_bind_address {
        let (what, setting) = ("/healthz and /livez", "--healthz-bind-address");
        let app = health::router(pages.clone()).layer(map_response(marked));
        let connections = Arc::clone(&pages.connections);
        servers.push(Server { port: "health", what, setting, address, app, connections, listener: None });
    }
    if let Some(address) = settings.metrics_bind_address {
        let what = "/metrics, /metrics/slis, /healthz, /proxyMode, /configz, /flagz, /statusz and /status";
        let app = router(pages.clone()).merge(zpages::router(settings, &pages.flags)).layer(map_response(marked));
        let (setting, connections) = ("--metrics-bind-address", Arc::clone(&pages.connections));
        servers.push(Server { port: "metrics", what, setting, address, app, connections, listener: None });
    }
    servers
}

/// The header in all answers at kube-proxy's addresses, by which another agent of Headgate is known.
pub(crate) const AGENT_HEADER: &str = "x-headgate-agent";

async fn marked(mut response: Response) -> Response {
    response.headers_mut().insert(AGENT_HEADER, HeaderValue::from_static("1"));
    response
}

/// Returns the server of `--standby-address`. The pages answer for an agent in standby, with the
/// other proxy that works on the node, or for one that programs the node.
pub fn probes(address: SocketAddr, pages: &Pages, standby: Option<&str>) -> Server {
    let health = match standby {
        Some(other) => health::in_standby(other),
        None => health::router(pages.clone()),
    };
    let (what, setting) = ("/healthz, /livez and /metrics for probes", "--standby-address");
    let (app, connections) = (health.merge(metrics(pages.clone())), Arc::clone(&pages.connections));
    Server { port: "standby", what, setting, address, app, connections, listener: None }
}

fn metrics(pages: Pages) -> Router {
    let page = MetricsPage::default();
    let metrics = move |State(pages): State<Pages>, request: HeaderMap| async move {
        page.answer(&request, move || pages.encode_metrics()).await
    };
    Router::new().route("/metrics", get(metrics)).with_state(pages)
}

fn router(pages: Pages) -> Router {
    Router::new()
        .route("/proxyMode", get(mode))
        .route("/configz", get(configz))
        .route("/status", get(status))
        .with_state(pages.clone())
        .merge(metrics(pages))
        .merge(component::router())
}

/// Serves `/status`: the connection, the received and programmed versions, and problems.
async fn status(State(pages): State<Pages>) -> impl IntoResponse {
    let progress = pages.progress.borrow().clone();
    let programmed = progress.programmed.map(|programmed| programmed.target.version);
    Json(serde_json::json!({
        "connected": pages.metrics.session.connected.get() == 1,
        "version": pages.metrics.session.version_received.get(),
        "programmedVersion": programmed,
        "sourceState": pages.metrics.session.source_state().map(SourceState::as_str),
        "sourceAgeSeconds": pages.metrics.session.source_age().map(|age| age.as_secs_f64()),
        "backend": progress.status.backend,
        "modeReason": progress.mode_reason,
        "degraded": progress.status.degraded,
        "tlsProblem": *pages.metrics.session.tls.problem.borrow(),
        "lastError": progress.failure.map(|failure| failure.error),
    }))
}

async fn mode(State(pages): State<Pages>) -> String {
    proxy_mode(&pages.progress.borrow().status.backend).to_owned()
}

/// Serves `/configz`. As in Kubernetes components, the key is the API group of the configuration.
async fn configz(State(pages): State<Pages>) -> impl IntoResponse {
    Json(serde_json::json!({ "kubeproxy.config.k8s.io": &*pages.configz }))
}
