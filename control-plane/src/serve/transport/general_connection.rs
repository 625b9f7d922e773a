//! The general server: a connection for everything except streams of agents. The general server is
//! hyper's HTTP/2 server in front of tonic's services. It closes connections whose clients do not
//! read a response.

use std::{
    io,
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{self, Poll, Wake, Waker, ready},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures::task::AtomicWaker;
use http::Request;
use http_body::{Frame, SizeHint};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, ReadBuf, join, split},
    time::{Instant, Sleep, sleep},
};
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body, service::Routes};
use tower::Service as _;

use super::{KEEPALIVE, connection_limits::HeldConnection, listener::Connection, sync_connection::PREFACE};
use crate::{
    identity::Peer,
    serve::context::{AuditedRequest, Budget, Context, Visit, Visited},
};

/// The maximum number of requests that a connection may have open at the same time, and the number
/// for a replica, which asks for each pod that waits.
const MAX_REQUESTS: u32 = 64;
const MAX_REQUESTS_OF_REPLICA: u32 = 16_384;

/// Flow-control window of a connection and of each request, in bytes. Requests are small.
const REQUEST_WINDOW_BYTES: u32 = 65_535;

/// The server for general connections.
#[derive(Clone)]
pub(crate) struct General {
    pub(crate) routes: Routes,
    pub(crate) context: Arc<Context>,
    /// The server sends GOAWAY on every connection when this token is cancelled.
    pub(crate) shutdown: CancellationToken,
    /// The server closes every connection when this token is cancelled.
    pub(crate) stopped: CancellationToken,
}

impl General {
    /// Serves one connection until it ends.
    pub(crate) async fn serve(self, connection: Connection, held: HeldConnection) {
        let (address, closed) = (connection.peer.address, self.stopped.child_token());
        let served = self.serve_until(connection, held.budget.clone(), &closed);
        if let Some(Err(error)) = closed.run_until_cancelled(served).await {
            tracing::debug!(%address, %error, "the connection ended with an error");
        }
        drop(held);
    }

    /// Serves one connection whose responses may cancel `closed`, because the client does not read
    /// them.
    async fn serve_until(
        self,
        Connection { io, peer, .. }: Connection,
        budget: Budget,
        closed: &CancellationToken,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let Self { routes, context, shutdown, .. } = self;
        let is_replica = peer.may_ask_as_replica(SystemTime::now()).is_ok();
        let max_requests = if is_replica { MAX_REQUESTS_OF_REPLICA } else { MAX_REQUESTS };
        let (reader, writer) = split(io);
        let io = join(Budgeted::new(reader, budget, context.settings.hello_timeout), writer);
        let caller = Caller { peer, closed: closed.clone() };
        let service = service_fn(move |request: Request<Incoming>| {
            let (mut routes, context, caller) = (routes.clone(), Arc::clone(&context), caller.clone());
            async move {
                let (mut head, body) = request.into_parts();
                head.extensions.insert(caller.peer.clone());
                let audited = AuditedRequest::begin(&context, &caller.peer, &mut head);
                let response = routes.call(Request::from_parts(head, Body::new(body))).await;
                if let (Some(audited), Ok(response)) = (audited, &response) {
                    audited.end(response.headers());
                }
                response.map(|response| response.map(|body| Watched::new(body, &context, caller)))
            }
        });
        let server = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .max_concurrent_streams(max_requests)
            .initial_stream_window_size(REQUEST_WINDOW_BYTES)
            .initial_connection_window_size(REQUEST_WINDOW_BYTES)
            .serve_connection(TokioIo::new(io), service);
        let mut server = pin!(server);
        tokio::select! {
            ended = server.as_mut() => ended.map_err(Into::into),
            () = shutdown.cancelled() => {
                server.as_mut().graceful_shutdown();
                server.await.map_err(Into::into)
            }
        }
    }
}

/// Reads a connection as fast as a [`Budget`] allows. Fails if the preface is late.
struct Budgeted<R> {
    reader: R,
    budget: Budget,
    pause: Option<Pin<Box<Sleep>>>,
    /// How many bytes of the preface have not arrived, and how long to wait for them; `None` once
    /// the preface is complete. hyper waits for it without a limit, and sends pings only after it.
    preface: Option<(usize, Pin<Box<Sleep>>)>,
}

impl<R> Budgeted<R> {
    fn new(reader: R, budget: Budget, preface_timeout: Duration) -> Self {
        let preface = Some((PREFACE.len(), Box::pin(sleep(preface_timeout))));
        let pause = budget.pause(Instant::now()).map(|pause| Box::pin(sleep(pause)));
        Self { reader, budget, pause, preface }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Budgeted<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
        }
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.reader).poll_read(cx, buffer);
        if polled.is_pending()
            && let Some((_, late)) = &mut self.preface
        {
            ready!(late.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        ready!(polled)?;
        let (now, bytes) = (Instant::now(), buffer.filled().len() - before);
        self.preface.take_if(|(missing, _)| {
            *missing = missing.saturating_sub(bytes);
            *missing == 0
        });
        self.budget.spend(bytes, now);
        self.pause = self.budget.pause(now).map(|pause| Box::pin(sleep(pause)));
        Poll::Ready(Ok(()))
    }
}

// Closes connections of the general server whose clients do not read a response.
//
// A client can leave its flow-control window at zero (RFC 9113, 6.9) and still answer pings. The
// response would then stay in memory for ever, because the server requests more data from a body
// only when the window has room. So the server closes the connection of a client that reads
// nothing of a pending response for some time.

/// The client of a request, and its connection.
#[derive(Debug, Clone)]
struct Caller {
    peer: Peer,
    /// Cancelling this token closes the connection.
    closed: CancellationToken,
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
struct Watched {
    body: Body,
    response: Arc<Response>,
    _visited: Visited,
}

impl Watched {
    /// Watches whether `caller` reads `body`.
    fn new(body: Body, context: &Arc<Context>, caller: Caller) -> Self {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
        time::timeout,
    };

    use super::*;
    #[tokio::test]
    async fn the_preface_has_a_deadline_and_later_bytes_have_none() {
        let timeout_of_preface = Duration::from_millis(20);
        let (mut client, server) = duplex(64);
        let mut reader = Budgeted::new(server, Budget::new(Instant::now()), timeout_of_preface);
        let mut buffer = [0; PREFACE.len()];
        client.write_all(&PREFACE[..23]).await.unwrap();
        reader.read_exact(&mut buffer[..23]).await.unwrap();
        assert_eq!(reader.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let (mut client, server) = duplex(64);
        let mut reader = Budgeted::new(server, Budget::new(Instant::now()), timeout_of_preface);
        client.write_all(PREFACE).await.unwrap();
        reader.read_exact(&mut buffer).await.unwrap();
        assert!(timeout(timeout_of_preface * 2, reader.read_u8()).await.is_err());
    }
}
