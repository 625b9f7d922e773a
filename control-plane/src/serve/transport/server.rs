//! The servers of the gRPC port, from the first connection to the last.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use tokio::net::TcpListener;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{service::Routes, transport::Server};
use tower::layer::layer_fn;

use super::{KEEPALIVE, LINGER, connections, listener, stalled_responses::StalledResponses, tls::Security};
use crate::serve::{context::Lifecycle, stream::Streams};

/// Requests at the same time on a connection of the general server.
const MAX_REQUESTS: u32 = 64;

/// What a client may send on such a connection before it is read: requests are small.
const REQUEST_WINDOW_BYTES: u32 = 65_535;

/// Serves streams, and `routes` on the general server, until `shutdown` is cancelled and the
/// streams have ended. Cancels `stopped` then.
pub(crate) async fn serve(
    listener: TcpListener,
    security: Security,
    routes: Routes,
    streams: Arc<Streams>,
    shutdown: CancellationToken,
    stopped: CancellationToken,
) {
    let (accepted, accept) = listener::accept(listener, security, Arc::clone(&streams.context), shutdown.clone());
    let tasks = TaskTracker::new();
    let (general, dispatch) = connections::dispatch(accepted, Arc::clone(&streams), tasks.clone(), shutdown.clone());
    let context = Arc::clone(&streams.context);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_concurrent_streams(Some(MAX_REQUESTS))
        .initial_stream_window_size(Some(REQUEST_WINDOW_BYTES))
        .initial_connection_window_size(Some(REQUEST_WINDOW_BYTES))
        .layer(layer_fn(move |routes| StalledResponses::new(routes, Arc::clone(&context))))
        .add_routes(routes)
        .serve_with_incoming_shutdown(
            ReceiverStream::new(general).map(Ok::<_, io::Error>),
            shutdown.clone().cancelled_owned(),
        );
    let mut server = tokio::spawn(server);
    shutdown.cancelled().await;
    drain(&streams).await;
    tasks.close();
    let ended = async { tokio::join!(&mut server, tasks.wait()).0 };
    match tokio::time::timeout(LINGER, ended).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::error!(%error, "gRPC server failed"),
        Ok(Err(error)) => tracing::error!(%error, "gRPC server ended by a defect"),
        // A connection that takes nothing, not even the end of its stream.
        Err(_) => {
            server.abort();
            streams.context.visits.abort();
        }
    }
    accept.abort();
    dispatch.abort();
    stopped.cancel();
}

/// Asks agents to go, and ends the streams of those that have not gone after the grace period.
async fn drain(streams: &Streams) {
    let context = &streams.context;
    let agents = streams.fleet.len();
    tracing::info!(agents, "stopping: agents are asked to go elsewhere");
    context.lifecycle.send_replace(Lifecycle::Draining);
    let deadline = Instant::now() + context.settings.drain_grace;
    while streams.fleet.len() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    context.lifecycle.send_replace(Lifecycle::Ended);
}
