//! Answers requests: applies faults, serves lists in pages, and opens watches. Options that neither
//! Headgate's watch loop nor kube's watcher sends are refused.

use std::{fmt::Display, io, sync::Arc};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use serde::Deserialize;
use serde_json::{Value, json};
use socket2::Socket;

use super::{
    Options,
    faults::{Cut, RecordedRequest, RequestFault, Verb},
    kinds::Kind,
    state::{Shared, State, key, line},
    status::{self, Failure, failure},
    watch,
};

/// The beginnings of field selectors.
const NOT_ADDRESS: &str = "spec.clusterIP!=";
const OF_NODE: &str = "spec.nodeName=";

/// The body of an answer.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;

/// The socket of a connection. `None` if the client calls the server in its own process.
pub(super) type Connection = Option<Arc<Socket>>;

/// Answers one request.
///
/// # Errors
/// A fault cuts the connection. After this error, the caller must close the connection.
pub(super) async fn answer<B>(
    shared: Arc<Shared>,
    socket: Connection,
    request: Request<B>,
) -> io::Result<Response<Body>>
where
    B: hyper::body::Body,
    B::Error: Display,
{
    let (head, body) = request.into_parts();
    let (path, query) = (head.uri.path().to_owned(), head.uri.query().unwrap_or_default().to_owned());
    let kind = Kind::of_path(&path).filter(|_| head.method == Method::GET).map(|(kind, _)| kind);
    let verb = match kind {
        None => Verb::Other,
        Some(_) if query.split('&').any(|pair| pair == "watch=true") => Verb::Watch,
        Some(_) => Verb::List,
    };
    let method = head.method.clone();
    let (index, fault) = shared.change(|state| {
        state.recorded.push(RecordedRequest { method, verb, kind, path, query, answered: None });
        (state.recorded.len() - 1, state.take_fault(verb, kind))
    });
    let answer = match fault {
        Some(RequestFault::Status { code, retry_after_seconds }) => Err(status::injected(code, retry_after_seconds)),
        Some(RequestFault::Garbage(bytes)) => Ok(respond(StatusCode::OK, bytes)),
        Some(RequestFault::Cut(how)) => return Err(cut(&socket, how)),
        Some(RequestFault::Stall) => {
            until_cleared(&shared).await;
            serve(&shared, &socket, &head, body).await
        }
        None => serve(&shared, &socket, &head, body).await,
    };
    let response = answer.unwrap_or_else(|failure| refusal(&failure));
    shared.change(|state| state.recorded[index].answered = Some(response.status().as_u16()));
    Ok(response)
}

async fn until_cleared(shared: &Shared) {
    let mut changes = shared.subscribe();
    let clearings = shared.lock().clearings;
    while shared.lock().clearings == clearings && changes.changed().await.is_ok() {}
}

/// The error that makes hyper close a connection. With [`Cut::Reset`], close(2) sends RST and not
/// FIN, because the linger time is 0.
pub(super) fn cut(socket: &Connection, how: Cut) -> io::Error {
    if how == Cut::Reset
        && let Some(socket) = socket
        && let Err(error) = socket.set_linger(Some(std::time::Duration::ZERO))
    {
        tracing::warn!(%error, "could not arm a TCP reset");
    }
    io::Error::other("the test cuts the connection")
}

async fn serve<B>(shared: &Arc<Shared>, socket: &Connection, head: &Parts, body: B) -> Result<Response<Body>, Failure>
where
    B: hyper::body::Body,
    B::Error: Display,
{
    let (path, query, options) = (head.uri.path(), head.uri.query().unwrap_or_default(), shared.lock().options.clone());
    if let Some(rights) = &options.rights {
        rights.check(&head.method, path, query)?;
    }
    if head.method == Method::GET {
        if let Some((kind, namespace)) = Kind::of_path(path) {
            if kind == Kind::ServiceCidr && !options.service_cidrs {
                return Err(status::not_found());
            }
            let params = Params::parse(kind, namespace, query, &options)?;
            if !params.watch {
                return list(&mut shared.lock(), kind, &params);
            }
            // The real server has sent code 200 when it finds that the version is too old.
            let answer = watch::open(shared, socket, kind, params);
            return Ok(answer.unwrap_or_else(|failure| respond(StatusCode::OK, line("ERROR", &failure.body))));
        }
        let found = Kind::of_object_path(path);
        let found = found.and_then(|(kind, namespace, name)| shared.lock().get(kind, &key(kind, namespace, name)));
        return found.map(|object| respond(StatusCode::OK, object.to_string())).ok_or_else(status::not_found);
    }
    let bytes = body.collect().await.map_err(|error| status::bad_request(&error.to_string()))?.to_bytes();
    let object = serde_json::from_slice(&bytes).map_err(|error| status::bad_request(&error.to_string()));
    let pod = path.strip_suffix("/status").and_then(Kind::of_object_path);
    match (&head.method, pod) {
        (&Method::POST, _) if path == "/apis/authentication.k8s.io/v1/tokenreviews" => {
            Ok(respond(StatusCode::CREATED, shared.lock().tokens.review(&object?).to_string()))
        }
        (&Method::PATCH, Some((Kind::Pod, namespace, name))) => {
            let content_type = head.headers.get(header::CONTENT_TYPE);
            if content_type.is_none_or(|value| value != "application/strategic-merge-patch+json") {
                return Err(failure(415, "UnsupportedMediaType", "write a strategic merge patch"));
            }
            let (key, patch) = (key(Kind::Pod, namespace, name), object?);
            let pod = shared.change(|state| {
                let pod = state.get(Kind::Pod, &key).ok_or_else(status::not_found)?;
                Ok(state.replace(Kind::Pod, key, patched((*pod).clone(), &patch)?))
            })?;
            Ok(respond(StatusCode::OK, pod.to_string()))
        }
        _ => write(shared, head, object),
    }
}

/// Merge patches of Nodes and DaemonSets, and new and deleted DaemonSets.
fn write(shared: &Arc<Shared>, head: &Parts, object: Result<Value, Failure>) -> Result<Response<Body>, Failure> {
    let (path, named) = (head.uri.path(), Kind::of_object_path(head.uri.path()));
    let is_merge = head.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/merge-patch+json");
    let written = match (&head.method, named) {
        (&Method::PATCH, Some((kind @ (Kind::Node | Kind::DaemonSet), namespace, name))) if is_merge => {
            let (key, patch) = (key(kind, namespace, name), object?);
            shared.change(|state| {
                let before = state.get(kind, &key).ok_or_else(status::not_found)?;
                let version = &patch["metadata"]["resourceVersion"];
                if !version.is_null() && *version != before["metadata"]["resourceVersion"] {
                    return Err(failure(409, "Conflict", "the object has been modified"));
                }
                let mut after = (*before).clone();
                merge(&mut after, &patch);
                Ok(state.replace(kind, key, after))
            })?
        }
        (&Method::POST, _) if matches!(Kind::of_path(path), Some((Kind::DaemonSet, Some(_)))) => {
            let object = object?;
            shared.change(|state| state.apply(object))?
        }
        (&Method::DELETE, Some((Kind::DaemonSet, namespace, name))) => {
            shared.change(|state| state.delete(Kind::DaemonSet, key(Kind::DaemonSet, namespace, name)))?
        }
        _ => return Err(status::not_found()),
    };
    Ok(respond(StatusCode::OK, written.to_string()))
}

/// Applies a merge patch (RFC 7386).
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else { return target.clone_from(patch) };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in fields {
        if !value.is_null() {
            merge(&mut target[name], value);
        } else if let Some(object) = target.as_object_mut() {
            object.remove(name);
        }
    }
}

/// Merges conditions by their type. With another UID than the pod's, the patch is refused.
fn patched(mut pod: Value, patch: &Value) -> Result<Value, Failure> {
    let uid = &patch["metadata"]["uid"];
    if !uid.is_null() && *uid != pod["metadata"]["uid"] {
        return Err(failure(422, "Invalid", &format!("metadata.uid: Invalid value: {uid}: field is immutable")));
    }
    let mut merged = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    for condition in patch["status"]["conditions"].as_array().into_iter().flatten() {
        match merged.iter_mut().find(|old| old["type"] == condition["type"]) {
            Some(old) => condition.as_object().into_iter().flatten().for_each(|(key, value)| old[key] = value.clone()),
            None => merged.push(condition.clone()),
        }
    }
    pod["status"]["conditions"] = json!(merged);
    Ok(pod)
}

/// Lists the newest state, or one page of the list. Later pages have the version of the first page.
fn list(state: &mut State, kind: Kind, params: &Params) -> Result<Response<Body>, Failure> {
    let page = params.page();
    if page.is_some_and(|(_, serial, _)| serial < state.expired_tokens) {
        return Err(status::expired("The provided continue parameter is too old to display a consistent list result."));
    }
    let (version, objects) = state.list(kind, page.map(|(version, ..)| version))?;
    let is_listed = |(key, object): &(String, Arc<Value>)| {
        page.is_none_or(|(_, _, after)| key.as_str() > after) && params.selects(object)
    };
    let mut objects = objects.into_iter().filter(is_listed).peekable();
    let (mut items, mut metadata) = (Vec::new(), json!({"resourceVersion": version.to_string()}));
    while let Some((key, object)) = objects.next() {
        let mut item = Arc::unwrap_or_clone(object);
        if let Some(fields) = item.as_object_mut() {
            // Items in lists of built-in kinds have neither `kind` nor `apiVersion`.
            fields.remove("kind");
            fields.remove("apiVersion");
        }
        items.push(item);
        if params.limit == Some(items.len()) && objects.peek().is_some() {
            metadata["continue"] = json!(format!("{version} {} {key}", state.token_serial));
            state.token_serial += 1;
            break;
        }
    }
    let list_kind = format!("{}List", kind.name());
    let list = json!({"kind": list_kind, "apiVersion": kind.api_version(), "metadata": metadata, "items": items});
    Ok(respond(StatusCode::OK, list.to_string()))
}

pub(super) fn respond(code: StatusCode, bytes: impl Into<Bytes>) -> Response<Body> {
    with_headers(code, Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync())
}

pub(super) fn with_headers(code: StatusCode, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn refusal(failure: &Failure) -> Response<Body> {
    let code = StatusCode::from_u16(failure.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = respond(code, failure.body.to_string());
    if let Some(seconds) = failure.body["details"]["retryAfterSeconds"].as_u64() {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// The query of a list or a watch. Label selectors have terms `NAME`, `NAME=VALUE` and `!NAME`.
/// Field selectors are those that Headgate sends: Services with another `clusterIP`, and pods of a
/// node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Params {
    #[serde(skip)]
    namespace: Option<String>,
    watch: bool,
    limit: Option<usize>,
    /// The version of all pages of a list, the serial number of the token, and the last key of the
    /// previous page, separated by spaces.
    #[serde(rename = "continue")]
    token: Option<String>,
    resource_version: String,
    resource_version_match: String,
    label_selector: String,
    field_selector: String,
    #[serde(rename = "allowWatchBookmarks")]
    pub(super) bookmarks: bool,
    pub(super) timeout_seconds: Option<u64>,
    pub(super) send_initial_events: bool,
}

impl Params {
    /// Decodes a query. An invalid query, or one that `options` do not allow, gets the code of a
    /// real server: 400 or 422.
    fn parse(kind: Kind, namespace: Option<&str>, query: &str, options: &Options) -> Result<Self, Failure> {
        let unsupported = || status::bad_request(&format!("the stand-in API server does not support {query}"));
        let params: Self = serde_urlencoded::from_str(query).map_err(|_| unsupported())?;
        if params.send_initial_events && !options.streaming_lists {
            let message = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
            return Err(failure(422, "Invalid", message));
        }
        if params.send_initial_events != (params.resource_version_match == "NotOlderThan") {
            let message = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            return Err(failure(422, "Invalid", message));
        }
        let has_field_selectors = match kind {
            Kind::Service => options.service_field_selectors,
            kind => kind == Kind::Pod,
        };
        if !params.field_selector.is_empty() && !has_field_selectors {
            return Err(status::bad_request("field label not supported: spec.clusterIP"));
        }
        let start = if kind == Kind::Pod { OF_NODE } else { NOT_ADDRESS };
        let are_known = params.field_selector.is_empty() || params.field_selector.starts_with(start);
        let is_match = matches!(&*params.resource_version_match, "" | "NotOlderThan");
        let is_version = params.resource_version.is_empty() || params.version().is_some();
        if !are_known || !is_match || !is_version || (params.token.is_some() && params.page().is_none()) {
            return Err(unsupported());
        }
        Ok(Self { namespace: namespace.map(str::to_owned), ..params })
    }

    /// The version from which to watch; 0 means any version.
    pub(super) fn version(&self) -> Option<u64> {
        self.resource_version.parse().ok()
    }

    /// The three parts of a continue token.
    fn page(&self) -> Option<(u64, u64, &str)> {
        let mut parts = self.token.as_ref()?.splitn(3, ' ');
        let mut number = || parts.next()?.parse().ok();
        Some((number()?, number()?, parts.next()?))
    }

    /// Whether an object is in the namespace and matches the selectors.
    pub(super) fn selects(&self, object: &Value) -> bool {
        let label = |name: &str| object["metadata"]["labels"].get(name);
        let has = |term: &str| match (term.strip_prefix('!'), term.split_once('=')) {
            (Some(name), _) => label(name).is_none(),
            (None, Some((name, value))) => label(name).is_some_and(|found| found == value),
            (None, None) => label(term).is_some(),
        };
        let is = |address: &str| object["spec"]["clusterIP"].as_str().unwrap_or_default() == address;
        self.namespace.as_deref().is_none_or(|namespace| object["metadata"]["namespace"] == namespace)
            && self.label_selector.split(',').filter(|term| !term.is_empty()).all(has)
            && !self.field_selector.strip_prefix(NOT_ADDRESS).is_some_and(is)
            && self.field_selector.strip_prefix(OF_NODE).is_none_or(|node| object["spec"]["nodeName"] == node)
    }
}
