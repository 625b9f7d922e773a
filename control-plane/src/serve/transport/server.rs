//! Starts and stops the servers of the gRPC ports.

use std::{sync::Arc, time::Duration};

use futures::FutureExt as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::{
    LINGER,
    general_connection::General,
    listener::{Entrance, Listener, Serve},
    sync_connection,
};
use crate::serve::{context::Lifecycle, stream::Streams, tls::Security};

/// Serves streams at `agents`, and `routes` at `inspect`, until `shutdown` is cancelled and the
/// streams have ended. Then cancels `stopped`.
pub(crate) async fn serve(
    [agents, inspect]: [Listener; 2],
    security: Security,
    routes: Routes,
    streams: Arc<Streams>,
    shutdown: CancellationToken,
    stopped: CancellationToken,
) {
    let entrance = Entrance::new(security, Arc::clone(&streams.context), shutdown.clone());
    let context = Arc::clone(&streams.context);
    let general = General { routes, context, shutdown: shutdown.clone(), stopped: stopped.clone() };
    let of_agents = Arc::clone(&streams);
    let serve: Serve =
        Arc::new(move |connection, held| sync_connection::serve_accepted(&of_agents, connection, held).boxed());
    tokio::spawn(entrance.clone().accept(agents, serve));
    let serve: Serve = Arc::new(move |connection, held| general.clone().serve(connection, held).boxed());
    tokio::spawn(entrance.clone().accept(inspect, serve));
    shutdown.cancelled().await;
    drain(&streams).await;
    entrance.tasks.close();
    if tokio::time::timeout(LINGER, entrance.tasks.wait()).await.is_err() {
        // Some clients do not read, so the end of their streams cannot be written.
        streams.context.visits.abort();
    }
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
