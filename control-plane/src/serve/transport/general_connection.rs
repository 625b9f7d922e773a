//! The general server: a connection for every method except `Discovery.Sync`. The general server is
//! hyper's HTTP/2 server in front of tonic's services.
//!
//! The server refuses a request for `Sync` with `REFUSED_STREAM`, after a GOAWAY. The client may
//! repeat a refused request (RFC 9113, 8.7). After the GOAWAY, the client must open a new
//! connection to repeat the request. [`super::sync_connection`] serves the new connection. Some
//! client libraries repeat such requests themselves.

use std::{
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::SystemTime,
};

use http::Request;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::{body::Body, service::Routes};
use tower::Service as _;

use super::{
    KEEPALIVE,
    budget::Budget,
    connection_limits::Held,
    first_request::{WithoutFirstAck, is_sync},
    listener::Connection,
    stalled_responses::{Caller, Watched},
};
use crate::serve::context;

/// The maximum number of requests that a connection may have open at the same time, and the number
/// for a replica, which asks for each pod that waits.
const MAX_REQUESTS: u32 = 64;
const MAX_REQUESTS_OF_REPLICA: u32 = 16_384;

/// Flow-control window of a connection and of each request, in bytes. Requests are small.
const REQUEST_WINDOW_BYTES: u32 = 65_535;

/// The server for general connections.
#[derive(Clone)]
pub(crate) struct General {
    routes: Routes,
    context: Arc<context::Context>,
    shutdown: CancellationToken,
    stopped: CancellationToken,
}

impl General {
    /// Returns a server of `routes`. The server sends GOAWAY on every connection when `shutdown` is
    /// cancelled, and closes every connection when `stopped` is cancelled.
    pub(crate) fn new(
        routes: Routes,
        context: Arc<context::Context>,
        shutdown: CancellationToken,
        stopped: CancellationToken,
    ) -> Self {
        Self { routes, context, shutdown, stopped }
    }

    /// Serves one connection until it ends. `read` holds the bytes that were already read from the
    /// connection.
    pub(crate) async fn serve(self, connection: Connection, held: Held, read: Vec<u8>) {
        let Self { routes, context, shutdown, stopped } = self;
        let closed = stopped.child_token();
        let caller = Caller { peer: connection.peer.clone(), closed: closed.clone() };
        let address = caller.peer.address;
        let is_replica = caller.peer.may_ask_as_replica(SystemTime::now()).is_ok();
        let max_requests = if is_replica { MAX_REQUESTS_OF_REPLICA } else { MAX_REQUESTS };
        // A request for `Sync` cancels `serving`, and then waits until GOAWAY is sent (`goaway`).
        let (serving, goaway) = (shutdown.child_token(), CancellationToken::new());
        let (ended_serving, sent_goaway) = (serving.clone(), goaway.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let (mut routes, context, caller) = (routes.clone(), Arc::clone(&context), caller.clone());
            let (serving, goaway) = (serving.clone(), goaway.clone());
            async move {
                if is_sync(&request) {
                    context.metrics.count_request_denied("sync_behind_others");
                    tracing::debug!(%address, "a request for Sync came after other requests: the client has to open another connection");
                    serving.cancel();
                    goaway.cancelled().await;
                    return Err(h2::Error::from(h2::Reason::REFUSED_STREAM));
                }
                let mut request = request.map(Body::new);
                request.extensions_mut().insert(caller.peer.clone());
                let response = match routes.call(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                };
                Ok(response.map(|body| Watched::new(body, &context, caller)))
            }
        });
        let server = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .max_concurrent_streams(max_requests)
            .initial_stream_window_size(REQUEST_WINDOW_BYTES)
            .initial_connection_window_size(REQUEST_WINDOW_BYTES)
            .serve_connection(TokioIo::new(Io::new(connection, held, &read, closed)), service);
        let mut server = pin!(server);
        let ended = tokio::select! {
            ended = server.as_mut() => ended,
            () = ended_serving.cancelled() => {
                // The server now sends GOAWAY before anything else.
                server.as_mut().graceful_shutdown();
                sent_goaway.cancel();
                server.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%address, %error, "the connection ended with an error");
        }
    }
}

/// The connection as hyper reads and writes it. Hyper first receives the bytes that
/// [`super::first_request`] has read, and then bytes from the connection. A [`Budget`] limits how
/// fast hyper reads.
struct Io {
    connection: Connection,
    _held: Held,
    unread: Vec<u8>,
    read_bytes: usize,
    filter: WithoutFirstAck,
    until_closed: Pin<Box<WaitForCancellationFutureOwned>>,
    budget: Budget,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Io {
    fn new(connection: Connection, held: Held, read: &[u8], closed: CancellationToken) -> Self {
        let (mut filter, mut unread) = (WithoutFirstAck::new(), Vec::new());
        filter.pass(read, &mut unread);
        let mut budget = Budget::new(Instant::now());
        budget.spend(read.len(), Instant::now());
        let until_closed = Box::pin(closed.cancelled_owned());
        Self { connection, _held: held, unread, read_bytes: 0, filter, until_closed, budget, pause: None }
    }

    /// Reads from the connection when its budget allows.
    fn poll_connection(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.connection.io).poll_read(cx, buffer))?;
        let now = Instant::now();
        self.budget.spend(buffer.filled().len() - before, now);
        self.pause = self.budget.pause(now).map(|pause| Box::pin(sleep(pause)));
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Io {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.until_closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        loop {
            if this.read_bytes < this.unread.len() {
                let unread = &this.unread[this.read_bytes..];
                let bytes = unread.len().min(buffer.remaining());
                buffer.put_slice(&unread[..bytes]);
                this.read_bytes += bytes;
                return Poll::Ready(Ok(()));
            }
            this.unread = Vec::new();
            this.read_bytes = 0;
            if this.filter.is_done() {
                return this.poll_connection(cx, buffer);
            }
            let mut scratch = [0; 4096];
            let mut read = ReadBuf::new(&mut scratch);
            match this.poll_connection(cx, &mut read) {
                Poll::Ready(Ok(())) if read.filled().is_empty() => return Poll::Ready(Ok(())),
                Poll::Ready(Ok(())) => this.filter.pass(read.filled(), &mut this.unread),
                other => return other,
            }
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection.io).poll_shutdown(cx)
    }
}
