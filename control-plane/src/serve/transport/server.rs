//! Starts and stops the servers of the gRPC port.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;

use super::{LINGER, connections, general_connection::General, listener, tls::Security};
use crate::serve::{context::Lifecycle, stream::Streams};

/// Serves streams, and `routes` on the general server, until `shutdown` is cancelled and the
/// streams have ended. Then cancels `stopped`.
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
    let general = General::new(routes, Arc::clone(&streams.context), shutdown.clone(), stopped.clone());
    let dispatch = connections::dispatch(accepted, Arc::clone(&streams), general, tasks.clone(), shutdown.clone());
    shutdown.cancelled().await;
    drain(&streams).await;
    tasks.close();
    if tokio::time::timeout(LINGER, tasks.wait()).await.is_err() {
        // Some clients do not read, so the end of their streams cannot be written.
        streams.context.visits.abort();
    }
    accept.abort();
    dispatch.abort();
    stopped.cancel();
}

/// Asks agents to move to another replica, and ends the streams that are left after the grace
/// period.
async fn drain(streams: &Streams) {
    let context = &streams.context;
    let agents = streams.fleet.len();
    tracing::info!(agents, "stopping: agents are asked to move to another replica");
    context.lifecycle.send_replace(Lifecycle::Draining);
    let deadline = Instant::now() + context.settings.drain_grace;
    while streams.fleet.len() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    context.lifecycle.send_replace(Lifecycle::Ended);
}
