//! Which TLS handshakes run, which wait, and which are closed.
//!
//! Whoever reaches the port can begin a TLS handshake without a certificate, and never finish it.
//! So the number of handshakes that run is bounded, and so is the number that run for one network.
//! The others wait. Networks take turns: of each network one connection at a time is in the queue
//! for a place. A network whose handshakes fail pauses in its turn. While connections wait,
//! handshakes whose peers are silent are closed. An honest peer is silent for a round trip.
//!
//! One step of a handshake computes as long as the sending of some fifty messages takes. So each
//! core computes one step at a time, and streams have their turn before the next step.

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

/// How long the peer of a handshake may be silent while a connection waits for its place.
const PATIENCE: Duration = Duration::from_secs(1);

/// How many connections there may be before and in their handshakes.
#[derive(Debug, Clone, Copy)]
struct Limits {
    running: usize,
    running_of_network: usize,
    waiting: usize,
    waiting_of_network: usize,
}

/// A core does some thousand handshakes a second. Each takes some round trips, so more handshakes
/// at a time would not make them faster. All agents behind one address translator are one network,
/// so thousands of one network may wait.
const LIMITS: Limits = Limits { running: 256, running_of_network: 64, waiting: 16_384, waiting_of_network: 12_288 };

/// See the module.
#[derive(Debug)]
pub(crate) struct Handshakes {
    limits: Limits,
    connections: Mutex<Connections>,
    /// Permits of handshakes that run.
    places: Semaphore,
    /// Permits to compute a step.
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

#[derive(Debug)]
struct Running {
    network: Network,
    heard: Instant,
    evict: Arc<Notify>,
}

/// The connections of one network.
#[derive(Debug)]
struct Group {
    queue: Arc<Queue>,
    running: usize,
    waiting: BTreeMap<u64, Arc<Notify>>,
}

#[derive(Debug)]
struct Queue {
    /// Permits of the network's handshakes that run.
    places: Semaphore,
    /// The permit to wait for a place among other networks.
    turn: Semaphore,
}

/// A connection before or in its handshake, until it is dropped.
#[derive(Debug)]
pub(crate) struct Handshake {
    handshakes: Arc<Handshakes>,
    number: u64,
    network: Network,
    queue: Arc<Queue>,
    evict: Arc<Notify>,
}

/// Why a connection has to make room for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evicted {
    /// Too many connections wait for their handshakes.
    QueueFull,
    /// The peer was silent in its handshake.
    Silent,
}

impl Handshakes {
    /// No handshakes. Networks with too many of `failures` pause.
    pub(crate) fn new(metrics: Arc<Metrics>, failures: Arc<Failures>) -> Arc<Self> {
        // Connections that wait leave files for those that are served. A client that is refused has
        // spent its session ticket, so few should be.
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

    /// Takes in a connection. When too many wait, the newest connection of the network with most of
    /// them is evicted; `None` when that is this one.
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

    /// True while connections wait, and [`Self::evict_silent`] may have something to do.
    pub(crate) fn is_crowded(&self) -> bool {
        self.connections().waiting > 0
    }

    /// Evicts handshakes whose peers are silent at `now`, the longest silent first, as many as
    /// there are connections that wait for just their places.
    pub(crate) fn evict_silent(&self, now: Instant) {
        let connections = self.connections();
        let is_full = connections.running.len() >= self.limits.running;
        let is_wanted = |network: Network| {
            let group = connections.networks.get(&network);
            let is_at_limit = |group: &Group| group.running >= self.limits.running_of_network;
            is_full || group.is_some_and(|group| is_at_limit(group) && !group.waiting.is_empty())
        };
        let is_silent = |running: &&Running| running.heard + PATIENCE <= now && is_wanted(running.network);
        let mut silent: Vec<&Running> = connections.running.values().filter(is_silent).collect();
        silent.sort_by_key(|running| running.heard);
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
    /// Waits for a place, and then runs the handshake step by step. A future that is woken counts
    /// as a peer that has said something.
    ///
    /// # Errors
    ///
    /// [`Evicted`]; what `begin` holds is dropped then.
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
        // On the heap only now: thousands may wait.
        let mut handshake = Box::pin(begin());
        let mut steps = PollSemaphore::new(Arc::clone(&self.handshakes.steps));
        let mut step = None;
        let ended = poll_fn(|cx| {
            if evicted.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(Evicted::Silent));
            }
            self.heard();
            if step.is_none() {
                step = ready!(steps.poll_acquire(cx));
                // To the end of the queue: who gave the step back had this task run next.
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

    /// Waits for a place of the network, for the network's turn, for the end of its pause, and for
    /// a place among all. Returns permits that hold both places; semaphores serve in order.
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

    /// False when the connection was evicted before.
    fn start(&self) -> bool {
        let mut connections = self.handshakes.connections();
        let Some(group) = connections.networks.get_mut(&self.network) else { return false };
        if group.waiting.remove(&self.number).is_none() {
            return false;
        }
        group.running += 1;
        connections.waiting -= 1;
        let running = Running { network: self.network, heard: Instant::now(), evict: Arc::clone(&self.evict) };
        connections.running.insert(self.number, running);
        self.handshakes.publish(&connections);
        true
    }

    fn heard(&self) {
        if let Some(running) = self.handshakes.connections().running.get_mut(&self.number) {
            running.heard = Instant::now();
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
