//! Answers requests: applies faults, serves lists in pages, and opens a `Session` for each watch.

use std::{io, sync::Arc};

use bytes::Bytes;
use futures::stream;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    Shared,
    connection::ConnectionState,
    counters::Verb,
    faults::{Cut, RequestFault},
    kinds::Kind,
    params::{ContinueToken, Params},
    status::{self, Failure},
    watch::{Session, is_in_namespace, line},
    writes::{patch_conditions, patched_pod},
};

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Answers one request.
///
/// # Errors
/// A fault cuts the connection. After this error, the caller must close the connection.
pub(super) async fn answer(
    shared: Arc<Shared>,
    connection: Arc<ConnectionState>,
    request: Request<Incoming>,
) -> io::Result<Response<Body>> {
    let (head, mut body) = request.into_parts();
    let (path, query) = (head.uri.path(), head.uri.query().unwrap_or_default());
    let target = Kind::of_path(path).filter(|_| head.method == Method::GET);
    let verb = match target {
        None => Verb::Other,
        Some(_) if query.split('&').any(|pair| pair == "watch=true") => Verb::Watch,
        Some(_) => Verb::List,
    };
    let kind = target.map(|(kind, _)| kind);
    let index = shared.counters.record(&head.method, verb, kind, path, query);
    let faulty = match shared.faults.take(verb, kind) {
        Some(fault) => apply_fault(&shared, &connection, fault).await?,
        None => None,
    };
    let rights = shared.options().rights;
    let forbidden = rights.and_then(|rights| rights.check(&head.method, path, query).err());
    let faulty = faulty.or_else(|| forbidden.as_ref().map(refusal));
    let page = match head.method {
        _ if faulty.is_some() => None,
        Method::GET => shared.tokens.pod(path).map(|pod| (StatusCode::OK, pod)),
        Method::POST if path == "/apis/authentication.k8s.io/v1/tokenreviews" => {
            let review = (&mut body).collect().await.map_err(io::Error::other)?.to_bytes();
            Some((StatusCode::CREATED, shared.tokens.review(&serde_json::from_slice(&review)?)))
        }
        _ => None,
    };
    if let Some(pod) = patched_pod(&head.method, path).filter(|_| faulty.is_none() && page.is_none()) {
        let bytes = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let content_type = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let answer = patch_conditions(&shared.store, pod, content_type.unwrap_or_default(), &bytes);
        let response = match answer {
            Ok(object) => respond(StatusCode::OK, object.to_string().into()),
            Err(failure) => refusal(&failure),
        };
        shared.counters.answered(index, response.status().as_u16());
        return Ok(response);
    }
    if let Some((status, page)) = page {
        shared.counters.answered(index, status.as_u16());
        return Ok(respond(status, Bytes::from(page.to_string())));
    }
    let response = faulty.unwrap_or_else(|| {
        let answer = target.ok_or_else(status::not_found).and_then(|(kind, namespace)| {
            let options = shared.options();
            if kind == Kind::ServiceCidr && !options.service_cidrs {
                return Err(status::not_found());
            }
            let params = Params::parse(kind, query, &options)?;
            if params.watch {
                watch(&shared, connection, kind, namespace, params)
            } else {
                list(&shared, kind, namespace, &params)
            }
        });
        answer.unwrap_or_else(|failure| refusal(&failure))
    });
    shared.counters.answered(index, response.status().as_u16());
    Ok(response)
}

/// Applies a fault: returns the faulty answer, an error that cuts the connection, or `None` for the
/// usual answer.
async fn apply_fault(
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
            let mut wakeups = shared.store.subscribe();
            let clearings = shared.faults.clearings();
            while shared.faults.clearings() == clearings && wakeups.changed().await.is_ok() {}
            Ok(None)
        }
        RequestFault::Cut(how) => {
            if how == Cut::Reset {
                connection.reset_on_close();
            }
            Err(io::Error::other("the test cuts the connection"))
        }
        RequestFault::Garbage(bytes) => Ok(Some(respond(StatusCode::OK, bytes))),
    }
}

fn with_headers(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    response
}

fn respond(code: StatusCode, bytes: Bytes) -> Response<Body> {
    let mut response = with_headers(Full::new(bytes).map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = code;
    response
}

fn refusal(failure: &Failure) -> Response<Body> {
    let code = StatusCode::from_u16(failure.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    respond(code, Bytes::from(format!("{}\n", failure.body)))
}

fn watch(
    shared: &Arc<Shared>,
    connection: Arc<ConnectionState>,
    kind: Kind,
    namespace: Option<&str>,
    params: Params,
) -> Result<Response<Body>, Failure> {
    let session = match Session::open(shared, connection, kind, namespace, params) {
        Ok(session) => session,
        Err(failure) if shared.options().gone_as_http_status => return Err(failure),
        // The real server has already sent code 200 when it finds that the version is too old.
        Err(failure) => return Ok(respond(StatusCode::OK, line("ERROR", &failure.body))),
    };
    let pieces = stream::unfold(session, |mut session| async move {
        let piece = session.next().await?;
        Some((piece.map(Frame::data), session))
    });
    Ok(with_headers(BodyExt::boxed_unsync(StreamBody::new(pieces))))
}

/// Lists the newest state, or one page of the list. Later pages have the version of the first page.
fn list(shared: &Shared, kind: Kind, namespace: Option<&str>, params: &Params) -> Result<Response<Body>, Failure> {
    if params.token.as_ref().is_some_and(|token| shared.token_is_expired(token.serial)) {
        return Err(status::expired("The provided continue parameter is too old to display a consistent list result."));
    }
    let (version, objects) = shared.store.list(kind, params.token.as_ref().map(|token| token.version))?;
    let is_listed = |(key, object): &(String, Arc<Value>)| {
        params.token.as_ref().is_none_or(|token| *key > token.after)
            && is_in_namespace(object, namespace)
            && params.selector.matches(object)
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
            let next = ContinueToken { version, serial: shared.next_token_serial(), after: key };
            metadata["continue"] = json!(next.encode());
            break;
        }
    }
    let list_kind = format!("{}List", kind.name());
    let list = json!({"kind": list_kind, "apiVersion": kind.api_version(), "metadata": metadata, "items": items});
    Ok(respond(StatusCode::OK, Bytes::from(format!("{list}\n"))))
}
