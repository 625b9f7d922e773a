//! Decides which connections of a listener are served, which wait, and which are closed, until
//! their clients have proved who they are.
//!
//! Any client that reaches a port can begin a TLS handshake without a certificate and never finish
//! it. So the number of running handshakes is bounded, in all and for each network. Other
//! connections wait for a place, which is the right to run a handshake. Clients with the address of
//! a Node and strangers have separate places. Networks take turns: at any time, only one connection
//! of each network is in the common queue of its places. A network whose handshakes fail has to
//! pause before its connection enters the common queue.
//!
//! A client that has sent nothing needs no place. If too many connections of its network wait, the
//! longest silent one is closed. A running handshake whose peer is silent, or has taken too long in
//! all, is closed if another connection can use its place. A normal peer is silent for one round
//! trip at a time, and needs two or three.
//!
//! A handshake consists of steps: the computations between two messages of the peer. One step takes
//! as much processor time as about fifty messages to agents. So at most one step for each core is
//! computed at a time, and streams are served before the next step.

use std::{
    collections::{BTreeMap, HashMap},
    future::poll_fn,
    num::NonZeroUsize,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    thread,
    time::Duration,
};

use headgate_listener::open_files;
use tokio::{
    sync::{Notify, Semaphore},
    task::yield_now,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    metrics::level,
    serve::context::{Context, Counted, Network, Tally},
};

/// The maximum numbers of running handshakes, in all and for one network, and of connections that
/// wait for a handshake, in all and for one Node address. Nodes and strangers each have these.
#[derive(Debug, Clone, Copy)]
struct HandshakeLimits {
    running: usize,
    running_of_network: usize,
    /// Of strangers, and of Nodes.
    waiting: [usize; 2],
    waiting_of_node: usize,
    /// How long the peer of a handshake may be silent, and may take in all, while another
    /// connection waits for the handshake's place.
    silence: Duration,
    peers_time: Duration,
}

/// A core computes about a thousand handshakes per second, and each handshake takes a few round
/// trips. So a higher limit of running handshakes would not complete more handshakes per second.
/// All agents behind one address translator are one network of a stranger, so thousands of its
/// connections may wait. A Node has one agent.
const LIMITS: HandshakeLimits = HandshakeLimits {
    running: 256,
    running_of_network: 64,
    waiting: [16_384; 2],
    waiting_of_node: 64,
    silence: Duration::from_secs(1),
    peers_time: Duration::from_secs(2),
};

/// The longest time until the first byte of a client.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);

/// A network of strangers may have this many times as many waiting connections as there is space
/// left. So one network alone can use three quarters of the limit, and two networks three sevenths
/// each. Some space is left for others.
const SHARE: usize = 3;

/// All connections of a listener, or of several, before and in their handshakes.
pub(crate) struct Handshakes {
    limits: HandshakeLimits,
    /// The share of strangers, and the share of clients with the address of a Node.
    shares: [Share; 2],
    /// The queues of the networks with a connection before or in its handshake.
    queues: Mutex<HashMap<Network, Arc<NetworkQueue>>>,
    /// One permit for each step that may be computed at a time.
    steps: Semaphore,
    context: Arc<Context>,
    /// The number of connections so far.
    entered: AtomicU64,
    /// The labels of running and of waiting handshakes.
    states: [&'static str; 2],
}

struct Share {
    /// The connections that wait, by network.
    waiting: Arc<Tally<Network>>,
    /// One permit for each handshake that may run. Semaphores serve waiting tasks in the order of
    /// their requests.
    places: Semaphore,
}

/// The queue of one network.
struct NetworkQueue {
    /// One permit for each handshake of the network that may run.
    places: Semaphore,
    /// The single permit to be in the common queue of all networks.
    turn: Semaphore,
    /// The connections whose clients have sent nothing, in the order in which they were accepted.
    /// A notification closes a connection.
    silent: Mutex<BTreeMap<u64, Arc<Notify>>>,
}

/// One connection before or in its handshake.
pub(crate) struct Handshake {
    handshakes: Arc<Handshakes>,
    network: Network,
    queue: Arc<NetworkQueue>,
    /// `None` once the handshake runs.
    waiting: Option<Counted<Network>>,
    number: u64,
    evicted: Arc<Notify>,
}

/// The peer was silent before its handshake, or silent or slow during it, and another connection
/// needs its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Silent;

impl Handshakes {
    /// Returns the handshakes of listeners. The metric counts them with the labels `states`: those
    /// that run, and those that wait. Strangers may keep three eighths, and Nodes an eighth, of
    /// this part of the open files waiting.
    pub(crate) fn new(context: Arc<Context>, part_of_files: usize, states: [&'static str; 2]) -> Arc<Self> {
        // The limits are high, because a client whose connection is refused has used up its session
        // ticket, and then needs a full handshake. But the rest of the open files is for
        // connections that are served.
        let files = usize::try_from(open_files::limit()).unwrap_or(usize::MAX) / part_of_files;
        let [strangers, nodes] = LIMITS.waiting;
        let waiting = [strangers.min(files / 8 * 3), nodes.min(files / 8)];
        let limits = HandshakeLimits { waiting, ..LIMITS };
        Self::with_limits(limits, context, states)
    }

    fn with_limits(limits: HandshakeLimits, context: Arc<Context>, states: [&'static str; 2]) -> Arc<Self> {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let shares = [(); 2].map(|()| Share { waiting: Arc::default(), places: Semaphore::new(limits.running) });
        let (queues, steps) = (Mutex::default(), Semaphore::new(cores));
        Arc::new(Self { limits, shares, queues, steps, context, entered: AtomicU64::new(0), states })
    }

    fn share(&self, network: Network) -> &Share {
        &self.shares[usize::from(network.is_node())]
    }

    /// Adds a connection of a network. If too many of its connections wait, closes the one whose
    /// client has been silent for longest. Returns `None` if there is none: see [`SHARE`].
    pub(crate) fn enter(self: &Arc<Self>, network: Network) -> Option<Handshake> {
        let waiting = &self.share(network).waiting;
        let may = |all: usize, own: usize| {
            let room = self.limits.waiting[usize::from(network.is_node())].saturating_sub(all);
            let most = if network.is_node() { self.limits.waiting_of_node } else { SHARE * room };
            if room > 0 && own < most { Ok(()) } else { Err(()) }
        };
        let mut queues = self.queues();
        let waiting = waiting.add(network, may).or_else(|()| {
            let (_, evicted) = queues.get(&network).and_then(|queue| queue.silent().pop_first()).ok_or(())?;
            evicted.notify_one();
            waiting.add(network, |_, _| Ok::<_, ()>(()))
        });
        let waiting = Some(waiting.ok()?);
        let new = || {
            let places = Semaphore::new(self.limits.running_of_network);
            Arc::new(NetworkQueue { places, turn: Semaphore::new(1), silent: Mutex::default() })
        };
        let queue = Arc::clone(queues.entry(network).or_insert_with(new));
        drop(queues);
        let (number, evicted) = (self.entered.fetch_add(1, Ordering::Relaxed), Arc::<Notify>::default());
        queue.silent().insert(number, Arc::clone(&evicted));
        self.publish();
        Some(Handshake { handshakes: Arc::clone(self), network, queue, waiting, number, evicted })
    }

    fn publish(&self) {
        // One thread at a time reads and sets, so the last value set is not an older one.
        let _lock = self.queues();
        let active = |share: &Share| self.limits.running - share.places.available_permits();
        let counts =
            [self.shares.iter().map(active).sum(), self.shares.iter().map(|share| share.waiting.all()).sum::<usize>()];
        for (state, count) in self.states.into_iter().zip(counts) {
            self.context.metrics.handshakes_pending.of([state]).set(level(count));
        }
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<Network, Arc<NetworkQueue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NetworkQueue {
    fn silent(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Notify>>> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handshake {
    /// Waits until `speaks`, when the client has sent something. Until then, the client takes no
    /// place and no turn.
    ///
    /// # Errors
    ///
    /// [`Silent`].
    pub(crate) async fn until_heard<T>(&self, speaks: impl Future<Output = T>) -> Result<(), Silent> {
        tokio::select! {
            biased;
            _ = speaks => Ok(()),
            () = self.evicted.notified() => Err(Silent),
            () = sleep(FIRST_BYTE_TIMEOUT) => Err(Silent),
        }
    }

    /// Waits for a place, and then runs the handshake that `begin` returns. Returns the result of
    /// the handshake.
    ///
    /// # Errors
    ///
    /// [`Silent`]. The future of `begin` owns the connection, so the connection is dropped and
    /// closed. While `is_peers_turn` is false, the peer waits for this side and is not silent.
    pub(crate) async fn run<T, E, F>(
        mut self,
        is_peers_turn: impl Fn() -> bool,
        begin: impl FnOnce() -> F,
    ) -> Result<Result<T, E>, Silent>
    where
        F: Future<Output = Result<T, E>>,
    {
        let (handshakes, queue) = (Arc::clone(&self.handshakes), Arc::clone(&self.queue));
        queue.silent().remove(&self.number);
        let _of_network = queue.places.acquire().await;
        let turn = queue.turn.acquire().await;
        while let Some(end) = handshakes.context.failures.pause_end(self.network, Instant::now()) {
            sleep_until(end).await;
        }
        let _of_all = handshakes.share(self.network).places.acquire().await;
        drop(turn);
        self.waiting = None;
        handshakes.publish();
        // The handshake is allocated only now, because thousands of connections may wait for a
        // place.
        let mut handshake = Box::pin(begin());
        let (silence, mut left) = (handshakes.limits.silence, handshakes.limits.peers_time);
        let ended = loop {
            let step = handshakes.steps.acquire().await;
            // Other tasks run before this step.
            yield_now().await;
            let polled = poll_fn(|cx| Poll::Ready(handshake.as_mut().poll(cx))).await;
            drop(step);
            if let Poll::Ready(ended) = polled {
                break Ok(ended);
            }
            let (is_peers_turn, began) = (is_peers_turn(), Instant::now());
            let is_late = tokio::select! {
                biased;
                () = sleep(if left.is_zero() { silence } else { silence.min(left) }) => true,
                () = wake_up() => false,
            };
            if is_peers_turn {
                left = left.saturating_sub(began.elapsed());
                if (is_late || left.is_zero()) && self.is_wanted() {
                    break Err(Silent);
                }
            }
        };
        if !matches!(ended, Ok(Ok(_))) {
            handshakes.context.failures.count(self.network, Instant::now());
        }
        ended
    }

    /// Returns true if a waiting connection can use the place of this handshake.
    fn is_wanted(&self) -> bool {
        let share = self.handshakes.share(self.network);
        let (all, own) = share.waiting.count(&self.network);
        let is_full = |places: &Semaphore| places.available_permits() == 0;
        (all > 0 && is_full(&share.places)) || (own > 0 && is_full(&self.queue.places))
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
        self.queue.silent().remove(&self.number);
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
