//! Runs streams of agents over pipes in memory, for counts of instructions (docs/benchmarks.md).

use std::{
    io, mem,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

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

/// A replica whose agents have pipes instead of sockets. Pipes accept everything at once.
pub struct Crowd {
    streams: Arc<Streams>,
    connections: Connections,
    served: Vec<Pin<Box<dyn Future<Output = ()> + Send>>>,
    sent: Vec<Arc<Mutex<Vec<u8>>>>,
    written: Arc<AtomicUsize>,
}

impl Crowd {
    /// Returns a replica without agents that serves `store`.
    #[must_use]
    pub fn new(store: Arc<Store>) -> Self {
        let streams = Streams::new(store, Arc::new(Metrics::default()), Settings::default());
        let (served, sent) = (Vec::new(), Vec::new());
        Self { streams, connections: Connections::default(), served, sent, written: Arc::default() }
    }

    /// Adds a connection of an agent.
    pub fn join(&mut self) {
        let sent = Arc::<Mutex<Vec<u8>>>::default();
        let pipe = Pipe { sent: Arc::clone(&sent), written: Arc::clone(&self.written) };
        let peer = Peer { address: ([127, 0, 0, 1], 7443).into(), identity: Identity::Unchecked, not_after: None };
        if let Ok(held) = hold(&self.connections, &peer.identity) {
            self.served.push(Box::pin(serve_stream(&self.streams, peer, pipe, None, held)));
            self.sent.push(sent);
        }
    }

    /// Sends bytes from the agent with this number, which [`Self::read`] reads.
    pub fn send(&self, agent: usize, bytes: &[u8]) {
        self.sent[agent].lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
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

    /// Returns how many bytes the replica has written to all agents since the last call.
    #[must_use]
    pub fn take_written(&self) -> usize {
        self.written.swap(0, Ordering::Relaxed)
    }
}

/// The replica's end of a connection.
struct Pipe {
    sent: Arc<Mutex<Vec<u8>>>,
    written: Arc<AtomicUsize>,
}

impl AsyncRead for Pipe {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        if sent.is_empty() {
            return Poll::Pending;
        }
        let mut bytes = mem::take(&mut *sent);
        *sent = bytes.split_off(bytes.len().min(buffer.remaining()));
        buffer.put_slice(&bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.written.fetch_add(bytes.len(), Ordering::Relaxed);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
