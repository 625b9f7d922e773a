//! The page `/v1/drain` (docs/drain.md): a pod that stops asks when no node sends new connections
//! to it any more. The source address and `?namespace=` identify the pod, so it can ask only about
//! itself. Pods with the node's address, and administrators, use `?pod=NAMESPACE/NAME`.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    extract::{ConnectInfo, RawQuery, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use headgate_core::dns_name::check_subdomain;
use headgate_proto::{
    address_to_wire,
    v1::{self, barrier_answer::Result as Outcome},
};
use headgate_settings::value::parse_duration;
use tokio::time::{Instant, sleep};

use crate::{
    interfaces::Interfaces,
    session::barriers::{Barriers, DrainMetrics},
};

/// The longest accepted duration.
const MAX_DURATION: Duration = Duration::from_secs(3_600);

#[derive(Debug, Clone)]
struct DrainPage {
    barriers: Arc<Barriers>,
    interfaces: Interfaces,
    metrics: DrainMetrics,
}

/// Returns the page. `interfaces` are the addresses of the node.
pub(crate) fn router(barriers: Arc<Barriers>, interfaces: Interfaces, metrics: DrainMetrics) -> Router {
    let page = DrainPage { barriers, interfaces, metrics };
    Router::new().route("/v1/drain", get(drain).post(drain)).with_state(page)
}

#[derive(Debug)]
struct Wish {
    timeout: Duration,
    settle: Duration,
    request: v1::BarrierRequest,
}

/// Maximum length of a pod's UID.
const MAX_UID_LENGTH: usize = 64;

impl Wish {
    fn parse(query: &str) -> Result<Self, String> {
        let request = v1::BarrierRequest { silent_ms: 20_000, ..v1::BarrierRequest::default() };
        let mut wish = Self { timeout: Duration::from_secs(25), settle: Duration::from_millis(200), request };
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            match name {
                "timeout" => wish.timeout = duration(name, value)?,
                "settle" => wish.settle = duration(name, value)?,
                "silent" => wish.request.silent_ms = duration(name, value)?.as_millis() as u64,
                "pod" => {
                    let value = value.replace("%2F", "/").replace("%2f", "/");
                    let pod =
                        value.split_once('/').filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty());
                    let (namespace, name) = pod.ok_or("pod: write pod=NAMESPACE/NAME")?;
                    check_subdomain(name).map_err(|problem| format!("pod: {problem}"))?;
                    namespace.clone_into(&mut wish.request.pod_namespace);
                    name.clone_into(&mut wish.request.pod_name);
                }
                "namespace" => value.clone_into(&mut wish.request.pod_namespace),
                "uid" => {
                    let is_usable = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
                    if value.is_empty() || value.len() > MAX_UID_LENGTH || !value.bytes().all(is_usable) {
                        return Err(format!(
                            "uid: write the metadata.uid of the pod, at most {MAX_UID_LENGTH} letters, digits and hyphens"
                        ));
                    }
                    value.clone_into(&mut wish.request.pod_uid);
                }
                _ => {
                    return Err(format!(
                        "unknown parameter {name:?}: use timeout, settle, silent, namespace, pod or uid"
                    ));
                }
            }
        }
        if !wish.request.pod_namespace.is_empty() {
            check_subdomain(&wish.request.pod_namespace).map_err(|problem| format!("namespace: {problem}"))?;
        }
        Ok(wish)
    }
}

/// Reads a duration such as 25s or 200ms. A number without a unit means seconds.
fn duration(name: &str, value: &str) -> Result<Duration, String> {
    let seconds = value.parse::<u32>().ok().map(|seconds| Duration::from_secs(seconds.into()));
    let duration = seconds.or_else(|| parse_duration(value)).filter(|duration| *duration <= MAX_DURATION);
    duration.ok_or_else(|| format!("{name}: write a duration up to 1h, such as 25s or 200ms"))
}

async fn drain(
    State(page): State<DrainPage>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    RawQuery(query): RawQuery,
) -> Response {
    let (result, status, text) = match answer(&page, from.ip().to_canonical(), &query.unwrap_or_default()).await {
        Ok(answer) => shown(&answer),
        Err((status, problem)) => ("refused", status, format!("error\n{problem}\n")),
    };
    page.metrics.count(result);
    (status, [(CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response()
}

async fn answer(page: &DrainPage, from: IpAddr, query: &str) -> Result<v1::BarrierAnswer, (StatusCode, String)> {
    let Wish { timeout, settle, mut request } =
        Wish::parse(query).map_err(|problem| (StatusCode::BAD_REQUEST, problem))?;
    // Requests from the node name their pod, so they do not count for its address.
    if page.barriers.is_crowded(from) {
        let text = format!("enough requests from {from} already wait: one for each pod is enough");
        return Err((StatusCode::TOO_MANY_REQUESTS, text));
    }
    match (!request.pod_name.is_empty(), is_of_node(page, from)?) {
        (true, true) => {}
        (true, false) => {
            let text = format!(
                "pod= is accepted only from addresses of this node, and {from} is none: leave it out, and the address identifies the pod"
            );
            return Err((StatusCode::FORBIDDEN, text));
        }
        (false, true) => {
            let text = format!(
                "{from} is an address of this node and identifies no pod: use an exec hook inside the pod and no httpGet hook; for a pod in the host network, \
                 or behind a CNI that masquerades, add ?pod=NAMESPACE/NAME"
            );
            return Err((StatusCode::BAD_REQUEST, text));
        }
        (false, false) if request.pod_namespace.is_empty() => {
            let text = "namespace: write namespace=NAMESPACE with the namespace of the pod, so that no other namespace can speak for its address";
            return Err((StatusCode::BAD_REQUEST, text.to_owned()));
        }
        (false, false) => request.address = address_to_wire(from),
    }
    let answer = page.barriers.ask(request, Instant::now() + timeout).await;
    let answer = answer.map_err(|problem| (StatusCode::TOO_MANY_REQUESTS, problem))?;
    if answer.result() == Outcome::Drained {
        // Packets that left before the last node was programmed are still on their way.
        sleep(settle).await;
    }
    Ok(answer)
}

/// True for loopback addresses and for the addresses of the node's interfaces.
fn is_of_node(page: &DrainPage, address: IpAddr) -> Result<bool, (StatusCode, String)> {
    if address.is_loopback() {
        return Ok(true);
    }
    let unknown =
        || (StatusCode::SERVICE_UNAVAILABLE, "the addresses of this node are not known yet: ask again".into());
    page.interfaces.borrow().as_ref().map(|addresses| addresses.contains(&address)).ok_or_else(unknown)
}

/// The label of the result, the status, and the text: the result on the first line, then the reason
/// and the numbers of nodes.
fn shown(answer: &v1::BarrierAnswer) -> (&'static str, StatusCode, String) {
    let (result, status) = match answer.result() {
        Outcome::Drained => ("drained", StatusCode::OK),
        Outcome::Last => ("last", StatusCode::OK),
        Outcome::Incomplete => ("incomplete", StatusCode::GATEWAY_TIMEOUT),
        Outcome::Refused => ("refused", StatusCode::CONFLICT),
    };
    let mut text = format!("{result}\n");
    if !answer.reason.is_empty() {
        text.push_str(&format!("{}\n", answer.reason));
    }
    for (what, count) in [("unconfirmed", answer.unconfirmed_count), ("not covered", answer.not_covered_count)] {
        if count > 0 {
            text.push_str(&format!("{what}: {count}\n"));
        }
    }
    if answer.standby_count > 0 {
        let (confirmed, standby) = (answer.confirmed_count, answer.standby_count);
        text.push_str(&format!("confirmed: {confirmed}, not known: {standby} in standby\n"));
    }
    (result, status, text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::{FutureExt as _, future::join_all};
    use tokio::{sync::watch, time::timeout};

    use super::*;

    #[test]
    fn parameters_have_defaults_and_bad_ones_are_named() {
        let wish = Wish::parse("").unwrap();
        assert_eq!((wish.timeout.as_secs(), wish.settle.as_millis(), wish.request.silent_ms), (25, 200, 20_000));
        let wish = Wish::parse("timeout=90&settle=1500ms&silent=0s&pod=prod%2Fweb-1").unwrap();
        assert_eq!((wish.timeout.as_secs(), wish.settle.as_millis(), wish.request.silent_ms), (90, 1500, 0));
        let v1::BarrierRequest { pod_namespace, pod_name, pod_uid, .. } = wish.request;
        assert_eq!((&*pod_namespace, &*pod_name, &*pod_uid), ("prod", "web-1", ""));
        let uid = "6f1a2f0e-1b1c-4f39-9a0e-5d0c7d3f1b2a";
        assert_eq!(Wish::parse(&format!("uid={uid}")).unwrap().request.pod_uid, uid);
        let long = format!("uid={}", "a".repeat(MAX_UID_LENGTH + 1));
        let unusable = ["uid=", "uid=$(POD_UID)", "uid=a%20b", &long].map(|query| (query, "metadata.uid"));
        let namespaces = [("namespace=A%0a", "namespace"), ("pod=prod/A", "pod"), ("pod=A/web", "namespace")];
        let others = [("timeout=2h", "timeout"), ("pod=web", "NAMESPACE/NAME"), ("wait=1s", "\"wait\"")];
        for (query, problem) in others.into_iter().chain(namespaces).chain(unusable) {
            assert!(Wish::parse(query).unwrap_err().contains(problem), "{query}");
        }
    }

    #[test]
    fn the_result_is_the_first_line_and_nodes_are_counted_and_not_named() {
        let answer = v1::BarrierAnswer {
            result: Outcome::Incomplete.into(),
            reason: "because".into(),
            unconfirmed: vec!["a".into(), "b".into()],
            unconfirmed_count: 5,
            not_covered: vec!["c".into()],
            not_covered_count: 1,
            standby_count: 3,
            confirmed_count: 7,
            ..v1::BarrierAnswer::default()
        };
        let (_, status, text) = shown(&answer);
        assert_eq!(status, StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(
            text,
            "incomplete\nbecause\nunconfirmed: 5\nnot covered: 1\nconfirmed: 7, not known: 3 in standby\n"
        );
    }

    #[tokio::test]
    async fn the_source_address_decides_about_whom_a_client_may_ask() {
        let (sender, interfaces) = watch::channel(None);
        let page = DrainPage { barriers: Arc::default(), interfaces, metrics: DrainMetrics::default() };
        let [loopback, node, pod] = [[127, 0, 0, 1], [192, 0, 2, 11], [192, 0, 2, 77]].map(IpAddr::from);
        let refused = |result: Result<v1::BarrierAnswer, (StatusCode, String)>| result.unwrap_err();
        let (status, _) = refused(answer(&page, pod, "namespace=prod").await);
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "whether this is a pod is not known yet");
        sender.send_replace(Some(Arc::from([node])));
        for node in [loopback, node] {
            let (_, text) = refused(answer(&page, node, "").await);
            assert!(text.contains("?pod=NAMESPACE/NAME"), "{text}");
        }
        let (status, _) = refused(answer(&page, pod, "pod=prod/web-1").await);
        assert_eq!(status, StatusCode::FORBIDDEN);
        let (status, text) = refused(answer(&page, pod, "timeout=0").await);
        assert!(status == StatusCode::BAD_REQUEST && text.contains("namespace=NAMESPACE"), "{text}");
        let asking = || answer(&page, pod, "timeout=1h&namespace=prod").boxed();
        let waiting: Vec<_> = (0..4).map(|_| asking()).collect();
        let mut waiting = join_all(waiting);
        while !page.barriers.is_crowded(pod) {
            assert!(timeout(Duration::from_millis(1), &mut waiting).await.is_err());
        }
        let (status, _) = refused(answer(&page, pod, "timeout=0&namespace=prod").await);
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        drop(waiting);
        assert!(!page.barriers.is_crowded(pod));
    }
}
