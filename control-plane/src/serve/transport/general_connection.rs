//! The general server: a connection for everything except streams of agents. The general server is
//! hyper's HTTP/2 server in front of tonic's services.

use std::{
    io::{self, Cursor},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::SystemTime,
};

use http::Request;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, ReadBuf, join, split},
    time::{Instant, Sleep, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{body::Body, service::Routes};
use tower::Service as _;

use super::{
    KEEPALIVE,
    budget::Budget,
    connection_limits::HeldConnection,
    listener::Connection,
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
    pub(crate) routes: Routes,
    pub(crate) context: Arc<context::Context>,
    /// The server sends GOAWAY on every connection when this token is cancelled.
    pub(crate) shutdown: CancellationToken,
    /// The server closes every connection when this token is cancelled.
    pub(crate) stopped: CancellationToken,
}

impl General {
    /// Serves one connection until it ends.
    pub(crate) async fn serve(self, connection: Connection, held: HeldConnection) {
        let (address, closed) = (connection.peer.address, self.stopped.child_token());
        if let Some(Err(error)) = closed.run_until_cancelled(self.serve_until(connection, &closed)).await {
            tracing::debug!(%address, %error, "the connection ended with an error");
        }
        drop(held);
    }

    /// Serves one connection whose responses may cancel `closed`, because the client does not read
    /// them.
    async fn serve_until(
        self,
        Connection { io, peer }: Connection,
        closed: &CancellationToken,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let Self { routes, context, shutdown, .. } = self;
        let is_replica = peer.may_ask_as_replica(SystemTime::now()).is_ok();
        let max_requests = if is_replica { MAX_REQUESTS_OF_REPLICA } else { MAX_REQUESTS };
        let (reader, writer) = split(io);
        let mut reader = Budgeted { reader, budget: Budget::new(Instant::now()), pause: None };
        // hyper would wait for the preface without a limit, and send pings only after it.
        let mut preface = [0_u8; PREFACE.len()];
        timeout(context.settings.hello_timeout, reader.read_exact(&mut preface)).await??;
        let io = join(Cursor::new(preface).chain(reader), writer);
        let caller = Caller { peer, closed: closed.clone() };
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

/// Reads a connection as fast as a [`Budget`] allows.
struct Budgeted<R> {
    reader: R,
    budget: Budget,
    pause: Option<Pin<Box<Sleep>>>,
}

impl<R: AsyncRead + Unpin> AsyncRead for Budgeted<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.reader).poll_read(cx, buffer))?;
        let now = Instant::now();
        self.budget.spend(buffer.filled().len() - before, now);
        self.pause = self.budget.pause(now).map(|pause| Box::pin(sleep(pause)));
        Poll::Ready(Ok(()))
    }
}
