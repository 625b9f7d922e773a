//! Decides which TLS handshakes run, which wait, and which are closed.
//!
//! Any client that reaches the port can begin a TLS handshake without a certificate and never
//! finish it. So the number of running handshakes is bounded, in all and for each network. Other
//! connections wait for a place, which is the right to run a handshake. Networks take turns: at any
//! time, only one connection of each network is in the common queue of all networks. A network
//! whose handshakes fail has to pause before its connection enters the common queue. While
//! connections wait, running handshakes with a silent peer are closed. A normal peer is silent for
//! one round trip at a time.
//!
//! A handshake consists of steps: the computations between two messages of the peer. One step takes
//! as much processor time as about fifty messages to agents. So at most one step for each core is
//! computed at a time, and streams are served before the next step.

use std::{
    collections::{BTreeMap, HashMap},
    future::poll_fn,
    net::IpAddr,
    num::NonZeroUsize,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Poll, ready},
    thread,
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore},
    time::{Instant, sleep_until},
};
use tokio_util::sync::PollSemaphore;

use crate::{
    metrics::Metrics,
    open_files,
    serve::context::{Failures, Network},
};

/// How long the peer of a handshake may be silent while another connection waits for the
/// handshake's place.
const SILENCE_LIMIT: Duration = Duration::from_secs(1);

/// The maximum numbers of running handshakes and of connections that wait for a handshake, in total
/// and for one network.
#[derive(Debug, Clone, Copy)]
struct Limits {
    running: usize,
    running_of_network: usize,
    waiting: usize,
    waiting_of_network: usize,
}

/// A core computes about a thousand handshakes per second, and each handshake takes a few round
/// trips. So a higher limit of running handshakes would not complete more handshakes per second.
/// All agents behind one address translator belong to one network, so thousands of connections of
/// one network may wait.
const LIMITS: Limits = Limits { running: 256, running_of_network: 64, waiting: 16_384, waiting_of_network: 12_288 };

/// All connections of a listener before and in their handshakes.
#[derive(Debug)]
pub(crate) struct Handshakes {
    limits: Limits,
    connections: Mutex<Connections>,
    /// One permit for each handshake that may run.
    places: Semaphore,
    /// One permit for each step that may be computed at a time.
    steps: Arc<Semaphore>,
    failures: Arc<Failures>,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct Connections {
    next_number: u64,
    running: BTreeMap<u64, Running>,
    waiting: usize,
    networks: HashMap<Network, Group>,
}

/// A running handshake.
#[derive(Debug)]
struct Running {
    network: Network,
    /// When the peer last sent something.
    heard_at: Instant,
    evict: Arc<Notify>,
}

/// The connections of one network.
#[derive(Debug)]
struct Group {
    queue: Arc<Queue>,
    /// The number of running handshakes.
    running: usize,
    /// For each waiting connection, by its number: the signal that evicts the connection.
    waiting: BTreeMap<u64, Arc<Notify>>,
}

/// The queue of one network.
#[derive(Debug)]
struct Queue {
    /// One permit for each handshake of the network that may run.
    places: Semaphore,
    /// The single permit to be in the common queue of all networks.
    turn: Semaphore,
}

/// One connection before or in its handshake. When this value is dropped, its place becomes free.
#[derive(Debug)]
pub(crate) struct Handshake {
    handshakes: Arc<Handshakes>,
    number: u64,
    network: Network,
    queue: Arc<Queue>,
    evict: Arc<Notify>,
}

/// Why a connection is closed in favour of another connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evicted {
    /// Too many connections waited for their handshakes.
    QueueFull,
    /// The peer was silent during its handshake.
    Silent,
}

impl Handshakes {
    /// Returns the handshakes of a new listener. `failures` decides which networks have to pause.
    pub(crate) fn new(metrics: Arc<Metrics>, failures: Arc<Failures>) -> Arc<Self> {
        // Waiting connections may use half of the open files; the other half is for connections
        // that are served. The limit of waiting connections is high, because a client whose
        // connection is refused has used up its session ticket. The client then needs a full
        // handshake.
        let files = usize::try_from(open_files::limit() / 2).unwrap_or(usize::MAX);
        let waiting = LIMITS.waiting.min(files);
        let waiting_of_network = LIMITS.waiting_of_network.min(files / 4 * 3);
        Self::with_limits(Limits { waiting, waiting_of_network, ..LIMITS }, metrics, failures)
    }

    fn with_limits(limits: Limits, metrics: Arc<Metrics>, failures: Arc<Failures>) -> Arc<Self> {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Arc::new(Self {
            limits,
            connections: Mutex::default(),
            places: Semaphore::new(limits.running),
            steps: Arc::new(Semaphore::new(cores)),
            failures,
            metrics,
        })
    }

    /// Adds a connection from `address`. If too many connections wait, evicts the newest connection
    /// of the network with the longest queue. Returns `None` if no network has a longer queue than
    /// the network of `address`, or if this network has too many waiting connections.
    pub(crate) fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Handshake> {
        let network = Network::of(address);
        let mut connections = self.connections();
        let own = connections.networks.get(&network).map_or(0, |group| group.waiting.len());
        if own >= self.limits.waiting_of_network {
            return None;
        }
        if connections.waiting >= self.limits.waiting {
            let longest = connections.networks.values_mut().max_by_key(|group| group.waiting.len());
            let (_, evict) = longest.filter(|group| group.waiting.len() > own)?.waiting.pop_last()?;
            evict.notify_one();
            connections.waiting -= 1;
        }
        let (number, evict) = (connections.next_number, Arc::new(Notify::new()));
        connections.next_number += 1;
        connections.waiting += 1;
        let group = connections.networks.entry(network).or_insert_with(|| Group::new(&self.limits));
        group.waiting.insert(number, Arc::clone(&evict));
        let queue = Arc::clone(&group.queue);
        self.publish(&connections);
        drop(connections);
        Some(Handshake { handshakes: Arc::clone(self), number, network, queue, evict })
    }

    /// Returns true if connections wait. While this method returns true, the caller must call
    /// [`Self::evict_silent`] regularly.
    pub(crate) fn has_waiting(&self) -> bool {
        self.connections().waiting > 0
    }

    /// Evicts running handshakes whose peers are silent at `now`. The peer that has been silent for
    /// longest is first. Evicts a handshake only if a waiting connection can use its place. Evicts
    /// at most as many handshakes as connections wait.
    pub(crate) fn evict_silent(&self, now: Instant) {
        let connections = self.connections();
        let is_full = connections.running.len() >= self.limits.running;
        let is_wanted = |network: Network| {
            let group = connections.networks.get(&network);
            let is_at_limit = |group: &Group| group.running >= self.limits.running_of_network;
            is_full || group.is_some_and(|group| is_at_limit(group) && !group.waiting.is_empty())
        };
        let is_evictable = |running: &&Running| running.heard_at + SILENCE_LIMIT <= now && is_wanted(running.network);
        let mut silent: Vec<&Running> = connections.running.values().filter(is_evictable).collect();
        silent.sort_by_key(|running| running.heard_at);
        silent.into_iter().take(connections.waiting).for_each(|running| running.evict.notify_one());
    }

    fn publish(&self, connections: &Connections) {
        self.metrics.set_handshakes_pending(connections.running.len(), connections.waiting);
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group {
    fn new(limits: &Limits) -> Self {
        let queue = Queue { places: Semaphore::new(limits.running_of_network), turn: Semaphore::new(1) };
        Self { queue: Arc::new(queue), running: 0, waiting: BTreeMap::new() }
    }
}

impl Handshake {
    /// Waits for a place, and then runs the handshake that `begin` returns. The task of the
    /// handshake wakes when the peer sends something, so each wake-up counts as a message of the
    /// peer. Returns the result of the handshake.
    ///
    /// # Errors
    ///
    /// [`Evicted`]. `begin` or its future owns the connection, so the connection is dropped and
    /// closed.
    pub(crate) async fn run<T, E, F>(self, begin: impl FnOnce() -> F) -> Result<Result<T, E>, Evicted>
    where
        F: Future<Output = Result<T, E>>,
    {
        let mut evicted = pin!(self.evict.notified());
        let _place = tokio::select! {
            () = &mut evicted => return Err(Evicted::QueueFull),
            place = self.place() => place,
        };
        if !self.start() {
            return Err(Evicted::QueueFull);
        }
        // The handshake is allocated only now, because thousands of connections may wait for a
        // place.
        let mut handshake = Box::pin(begin());
        let mut steps = PollSemaphore::new(Arc::clone(&self.handshakes.steps));
        let mut step = None;
        let ended = poll_fn(|cx| {
            if evicted.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(Evicted::Silent));
            }
            self.mark_heard();
            if step.is_none() {
                step = ready!(steps.poll_acquire(cx));
                // The release of the permit made this task run next. The task yields, so that other
                // tasks run before this step.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let polled = handshake.as_mut().poll(cx);
            step = None;
            polled.map(Ok)
        })
        .await;
        if !matches!(ended, Ok(Ok(_))) {
            self.handshakes.failures.count(self.network, Instant::now());
        }
        ended
    }

    /// Waits for these conditions in order: a place of the network, the network's turn, the end of
    /// the network's pause, and a place of all networks. Returns the permits of both places.
    /// Semaphores serve waiting tasks in the order of their requests.
    async fn place(&self) -> impl Sized + use<'_> {
        let Self { handshakes, network, queue, .. } = self;
        let of_network = queue.places.acquire().await;
        let turn = queue.turn.acquire().await;
        while let Some(end) = handshakes.failures.pause_end(*network, Instant::now()) {
            sleep_until(end).await;
        }
        let of_all = handshakes.places.acquire().await;
        drop(turn);
        (of_network, of_all)
    }

    /// Counts the connection as running. Returns false if it was evicted while it waited.
    fn start(&self) -> bool {
        let mut connections = self.handshakes.connections();
        let Some(group) = connections.networks.get_mut(&self.network) else { return false };
        if group.waiting.remove(&self.number).is_none() {
            return false;
        }
        group.running += 1;
        connections.waiting -= 1;
        let running = Running { network: self.network, heard_at: Instant::now(), evict: Arc::clone(&self.evict) };
        connections.running.insert(self.number, running);
        self.handshakes.publish(&connections);
        true
    }

    /// Records that the peer has sent something.
    fn mark_heard(&self) {
        if let Some(running) = self.handshakes.connections().running.get_mut(&self.number) {
            running.heard_at = Instant::now();
        }
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut connections = self.handshakes.connections();
        let was_running = connections.running.remove(&self.number).is_some();
        if let Some(group) = connections.networks.get_mut(&self.network) {
            let was_waiting = group.waiting.remove(&self.number).is_some();
            group.running -= usize::from(was_running);
            if group.running == 0 && group.waiting.is_empty() {
                connections.networks.remove(&self.network);
            }
            connections.waiting -= usize::from(was_waiting);
        }
        self.handshakes.publish(&connections);
    }
}

#[cfg(test)]
#[path = "handshakes_tests.rs"]
mod tests;
