//! State that all handlers of a replica share: store, metrics, settings, limits and signals.

mod audit;
mod settings;
mod tally;

use std::{
    collections::HashMap,
    fmt::Display,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Waker,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures::task::AtomicWaker;
use headgate_core::{node_state::SourceState, turns::Turns};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::{unconstrained, yield_now},
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{metrics::Metrics, store::Store};

pub use self::settings::{EnrolmentSettings, PeerSettings, Ports, ReadinessSettings, Settings};
pub(crate) use self::{
    audit::{AuditedRequest, audit_object},
    tally::{Counted, Failures, Tally},
};
pub(crate) use headgate_listener::Network;

/// The phase of a replica between start and stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    Serving,
    /// Agents have been asked to move to another replica.
    Draining,
    /// The remaining streams end.
    Ended,
}

/// The state that all handlers of a replica share.
pub(crate) struct Context {
    pub(crate) store: Arc<Store>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) settings: Settings,
    pub(crate) warnings: Warnings,
    /// The lines of the audit log that each client may cause.
    audit_lines: Mutex<Turns<String>>,
    pub(crate) lifecycle: watch::Sender<Lifecycle>,
    pub(crate) visits: Arc<Visits>,
    pub(crate) failures: Arc<Failures>,
}

impl Context {
    pub(crate) fn new(store: Arc<Store>, metrics: Arc<Metrics>, settings: Settings) -> Arc<Self> {
        let Settings { heartbeat_interval, behind_wait, hello_timeout, stalled_response_timeout, .. } = settings;
        let visits = Visits::new([heartbeat_interval, behind_wait, hello_timeout, stalled_response_timeout]);
        Arc::new(Self {
            store,
            metrics,
            settings,
            warnings: Warnings::default(),
            audit_lines: audit::lines(),
            lifecycle: watch::Sender::new(Lifecycle::Serving),
            visits: Arc::new(visits),
            failures: Arc::default(),
        })
    }

    pub(crate) fn lifecycle(&self) -> Lifecycle {
        *self.lifecycle.borrow()
    }

    /// Returns the network of a client. The address of a Node has a share of its own, which the
    /// node and its pods contest with nobody else.
    pub(crate) fn network(&self, client: IpAddr) -> Network {
        let is_node = self.store.is_node_address(client.to_canonical());
        if is_node { Network::of_node(client) } else { Network::of(client) }
    }

    /// Returns why this replica is not ready, if so, for all probes (discovery.proto, section 14).
    pub(crate) fn unready_reason(&self) -> Option<String> {
        if self.lifecycle() != Lifecycle::Serving {
            return Some("draining".into());
        }
        let reason = match self.store.source_state() {
            SourceState::Following => return None,
            SourceState::Unlisted => "the source has not been listed yet",
            SourceState::CutOff => "cut off from the source",
        };
        let problem = self.store.source_problem();
        Some(problem.map_or_else(|| reason.to_owned(), |problem| format!("{reason}: {problem}")))
    }
}

/// The time since the Unix epoch in whole milliseconds.
pub(crate) fn unix_ms(time: SystemTime) -> u64 {
    milliseconds(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

// All open streams, and the tasks that visit them after an event that concerns every stream.
//
// A new version concerns every stream. Waking thousands of tasks would cost more than the work of
// the tasks. So one task for each worker of the runtime visits the streams in turn. A visit to a
// stream without work costs some tens of nanoseconds. The visits also serve heartbeats and time
// limits, so that a stream needs no timer. Responses have only time limits, so a new version
// causes no visits to them. A [`Signal`] wakes a stream for events that concern only this stream.

/// After this number of visits, the visiting task yields to other tasks. These visits take a
/// fraction of a millisecond.
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

    /// Ends the item at once, without a message to the peer. The default does nothing, because
    /// items without this method end together with their server.
    fn abort(&self) {}
}

/// The streams, connections and responses that are visited.
pub(crate) struct Visits {
    /// One shard for each worker of the runtime, and then the shard of the items that are visited
    /// only once in a tick.
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

/// While a value of this type exists, all streams are visited whenever a position of the source
/// moves.
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

    /// Visits the streams of a shard, including streams that are added meanwhile. Late streams are
    /// visited after all other streams.
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
        // The stream is dropped after the lock is released. `stream` may be the last reference, and
        // dropping the stream may call other streams and `Visits`.
        drop(stream);
    }
}

/// Starts the tasks that visit the streams. The tasks run until `stopped` is cancelled.
pub(crate) fn start_visits(context: &Arc<Context>, stopped: &CancellationToken) {
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
                // Positions move with each bookmark. After such a move, only streams that wait for
                // a position need a visit.
                if visits.position_waits.load(Ordering::Acquire) == 0 && !head.has_changed().unwrap_or(false) {
                    continue;
                }
            }
            _ = tick.tick() => context.warnings.tick(Instant::now()),
        }
        // The versions are marked as seen before the visits, so that a change during the visits
        // causes further visits.
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

/// Wakes the task that serves a stream, for events that concern only this stream. For events that
/// concern all streams, such as a new version, [`Visits`] visits every stream.
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

    /// Sets the task to wake. The task must call this method before looking for work. Otherwise,
    /// the task could miss a signal.
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
        // The load precedes the swap, because the value is usually false. A write would slow down
        // other cores that read this memory.
        self.node_changed.load(Ordering::Acquire) && self.node_changed.swap(false, Ordering::AcqRel)
    }
}

impl Visit for Signal {
    fn visit(&self, _: Instant) {
        self.wake();
    }
}

// Limits on warnings that each of thousands of peers may cause. In each interval, the log shows
// the first few warnings of a kind, and the number of further warnings.
//
// A resource that one agent rejects is usually rejected by every agent, and an untrusted peer may
// retry as often as it likes. Metrics count all warnings.

/// The maximum number of warnings of one kind that are logged within [`INTERVAL`].
const MAX_LOGGED: u32 = 10;

/// How long further warnings are counted before their number is logged.
const INTERVAL: Duration = Duration::from_secs(10);

/// The maximum number of networks and clients whose warnings are counted within [`INTERVAL`], and
/// of those that are named.
const MAX_SOURCES: usize = 1024;
const MAX_NAMED: usize = 10;

/// The kinds of warnings that peers can cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Warning {
    /// An agent rejects resources.
    Rejected,
    /// An agent could not program its kernel.
    ApplyFailed,
    /// An agent receives this replica's older state, because the replica's source did not reach the
    /// agent's position.
    WentBack,
    /// A stream was refused.
    StreamRefused,
    /// A request to Inspect or reflection was refused.
    RequestRefused,
    /// A connection was refused.
    ConnectionRefused,
    /// A TLS handshake failed.
    Handshake,
    /// An agent got no certificate.
    Enrolment,
    /// A client has had all its lines in the audit log.
    Audited,
    /// Pods have waited for a node too long.
    Stalled,
}

/// For each kind, the log message for the warnings that were left out. The log line also contains
/// their number.
const SUMMARIES: [(Warning, &str); 10] = [
    (Warning::Rejected, "more NACKs from agents; `headgatectl agents` shows what each agent rejects"),
    (
        Warning::ApplyFailed,
        "more agents failed to program their kernels; `headgatectl agents` shows the error of each agent",
    ),
    (
        Warning::WentBack,
        "more agents receive this replica's older state, because the replica's source did not reach their positions",
    ),
    (Warning::StreamRefused, "more streams refused; headgate_streams_rejected_total counts them by reason"),
    (Warning::RequestRefused, "more requests refused; headgate_requests_denied_total counts them by reason"),
    (Warning::ConnectionRefused, "more connections refused; headgate_connections_refused_total counts them by reason"),
    (Warning::Handshake, "more TLS handshakes failed; headgate_tls_handshakes_failed_total counts them by reason"),
    (Warning::Enrolment, "more agents got no certificate; headgate_enrolments_total counts them by result"),
    (Warning::Audited, "more requests of clients of Inspect are not in the audit log"),
    (Warning::Stalled, "more nodes for which pods hardly wait; `headgatectl agents` shows them"),
];

/// Decides which warnings are logged.
#[derive(Debug, Default)]
pub(crate) struct Warnings([Mutex<LoggedKind>; SUMMARIES.len()]);

#[derive(Debug, Default)]
struct LoggedKind {
    /// When the interval ends; `None` before the first warning of an interval.
    end: Option<Instant>,
    logged: u32,
    /// How many warnings each network or client caused. The others count as `None`.
    left_out: HashMap<Option<String>, u64>,
}

impl Warnings {
    /// Returns true if a warning may be logged at `now`. Otherwise counts the warning.
    pub(crate) fn admit(&self, warning: Warning, now: Instant) -> bool {
        self.admit_from(None::<&str>, warning, now)
    }

    /// As [`Self::admit`], for a warning that a network or client causes. The log names those that
    /// cause most.
    pub(crate) fn admit_from(&self, source: Option<impl Display>, warning: Warning, now: Instant) -> bool {
        self.end_interval(warning, now);
        let mut kind = self.kind(warning);
        kind.end.get_or_insert(now + INTERVAL);
        let is_admitted = kind.logged < MAX_LOGGED;
        if is_admitted {
            kind.logged += 1;
        } else {
            let source = source.filter(|_| kind.left_out.len() < MAX_SOURCES).map(|source| source.to_string());
            *kind.left_out.entry(source).or_default() += 1;
        }
        is_admitted
    }

    /// Logs how many warnings were left out in intervals that have ended. Call this method
    /// regularly.
    pub(crate) fn tick(&self, now: Instant) {
        for (warning, _) in SUMMARIES {
            self.end_interval(warning, now);
        }
    }

    /// Ends the interval of a kind if it is over, and logs how many warnings were left out.
    fn end_interval(&self, warning: Warning, now: Instant) {
        let mut kind = self.kind(warning);
        if kind.end.is_none_or(|end| end > now) {
            return;
        }
        let LoggedKind { left_out, .. } = std::mem::take(&mut *kind);
        drop(kind);
        let count: u64 = left_out.values().sum();
        if count > 0 {
            let mut most: Vec<_> = left_out.into_iter().filter_map(|(source, count)| Some((count, source?))).collect();
            most.sort_unstable_by(|a, b| b.cmp(a));
            let named = most.into_iter().take(MAX_NAMED).map(|(count, source)| format!("{source} ({count})"));
            let most_from = named.reduce(|all, next| all + ", " + &next);
            tracing::warn!(count, most_from, "{}", SUMMARIES[warning as usize].1);
        }
    }

    fn kind(&self, warning: Warning) -> std::sync::MutexGuard<'_, LoggedKind> {
        self.0[warning as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number of bytes that may be read without a pause. A `Hello` and NACKs of very many resources
/// fit.
const BURST: u64 = 1 << 20;

/// The number of bytes that may be read per second on average.
const PER_SECOND: u64 = 256 << 10;

/// A read spends at least this number of bytes. A call to the kernel and a TLS record take time
/// even if the read returns few bytes.
const MIN_READ: u64 = 32;

/// The read budget of a client, which all its connections share, limits how fast the server reads.
/// Bytes above it are read later; until then TCP flow control holds them back.
///
/// A normal agent sends about a hundred bytes per second, and its `Hello` has about 20 KiB. Without
/// a budget, an agent that sends valid messages as fast as it can would use up a core.
///
/// The value is the time at which the budget is full again.
#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Mutex<Instant>>);

impl Budget {
    /// Returns a full budget.
    pub(crate) fn new(now: Instant) -> Self {
        Self(Arc::new(Mutex::new(now)))
    }

    /// True if no connection uses the budget, and nothing of it is spent at `now`.
    pub(crate) fn is_unused(&self, now: Instant) -> bool {
        Arc::strong_count(&self.0) == 1 && *self.full_at() <= now
    }

    fn full_at(&self) -> MutexGuard<'_, Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spends the bytes of one read.
    pub(crate) fn spend(&self, bytes: usize, now: Instant) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX).clamp(MIN_READ, BURST);
        let mut full_at = self.full_at();
        *full_at = now.max(*full_at) + time_for(bytes);
    }

    /// Returns how long a connection must not be read, or `None` if it may be read at `now`.
    pub(crate) fn pause(&self, now: Instant) -> Option<Duration> {
        let missing = self.full_at().saturating_duration_since(now);
        missing.checked_sub(time_for(BURST)).filter(|pause| !pause.is_zero())
    }
}

fn time_for(bytes: u64) -> Duration {
    Duration::from_micros(bytes * 1_000_000 / PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that records its visits.
    struct Recorder {
        name: usize,
        is_late: bool,
        visits: Arc<Mutex<Vec<usize>>>,
    }

    impl Visit for Recorder {
        fn visit(&self, _: Instant) {
            self.visits.lock().unwrap_or_else(PoisonError::into_inner).push(self.name);
        }

        fn is_late(&self) -> bool {
            self.is_late
        }
    }

    #[tokio::test]
    async fn each_stream_is_visited_once_and_late_streams_are_visited_last() {
        let all = Arc::new(Visits { shards: Box::new([Mutex::default(), Mutex::default()]), ..Visits::new([]) });
        let visits = Arc::new(Mutex::default());
        let stream = |name| Recorder { name, is_late: name % 3 == 0, visits: Arc::clone(&visits) };
        let visited: Vec<Visited> = (0..10 * VISITS_PER_TURN).map(|name| all.add(Arc::new(stream(name)))).collect();
        all.sweep(0).await;
        let in_time = (0..visited.len()).filter(|name| name % 3 != 0);
        let late = (0..visited.len()).filter(|name| name % 3 == 0);
        assert_eq!(*visits.lock().unwrap_or_else(PoisonError::into_inner), in_time.chain(late).collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod warnings_tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        io::Write,
        sync::{Arc, MutexGuard},
    };

    use super::*;

    /// Collects log lines.
    #[derive(Clone, Default)]
    struct LogLines(Arc<Mutex<Vec<u8>>>);

    impl LogLines {
        fn text(&self) -> MutexGuard<'_, Vec<u8>> {
            self.0.lock().unwrap()
        }

        fn lines(&self) -> Vec<String> {
            String::from_utf8(std::mem::take(&mut *self.text())).unwrap().lines().map(str::to_owned).collect()
        }
    }

    impl Write for LogLines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.text().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn thousands_of_warnings_become_a_few_lines_and_a_count() {
        let log = LogLines::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let _default = tracing::subscriber::set_default(subscriber);
        let (warnings, start) = (Warnings::default(), Instant::now());
        let admitted = (0..15_000).filter(|_| warnings.admit(Warning::Rejected, start)).count();
        assert_eq!(admitted, MAX_LOGGED as usize);
        assert!(warnings.admit(Warning::ApplyFailed, start), "each kind has its own limit");
        warnings.tick(start + INTERVAL / 2);
        assert_eq!(log.lines().len(), 0);
        warnings.tick(start + INTERVAL);
        let lines = log.lines();
        assert!(lines.len() == 1 && lines[0].contains("more NACKs") && lines[0].contains("count=14990"), "{lines:?}");
        // No further count is logged, and the next warnings are logged again.
        warnings.tick(start + INTERVAL * 3);
        assert!(warnings.admit(Warning::Rejected, start + INTERVAL * 3));
        assert_eq!(log.lines().len(), 0);
        // Without a tick, the next warning logs the count of the interval before it.
        let admitted = (0..20).filter(|_| warnings.admit(Warning::Rejected, start + INTERVAL * 3)).count();
        assert_eq!(admitted, MAX_LOGGED as usize - 1);
        assert!(warnings.admit(Warning::Rejected, start + INTERVAL * 4));
        assert!(log.lines()[0].contains("count=11"));
        // The networks that cause most warnings are named.
        let later = start + INTERVAL * 5;
        for host in [1, 1, 2].iter().cycle().take(MAX_LOGGED as usize + 30) {
            warnings.admit_from(Some(format!("192.0.2.{host}")), Warning::Handshake, later);
        }
        warnings.tick(later + INTERVAL);
        assert!(log.lines()[0].contains("most_from=\"192.0.2.1 (20), 192.0.2.2 (10)\""));
    }
}

#[cfg(test)]
mod budget_tests {
    use super::*;

    #[test]
    fn a_burst_is_read_at_once_and_then_a_rate_applies() {
        let start = Instant::now();
        let budget = Budget::new(start);
        let mut reads = 0;
        while budget.pause(start).is_none() {
            budget.spend(16 << 10, start);
            reads += 1;
        }
        assert_eq!(reads, BURST / (16 << 10) + 1);
        assert_eq!(budget.pause(start), Some(Duration::from_micros(62_500)), "the pause is the time for 16 KiB");
        assert_eq!(budget.pause(start + Duration::from_micros(62_500)), None);
        // Small reads count as `MIN_READ` bytes.
        let later = start + Duration::from_secs(3_600);
        let small = (0..).take_while(|_| {
            budget.spend(1, later);
            budget.pause(later).is_none()
        });
        let (count, expected) = (small.count() as u64, BURST / MIN_READ);
        assert!(count.abs_diff(expected) < expected / 100, "{count}");
    }
}
