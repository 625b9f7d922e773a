//! Responses of the general server that their clients do not take.
//!
//! A client may give no room for a response (RFC 9113, 6.9) and still answer pings. It would keep
//! the response for ever: a body is asked for more only when there is room for what it gave. So a
//! client that takes nothing of a pending response for a time loses its connection.

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

/// Who asks, and the connection that the request came on.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) peer: Peer,
    /// Closes the connection when it is cancelled.
    pub(crate) closed: CancellationToken,
}

/// One answer.
struct Answer {
    context: Arc<Context>,
    caller: Caller,
    server: AtomicWaker,
    /// Since when there is something to take.
    waits_since: Mutex<Option<Instant>>,
}

impl Answer {
    fn waits_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.waits_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waits(&self) {
        self.waits_since().get_or_insert_with(Instant::now);
    }

    fn limit(&self) -> Duration {
        self.context.settings.stalled_response_timeout
    }
}

impl Wake for Answer {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.waits();
        self.server.wake();
    }
}

impl Visit for Answer {
    fn visit(&self, now: Instant) {
        if self.waits_since().take_if(|since| *since + self.limit() <= now).is_some() {
            self.context.metrics.stalled_responses.inc();
            let (address, seconds) = (self.caller.peer.address, self.limit().as_secs());
            tracing::info!(%address, seconds, "connection closed: its client takes nothing of an answer");
            self.caller.closed.cancel();
        }
    }
}

/// The body of an answer whose client is watched.
pub(crate) struct Watched {
    body: Body,
    answer: Arc<Answer>,
    _visited: Visited,
}

impl Watched {
    /// Watches whether `caller` takes `body`.
    pub(crate) fn new(body: Body, context: &Arc<Context>, caller: Caller) -> Self {
        let waits_since = Mutex::new(Some(Instant::now()));
        let answer = Arc::new(Answer { context: Arc::clone(context), caller, server: AtomicWaker::new(), waits_since });
        let visited = context.visits.add(Arc::<Answer>::clone(&answer));
        Self { body, answer, _visited: visited }
    }
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        this.answer.server.register(cx.waker());
        // The server asks: it has room.
        *this.answer.waits_since() = None;
        let waker = Waker::from(Arc::clone(&this.answer));
        let polled = Pin::new(&mut this.body).poll_frame(&mut task::Context::from_waker(&waker));
        if let Poll::Ready(Some(_)) = &polled {
            this.answer.waits();
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
