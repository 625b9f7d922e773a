//! The threads of a proxy, and the event loop that they share.

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{self, Receiver, Sender, TryRecvError},
    },
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    event::{
        EventfdFlags, Timespec,
        epoll::{self, EventData, EventFlags},
        eventfd,
    },
    io::Errno,
};

use crate::{
    balance::mix,
    list::{ConnectionList, ListFilter},
    timers::Timers,
};

/// The epoll token of the descriptor that wakes a thread.
const WAKE: u64 = u64::MAX;
/// The bit in the epoll tokens of listeners. The other bits are the slot.
pub(crate) const LISTENER: u64 = 1 << 63;
/// Generations use 31 bits of a token.
const MAX_GENERATION: u32 = u32::MAX >> 1;
const EVENTS: usize = 256;
/// The loop of a thread that has a listener turns at least this often.
const HEARTBEAT_MS: u64 = 100;
/// The time of the last turn of a thread that has no listener, and need not turn.
const IDLE: u64 = u64::MAX;

/// A listener of a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ListenerId(pub(crate) u64);

/// What a thread of a proxy does in its event loop.
pub(crate) trait Worker: Send + 'static {
    fn event_loop(&mut self) -> &mut EventLoop;

    /// Whether the thread has a listener, so that its loop turns often.
    fn is_listening(&self) -> bool;

    /// The time until something is due that neither a timer nor an event announces.
    fn due_ms(&self, _now_ms: u64) -> Option<u64> {
        None
    }

    fn list(&self, filter: &ListFilter) -> ConnectionList;

    fn event(&mut self, token: u64, flags: EventFlags);

    /// Called after the events of a turn.
    fn after_events(&mut self) {}

    fn timer(&mut self, token: u64);
}

/// What another thread asks a worker to do.
type Order<W> = Box<dyn FnOnce(&mut W) + Send>;

/// What other threads and the thread itself share.
#[derive(Debug)]
struct Shared {
    /// The descriptor that is readable while orders wait.
    wake: OwnedFd,
    /// When the thread last began a turn of its loop, or [`IDLE`].
    last_turn_ms: AtomicU64,
}

impl Shared {
    fn wake(&self) {
        // The write fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

#[derive(Debug)]
pub(crate) struct EventLoop {
    pub(crate) epoll: OwnedFd,
    pub(crate) timers: Timers,
    /// When this turn began, since the start of the proxy.
    pub(crate) now_ms: u64,
    last_generation: u32,
    random_state: u64,
}

impl EventLoop {
    pub(crate) fn watch(&self, socket: impl AsFd, token: u64, flags: EventFlags) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, socket, EventData::new_u64(token), flags)
    }

    /// The part of a new token that tells it from earlier tokens of the same slot.
    pub(crate) fn next_generation(&mut self) -> u32 {
        self.last_generation = self.last_generation.wrapping_add(1) & MAX_GENERATION;
        self.last_generation
    }

    /// A random number. Nobody gains from guessing the choice of an endpoint.
    pub(crate) fn random(&mut self) -> u64 {
        self.random_state = self.random_state.wrapping_add(1);
        mix(self.random_state)
    }
}

/// Runs until nobody can send orders any more. Returns an error only if epoll itself fails.
fn run<W: Worker>(mut worker: W, orders: &Receiver<Order<W>>, shared: &Shared, began: Instant) -> io::Result<()> {
    let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
    let mut fired = Vec::new();
    loop {
        let now_ms = milliseconds(began.elapsed());
        let beat_ms = worker.is_listening().then_some(HEARTBEAT_MS);
        let due_ms = worker.due_ms(now_ms);
        let inner = worker.event_loop();
        shared.last_turn_ms.store(beat_ms.map_or(IDLE, |_| now_ms), Relaxed);
        let wait_ms = due_ms.into_iter().chain(beat_ms).chain(inner.timers.next_ms(now_ms)).min();
        let timeout = wait_ms.and_then(epoll_timeout);
        let ready = match epoll::wait(&inner.epoll, &mut events[..], timeout.as_ref()) {
            Ok((ready, _)) => &*ready,
            Err(Errno::INTR) => &[],
            Err(error) => return Err(error.into()),
        };
        let now_ms = milliseconds(began.elapsed());
        inner.now_ms = now_ms;
        for event in ready {
            let token = event.data.u64();
            if token != WAKE {
                worker.event(token, event.flags);
                continue;
            }
            // The read fails only when nobody wrote, and then there is nothing to reset.
            let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
            loop {
                match orders.try_recv() {
                    Ok(order) => order(&mut worker),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Ok(()),
                }
            }
        }
        worker.after_events();
        worker.event_loop().timers.advance(now_ms, &mut fired);
        for token in fired.drain(..) {
            worker.timer(token);
        }
    }
}

/// The timeout of epoll for a wait. Adds a millisecond, because the clock of epoll rounds down.
fn epoll_timeout(wait_ms: u64) -> Option<Timespec> {
    let wait_ms = if wait_ms == 0 { 0 } else { wait_ms.saturating_add(1) };
    Timespec::try_from(Duration::from_millis(wait_ms)).ok()
}

#[derive(Debug)]
struct Thread<W> {
    orders: Sender<Order<W>>,
    shared: Arc<Shared>,
    handle: JoinHandle<io::Result<()>>,
}

impl<W> Thread<W> {
    fn send(&self, order: impl FnOnce(&mut W) + Send + 'static) {
        // A thread that lost epoll obeys no orders.
        let _ = self.orders.send(Box::new(order));
        self.shared.wake();
    }
}

/// The threads of a proxy. Dropping this value ends the threads.
#[derive(Debug)]
pub(crate) struct Threads<W> {
    began: Instant,
    threads: Vec<Thread<W>>,
    next_listener: AtomicU64,
}

impl<W: Worker> Threads<W> {
    /// Starts at least one thread. Errors: the kernel refused a descriptor or a thread.
    pub(crate) fn start(
        name: &str,
        count: usize,
        mut worker: impl FnMut(EventLoop) -> io::Result<W>,
    ) -> io::Result<Self> {
        let mut threads = Self { began: Instant::now(), threads: Vec::new(), next_listener: AtomicU64::new(0) };
        for number in 0..count.max(1) {
            let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
            let random_state = RandomState::new().hash_one(number);
            let worker =
                worker(EventLoop { epoll, timers: Timers::new(0), now_ms: 0, last_generation: 0, random_state })?;
            let (orders, received) = mpsc::channel();
            let shared = Arc::new(Shared { wake, last_turn_ms: AtomicU64::new(IDLE) });
            let (began, its_shared) = (threads.began, Arc::clone(&shared));
            let builder = Builder::new().name(format!("{name}-{number}"));
            let handle = builder.spawn(move || run(worker, &received, &its_shared, began))?;
            threads.threads.push(Thread { orders, shared, handle });
        }
        Ok(threads)
    }

    pub(crate) fn next_listener(&self) -> ListenerId {
        ListenerId(self.next_listener.fetch_add(1, Relaxed))
    }

    /// Sends an order to the thread of a listener that belongs to one thread.
    pub(crate) fn send_to_owner(&self, listener: ListenerId, order: impl FnOnce(&mut W) + Send + 'static) {
        let thread = listener.0 % self.threads.len() as u64;
        self.threads[usize::try_from(thread).unwrap_or_default()].send(order);
    }

    /// Asks each thread. Returns the answers, which end when each thread has answered or has ended.
    pub(crate) fn ask<A: Send + 'static>(
        &self,
        question: impl FnOnce(&mut W) -> A + Clone + Send + 'static,
    ) -> Receiver<A> {
        let (sender, answers) = mpsc::channel();
        for thread in &self.threads {
            let (question, sender) = (question.clone(), sender.clone());
            // The caller may have stopped waiting.
            thread.send(move |worker| drop(sender.send(question(worker))));
        }
        answers
    }

    /// What the threads carry, the most bytes first.
    pub(crate) fn list(&self, filter: ListFilter) -> ConnectionList {
        let limit = filter.limit;
        ConnectionList::join(self.ask(move |worker| worker.list(&filter)), limit)
    }

    /// The time since each thread last began a turn of its loop. Zero without a listener.
    pub(crate) fn since_last_turns(&self) -> impl Iterator<Item = Duration> {
        let now_ms = milliseconds(self.began.elapsed());
        let last_ms = self.threads.iter().map(|thread| thread.shared.last_turn_ms.load(Relaxed));
        last_ms.map(move |last_ms| Duration::from_millis(now_ms.saturating_sub(last_ms)))
    }
}

impl<W> Drop for Threads<W> {
    fn drop(&mut self) {
        let end = |Thread { orders, shared, handle }: Thread<W>| {
            drop(orders);
            shared.wake();
            handle
        };
        for handle in self.threads.drain(..).map(end).collect::<Vec<_>>() {
            // A thread that panicked or lost epoll has closed its sockets.
            let _ = handle.join();
        }
    }
}

pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
