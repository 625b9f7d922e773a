//! Requests to answers: routing, faults, lists with paging, reads, writes; watches are handed to `Session`.

use std::{collections::BTreeMap, io, sync::Arc};

use bytes::Bytes;
use futures::stream;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout_at};

use super::{
    Shared,
    connection::ConnectionState,
    counters::Verb,
    faults::{Cut, RequestFault},
    kinds::{Kind, Target},
    params::{ContinueToken, Match, Params},
    selectors::{Selector, indexed_fields},
    status::{self, Failure},
    watch::{Opening, Session, line},
};

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// The real server's limit on a request body, in bytes.
const BODY_LIMIT_BYTES: usize = 3 * 1024 * 1024;

/// Answers one request. An error cuts the connection, as a fault may ask.
pub(super) async fn answer(
    shared: Arc<Shared>,
    connection: Arc<ConnectionState>,
    request: Request<Incoming>,
) -> io::Result<Response<Body>> {
    let path = request.uri().path().to_owned();
    let query = request.uri().query().unwrap_or_default().to_owned();
    let target = Target::parse(&path);
    let params = Params::parse(&query);
    let (verb, kind) = classify(request.method(), target.as_ref(), params.as_ref().is_ok_and(|params| params.watch));
    let index = shared.counters.record(verb, kind, &path, &query);
    let faulty = match shared.faults.take(verb, kind) {
        Some(fault) => suffer(&shared, &connection, fault).await?,
        None => None,
    };
    let response = match faulty {
        Some(response) => response,
        None => {
            let call = Call { shared: &shared, connection, params, target };
            call.respond(request).await.unwrap_or_else(|failure| refusal(&failure))
        }
    };
    shared.counters.answered(index, response.status().as_u16());
    Ok(response)
}

fn classify(method: &Method, target: Option<&Target>, watch: bool) -> (Verb, Option<Kind>) {
    let kind = match target {
        Some(Target::Collection { kind, .. } | Target::Object { kind, .. }) => *kind,
        _ => return (Verb::Other, None),
    };
    let verb = match (method, target) {
        (&Method::GET, Some(Target::Collection { .. })) if watch => Verb::Watch,
        (&Method::GET, Some(Target::Collection { .. })) => Verb::List,
        (&Method::GET, _) => Verb::Get,
        (&Method::POST, _) => Verb::Create,
        (&Method::PUT, _) => Verb::Update,
        (&Method::DELETE, _) => Verb::Delete,
        _ => Verb::Other,
    };
    (verb, Some(kind))
}

/// Lets a fault act: an answer in its place, an error that cuts, or `None` to go on as usual.
async fn suffer(
    shared: &Shared,
    connection: &ConnectionState,
    fault: RequestFault,
) -> io::Result<Option<Response<Body>>> {
    match fault {
        RequestFault::Status { code, retry_after_seconds } => {
            let mut response = refusal(&status::injected(code, retry_after_seconds));
            if let Some(seconds) = retry_after_seconds {
                response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            }
            Ok(Some(response))
        }
        RequestFault::Delay(time) => {
            sleep(time).await;
            Ok(None)
        }
        RequestFault::Stall => {
            let mut bell = shared.store.subscribe();
            let clearings = shared.faults.clearings();
            while shared.faults.clearings() == clearings && bell.changed().await.is_ok() {}
            Ok(None)
        }
        RequestFault::Cut(how) => {
            if how == Cut::Reset {
                connection.reset_on_close();
            }
            Err(io::Error::other("cut as a test ordered"))
        }
        RequestFault::Garbage(bytes) => Ok(Some(respond(StatusCode::OK, "application/json", bytes))),
    }
}

fn respond(code: StatusCode, content_type: &'static str, bytes: Bytes) -> Response<Body> {
    let body = Full::new(bytes).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    response
}

fn respond_json(code: StatusCode, value: &Value) -> Response<Body> {
    respond(code, "application/json", Bytes::from(format!("{value}\n")))
}

fn refusal(failure: &Failure) -> Response<Body> {
    let code = StatusCode::from_u16(failure.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    respond_json(code, &failure.body)
}

/// One request, decoded as far as its kind needs.
struct Call<'a> {
    shared: &'a Arc<Shared>,
    connection: Arc<ConnectionState>,
    params: Result<Params, Failure>,
    target: Option<Target>,
}

impl Call<'_> {
    async fn respond(mut self, request: Request<Incoming>) -> Result<Response<Body>, Failure> {
        let target = self.target.take().ok_or_else(status::no_such_path)?;
        match (request.method(), target) {
            (&Method::GET, Target::Version) => Ok(respond_json(StatusCode::OK, &version())),
            (&Method::GET, Target::Health) => {
                Ok(respond(StatusCode::OK, "text/plain; charset=utf-8", Bytes::from_static(b"ok")))
            }
            (&Method::GET, Target::Collection { kind, namespace }) => {
                let params = self.params.clone()?;
                let options = self.shared.options();
                if kind == Kind::ServiceCidr && !options.service_cidrs {
                    return Err(status::no_such_path());
                }
                params.validate(options.streaming_lists)?;
                let fields = indexed_fields(kind, options.service_field_selectors);
                let selector = Selector::parse(fields, &params.label_selector, &params.field_selector)?;
                if params.watch {
                    self.watch(kind, namespace, selector, &params).await
                } else {
                    self.list(kind, namespace.as_deref(), &selector, &params).await
                }
            }
            (&Method::GET, Target::Object { kind, namespace, name }) => {
                let found = self.shared.store.get(kind, &namespace, &name);
                let object = found.ok_or_else(|| status::not_found(kind, &name))?;
                Ok(respond_json(StatusCode::OK, &object))
            }
            (&Method::POST, Target::Collection { kind, namespace }) => {
                let object = read_object(request, kind, namespace.as_deref(), None).await?;
                Ok(respond_json(StatusCode::CREATED, &*self.shared.store.create(object)?))
            }
            (&Method::PUT, Target::Object { kind, namespace, name }) => {
                let object = read_object(request, kind, Some(&namespace), Some(&name)).await?;
                Ok(respond_json(StatusCode::OK, &*self.shared.store.update(object)?))
            }
            (&Method::DELETE, Target::Object { kind, namespace, name }) => {
                let object = self.shared.store.delete(kind, &namespace, &name)?;
                let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
                Ok(respond_json(StatusCode::OK, &status::deleted(kind, &name, uid)))
            }
            _ => Err(status::method_not_allowed()),
        }
    }

    async fn watch(
        &self,
        kind: Kind,
        namespace: Option<String>,
        selector: Selector,
        params: &Params,
    ) -> Result<Response<Body>, Failure> {
        if let (Some(true), Some(version)) = (params.send_initial_events, params.resource_version) {
            self.wait_for_version(version).await?;
        }
        let opening = Opening { kind, namespace, selector, params };
        let session = match Session::open(self.shared, self.connection.clone(), opening) {
            Ok(session) => session,
            Err(failure) if self.shared.options().gone_as_http_status => return Err(failure),
            // The real server has answered 200 by the time it finds that a version is too old.
            Err(failure) => return Ok(respond(StatusCode::OK, "application/json", line("ERROR", &failure.body))),
        };
        let pieces = stream::unfold(session, |mut session| async move {
            let piece = session.next().await?;
            Some((piece.map(Frame::data), session))
        });
        let mut response = Response::new(BodyExt::boxed_unsync(StreamBody::new(pieces)));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
        Ok(response)
    }

    async fn list(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        selector: &Selector,
        params: &Params,
    ) -> Result<Response<Body>, Failure> {
        let token = params.continue_token.as_deref().map(ContinueToken::decode).transpose()?;
        let at = match (&token, params.resource_version) {
            (Some(_), Some(version)) if version > 0 => {
                return Err(status::bad_request("specifying resource version is not allowed when using continue"));
            }
            (Some(token), _) => self.check_token(token)?,
            (None, None | Some(0)) => None,
            (None, Some(version)) => {
                self.wait_for_version(version).await?;
                // Without a match rule a version together with a limit means exactly that version.
                let exact = params.version_match == Some(Match::Exact)
                    || (params.version_match.is_none() && params.limit.is_some());
                exact.then_some(version)
            }
        };
        let (version, objects) = self.shared.store.list(kind, at)?;
        // A list at "0" comes from the cache, which knows no pages.
        let limit = params.limit.filter(|_| token.is_some() || params.resource_version != Some(0));
        let page = Page::cut(objects, token.as_ref(), limit, namespace, selector);
        let mut metadata = json!({"resourceVersion": version.to_string()});
        if let Some(after) = page.last_key.filter(|_| page.remaining > 0) {
            let next = ContinueToken { version: Some(version), serial: self.shared.next_token_serial(), after };
            metadata["continue"] = json!(next.encode());
            if selector.is_empty() {
                metadata["remainingItemCount"] = json!(page.remaining);
            }
        }
        let list_kind = format!("{}List", kind.name());
        let list =
            json!({"kind": list_kind, "apiVersion": kind.api_version(), "metadata": metadata, "items": page.items});
        Ok(respond_json(StatusCode::OK, &list))
    }

    /// The version that a continue token stands for; 410 with a token for an inconsistent rest if it has expired.
    fn check_token(&self, token: &ContinueToken) -> Result<Option<u64>, Failure> {
        let Some(version) = token.version else { return Ok(None) };
        if version >= self.shared.store.oldest_version() && !self.shared.token_is_expired(token.serial) {
            return Ok(Some(version));
        }
        let mut failure = status::expired(
            "The provided continue parameter is too old to display a consistent list result. You can start a new list \
             without the continue parameter, or use the continue token in this response to retrieve the remainder of \
             the results. Continuing with the provided token results in an inconsistent list - objects that were \
             created, modified, or deleted between the time the first chunk was returned and now may show up in the list.",
        );
        let rest = ContinueToken { version: None, ..token.clone() };
        failure.body["metadata"]["continue"] = json!(rest.encode());
        Err(failure)
    }

    /// Waits until the store has reached a version; 504 if it does not in the time set in the options.
    async fn wait_for_version(&self, version: u64) -> Result<(), Failure> {
        let mut bell = self.shared.store.subscribe();
        let until = Instant::now() + self.shared.options().future_version_wait;
        loop {
            bell.borrow_and_update();
            let current = self.shared.store.version();
            if current >= version {
                return Ok(());
            }
            if !matches!(timeout_at(until, bell.changed()).await, Ok(Ok(()))) {
                return Err(status::too_large(version, current));
            }
        }
    }
}

struct Page {
    items: Vec<Value>,
    last_key: Option<String>,
    remaining: usize,
}

impl Page {
    fn cut(
        objects: BTreeMap<String, Arc<Value>>,
        token: Option<&ContinueToken>,
        limit: Option<usize>,
        namespace: Option<&str>,
        selector: &Selector,
    ) -> Self {
        let mut page = Self { items: Vec::new(), last_key: None, remaining: 0 };
        for (key, object) in objects {
            let in_namespace =
                namespace.is_none_or(|namespace| object["metadata"]["namespace"].as_str() == Some(namespace));
            let is_past = token.is_some_and(|token| key <= token.after);
            if is_past || !in_namespace || !selector.matches(&object) {
                continue;
            }
            if limit.is_some_and(|limit| page.items.len() >= limit) {
                page.remaining += 1;
                continue;
            }
            let mut item = Arc::unwrap_or_clone(object);
            if let Some(fields) = item.as_object_mut() {
                // Items of a list of built-in kinds name neither.
                fields.remove("kind");
                fields.remove("apiVersion");
            }
            page.items.push(item);
            page.last_key = Some(key);
        }
        page
    }
}

/// Reads a body to its end; 413 where it is over the limit. What is over is read all the same and thrown away: closing
/// on unread data would reset the connection, and the client might never see the answer.
async fn read_body(mut body: Incoming) -> Result<Vec<u8>, Failure> {
    let (mut bytes, mut total) = (Vec::new(), 0_usize);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| status::bad_request(&format!("the body could not be read: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        total += data.len();
        if total <= BODY_LIMIT_BYTES {
            bytes.extend_from_slice(&data);
        }
    }
    if total > BODY_LIMIT_BYTES {
        let message = format!("Request entity too large: limit is {BODY_LIMIT_BYTES}");
        return Err(status::failure(413, "RequestEntityTooLarge", &message));
    }
    Ok(bytes)
}

/// Reads the body of a write and holds it against the path: what the body leaves out is filled in from the path.
async fn read_object(
    request: Request<Incoming>,
    kind: Kind,
    namespace: Option<&str>,
    name: Option<&str>,
) -> Result<Value, Failure> {
    let body = read_body(request.into_body()).await?;
    let mut object: Value = serde_json::from_slice(&body).map_err(|error| {
        status::bad_request(&format!("the object provided is unrecognized (must be JSON): {error}"))
    })?;
    let Some(fields) = object.as_object_mut() else {
        return Err(status::bad_request("the object provided is unrecognized: it must be a JSON object"));
    };
    fields.entry("kind").or_insert_with(|| json!(kind.name()));
    fields.entry("apiVersion").or_insert_with(|| json!(kind.api_version()));
    if Kind::of(&object) != Some(kind) {
        let message = format!(
            "the API version and kind in the data ({}, {}) do not match the expected ones ({}, {})",
            object["apiVersion"],
            object["kind"],
            kind.api_version(),
            kind.name()
        );
        return Err(status::bad_request(&message));
    }
    for (field, expected) in [("namespace", namespace.filter(|_| kind.is_namespaced())), ("name", name)] {
        let Some(expected) = expected else { continue };
        let Some(metadata) = object["metadata"].as_object_mut() else {
            return Err(status::invalid_object(
                kind,
                name.unwrap_or_default(),
                "metadata",
                "Required value: an object with a name",
            ));
        };
        let given = metadata.entry(field).or_insert_with(|| json!(expected));
        if given.as_str() != Some(expected) {
            let message =
                format!("the {field} of the object ({given}) does not match the {field} on the request ({expected})");
            return Err(status::bad_request(&message));
        }
    }
    Ok(object)
}

fn version() -> Value {
    json!({
        "major": "1", "minor": "37", "gitVersion": "v1.37.0", "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "go1.25", "compiler": "gc", "platform": "linux/amd64",
    })
}
