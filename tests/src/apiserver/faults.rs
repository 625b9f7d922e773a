//! Faults that a test can turn on at any time, and the requests that the server has seen.

use bytes::Bytes;
use http::Method;
use serde_json::Value;

use super::kinds::Kind;

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verb {
    /// A list of a collection.
    List,
    /// A watch of a collection.
    Watch,
    /// Any other request.
    Other,
}

/// One received request.
#[derive(Debug, Clone)]
pub struct RecordedRequest {
    /// The HTTP method.
    pub method: Method,
    /// The verb.
    pub verb: Verb,
    /// The kind of objects in the collection that the path names, if any.
    pub kind: Option<Kind>,
    /// The path, percent-encoded.
    pub path: String,
    /// The query string, percent-encoded. The string may be empty.
    pub query: String,
    /// The HTTP code of the answer, or `None` before the answer.
    pub answered: Option<u16>,
}

/// How a connection ends when it is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The socket is closed without the last chunk of the body. The peer sees an end of file in the
    /// middle of a message.
    Close,
    /// The peer gets a TCP reset.
    Reset,
}

/// What happens to a request to which a fault applies.
#[derive(Debug, Clone)]
pub enum RequestFault {
    /// The answer has this code, a Status body, and a Retry-After header if the time is given.
    Status {
        /// The HTTP code, such as 429, 500 or 503.
        code: u16,
        /// The seconds in the Retry-After header and in the Status details.
        retry_after_seconds: Option<u32>,
    },
    /// The request waits until `ApiServer::clear_faults` is called, and is then answered without a
    /// fault.
    Stall,
    /// The connection is cut before any answer.
    Cut(Cut),
    /// The answer has code 200 and these bytes as the body.
    Garbage(Bytes),
}

impl RequestFault {
    /// An answer with this code and without a Retry-After header.
    pub fn status(code: u16) -> Self {
        Self::Status { code, retry_after_seconds: None }
    }
}

/// The requests to which a fault applies. A field that is `None` matches every request.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestFilter {
    /// The verb of the requests.
    pub verb: Option<Verb>,
    /// The kind of objects that the requests name.
    pub kind: Option<Kind>,
}

impl RequestFilter {
    /// All requests, including `/version` and health checks.
    pub fn all() -> Self {
        Self::default()
    }

    /// Requests of one verb.
    pub fn verb(verb: Verb) -> Self {
        Self { verb: Some(verb), kind: None }
    }

    /// Requests of one verb and kind.
    pub fn verb_of(verb: Verb, kind: Kind) -> Self {
        Self { verb: Some(verb), kind: Some(kind) }
    }

    pub(super) fn matches(self, verb: Verb, kind: Option<Kind>) -> bool {
        self.verb.is_none_or(|wanted| wanted == verb) && self.kind.is_none_or(|wanted| Some(wanted) == kind)
    }
}

/// An order to open watches.
#[derive(Debug, Clone)]
pub enum Order {
    /// End the response, as after a time-out of the watch.
    Close,
    /// Send half an event, then cut the connection.
    CutNow(Cut),
    /// Send only half of the next real event, then cut the connection.
    CutOnNextEvent(Cut),
    /// Send these bytes unchanged, then continue. They should end with a newline.
    Raw(Bytes),
    /// Send an ERROR event with this Status, which `failure` builds, then end the response.
    Error(Value),
    /// Send an ERROR event with code 410 (the version is too old), then end the response. After
    /// `ApiServer::compact`, the watches cannot be resumed either.
    Expire,
}
