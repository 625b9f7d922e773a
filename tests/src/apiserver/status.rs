//! `Status` bodies with the codes, reasons and messages of the real API server. Clients distinguish
//! errors by code and reason.

use serde_json::{Value, json};

/// A failure response: an HTTP code, and a `v1` Status object as the body.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The HTTP code, which the body also contains.
    pub code: u16,
    /// The Status object.
    pub body: Value,
}

/// Builds a failure from an HTTP code, a machine-readable reason and a message.
pub fn failure(code: u16, reason: &str, message: &str) -> Failure {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    });
    Failure { code, body }
}

/// 404 for a path or an object that does not exist.
pub(super) fn not_found() -> Failure {
    failure(404, "NotFound", "the server could not find the requested resource")
}

/// 400 for an invalid request.
pub(super) fn bad_request(message: &str) -> Failure {
    failure(400, "BadRequest", message)
}

/// 410 for a resourceVersion or a continue token that is older than the history.
pub(super) fn expired(message: &str) -> Failure {
    failure(410, "Expired", message)
}

/// 410 for a watch from a version that is older than the history.
pub(super) fn too_old(asked: u64, oldest: u64) -> Failure {
    expired(&format!("too old resource version: {asked} ({oldest})"))
}

/// The Status of a failure that a test injects, such as 429, 500 or 503.
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
    let mut failure = failure(code, reason, message);
    if let Some(seconds) = retry_after_seconds {
        failure.body["details"] = json!({"retryAfterSeconds": seconds});
    }
    failure
}
