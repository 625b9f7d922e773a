//! The server of the HTTP pages, which any client can reach. It limits the number of connections,
//! in all and for each network. When a limit is reached, a new connection replaces an old one:
//!
//! - If the client's network has reached its limit, the connection of this network is closed whose
//!   last request is the oldest.
//! - If all connections together have reached the limit, the network with the most connections
//!   loses the connection whose last request is the oldest.
//!
//! Without these limits, a client could use up the open files that agents need.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::Router;
use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::{net::TcpListener, time::Instant};
use tokio_util::sync::CancellationToken;
use tower::Service as _;

use super::accept;
use crate::serve::context::Network;

/// The maximum number of open connections: enough for probes and for some programs that collect
/// metrics and keep their connections.
const MAX_CONNECTIONS: usize = 64;

/// The maximum number of open connections of one network.
const MAX_CONNECTIONS_OF_NETWORK: usize = 16;

/// The open connections, by their numbers.
#[derive(Debug, Default)]
struct OpenPages(Mutex<BTreeMap<u64, OpenPage>>);

#[derive(Debug)]
struct OpenPage {
    network: Network,
    /// When the client connected, or last sent a request.
    heard_at: Instant,
    /// Cancelling this token closes the connection.
    closed: CancellationToken,
}

impl OpenPages {
    fn table(&self) -> MutexGuard<'_, BTreeMap<u64, OpenPage>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection, and closes another connection if a limit is reached. Returns a token that
    /// is cancelled when the new connection has to close.
    fn enter(&self, number: u64, network: Network, now: Instant) -> CancellationToken {
        let mut table = self.table();
        let mut counts: BTreeMap<Network, usize> = BTreeMap::new();
        table.values().for_each(|entry| *counts.entry(entry.network).or_default() += 1);
        let crowded = if counts.get(&network).is_some_and(|count| *count >= MAX_CONNECTIONS_OF_NETWORK) {
            Some(network)
        } else if table.len() >= MAX_CONNECTIONS {
            counts.into_iter().max_by_key(|(_, count)| *count).map(|(network, _)| network)
        } else {
            None
        };
        let of_network = table.iter().filter(|(_, entry)| Some(entry.network) == crowded);
        let longest_silent = of_network.min_by_key(|(_, entry)| entry.heard_at).map(|(number, _)| *number);
        if let Some(OpenPage { closed, .. }) = longest_silent.and_then(|number| table.remove(&number)) {
            closed.cancel();
        }
        let closed = CancellationToken::new();
        table.insert(number, OpenPage { network, heard_at: now, closed: closed.clone() });
        closed
    }

    /// Records that a client has sent a request.
    fn mark_heard(&self, number: u64, now: Instant) {
        if let Some(entry) = self.table().get_mut(&number) {
            entry.heard_at = now;
        }
    }
}

/// Serves `pages` to each client of `listener`. Never returns.
pub(crate) async fn serve_pages(listener: TcpListener, pages: Router) {
    let open = Arc::new(OpenPages::default());
    for number in 0.. {
        let failed = |error: io::Error| tracing::debug!(%error, "a connection to the HTTP pages cannot be accepted");
        let (stream, address) = accept(&listener, failed).await;
        let closed = open.enter(number, Network::of(address.ip()), Instant::now());
        let (open, pages) = (Arc::clone(&open), pages.clone());
        tokio::spawn(async move {
            let answer = service_fn(|request: Request<Incoming>| {
                open.mark_heard(number, Instant::now());
                pages.clone().call(request)
            });
            // The pages also speak HTTP/2, so that a gRPC client with a wrong port gets an answer.
            let server = auto::Builder::new(TokioExecutor::new());
            let connection = server.serve_connection(TokioIo::new(stream), answer);
            if let Some(Err(error)) = closed.run_until_cancelled(connection).await {
                tracing::debug!(%address, %error, "a connection to the HTTP pages ended with an error");
            }
            open.table().remove(&number);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn network(host: u8) -> Network {
        Network::of([192, 0, 2, host].into())
    }

    fn closed(entered: &[CancellationToken]) -> Vec<usize> {
        (0..entered.len()).filter(|index| entered[*index].is_cancelled()).collect()
    }

    #[test]
    fn the_longest_silent_connection_of_the_most_crowded_network_is_closed() {
        let (open, start) = (OpenPages::default(), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        // The first network has one connection, the next networks have more, and the last network
        // has most.
        let hosts = [1, 2, 3, 4, 5, 6].iter().flat_map(|host| std::iter::repeat_n(*host, 2 * usize::from(*host) - 1));
        let hosts: Vec<u8> = hosts.chain(std::iter::repeat_n(7, MAX_CONNECTIONS_OF_NETWORK)).collect();
        let enter = |(number, host): (usize, &u8)| open.enter(number as u64, network(*host), at(number as u64));
        let mut entered: Vec<_> = hosts.iter().enumerate().map(enter).collect();
        assert_eq!((hosts.len(), closed(&entered)), (52, vec![]));
        let first_of_last = hosts.len() - MAX_CONNECTIONS_OF_NETWORK;
        open.mark_heard(first_of_last as u64, at(1_000));
        entered.push(open.enter(1_000, network(7), at(1_001)));
        assert_eq!(closed(&entered), [first_of_last + 1], "a network at its limit loses a connection");
        entered.extend((2_000..2_012).map(|number| open.enter(number, network(8), at(number))));
        assert_eq!((open.table().len(), closed(&entered).len()), (MAX_CONNECTIONS, 1));
        entered.push(open.enter(3_000, network(1), at(3_000)));
        assert_eq!(closed(&entered), [first_of_last + 1, first_of_last + 2], "the network with most connections loses");
        assert_eq!(open.table().len(), MAX_CONNECTIONS);
    }
}
