//! All open streams, and the tasks that visit them after an event that concerns every stream.
//!
//! A new version concerns every stream. Waking thousands of tasks would cost more than the work of
//! the tasks. So one task for each worker of the runtime visits the streams in turn. A visit to a
//! stream without work costs some tens of nanoseconds. The visits also serve heartbeats and time
//! limits, so that a stream needs no timer. Responses have only time limits, so a new version
//! causes no visits to them. A [`Signal`] wakes a stream for events that concern only this stream.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Waker,
    time::Duration,
};

use futures::task::AtomicWaker;
use tokio::{
    runtime::Handle,
    sync::watch,
    task::{unconstrained, yield_now},
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use super::Context;

/// After so many visits, a fraction of a millisecond, the task yields to others.
const VISITS_PER_TURN: usize = 32;

/// The lower and upper bound of the time between two visits when nothing happens.
const TICK: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));

/// An item to visit, such as a stream or a response of the general server.
pub(crate) trait Visit: Send + Sync {
    /// Does the work that is due at `now`, without waiting for anything.
    fn visit(&self, now: Instant);

    /// Returns true if all other items are to be visited first.
    fn is_late(&self) -> bool {
        false
    }

    /// Ends the item at once, without a message. The default is for items of a server.
    fn abort(&self) {}
}

/// The streams, connections and responses that are visited.
pub(crate) struct Visits {
    /// A shard for each worker, and then one for items that are visited once in a tick.
    shards: Box<[Mutex<Slots>]>,
    next: AtomicUsize,
    tick: Duration,
    position_waits: AtomicUsize,
}

#[derive(Default)]
struct Slots {
    entries: Vec<Option<Arc<dyn Visit>>>,
    free: Vec<usize>,
}

/// While this value exists, streams are visited whenever a position of the source moves.
pub(crate) struct PositionWait(Arc<Visits>);

impl Drop for PositionWait {
    fn drop(&mut self) {
        self.0.position_waits.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Membership of a stream in [`Visits`]. Dropping this value ends the visits to the stream.
pub(crate) struct Visited {
    visits: Arc<Visits>,
    shard: usize,
    slot: usize,
}

impl Visits {
    /// Returns visits without streams. `times` are the time limits that visits enforce. The time
    /// between two visits is at most a sixteenth of the shortest of `times`, within [`TICK`]. This
    /// maximum is also the precision of the time limits.
    pub(crate) fn new(times: impl IntoIterator<Item = Duration>) -> Self {
        let workers = Handle::try_current().map_or(1, |runtime| runtime.metrics().num_workers());
        let tick = times.into_iter().min().unwrap_or(TICK.1) / 16;
        Self {
            shards: (0..=workers).map(|_| Mutex::default()).collect(),
            next: AtomicUsize::new(0),
            tick: tick.clamp(TICK.0, TICK.1),
            position_waits: AtomicUsize::new(0),
        }
    }

    /// Registers a stream that waits for the source to reach a position, or to be listed.
    pub(crate) fn wait_for_position(self: &Arc<Self>) -> PositionWait {
        self.position_waits.fetch_add(1, Ordering::AcqRel);
        PositionWait(Arc::clone(self))
    }

    /// Returns the longest time between two visits of a server that is not overloaded.
    pub(crate) fn tick(&self) -> Duration {
        self.tick
    }

    /// Adds a stream, which is visited from now on.
    pub(crate) fn add(self: &Arc<Self>, stream: Arc<dyn Visit>) -> Visited {
        self.add_to(self.next.fetch_add(1, Ordering::Relaxed) % self.timed(), stream)
    }

    /// Adds an item with time limits only. It is visited once in a tick, and not after events.
    pub(crate) fn add_timed(self: &Arc<Self>, item: Arc<dyn Visit>) -> Visited {
        self.add_to(self.timed(), item)
    }

    /// The shard of the items with time limits only.
    fn timed(&self) -> usize {
        self.shards.len() - 1
    }

    fn add_to(self: &Arc<Self>, shard: usize, stream: Arc<dyn Visit>) -> Visited {
        let mut slots = self.slots(shard);
        let slot = slots.free.pop().unwrap_or(slots.entries.len());
        if slot == slots.entries.len() {
            slots.entries.push(None);
        }
        slots.entries[slot] = Some(stream);
        drop(slots);
        Visited { visits: Arc::clone(self), shard, slot }
    }

    /// Ends every stream at once.
    pub(crate) fn abort(&self) {
        for shard in 0..self.shards.len() {
            let streams: Vec<_> = self.slots(shard).entries.iter().flatten().cloned().collect();
            streams.iter().for_each(|stream| stream.abort());
        }
    }

    fn slots(&self, shard: usize) -> MutexGuard<'_, Slots> {
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Visits every stream once, without a task for each core.
    pub(crate) async fn sweep_all(&self) {
        for shard in 0..self.timed() {
            self.sweep(shard).await;
        }
    }

    /// Visits the streams of a shard, also those added meanwhile, and the late ones last.
    async fn sweep(&self, shard: usize) {
        let mut turn: Vec<Arc<dyn Visit>> = Vec::with_capacity(VISITS_PER_TURN);
        let mut late: Vec<Arc<dyn Visit>> = Vec::new();
        let mut from = 0;
        loop {
            {
                let slots = self.slots(shard);
                let Some(rest) = slots.entries.get(from..).filter(|rest| !rest.is_empty()) else { break };
                let entries = &rest[..rest.len().min(VISITS_PER_TURN)];
                from += entries.len();
                for stream in entries.iter().flatten() {
                    if stream.is_late() { &mut late } else { &mut turn }.push(Arc::clone(stream));
                }
            }
            let now = Instant::now();
            turn.drain(..).for_each(|stream| stream.visit(now));
            yield_now().await;
        }
        for turn in late.chunks(VISITS_PER_TURN) {
            let now = Instant::now();
            turn.iter().for_each(|stream| stream.visit(now));
            yield_now().await;
        }
    }
}

impl Drop for Visited {
    fn drop(&mut self) {
        let mut slots = self.visits.slots(self.shard);
        let stream = slots.entries[self.slot].take();
        slots.free.push(self.slot);
        drop(slots);
        // Dropping the last reference may call other streams and `Visits`, so not under the lock.
        drop(stream);
    }
}

/// Starts the tasks that visit the streams. The tasks run until `stopped` is cancelled.
pub(crate) fn start(context: &Arc<Context>, stopped: &CancellationToken) {
    for shard in 0..context.visits.timed() {
        let context = Arc::clone(context);
        // tokio would stop a task after some writes to sockets. This task yields by itself.
        let visits = unconstrained(async move { visit_all(&context, shard).await });
        tokio::spawn(stopped.clone().run_until_cancelled_owned(visits));
    }
    let visits = Arc::clone(&context.visits);
    let timed = async move {
        let mut tick = interval(visits.tick);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            visits.sweep(visits.timed()).await;
        }
    };
    tokio::spawn(stopped.clone().run_until_cancelled_owned(timed));
}

async fn visit_all(context: &Context, shard: usize) {
    let Context { store, visits, .. } = context;
    let (mut head, mut moves, mut source) = (store.head(), store.moves(), store.watch_source());
    let mut lifecycle = context.lifecycle.subscribe();
    let mut tick = interval(visits.tick);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = change(&mut head) => {}
            () = change(&mut lifecycle) => {}
            () = change(&mut source) => {}
            () = change(&mut moves) => {
                // Bookmarks move positions, for which only some streams wait.
                if visits.position_waits.load(Ordering::Acquire) == 0 && !head.has_changed().unwrap_or(false) {
                    continue;
                }
            }
            _ = tick.tick() => context.warnings.tick(Instant::now()),
        }
        // Marked before the visits, so that a change meanwhile causes further visits.
        head.mark_unchanged();
        moves.mark_unchanged();
        visits.sweep(shard).await;
    }
}

async fn change<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        // The sender no longer exists, so no further change can arrive.
        std::future::pending::<()>().await;
    }
}

// The signal that wakes one stream, and reports that the Node of the stream's agent changed.

/// Wakes the task of one stream. [`Visits`] visits all of them after a new version.
#[derive(Debug)]
pub(crate) struct Signal {
    waker: AtomicWaker,
    node_changed: AtomicBool,
}

impl Signal {
    /// Returns the signal of a new stream, whose Node has not been sent yet.
    pub(crate) fn new() -> Self {
        Self { waker: AtomicWaker::new(), node_changed: AtomicBool::new(true) }
    }

    /// Sets the task to wake, before it looks for work, so that it misses no signal.
    pub(crate) fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Wakes the stream's task, which then looks for work.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Reports that the Node of the stream's agent changed, and wakes the stream's task.
    pub(crate) fn change_node(&self) {
        self.node_changed.store(true, Ordering::Release);
        self.wake();
    }

    /// Returns true once after each change of the Node, and once for a new signal.
    pub(crate) fn take_node_change(&self) -> bool {
        // The value is usually false, and a write would slow down other cores that read it.
        self.node_changed.load(Ordering::Acquire) && self.node_changed.swap(false, Ordering::AcqRel)
    }
}

impl Visit for Signal {
    fn visit(&self, _: Instant) {
        self.wake();
    }
}
