//! All open streams, and the tasks that look after what concerns every one of them.
//!
//! A new version concerns every stream. Waking thousands of tasks for it costs more than what each then does, so one task per core visits
//! them in turn instead, and a stream without anything to do costs a visit some tens of nanoseconds. The same visits serve heartbeats and time limits,
//! so that a stream needs no timer. What concerns one stream alone goes by its [`super::signal::Signal`].

use std::{
    num::NonZeroUsize,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use tokio::{
    sync::watch,
    task::yield_now,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use super::Shared;

/// Streams visited before other tasks get their turn: a fraction of a millisecond.
const VISITS_PER_TURN: usize = 32;

/// Bounds of the time between two visits when nothing happens.
const TICK: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));

/// Something to look after: a stream, or a connection that will have one.
pub(super) trait Visit: Send + Sync {
    /// Does what there is to do at `now`, without waiting for anything.
    fn visit(&self, now: Instant);

    /// True when others are to be visited before it.
    fn is_late(&self) -> bool {
        false
    }

    /// Ends at once, without a word to the peer.
    fn abort(&self);
}

/// See the module.
pub(super) struct Streams {
    shards: Box<[Mutex<Slots>]>,
    next: AtomicUsize,
    tick: Duration,
}

#[derive(Default)]
struct Slots {
    entries: Vec<Option<Arc<dyn Visit>>>,
    free: Vec<usize>,
}

/// Keeps a stream visited until it is dropped.
pub(super) struct Visited {
    streams: Arc<Streams>,
    shard: usize,
    slot: usize,
}

impl Streams {
    /// No streams. A visit comes at least sixteen times in the shortest of `times`, which is as exact as they are kept.
    pub(super) fn new(times: impl IntoIterator<Item = Duration>) -> Self {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let tick = times.into_iter().min().unwrap_or(TICK.1) / 16;
        Self {
            shards: (0..cores).map(|_| Mutex::default()).collect(),
            next: AtomicUsize::new(0),
            tick: tick.clamp(TICK.0, TICK.1),
        }
    }

    /// Longest time between two visits of a server that is not overloaded.
    pub(super) fn tick(&self) -> Duration {
        self.tick
    }

    /// Has a stream visited from now on.
    pub(super) fn add(self: &Arc<Self>, stream: Arc<dyn Visit>) -> Visited {
        let shard = self.next.fetch_add(1, Ordering::Relaxed) % self.shards.len();
        let mut slots = self.slots(shard);
        let slot = slots.free.pop().unwrap_or(slots.entries.len());
        if slot == slots.entries.len() {
            slots.entries.push(None);
        }
        slots.entries[slot] = Some(stream);
        drop(slots);
        Visited { streams: Arc::clone(self), shard, slot }
    }

    /// Ends every stream at once.
    pub(super) fn abort(&self) {
        for shard in 0..self.shards.len() {
            let streams: Vec<_> = self.slots(shard).entries.iter().flatten().cloned().collect();
            streams.iter().for_each(|stream| stream.abort());
        }
    }

    fn slots(&self, shard: usize) -> MutexGuard<'_, Slots> {
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Visits the streams of a shard, those that come meanwhile included; those that are late after all others.
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
        let mut slots = self.streams.slots(self.shard);
        let stream = slots.entries[self.slot].take();
        slots.free.push(self.slot);
        drop(slots);
        // Outside of the lock: it may be the last reference, and what it drops may have something to do with other streams.
        drop(stream);
    }
}

/// Starts the visits, which go on until `stopped` is cancelled.
pub(super) fn start(shared: &Arc<Shared>, stopped: &CancellationToken) {
    for shard in 0..shared.streams.shards.len() {
        let (shared, stopped) = (Arc::clone(shared), stopped.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = visit_all(&shared, shard) => {}
                () = stopped.cancelled() => {}
            }
        });
    }
}

async fn visit_all(shared: &Shared, shard: usize) {
    let store = &shared.store;
    let (mut head, mut moves, mut source) = (store.head(), store.moves(), store.watch_source());
    let mut lifecycle = shared.lifecycle.subscribe();
    let mut tick = interval(shared.streams.tick);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = change(&mut head) => {}
            () = change(&mut lifecycle) => {}
            () = change(&mut source) => {}
            () = change(&mut moves) => {
                // Positions move with each bookmark; only who waits for one has something to do then.
                if shared.waiting_for_position.load(Ordering::Acquire) == 0 && !head.has_changed().unwrap_or(false) {
                    continue;
                }
            }
            _ = tick.tick() => {
                let now = Instant::now();
                shared.admission.tick(now);
                shared.warnings.tick(now);
            }
        }
        // Seen before the look, so that what comes meanwhile has the streams visited again.
        head.mark_unchanged();
        moves.mark_unchanged();
        shared.streams.sweep(shard).await;
    }
}

async fn change<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        // The sender is gone, and with it everything that could happen.
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Noted {
        name: usize,
        is_late: bool,
        visits: Arc<Mutex<Vec<usize>>>,
    }

    impl Visit for Noted {
        fn visit(&self, _: Instant) {
            self.visits.lock().unwrap_or_else(PoisonError::into_inner).push(self.name);
        }

        fn is_late(&self) -> bool {
            self.is_late
        }

        fn abort(&self) {}
    }

    #[tokio::test]
    async fn each_is_visited_once_and_who_is_late_after_the_others() {
        let streams = Arc::new(Streams { shards: Box::new([Mutex::default()]), ..Streams::new([]) });
        let visits = Arc::new(Mutex::default());
        let noted = |name| Noted { name, is_late: name % 3 == 0, visits: Arc::clone(&visits) };
        let visited: Vec<Visited> = (0..10 * VISITS_PER_TURN).map(|name| streams.add(Arc::new(noted(name)))).collect();
        streams.sweep(0).await;
        let in_time = (0..visited.len()).filter(|name| name % 3 != 0);
        let late = (0..visited.len()).filter(|name| name % 3 == 0);
        assert_eq!(*visits.lock().unwrap_or_else(PoisonError::into_inner), in_time.chain(late).collect::<Vec<_>>());
    }
}
