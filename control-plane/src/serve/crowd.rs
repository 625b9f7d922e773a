//! Runs streams of agents over pipes in memory, for counts of instructions (docs/benchmarks.md).

use std::{
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use tokio::io::{DuplexStream, duplex};

use super::{
    context::Settings,
    stream::Streams,
    transport::{Connections, hold, serve_stream},
};
use crate::{
    identity::{Identity, Peer},
    metrics::Metrics,
    store::Store,
};

/// The number of bytes that a pipe holds.
const PIPE_BYTES: usize = 64 << 10;

/// A replica whose agents have pipes instead of sockets.
pub struct Crowd {
    streams: Arc<Streams>,
    connections: Connections,
    served: Vec<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Crowd {
    /// Returns a replica without agents that serves `store`.
    #[must_use]
    pub fn new(store: Arc<Store>) -> Self {
        // A heartbeat would come at another place of each run.
        let settings = Settings { heartbeat_interval: Duration::from_secs(3_600), ..Settings::default() };
        let streams = Streams::new(store, Arc::new(Metrics::default()), settings);
        Self { streams, connections: Connections::default(), served: Vec::new() }
    }

    /// Adds a connection. Returns the agent's end; `None` if there are too many connections.
    pub fn join(&mut self) -> Option<DuplexStream> {
        let (agent, replica) = duplex(PIPE_BYTES);
        let peer = Peer { address: ([127, 0, 0, 1], 7443).into(), identity: Identity::Unchecked, not_after: None };
        let held = hold(&self.connections, &peer.identity).ok()?;
        self.served.push(Box::pin(serve_stream(&self.streams, peer, replica, None, held)));
        Some(agent)
    }

    /// Wakes the task of each connection once, as the kernel does when bytes arrive.
    pub fn read(&mut self) {
        for served in &mut self.served {
            // A connection that has ended stays at its end.
            let _ = served.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
    }

    /// Visits each connection once, as after a commit.
    pub fn visit(&self) {
        let mut sweep = pin!(self.streams.context.visits.sweep_all());
        while sweep.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {}
    }
}
