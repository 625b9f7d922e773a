//! Decides which TLS handshakes run, which wait, and which are closed.
//!
//! Any client that reaches a port can begin a TLS handshake without a certificate and never finish
//! it. So the number of running handshakes is bounded, in all and for each network. Other
//! connections wait for a place, which is the right to run a handshake. Networks take turns: at any
//! time, only one connection of each network is in the common queue of all networks. A network
//! whose handshakes fail has to pause before its connection enters the common queue. A running
//! handshake with a silent peer is closed if another connection can use its place. A normal peer is
//! silent for one round trip at a time.
//!
//! A handshake consists of steps: the computations between two messages of the peer. One step takes
//! as much processor time as about fifty messages to agents. So at most one step for each core is
//! computed at a time, and streams are served before the next step.

use std::{
    collections::HashMap,
    future::poll_fn,
    net::IpAddr,
    num::NonZeroUsize,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
    thread,
    time::Duration,
};

use headgate_listener::open_files;
use tokio::{
    sync::Semaphore,
    task::yield_now,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    metrics::{Metrics, level},
    serve::context::{Counted, Failures, Network, Tally},
};

/// The maximum numbers of running handshakes, in all and for one network, and of connections that
/// wait for a handshake.
#[derive(Debug, Clone, Copy)]
struct HandshakeLimits {
    running: usize,
    running_of_network: usize,
    waiting: usize,
    /// How long the peer of a handshake may be silent while another connection waits for the
    /// handshake's place.
    silence: Duration,
}

/// A core computes about a thousand handshakes per second, and each handshake takes a few round
/// trips. So a higher limit of running handshakes would not complete more handshakes per second.
/// All agents behind one address translator belong to one network, so thousands of connections of
/// one network may wait.
const LIMITS: HandshakeLimits =
    HandshakeLimits { running: 256, running_of_network: 64, waiting: 16_384, silence: Duration::from_secs(1) };

/// A network may have this many times as many waiting connections as there is space left. So one
/// network alone can use three quarters of the limit, and two networks three sevenths each. Some
/// space is left for others.
const SHARE: usize = 3;

/// All connections of a replica before and in their handshakes.
#[derive(Debug)]
pub(crate) struct Handshakes {
    limits: HandshakeLimits,
    /// The connections that wait, by network.
    waiting: Arc<Tally<Network>>,
    /// The queues of the networks with a connection before or in its handshake.
    queues: Mutex<HashMap<Network, Arc<NetworkQueue>>>,
    /// One permit for each handshake that may run. Semaphores serve waiting tasks in the order of
    /// their requests.
    places: Semaphore,
    /// One permit for each step that may be computed at a time.
    steps: Semaphore,
    failures: Arc<Failures>,
    metrics: Arc<Metrics>,
}

/// The queue of one network.
#[derive(Debug)]
struct NetworkQueue {
    /// One permit for each handshake of the network that may run.
    places: Semaphore,
    /// The single permit to be in the common queue of all networks.
    turn: Semaphore,
}

/// One connection before or in its handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    handshakes: Arc<Handshakes>,
    network: Network,
    queue: Arc<NetworkQueue>,
    /// `None` once the handshake runs.
    waiting: Option<Counted<Network>>,
}

/// The peer was silent during its handshake, and another connection needs the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Silent;

impl Handshakes {
    /// Returns the handshakes of a replica. `failures` decides which networks have to pause.
    pub(crate) fn new(metrics: Arc<Metrics>, failures: Arc<Failures>) -> Arc<Self> {
        // Waiting connections may use half of the open files; the other half is for connections
        // that are served. The limit of waiting connections is high, because a client whose
        // connection is refused has used up its session ticket. The client then needs a full
        // handshake.
        let files = usize::try_from(open_files::limit() / 2).unwrap_or(usize::MAX);
        Self::with_limits(HandshakeLimits { waiting: LIMITS.waiting.min(files), ..LIMITS }, metrics, failures)
    }

    fn with_limits(limits: HandshakeLimits, metrics: Arc<Metrics>, failures: Arc<Failures>) -> Arc<Self> {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let (places, steps) = (Semaphore::new(limits.running), Semaphore::new(cores));
        Arc::new(Self { limits, waiting: Arc::default(), queues: Mutex::default(), places, steps, failures, metrics })
    }

    /// Adds a connection from `address`. Returns `None` if too many connections wait: see
    /// [`SHARE`].
    pub(crate) fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Handshake> {
        let network = Network::of(address);
        let may = |all: usize, own: usize| match own >= SHARE * self.limits.waiting.saturating_sub(all) {
            true => Err(()),
            false => Ok(()),
        };
        let waiting = Some(self.waiting.add(network, may).ok()?);
        let new = || {
            let places = Semaphore::new(self.limits.running_of_network);
            Arc::new(NetworkQueue { places, turn: Semaphore::new(1) })
        };
        let queue = Arc::clone(self.queues().entry(network).or_insert_with(new));
        self.publish();
        Some(Handshake { handshakes: Arc::clone(self), network, queue, waiting })
    }

    fn publish(&self) {
        // One thread at a time reads and sets, so the last value set is not an older one.
        let _lock = self.queues();
        let active = self.limits.running - self.places.available_permits();
        for (state, count) in [("active", active), ("waiting", self.waiting.all())] {
            self.metrics.handshakes_pending.of([state]).set(level(count));
        }
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<Network, Arc<NetworkQueue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handshake {
    /// Waits for a place, and then runs the handshake that `begin` returns. Returns the result of
    /// the handshake.
    ///
    /// # Errors
    ///
    /// [`Silent`]. The future of `begin` owns the connection, so the connection is dropped and
    /// closed.
    pub(crate) async fn run<T, E, F>(mut self, begin: impl FnOnce() -> F) -> Result<Result<T, E>, Silent>
    where
        F: Future<Output = Result<T, E>>,
    {
        let (handshakes, queue) = (Arc::clone(&self.handshakes), Arc::clone(&self.queue));
        let _of_network = queue.places.acquire().await;
        let turn = queue.turn.acquire().await;
        while let Some(end) = handshakes.failures.pause_end(self.network, Instant::now()) {
            sleep_until(end).await;
        }
        let _of_all = handshakes.places.acquire().await;
        drop(turn);
        self.waiting = None;
        handshakes.publish();
        // The handshake is allocated only now, because thousands of connections may wait for a
        // place.
        let mut handshake = Box::pin(begin());
        let ended = loop {
            let step = handshakes.steps.acquire().await;
            // Other tasks run before this step.
            yield_now().await;
            let polled = poll_fn(|cx| Poll::Ready(handshake.as_mut().poll(cx))).await;
            drop(step);
            if let Poll::Ready(ended) = polled {
                break Ok(ended);
            }
            tokio::select! {
                biased;
                () = sleep(handshakes.limits.silence) => {
                    if self.is_wanted() {
                        break Err(Silent);
                    }
                }
                () = wake_up() => {}
            }
        };
        if !matches!(ended, Ok(Ok(_))) {
            handshakes.failures.count(self.network, Instant::now());
        }
        ended
    }

    /// Returns true if a waiting connection can use the place of this handshake.
    fn is_wanted(&self) -> bool {
        let (all, own) = self.handshakes.waiting.count(&self.network);
        let is_full = |places: &Semaphore| places.available_permits() == 0;
        (all > 0 && is_full(&self.handshakes.places)) || (own > 0 && is_full(&self.queue.places))
    }
}

/// Waits until the present task is woken. While a handshake waits, a message of the peer wakes the
/// task.
async fn wake_up() {
    let mut is_polled = false;
    poll_fn(|_| if std::mem::replace(&mut is_polled, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.waiting = None;
        self.handshakes.publish();
        let mut queues = self.handshakes.queues();
        // A queue that nobody else uses is referred to by the map and by this value.
        if Arc::strong_count(&self.queue) == 2 {
            queues.remove(&self.network);
        }
    }
}

#[cfg(test)]
#[path = "handshakes_tests.rs"]
mod tests;
