//! Chooses the server for each connection: [`sync_connection`] for a stream, or the general server.

use std::{io, sync::Arc, time::Duration};

use tokio::{sync::mpsc, task::JoinHandle, time::Instant};
use tokio_util::{either::Either, sync::CancellationToken, task::TaskTracker};

use super::{
    connection_limits::{Connections, Held},
    first_request,
    general_connection::General,
    listener::Connection,
    sync_connection,
};
use crate::serve::{context::Warning, stream::Streams};

/// How long to wait for the first request. After this time, the general server serves the
/// connection. A later request for `Sync` needs another connection.
const FIRST_REQUEST_WAIT: Duration = Duration::from_secs(10);

/// Starts a task that passes each accepted connection to its server. `tasks` tracks the tasks that
/// serve connections. When `shutdown` is cancelled, connections that still wait for their first
/// request are dropped.
pub(crate) fn dispatch(
    mut accepted: mpsc::Receiver<Connection>,
    streams: Arc<Streams>,
    general: General,
    tasks: TaskTracker,
    shutdown: CancellationToken,
) -> JoinHandle<()> {
    let connections = Arc::new(Connections::default());
    let dispatch = async move {
        let context = &streams.context;
        while let Some(connection) = accepted.recv().await {
            let held = match connections.hold(&connection.peer.identity) {
                Ok(held) => held,
                Err(reason) => {
                    context.metrics.count_connection_refused(reason);
                    if context.warnings.admit(Warning::ConnectionRefused, Instant::now()) {
                        tracing::warn!(address = %connection.peer.address, reason, "connection refused");
                    }
                    continue;
                }
            };
            let first = first_request(connection, Arc::clone(&streams), held, general.clone(), tasks.clone());
            let shutdown = shutdown.clone();
            tokio::spawn(async move { shutdown.run_until_cancelled(first).await });
        }
    };
    tokio::spawn(dispatch)
}

/// Reads the first request of a connection and hands the connection to its server.
async fn first_request(
    mut connection: Connection,
    streams: Arc<Streams>,
    held: Held,
    general: General,
    tasks: TaskTracker,
) {
    let first = match first_request::read(&mut connection.io, FIRST_REQUEST_WAIT).await {
        Ok(first) => first,
        Err(error) => {
            if error.kind() == io::ErrorKind::TimedOut {
                streams.context.metrics.count_connection_refused("no_request");
            }
            tracing::debug!(address = %connection.peer.address, %error, "the connection ended without a request");
            return;
        }
    };
    if !first.is_sync {
        tasks.spawn(general.serve(connection, held, first.bytes));
        return;
    }
    let Connection { io, peer } = connection;
    let (stream, tls) = match io {
        Either::Left(stream) => (stream, None),
        Either::Right(tls) => {
            let (stream, tls) = tls.into_inner();
            (stream, Some(tls))
        }
    };
    tasks.spawn(sync_connection::serve(&streams, peer, stream, tls, &first.bytes, held));
}
