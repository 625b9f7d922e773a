//! Whose turn it is to shake hands.
//!
//! Whoever reaches the port can begin a TLS handshake without any certificate, and never go on, or begin one after the other. So no address has all the places: it has a
//! bounded number of handshakes at the same time, and of connections that wait for that; addresses take turns; and where somebody waits, who has said nothing
//! for a while goes, the longest silent first. An honest client is silent for a round trip. A source whose handshakes fail rests in between. And since a handshake computes as
//! long as it takes to send some fifty messages, there is one step of one handshake at a time on each core, and streams have their turn before the next.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    future::poll_fn,
    net::{IpAddr, Ipv6Addr},
    num::NonZeroUsize,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Poll, ready},
    thread,
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore, oneshot},
    time::Instant,
};
use tokio_util::sync::PollSemaphore;

use crate::{metrics::Metrics, open_files};

/// How long a handshake may be silent when somebody waits for its place.
const PATIENCE: Duration = Duration::from_secs(1);

/// Rest of a source for each handshake that failed.
const REST: Duration = Duration::from_millis(50);

/// Rests that a source may owe before it has to take them: a few failures cost nothing.
const OWED: Duration = Duration::from_secs(1);

/// Sources that owe rests; more are not kept.
const MAX_OWING: usize = 65_536;

/// How many there may be.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// Handshakes at the same time.
    active: usize,
    /// Of one source.
    active_of_source: usize,
    /// Connections that wait for their turn.
    waiting: usize,
    /// Of one source.
    waiting_of_source: usize,
}

/// A core does some thousand handshakes a second, each of which is on its way for some round trips, so more at the same time would not make them faster. All agents
/// behind one address translator are one source: thousands may wait.
const BOUNDS: Bounds = Bounds { active: 256, active_of_source: 64, waiting: 16_384, waiting_of_source: 12_288 };

/// Where connections come from: an IPv4 address, or an IPv6 network of 64 bits, of which a host may use any address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Source(IpAddr);

impl Source {
    pub(super) fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => Self(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()),
            ipv4 @ IpAddr::V4(_) => Self(ipv4),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Handshakes {
    table: Mutex<Table>,
    bounds: Bounds,
    /// Steps of handshakes at the same time.
    steps: Arc<Semaphore>,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct Table {
    next_number: u64,
    active: BTreeMap<u64, Active>,
    /// Those that have a connection here.
    sources: HashMap<Source, Connections>,
    /// Sources of which somebody waits, in the order of their turns; without those that rest.
    turns: VecDeque<Source>,
    /// Sources of which somebody waits, and that rest for so long.
    resting: BTreeSet<(Instant, Source)>,
    /// Until when sources would rest if each failure had its rest at once.
    owed: HashMap<Source, Instant>,
    /// The same by how many wait.
    by_waiting: BTreeSet<(usize, Source)>,
    waiting: usize,
}

#[derive(Debug, Default)]
struct Connections {
    active: usize,
    /// In order of their numbers.
    waiting: VecDeque<Waiting>,
    rests_until: Option<Instant>,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    turn: oneshot::Sender<()>,
    leave: Arc<Notify>,
}

#[derive(Debug)]
struct Active {
    source: Source,
    heard: Instant,
    leave: Arc<Notify>,
}

/// A connection's place, given back when dropped.
#[derive(Debug)]
pub(super) struct Place {
    handshakes: Arc<Handshakes>,
    number: u64,
    source: Source,
    turn: oneshot::Receiver<()>,
    leave: Arc<Notify>,
}

/// The place was needed for somebody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Displaced {
    /// Before its turn: more wait than there may.
    Waiting,
    /// After a silence.
    Silent,
}

impl Handshakes {
    pub(super) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        // Those who wait leave files for connections. A client that is sent away has spent its session ticket, so few should be.
        let files = usize::try_from(open_files::limit() / 2).unwrap_or(usize::MAX);
        let (waiting, waiting_of_source) = (BOUNDS.waiting.min(files), BOUNDS.waiting_of_source.min(files / 4 * 3));
        Self::with_bounds(Bounds { waiting, waiting_of_source, ..BOUNDS }, metrics)
    }

    fn with_bounds(bounds: Bounds, metrics: Arc<Metrics>) -> Arc<Self> {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Arc::new(Self { table: Mutex::default(), bounds, steps: Arc::new(Semaphore::new(cores)), metrics })
    }

    /// Takes in a connection from an address. `None` when more wait than there may, and it is not to be preferred to any of them.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr, now: Instant) -> Option<Place> {
        let source = Source::of(address);
        let mut table = self.table();
        let (turn, leave) = (oneshot::channel(), Arc::new(Notify::new()));
        let number = table.next_number;
        table.next_number += 1;
        table.wait(source, Waiting { number, turn: turn.0, leave: Arc::clone(&leave) });
        table.begin(&self.bounds, now);
        let own = table.waiting_of(source);
        let is_displaced = match table.by_waiting.last().copied() {
            _ if own > self.bounds.waiting_of_source => table.displace(source),
            Some((_, longest)) if table.waiting > self.bounds.waiting => table.displace(longest),
            _ => None,
        } == Some(number);
        self.publish(&table);
        drop(table);
        // Nothing is left of it in the table, so a place would have nothing to give back.
        (!is_displaced).then(|| Place { handshakes: Arc::clone(self), number, source, turn: turn.1, leave })
    }

    /// True while somebody waits, and [`Self::make_room`] has something to do.
    pub(super) fn is_crowded(&self) -> bool {
        self.table().waiting > 0
    }

    /// Begins what can begin, since sources have rested; then has handshakes leave that have been silent for too long, as many as there are connections that
    /// wait for just their places.
    pub(super) fn make_room(&self, now: Instant) {
        let mut table = self.table();
        table.begin(&self.bounds, now);
        self.publish(&table);
        let is_full = table.active.len() >= self.bounds.active;
        let is_in_the_way = |source: Source| {
            let connections = table.sources.get(&source);
            is_full || connections.is_some_and(|of| of.active >= self.bounds.active_of_source && !of.waiting.is_empty())
        };
        let is_silent = |active: &&Active| active.heard + PATIENCE <= now && is_in_the_way(active.source);
        let mut silent: Vec<&Active> = table.active.values().filter(is_silent).collect();
        silent.sort_by_key(|active| active.heard);
        silent.into_iter().take(table.waiting).for_each(|active| active.leave.notify_one());
    }

    /// Has the source of an address rest, since it comes too often with what is refused.
    pub(super) fn failed(&self, address: IpAddr) {
        self.owe(Source::of(address), Instant::now());
    }

    fn owe(&self, source: Source, now: Instant) {
        let mut table = self.table();
        if table.owed.len() >= MAX_OWING {
            table.owed.retain(|_, until| *until > now);
        }
        let has_room = table.owed.len() < MAX_OWING;
        match table.owed.get_mut(&source) {
            Some(until) => *until = (*until).max(now) + REST,
            None if has_room => drop(table.owed.insert(source, now + REST)),
            None => {}
        }
    }

    fn heard(&self, number: u64, now: Instant) {
        if let Some(active) = self.table().active.get_mut(&number) {
            active.heard = now;
        }
    }

    fn leave(&self, number: u64, source: Source, now: Instant) {
        let mut table = self.table();
        table.remove(number, source);
        table.begin(&self.bounds, now);
        self.publish(&table);
    }

    fn publish(&self, table: &Table) {
        self.metrics.set_handshakes_pending(table.active.len(), table.waiting);
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn waiting_of(&self, source: Source) -> usize {
        self.sources.get(&source).map_or(0, |of| of.waiting.len())
    }

    /// Notes that so many fewer or more of a source wait than `before`.
    fn recount(&mut self, source: Source, before: usize) {
        let now = self.waiting_of(source);
        self.waiting = self.waiting + now - before;
        self.by_waiting.remove(&(before, source));
        if now > 0 {
            self.by_waiting.insert((now, source));
        }
        if self.sources.get(&source).is_some_and(|of| of.active == 0 && of.waiting.is_empty()) {
            self.sources.remove(&source);
        }
    }

    fn wait(&mut self, source: Source, waiting: Waiting) {
        let before = self.waiting_of(source);
        if before == 0 {
            self.turns.push_back(source);
        }
        self.sources.entry(source).or_default().waiting.push_back(waiting);
        self.recount(source, before);
    }

    /// When a source has rested, if it has to.
    fn rest(&self, source: Source, now: Instant) -> Option<Instant> {
        self.owed.get(&source)?.checked_sub(OWED).filter(|until| *until > now)
    }

    /// Begins as many handshakes as there is room for, of one source after the other.
    fn begin(&mut self, bounds: &Bounds, now: Instant) {
        while let Some((until, source)) = self.resting.first().copied().filter(|(until, _)| *until <= now) {
            self.resting.remove(&(until, source));
            self.turns.push_back(source);
            self.sources.entry(source).or_default().rests_until = None;
        }
        while self.active.len() < bounds.active {
            // Few sources can be at their bound, so few are passed over.
            let has_room =
                |source: &Source| self.sources.get(source).is_some_and(|of| of.active < bounds.active_of_source);
            let Some(position) = self.turns.iter().position(has_room) else { return };
            let Some(source) = self.turns.remove(position) else { return };
            if let Some(until) = self.rest(source, now) {
                self.resting.insert((until, source));
                self.sources.entry(source).or_default().rests_until = Some(until);
                continue;
            }
            let before = self.waiting_of(source);
            let Some(of) = self.sources.get_mut(&source) else { continue };
            let Some(first) = of.waiting.pop_front() else { continue };
            if !of.waiting.is_empty() {
                self.turns.push_back(source);
            }
            // Nobody is told who is just going; it gives its place back.
            let _ = first.turn.send(());
            of.active += 1;
            self.active.insert(first.number, Active { source, heard: now, leave: first.leave });
            self.recount(source, before);
        }
    }

    /// Sends away the one of a source that has waited for the shortest time. Returns its number.
    fn displace(&mut self, source: Source) -> Option<u64> {
        let before = self.waiting_of(source);
        let last = self.sources.get_mut(&source)?.waiting.pop_back()?;
        self.skip_if_nobody_waits(source);
        self.recount(source, before);
        Some(last.number)
    }

    fn remove(&mut self, number: u64, source: Source) {
        let before = self.waiting_of(source);
        let Some(of) = self.sources.get_mut(&source) else { return };
        if self.active.remove(&number).is_some() {
            of.active -= 1;
        } else if let Ok(position) = of.waiting.binary_search_by_key(&number, |waiting| waiting.number) {
            of.waiting.remove(position);
            self.skip_if_nobody_waits(source);
        }
        self.recount(source, before);
    }

    fn skip_if_nobody_waits(&mut self, source: Source) {
        let Some(of) = self.sources.get_mut(&source).filter(|of| of.waiting.is_empty()) else { return };
        match of.rests_until.take() {
            Some(until) => drop(self.resting.remove(&(until, source))),
            None => self.turns.retain(|other| *other != source),
        }
    }
}

impl Place {
    /// Begins a handshake when it is its turn, and runs it, step by step. A future that is woken counts as a peer that has said something.
    ///
    /// # Errors
    ///
    /// [`Displaced`]; what `begin` holds is dropped then.
    pub(super) async fn run<T, E, F>(mut self, begin: impl FnOnce() -> F) -> Result<Result<T, E>, Displaced>
    where
        F: Future<Output = Result<T, E>>,
    {
        (&mut self.turn).await.map_err(|_| Displaced::Waiting)?;
        // On the heap only now: thousands may wait.
        let mut handshake = Box::pin(begin());
        let mut leave = pin!(self.leave.notified());
        let mut steps = PollSemaphore::new(Arc::clone(&self.handshakes.steps));
        let mut step = None;
        let ended = poll_fn(|cx| {
            if leave.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(Displaced::Silent));
            }
            self.handshakes.heard(self.number, Instant::now());
            if step.is_none() {
                step = ready!(steps.poll_acquire(cx));
                // To the end of the queue: who gave the step back had us run next.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let polled = handshake.as_mut().poll(cx);
            step = None;
            polled.map(Ok)
        })
        .await;
        if !matches!(ended, Ok(Ok(_))) {
            self.handshakes.owe(self.source, Instant::now());
        }
        ended
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.handshakes.leave(self.number, self.source, Instant::now());
    }
}

#[cfg(test)]
#[path = "handshakes_tests.rs"]
mod tests;
