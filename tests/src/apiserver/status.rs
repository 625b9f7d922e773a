//! `Status` bodies, worded as the real API server words them: clients tell errors apart by code and reason.

use serde_json::{Value, json};

use super::kinds::Kind;

/// A failure as the API reports it: an HTTP code and the `v1` Status object that is the body.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The HTTP code, also in the body.
    pub code: u16,
    /// The Status object.
    pub body: Value,
}

/// A failure Status with the given HTTP code, machine-readable reason and message.
pub fn failure(code: u16, reason: &str, message: &str) -> Failure {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    });
    Failure { code, body }
}

fn with_details(mut failure: Failure, details: Value) -> Failure {
    failure.body["details"] = details;
    failure
}

fn about(kind: Kind, name: &str) -> Value {
    match kind.group() {
        "" => json!({"name": name, "kind": kind.plural()}),
        group => json!({"name": name, "group": group, "kind": kind.plural()}),
    }
}

/// 404 for a path that the server does not know.
pub(super) fn no_such_path() -> Failure {
    let failure = failure(404, "NotFound", "the server could not find the requested resource");
    with_details(failure, json!({}))
}

/// 404 for an object that does not exist.
pub(super) fn not_found(kind: Kind, name: &str) -> Failure {
    let message = format!("{} \"{name}\" not found", kind.qualified_plural());
    with_details(failure(404, "NotFound", &message), about(kind, name))
}

/// 409 for a create of what exists.
pub(super) fn already_exists(kind: Kind, name: &str) -> Failure {
    let message = format!("{} \"{name}\" already exists", kind.qualified_plural());
    with_details(failure(409, "AlreadyExists", &message), about(kind, name))
}

/// 409 for an update made from an old resourceVersion.
pub(super) fn conflict(kind: Kind, name: &str) -> Failure {
    let message = format!(
        "Operation cannot be fulfilled on {} \"{name}\": the object has been modified; please apply your changes to \
         the latest version and try again",
        kind.qualified_plural()
    );
    with_details(failure(409, "Conflict", &message), about(kind, name))
}

/// 400 for a request that cannot be understood.
pub(super) fn bad_request(message: &str) -> Failure {
    failure(400, "BadRequest", message)
}

/// 405 for a verb that the path does not take.
pub(super) fn method_not_allowed() -> Failure {
    failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
}

/// 422 for list options that exclude one another.
pub(super) fn invalid_options(field: &str, cause: &str, message: &str) -> Failure {
    let whole = format!("ListOptions.meta.k8s.io \"\" is invalid: {field}: {message}");
    let details = json!({
        "group": "meta.k8s.io", "kind": "ListOptions",
        "causes": [{"reason": cause, "message": message, "field": field}],
    });
    with_details(failure(422, "Invalid", &whole), details)
}

/// 422 for an object whose field is wrong.
pub(super) fn invalid_object(kind: Kind, name: &str, field: &str, message: &str) -> Failure {
    let whole = format!("{} \"{name}\" is invalid: {field}: {message}", kind.name());
    let mut details = about(kind, name);
    details["causes"] = json!([{"reason": "FieldValueInvalid", "message": message, "field": field}]);
    with_details(failure(422, "Invalid", &whole), details)
}

/// 410 for a resourceVersion or a continue token that is older than the history kept.
pub(super) fn expired(message: &str) -> Failure {
    failure(410, "Expired", message)
}

/// 410 for a watch that starts at a version older than the history kept.
pub(super) fn too_old(asked: u64, oldest: u64) -> Failure {
    expired(&format!("too old resource version: {asked} ({oldest})"))
}

/// 504 for a resourceVersion that the server has not reached.
pub(super) fn too_large(asked: u64, current: u64) -> Failure {
    let message = format!("Too large resource version: {asked}, current: {current}");
    let details = json!({
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    });
    with_details(failure(504, "Timeout", &message), details)
}

/// The Status of a failure that a test asked for: 429, 500, 503 or whatever code it named.
pub(super) fn injected(code: u16, retry_after_seconds: Option<u32>) -> Failure {
    let (reason, message) = match code {
        401 => ("Unauthorized", "Unauthorized"),
        403 => ("Forbidden", "access is forbidden"),
        410 => ("Expired", "The resourceVersion for the provided list is too old."),
        429 => ("TooManyRequests", "Too many requests, please try again later."),
        500 => ("InternalError", "Internal error occurred: etcdserver: request timed out"),
        503 => ("ServiceUnavailable", "apiserver is shutting down"),
        504 => ("Timeout", "Timeout: request did not complete within the allotted timeout"),
        _ => ("Unknown", "failure injected by the test"),
    };
    let failure = failure(code, reason, message);
    match retry_after_seconds {
        Some(seconds) => with_details(failure, json!({"retryAfterSeconds": seconds})),
        None => failure,
    }
}

/// The Status of a delete that was done.
pub(super) fn deleted(kind: Kind, name: &str, uid: &str) -> Value {
    let mut details = about(kind, name);
    details["uid"] = json!(uid);
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}
