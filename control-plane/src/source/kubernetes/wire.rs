//! Decodes what the API server sends: lists, and watches with one JSON document per line.
//!
//! `kube::runtime::watcher` is not used, for two reasons. First, the watcher does not pass on
//! bookmarks. While no object of a kind changes, only bookmarks report the position of the kind.
//! Second, the watcher hides the loss of an event in a line that cannot be decoded. In this module,
//! an invalid object is still an event if the name of the object can be read. So one invalid object
//! does not stop a list.

use std::{borrow::Cow, collections::BTreeMap, error::Error, time::Duration};

use bytes::{Bytes, BytesMut};
use headgate_core::errors::chain;
use http::StatusCode;
use http_body_util::BodyExt as _;
use kube::{client::Body, core::Status};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::{
    model::Event,
    objects::{ManifestHeader, Object, ObjectKey, ObjectKind},
};

/// Maximum size of a line. No object is this large, because etcd accepts only 1.5 MiB by default.
const LINE_LIMIT_BYTES: usize = 16 * 1024 * 1024;

/// One line of a watch.
#[derive(Debug)]
pub(super) enum Line {
    /// An object has changed, or is part of the initial state.
    Object {
        /// The change; `None` for a pod without the readiness gate of Headgate.
        event: Option<Event>,
        version: String,
    },
    /// All changes up to this version have been sent.
    Bookmark {
        version: String,
        /// The initial state of a streaming list is complete.
        ends_initial_state: bool,
    },
    /// The server ends the watch with an error.
    Error(Box<kube::core::Status>),
}

#[derive(Deserialize)]
struct RawLine<'a> {
    #[serde(rename = "type", borrow)]
    event: Cow<'a, str>,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: ListMetadata,
}

/// The metadata of a bookmark, or of a page of a list.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    continue_token: Option<String>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// Decodes one line of a watch, or says why it is no event of this kind.
pub(super) fn line(kind: ObjectKind, text: &[u8]) -> Result<Line, String> {
    let raw: RawLine<'_> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    match raw.event.as_ref() {
        "ADDED" | "MODIFIED" => {
            let (event, version) = object(kind, raw.object)?;
            Ok(Line::Object { event: Some(event).filter(has_effect), version })
        }
        "DELETED" => {
            let (key, version) = names(kind, raw.object)?;
            Ok(Line::Object { event: Some(Event::Delete(key)), version })
        }
        "BOOKMARK" => {
            let metadata =
                serde_json::from_str::<Bookmark>(raw.object.get()).map_err(|error| error.to_string())?.metadata;
            if metadata.resource_version.is_empty() {
                return Err("a bookmark without a resourceVersion".to_owned());
            }
            let annotations = metadata.annotations.unwrap_or_default();
            let ends_initial_state = annotations.get("k8s.io/initial-events-end").is_some_and(|value| value == "true");
            Ok(Line::Bookmark { version: metadata.resource_version, ends_initial_state })
        }
        "ERROR" => serde_json::from_str(raw.object.get()).map(Line::Error).map_err(|error| error.to_string()),
        other => Err(format!("an event of unknown type {other:?}")),
    }
}

/// All objects of a kind, or those of one page, and the version of the list.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) events: Vec<Event>,
    pub(super) version: String,
}

impl Listed {
    /// The newest version of an object.
    pub(super) fn newest(&self) -> Option<u64> {
        let version = |event: &Event| match event {
            Event::Apply(object) => object.names().1[2].parse().ok(),
            Event::Delete(_) | Event::Undecodable { .. } => None,
        };
        self.events.iter().filter_map(version).max()
    }
}

#[derive(Deserialize)]
struct RawPage<'a> {
    metadata: ListMetadata,
    #[serde(borrow, deserialize_with = "required_items")]
    items: Vec<&'a RawValue>,
}

/// Reads `items`: `null` is empty, but without the field the answer is not a list.
fn required_items<'de: 'a, 'a, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<&'a RawValue>, D::Error> {
    Ok(Option::<Vec<&'a RawValue>>::deserialize(deserializer)?.unwrap_or_default())
}

/// Decodes one page of a list, with the token for the next. Fails if it is no list, or an item has
/// no name, namespace or resourceVersion.
pub(super) fn page(kind: ObjectKind, text: &[u8]) -> Result<(Listed, Option<String>), String> {
    let raw: RawPage<'_> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if raw.metadata.resource_version.is_empty() {
        return Err("a list without a resourceVersion".to_owned());
    }
    let events = raw
        .items
        .into_iter()
        .map(|item| object(kind, item).map(|(event, _)| event))
        .filter(|event| event.as_ref().map_or(true, has_effect))
        .collect::<Result<_, _>>()?;
    let continue_token = raw.metadata.continue_token.filter(|token| !token.is_empty());
    Ok((Listed { events, version: raw.metadata.resource_version }, continue_token))
}

/// False for a pod without our readiness gate, which it can never get.
fn has_effect(event: &Event) -> bool {
    !matches!(event, Event::Apply(object) if matches!(&**object, Object::Pod(pod) if !pod.has_gate()))
}

fn object(kind: ObjectKind, raw: &RawValue) -> Result<(Event, String), String> {
    let decoded = Object::deserialize(kind, &mut serde_json::Deserializer::from_str(raw.get()));
    match decoded {
        Ok(object) => {
            let (_, [namespace, name, version]) = object.names();
            check_names(kind, name, namespace, version)?;
            let version = version.to_owned();
            Ok((Event::Apply(Box::new(object)), version))
        }
        Err(_) => {
            let (key, version) = names(kind, raw)?;
            let mut deserializer = serde_json::Deserializer::from_str(raw.get());
            let mut track = serde_path_to_error::Track::new();
            let tracked = serde_path_to_error::Deserializer::new(&mut deserializer, &mut track);
            let Err(error) = Object::deserialize(kind, tracked) else {
                return Err("an object that was decoded only at the second attempt".to_owned());
            };
            let field = track.path().to_string();
            let message = format!("{error}: correct the field, or the program that writes it");
            Ok((Event::Undecodable { key, field, message }, version))
        }
    }
}

fn names(kind: ObjectKind, raw: &RawValue) -> Result<(ObjectKey, String), String> {
    let header: ManifestHeader = serde_json::from_str(raw.get()).map_err(|error| error.to_string())?;
    let names = header.metadata;
    check_names(kind, &names.name, &names.namespace, &names.resource_version)?;
    Ok((ObjectKey::new(kind, &names.namespace, &names.name), names.resource_version))
}

fn check_names(kind: ObjectKind, name: &str, namespace: &str, version: &str) -> Result<(), String> {
    let missing = match () {
        () if name.is_empty() => "name",
        () if kind.is_namespaced() && namespace.is_empty() => "namespace",
        () if version.is_empty() => "resourceVersion",
        () => return Ok(()),
    };
    Err(format!("a {} without metadata.{missing}", kind.name()))
}

/// The lines of a response body.
#[derive(Debug)]
pub(super) struct Lines {
    body: Body,
    buffer: BytesMut,
    /// Number of bytes at the start of the buffer that contain no line end.
    searched_bytes: usize,
}

impl Lines {
    pub(super) fn new(body: Body) -> Self {
        Self { body, buffer: BytesMut::new(), searched_bytes: 0 }
    }

    /// The next line without its line end; `None` after a complete body. After an error, the watch
    /// can be resumed.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let found = self.buffer[self.searched_bytes..].iter().position(|byte| *byte == b'\n');
            if let Some(place) = found {
                let mut line = self.buffer.split_to(self.searched_bytes + place + 1);
                self.searched_bytes = 0;
                line.truncate(line.len() - 1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return Ok(Some(line.freeze()));
            }
            self.searched_bytes = self.buffer.len();
            if self.buffer.len() > LINE_LIMIT_BYTES {
                return Err(Failure::malformed(format!("a line of more than {LINE_LIMIT_BYTES} bytes")));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Err(Failure::dropped(&error)),
                None if self.buffer.trim_ascii().is_empty() => return Ok(None),
                None => return Err(Failure::cut()),
            }
        }
    }
}

// Failures of lists and watches, their remedies, and the pauses before retries.

/// Upper bound of the first pause, which is random.
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// Upper bound of the random pause, and of the pause that a server asks for.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Why a request failed, or a watch ended early. Every failure is retried.
#[derive(Debug)]
pub(super) struct Failure {
    /// The value of the metric label `reason`.
    pub(super) reason: &'static str,
    /// What happened and what to do about it.
    pub(super) message: String,
    /// True if the watch cannot continue from its position, so the kind must be listed again.
    pub(super) needs_list: bool,
    /// The HTTP status code, if the server has answered.
    pub(super) code: Option<StatusCode>,
    /// The pause that the server asks for.
    pub(super) retry_after: Option<Duration>,
}

impl Failure {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), needs_list: false, code: None, retry_after: None }
    }

    /// The server sent an answer that violates the protocol. An event may be lost, so the watch is
    /// opened again after the last event that was decoded. If it breaks there again, the kind is
    /// listed.
    pub(super) fn malformed(message: impl std::fmt::Display) -> Self {
        Self::new("malformed_answer", format!("the server sent an invalid answer: {message}"))
    }

    /// The connection broke.
    pub(super) fn dropped(error: &(dyn Error + 'static)) -> Self {
        Self::new("connection_lost", format!("the connection broke: {}", chain(error)))
    }

    /// The answer ended in the middle of an object.
    pub(super) fn cut() -> Self {
        Self::new("connection_lost", "the answer ended in the middle of an object")
    }

    /// Nothing arrived for `time`. The message begins with `what`.
    pub(super) fn silent(what: &str, time: Duration) -> Self {
        Self::new("timeout", format!("{what} for {} seconds", time.as_secs()))
    }

    /// A streaming list ended before it was complete.
    pub(super) fn incomplete_list() -> Self {
        Self::new("list_incomplete", "the server ended a streaming list before it was complete")
    }

    /// The newest version at the server is older than a version that the server sent before.
    pub(super) fn went_back(ours: u64, theirs: u64) -> Self {
        let message = format!(
            "the server is at version {theirs}, but has sent version {ours} before, as after the restore of a backup: \
             everything is listed again"
        );
        Self { needs_list: true, ..Self::new("source_went_back", message) }
    }

    /// The server did not answer the request.
    pub(super) fn request(error: &kube::Error) -> Self {
        let message =
            format!("a request to the API server failed: {}: check the address and the network", chain(error));
        match error {
            kube::Error::Auth(_) => Self::new("unauthorized", message),
            _ => Self::new("connection_failed", message),
        }
    }

    /// An answer with an error code to a request that needs the right `verb`.
    pub(super) fn answer(kind: ObjectKind, verb: &str, code: StatusCode, status: Option<&Status>) -> Self {
        let said = status.map_or_else(|| code.to_string(), |status| format!("{} ({})", status.message, code.as_u16()));
        let resource = kind.rbac_resource();
        let (reason, message) = match code {
            StatusCode::UNAUTHORIZED => {
                ("unauthorized", format!("{said}: the credentials are not accepted; check the token or the kubeconfig"))
            }
            StatusCode::FORBIDDEN => {
                let message =
                    format!("{said}: allow the verb {verb:?} on {resource} in the ClusterRole of this account");
                ("forbidden", message)
            }
            StatusCode::NOT_FOUND => ("not_found", format!("{said}: the server does not serve {resource}")),
            StatusCode::GONE => ("watch_expired", format!("{said}: everything is listed again")),
            StatusCode::TOO_MANY_REQUESTS => ("throttled", said),
            _ if code.is_server_error() => ("server_error", said),
            _ => ("refused", said),
        };
        let retry_after = status.and_then(|status| status.details.as_ref()).map(|details| details.retry_after_seconds);
        let retry_after = retry_after.filter(|seconds| *seconds > 0).map(|seconds| Duration::from_secs(seconds.into()));
        let needs_list = code == StatusCode::GONE;
        Self { needs_list, code: Some(code), retry_after, ..Self::new(reason, message) }
    }

    /// An ERROR event inside a watch.
    pub(super) fn event(kind: ObjectKind, status: &Status) -> Self {
        let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let expired = matches!(status.reason.as_str(), "Expired" | "Gone");
        let code = if expired { StatusCode::GONE } else { code };
        Self::answer(kind, "watch", code, Some(status))
    }

    /// Whether an error of the server's own may come again at this version.
    pub(super) fn is_fault_of_server(&self) -> bool {
        matches!(self.reason, "malformed_answer" | "server_error" | "refused")
    }

    /// Whether the answer means that the server has no streaming lists. API servers with the
    /// feature disabled answer 422. Proxies in front of API servers answer with one of the other
    /// codes below.
    pub(super) fn refuses_streaming(&self) -> bool {
        self.code.is_some_and(|code| matches!(code.as_u16(), 400 | 405 | 406 | 415 | 422 | 501))
    }
}

/// Pauses between retries: random, so that replicas differ, up to a bound that doubles.
#[derive(Debug, Default)]
pub(crate) struct BackOff {
    failures: u32,
    pub(super) rng: fastrand::Rng,
}

impl BackOff {
    /// A back-off before the first failure, which draws its pauses from `rng`.
    pub(super) fn new(rng: fastrand::Rng) -> Self {
        Self { failures: 0, rng }
    }

    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    /// The time to wait before the next retry, after `retry_after` if the server asks for it.
    pub(crate) fn pause(&mut self, retry_after: Option<Duration>) -> Duration {
        let bound = FIRST_PAUSE.saturating_mul(1 << self.failures.min(16)).min(LONGEST_PAUSE);
        self.failures = self.failures.saturating_add(1);
        let drawn = bound.mul_f64(self.rng.f64());
        retry_after.map_or(drawn, |asked| asked.min(LONGEST_PAUSE) + drawn)
    }
}

#[cfg(test)]
mod failure_tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_start_over() {
        let mut back_off = BackOff::default();
        assert!(back_off.pause(None) <= FIRST_PAUSE);
        for _ in 0..100 {
            assert!(back_off.pause(None) <= LONGEST_PAUSE);
        }
        assert!(back_off.pause(Some(Duration::from_secs(3))) >= Duration::from_secs(3));
        back_off.reset();
        assert!(back_off.pause(None) <= FIRST_PAUSE);
    }

    #[test]
    fn a_missing_permission_is_named() {
        let failure = Failure::answer(ObjectKind::EndpointSlice, "watch", StatusCode::FORBIDDEN, None);
        assert_eq!(failure.reason, "forbidden");
        assert!(failure.message.contains("\"watch\"") && failure.message.contains("endpointslices.discovery.k8s.io"));
        assert!(Failure::answer(ObjectKind::Node, "watch", StatusCode::GONE, None).needs_list);
    }
}
