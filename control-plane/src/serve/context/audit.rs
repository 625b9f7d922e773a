//! The audit log: one line for each request to Inspect or reflection, on a log target of its own.
//! Requests between replicas are left out, because they follow from a request that one of them has
//! logged.

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use headgate_core::turns::Turns;
use http::{HeaderMap, request::Parts};
use tonic::{Code, Request, Status};

use super::{Context, Warning};
use crate::identity::{Identity, Peer};

/// How many lines a client may cause at once, and the time after which it may cause one more.
const LINES_AT_ONCE: u32 = 200;
const LINE_INTERVAL: Duration = Duration::from_millis(100);

/// A request whose line follows when it ends: with the begin of its answer, or without one.
pub(crate) struct AuditedRequest {
    context: Arc<Context>,
    result: Code,
    peer: Peer,
    method: String,
    object: AuditedObject,
}

/// The object of a request. The method that answers the request sets it.
#[derive(Clone, Default)]
struct AuditedObject(Arc<OnceLock<String>>);

/// Names the object of a request for the audit log by the parts of its name. An empty part stands
/// for any.
pub(crate) fn audit_object<T>(request: &Request<T>, parts: &[&str]) {
    if let Some(AuditedObject(object)) = request.extensions().get() {
        let parts = parts.iter().map(|part| if part.is_empty() { "*" } else { &part[..part.floor_char_boundary(253)] });
        // It is set once.
        let _ = object.set(parts.collect::<Vec<_>>().join("/"));
    }
}

/// The lines that each client may cause, so that nobody fills the log or hides the requests of
/// others. The numbers of lines that are left out are logged by client and method.
pub(super) fn lines() -> Mutex<Turns<String>> {
    Mutex::new(Turns::new(LINE_INTERVAL, LINES_AT_ONCE))
}

impl AuditedRequest {
    /// Begins a request; `None` if it is not logged.
    pub(crate) fn begin(context: &Arc<Context>, peer: &Peer, request: &mut Parts) -> Option<Self> {
        let path = request.uri.path();
        let is_logged = path.starts_with("/headgate.v1.Inspect/") || path.starts_with("/grpc.reflection.");
        if !is_logged || matches!(peer.identity, Identity::Replica(_)) {
            return None;
        }
        let method = path[1..path.floor_char_boundary(100)].to_owned();
        let object = AuditedObject::default();
        request.extensions.insert(object.clone());
        Some(Self { context: Arc::clone(context), result: Code::Cancelled, peer: peer.clone(), method, object })
    }

    /// Ends a request whose answer begins with these headers.
    pub(crate) fn end(mut self, answer: &HeaderMap) {
        self.result = Status::from_header_map(answer).map_or(Code::Ok, |status| status.code());
    }
}

impl Drop for AuditedRequest {
    fn drop(&mut self) {
        let Self { context, result, peer, method, object } = &*self;
        let who = match &peer.identity {
            Identity::Unchecked => format!("anybody at {}", peer.address.ip()),
            Identity::Node(name) => format!("node {name}"),
            Identity::Reader(name) => format!("reader {name}"),
            Identity::Replica(name) => format!("replica {name}"),
            Identity::Unusable(_) => "a certificate without a usable name".to_owned(),
        };
        let now = Instant::now();
        let has_turn = context.audit_lines.lock().unwrap_or_else(PoisonError::into_inner).take(who.clone(), now);
        let source = Some(format!("{who} {method}"));
        if has_turn.is_err() && !context.warnings.admit_from(source, Warning::Audited, now.into()) {
            return;
        }
        let object = object.0.get().map_or("-", String::as_str);
        tracing::info!(target: "headgate::audit", who, address = %peer.address, method, object, ?result, "request");
    }
}
