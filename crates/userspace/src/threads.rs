//! The threads of a proxy, and the event loop that they share.

use std::{
    collections::VecDeque,
    hash::{BuildHasher as _, RandomState},
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
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
    wheel::Wheel,
};

/// The epoll token of an inbox.
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

/// What a thread of a proxy does in its event loop.
pub(crate) trait Worker: Send + 'static {
    /// A command of another thread.
    type Command: Send + 'static;

    fn event_loop(&mut self) -> &mut EventLoop<Self::Command>;

    /// Whether the thread has a listener, so that its loop turns often.
    fn is_listening(&self) -> bool;

    /// The time until something is due that neither a timer nor an event announces.
    fn due_ms(&self, _now_ms: u64) -> Option<u64> {
        None
    }

    fn obey(&mut self, command: Self::Command);

    fn list(&self, filter: &ListFilter) -> ConnectionList;

    fn event(&mut self, token: u64, flags: EventFlags);

    /// Called after the events of a turn.
    fn after_events(&mut self) {}

    /// A token of the timer wheel fired.
    fn timer(&mut self, token: u64);
}

#[derive(Debug)]
enum Command<C> {
    OfWorker(C),
    List(Arc<ListFilter>, mpsc::Sender<ConnectionList>),
    End,
}

/// What other threads and the thread itself share.
#[derive(Debug)]
struct Inbox<C> {
    commands: Mutex<VecDeque<Command<C>>>,
    /// The descriptor that is readable while commands wait.
    wake: OwnedFd,
    /// When the thread last began a turn of its loop, or [`IDLE`].
    last_turn_ms: AtomicU64,
}

impl<C> Inbox<C> {
    fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self { commands: Mutex::default(), wake, last_turn_ms: AtomicU64::new(IDLE) })
    }

    fn send(&self, command: Command<C>) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        // The write fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn take(&self) -> VecDeque<Command<C>> {
        // The read fails only when nobody wrote, and then there is nothing to reset.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        std::mem::take(&mut self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The event loop of a thread.
#[derive(Debug)]
pub(crate) struct EventLoop<C> {
    pub(crate) epoll: OwnedFd,
    pub(crate) wheel: Wheel,
    /// When this turn began, since the start of the proxy.
    pub(crate) now_ms: u64,
    inbox: Arc<Inbox<C>>,
    began: Instant,
    last_generation: u32,
    random_state: u64,
}

impl<C> EventLoop<C> {
    fn new(inbox: Arc<Inbox<C>>, began: Instant, random_state: u64) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &inbox.wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Self { epoll, wheel: Wheel::new(0), now_ms: 0, inbox, began, last_generation: 0, random_state })
    }

    /// Adds a socket to epoll.
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

/// Runs until the command to end. Returns an error only if epoll itself fails.
fn run(mut worker: impl Worker) -> io::Result<()> {
    let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
    let mut fired = Vec::new();
    loop {
        let now_ms = milliseconds(worker.event_loop().began.elapsed());
        let beat_ms = worker.is_listening().then_some(HEARTBEAT_MS);
        let due_ms = worker.due_ms(now_ms);
        let inner = worker.event_loop();
        inner.inbox.last_turn_ms.store(beat_ms.map_or(IDLE, |_| now_ms), Relaxed);
        let wait_ms = due_ms.into_iter().chain(beat_ms).chain(inner.wheel.next_ms(now_ms)).min();
        let timeout = wait_ms.and_then(epoll_timeout);
        let ready = match epoll::wait(&inner.epoll, &mut events[..], timeout.as_ref()) {
            Ok((ready, _)) => &*ready,
            Err(Errno::INTR) => &[],
            Err(error) => return Err(error.into()),
        };
        let now_ms = milliseconds(inner.began.elapsed());
        inner.now_ms = now_ms;
        for event in ready {
            let token = event.data.u64();
            if token != WAKE {
                worker.event(token, event.flags);
                continue;
            }
            for command in worker.event_loop().inbox.take() {
                match command {
                    Command::OfWorker(command) => worker.obey(command),
                    // The caller may have stopped waiting.
                    Command::List(filter, answer) => drop(answer.send(worker.list(&filter))),
                    Command::End => return Ok(()),
                }
            }
        }
        worker.after_events();
        worker.event_loop().wheel.advance(now_ms, &mut fired);
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

/// The threads of a proxy, each with an inbox for commands. Dropping this value ends the threads.
#[derive(Debug)]
pub(crate) struct Threads<C> {
    began: Instant,
    inboxes: Vec<Arc<Inbox<C>>>,
    handles: Vec<JoinHandle<io::Result<()>>>,
}

impl<C: Send + 'static> Threads<C> {
    /// Starts at least one thread.
    ///
    /// # Errors
    ///
    /// The kernel refused a descriptor or a thread.
    pub(crate) fn start<W: Worker<Command = C>>(
        name: &str,
        count: usize,
        mut worker: impl FnMut(EventLoop<C>) -> io::Result<W>,
    ) -> io::Result<Self> {
        let mut threads = Self { began: Instant::now(), inboxes: Vec::new(), handles: Vec::new() };
        for number in 0..count.max(1) {
            let inbox = Arc::new(Inbox::new()?);
            let seed = RandomState::new().hash_one(number);
            let worker = worker(EventLoop::new(Arc::clone(&inbox), threads.began, seed)?)?;
            threads.handles.push(Builder::new().name(format!("{name}-{number}")).spawn(|| run(worker))?);
            threads.inboxes.push(inbox);
        }
        Ok(threads)
    }
}

impl<C> Threads<C> {
    /// Sends a command to one thread. Each number belongs to one thread.
    pub(crate) fn send_to_one(&self, number: u64, command: C) {
        let thread = number % self.inboxes.len() as u64;
        self.inboxes[usize::try_from(thread).unwrap_or_default()].send(Command::OfWorker(command));
    }

    /// Sends a command to each thread.
    pub(crate) fn send_to_all(&self, command: impl Fn() -> C) {
        self.inboxes.iter().for_each(|inbox| inbox.send(Command::OfWorker(command())));
    }

    /// Sends a command with a channel for the answer to each thread. Returns the answers. The
    /// channel ends when each thread has answered or has ended.
    pub(crate) fn ask<A>(&self, command: impl Fn(mpsc::Sender<A>) -> C) -> mpsc::Receiver<A> {
        let (answer, answers) = mpsc::channel();
        self.send_to_all(|| command(answer.clone()));
        answers
    }

    /// What the threads carry, the most bytes first.
    pub(crate) fn list(&self, filter: ListFilter) -> ConnectionList {
        let (limit, filter) = (filter.limit, Arc::new(filter));
        let (answer, answers) = mpsc::channel();
        for inbox in &self.inboxes {
            inbox.send(Command::List(Arc::clone(&filter), answer.clone()));
        }
        drop(answer);
        ConnectionList::join(answers, limit)
    }

    /// The time since each thread last began a turn of its loop. It is zero for a thread that has
    /// no listener.
    pub(crate) fn since_last_turns(&self) -> impl Iterator<Item = Duration> {
        let now_ms = milliseconds(self.began.elapsed());
        let last_ms = self.inboxes.iter().map(|inbox| inbox.last_turn_ms.load(Relaxed));
        last_ms.map(move |last_ms| Duration::from_millis(now_ms.saturating_sub(last_ms)))
    }
}

impl<C> Drop for Threads<C> {
    fn drop(&mut self) {
        for inbox in &self.inboxes {
            inbox.send(Command::End);
        }
        for handle in self.handles.drain(..) {
            // A thread that panicked or lost epoll has closed its sockets.
            let _ = handle.join();
        }
    }
}

/// A duration in milliseconds.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
