//! The page of metrics: it takes as long as a hundred messages to agents, and any client may ask.

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
};
use headgate_core::exposition;
use tokio::{
    sync::Mutex,
    task::spawn_blocking,
    time::{Instant, sleep},
};

/// Pause before each rendering.
const PAUSE: Duration = Duration::from_millis(20);

/// A page of metrics. One rendering runs at a time, and requests that have waited for it share its
/// text, so any number of clients costs as much as one.
#[derive(Debug, Clone, Default)]
pub struct MetricsPage(Arc<Mutex<LastTexts>>);

type LastTexts = HashMap<&'static str, (Instant, Bytes)>;

impl MetricsPage {
    /// Answers a request in the format that its headers select, with values from after its arrival.
    /// `render` returns the page in the OpenMetrics format, and may block.
    pub async fn answer(&self, request: &HeaderMap, render: impl FnOnce() -> String + Send + 'static) -> Response {
        let (content_type, arrived_at) = (content_type(request), Instant::now());
        let mut texts = Arc::clone(&self.0).lock_owned().await;
        if texts.get(content_type).is_none_or(|(begun_at, _)| *begun_at <= arrived_at) {
            sleep(PAUSE).await;
            // The lock moves to the rendering, which goes on if the client disconnects.
            let rendering = spawn_blocking(move || {
                let (begun_at, text) = (Instant::now(), exposition::page([content_type], render()).1);
                texts.insert(content_type, (begun_at, text.into()));
                texts
            });
            texts = match rendering.await {
                Ok(texts) => texts,
                Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
            };
        }
        let text = texts.get(content_type).map(|(_, text)| text.clone()).unwrap_or_default();
        ([(CONTENT_TYPE, content_type)], text).into_response()
    }
}

/// Converts metrics from OpenMetrics text into the format that the request accepts.
pub fn in_format(request: &HeaderMap, open_metrics: String) -> impl IntoResponse + use<> {
    let content_type = content_type(request);
    ([(CONTENT_TYPE, content_type)], exposition::page([content_type], open_metrics).1)
}

/// Returns the content type of the format that the request accepts. `Accept` may repeat it.
fn content_type(request: &HeaderMap) -> &'static str {
    let accepted = request.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    exposition::page(accepted, String::new()).0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use axum::body::to_bytes;
    use futures::future::join_all;

    use super::*;

    // The time stands still while anything runs, so that all requests arrive within the pause.
    #[tokio::test(start_paused = true)]
    async fn requests_share_a_page_that_is_rendered_after_their_arrival() {
        let (page, rendered) = (MetricsPage::default(), Arc::new(AtomicUsize::new(0)));
        let accept = |kind: &'static str| HeaderMap::from_iter([(ACCEPT, kind.parse().unwrap())]);
        let get = async |kind| {
            let (rendered, request) = (Arc::clone(&rendered), accept(kind));
            let render = move || format!("a_total {}\n# EOF\n", rendered.fetch_add(1, Relaxed));
            let answer = page.answer(&request, render).await;
            assert_eq!(answer.status(), StatusCode::OK);
            String::from_utf8(to_bytes(answer.into_body(), 1 << 10).await.unwrap().to_vec()).unwrap()
        };
        assert_eq!(get("text/plain").await, "a_total 0\n");
        let texts = join_all((0..1_000).map(|_| get("text/plain"))).await;
        assert!(texts.iter().all(|text| *text == "a_total 1\n"), "all requests arrived before the rendering");
        assert_eq!(get("application/openmetrics-text").await, "a_total 2\n# EOF\n");
        // A client that has gone leaves the page to the others.
        let _ = tokio::time::timeout(Duration::from_millis(1), get("text/plain")).await;
        assert_eq!(get("text/plain").await, "a_total 3\n");
        let failed = page.answer(&accept("text/plain"), || panic!("a defect")).await;
        assert_eq!(failed.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(get("text/plain").await.split(' ').next(), Some("a_total"));
    }
}
