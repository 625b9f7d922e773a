//! Closes connections of the general server whose clients do not read a response.
//!
//! A client can leave its flow-control window at zero (RFC 9113, 6.9) and still answer pings. The
//! response would then stay in memory for ever, because the server requests more data from a body
//! only when the window has room. So the server closes the connection of a client that reads
//! nothing of a pending response for some time.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{self, Poll, Wake, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures::task::AtomicWaker;
use http_body::{Frame, SizeHint};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body};

use crate::{
    identity::Peer,
    serve::context::{Context, Visit, Visited},
};

/// The client of a request, and its connection.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) peer: Peer,
    /// Cancelling this token closes the connection.
    pub(crate) closed: CancellationToken,
}

/// The state of one response.
struct Response {
    context: Arc<Context>,
    caller: Caller,
    /// Wakes the server's task for the response.
    server: AtomicWaker,
    /// The time since which the response has had data that the client does not read; `None` while
    /// the response has no such data.
    pending_since: Mutex<Option<Instant>>,
}

impl Response {
    fn pending_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.pending_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_pending(&self) {
        self.pending_since().get_or_insert_with(Instant::now);
    }

    fn limit(&self) -> Duration {
        self.context.settings.stalled_response_timeout
    }
}

impl Wake for Response {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.set_pending();
        self.server.wake();
    }
}

impl Visit for Response {
    fn visit(&self, now: Instant) {
        if self.pending_since().take_if(|since| *since + self.limit() <= now).is_some() {
            self.context.metrics.stalled_responses.inc();
            let (address, seconds) = (self.caller.peer.address, self.limit().as_secs());
            tracing::info!(%address, seconds, "connection closed: the client does not read a response");
            self.caller.closed.cancel();
        }
    }
}

/// The body of a response. If the client does not read the body, the connection is closed.
pub(crate) struct Watched {
    body: Body,
    response: Arc<Response>,
    _visited: Visited,
}

impl Watched {
    /// Watches whether `caller` reads `body`.
    pub(crate) fn new(body: Body, context: &Arc<Context>, caller: Caller) -> Self {
        let pending_since = Mutex::new(Some(Instant::now()));
        let response =
            Arc::new(Response { context: Arc::clone(context), caller, server: AtomicWaker::new(), pending_since });
        let visited = context.visits.add_timed(Arc::<Response>::clone(&response));
        Self { body, response, _visited: visited }
    }
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        this.response.server.register(cx.waker());
        // The server asks for data only if the client's window has room.
        *this.response.pending_since() = None;
        let waker = Waker::from(Arc::clone(&this.response));
        let polled = Pin::new(&mut this.body).poll_frame(&mut task::Context::from_waker(&waker));
        if let Poll::Ready(Some(_)) = &polled {
            this.response.set_pending();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
