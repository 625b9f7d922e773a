//! The general server: a connection for everything except streams of agents. The general server is
//! hyper's HTTP/2 server in front of tonic's services.

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
    time::{Instant, Sleep, sleep, sleep_until},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::{body::Body, service::Routes};
use tower::Service as _;

use super::{
    KEEPALIVE,
    budget::Budget,
    connection_limits::Held,
    listener::{self, Connection},
    stalled_responses::{Caller, Watched},
    sync_connection::PREFACE,
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

    /// Serves one connection until it ends.
    pub(crate) async fn serve(self, connection: Connection, held: Held) {
        let Self { routes, context, shutdown, stopped } = self;
        let Connection { io, peer } = connection;
        let caller = Caller { peer, closed: stopped.child_token() };
        let (address, closed) = (caller.peer.address, caller.closed.clone());
        let is_replica = caller.peer.may_ask_as_replica(SystemTime::now()).is_ok();
        let max_requests = if is_replica { MAX_REQUESTS_OF_REPLICA } else { MAX_REQUESTS };
        let preface_until = Instant::now() + context.settings.hello_timeout;
        let service = service_fn(move |request: Request<Incoming>| {
            let (mut routes, context, caller) = (routes.clone(), Arc::clone(&context), caller.clone());
            async move {
                let mut request = request.map(Body::new);
                request.extensions_mut().insert(caller.peer.clone());
                let response = routes.call(request).await;
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
            .serve_connection(TokioIo::new(Io::new(io, held, closed, preface_until)), service);
        let mut server = pin!(server);
        let ended = tokio::select! {
            ended = server.as_mut() => ended,
            () = shutdown.cancelled() => {
                server.as_mut().graceful_shutdown();
                server.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%address, %error, "the connection ended with an error");
        }
    }
}

/// The connection as hyper reads and writes it. A [`Budget`] limits how fast hyper reads.
struct Io {
    io: listener::Io,
    _held: Held,
    until_closed: Pin<Box<WaitForCancellationFutureOwned>>,
    budget: Budget,
    pause: Option<Pin<Box<Sleep>>>,
    /// When the preface must be complete; `None` once it is. hyper waits for the preface without a
    /// limit, and sends pings only after it.
    preface_until: Option<Pin<Box<Sleep>>>,
    preface_bytes: usize,
}

impl Io {
    fn new(io: listener::Io, held: Held, closed: CancellationToken, preface_until: Instant) -> Self {
        let until_closed = Box::pin(closed.cancelled_owned());
        let (budget, preface_until) = (Budget::new(Instant::now()), Some(Box::pin(sleep_until(preface_until))));
        Self { io, _held: held, until_closed, budget, pause: None, preface_until, preface_bytes: 0 }
    }
}

impl AsyncRead for Io {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.until_closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if let Some(until) = &mut self.preface_until
            && until.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buffer))?;
        let (now, bytes) = (Instant::now(), buffer.filled().len() - before);
        if self.preface_until.is_some() {
            self.preface_bytes += bytes;
            self.preface_until = self.preface_until.take().filter(|_| self.preface_bytes < PREFACE.len());
        }
        self.budget.spend(bytes, now);
        self.pause = self.budget.pause(now).map(|pause| Box::pin(sleep(pause)));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
