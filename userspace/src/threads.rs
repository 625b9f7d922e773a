//! The threads of a proxy, and what their event loops share.

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use rustix::event::{
    Timespec,
    epoll::{self, EventData, EventFlags},
};

use crate::inbox::Inbox;

/// The epoll token of an inbox.
pub(crate) const WAKE: u64 = u64::MAX;
/// The bit in the epoll tokens of listeners. The other bits are the slot.
pub(crate) const LISTENER: u64 = 1 << 63;
/// Generations use 31 bits of a token.
pub(crate) const MAX_GENERATION: u32 = u32::MAX >> 1;

/// The loop of a thread that has a listener turns at least this often.
pub(crate) const HEARTBEAT_MS: u64 = 100;

/// A command that ends a thread.
pub(crate) trait End {
    const END: Self;
}

/// The threads of a proxy, each with an inbox for commands. Dropping this value ends the threads.
#[derive(Debug)]
pub(crate) struct Threads<C: End> {
    inboxes: Vec<Arc<Inbox<C>>>,
    handles: Vec<JoinHandle<io::Result<()>>>,
}

impl<C: End + Send + 'static> Threads<C> {
    /// Starts at least one thread. `worker` gets the inbox and the random seed of a thread, and
    /// returns the function that the thread runs.
    ///
    /// # Errors
    ///
    /// The kernel refused a descriptor or a thread.
    pub(crate) fn start<W>(
        name: &str,
        count: usize,
        mut worker: impl FnMut(Arc<Inbox<C>>, u64) -> io::Result<W>,
    ) -> io::Result<Self>
    where
        W: FnOnce() -> io::Result<()> + Send + 'static,
    {
        let mut threads = Self { inboxes: Vec::new(), handles: Vec::new() };
        for number in 0..count.max(1) {
            let inbox = Arc::new(Inbox::new()?);
            let run = worker(Arc::clone(&inbox), RandomState::new().hash_one(number))?;
            threads.handles.push(Builder::new().name(format!("{name}-{number}")).spawn(run)?);
            threads.inboxes.push(inbox);
        }
        Ok(threads)
    }
}

impl<C: End> Threads<C> {
    /// Sends a command to one thread. Each number belongs to one thread.
    pub(crate) fn send_to_one(&self, number: usize, command: C) {
        self.inboxes[number % self.inboxes.len()].send(command);
    }

    /// Sends a command to each thread.
    pub(crate) fn send_to_all(&self, command: impl Fn() -> C) {
        self.inboxes.iter().for_each(|inbox| inbox.send(command()));
    }

    /// Sends a command with a channel for the answer to each thread. Returns the answers. The
    /// channel ends when each thread has answered or has ended.
    pub(crate) fn ask<A>(&self, command: impl Fn(mpsc::Sender<A>) -> C) -> mpsc::Receiver<A> {
        let (answer, answers) = mpsc::channel();
        self.send_to_all(|| command(answer.clone()));
        answers
    }
}

impl<C: End> Drop for Threads<C> {
    fn drop(&mut self) {
        for inbox in &self.inboxes {
            inbox.send(C::END);
        }
        for handle in self.handles.drain(..) {
            // A thread that panicked or lost epoll has closed its sockets.
            let _ = handle.join();
        }
    }
}

/// Creates the epoll instance of a thread, which contains the inbox.
pub(crate) fn epoll_with<C>(inbox: &Inbox<C>) -> io::Result<OwnedFd> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, inbox.wake(), EventData::new_u64(WAKE), EventFlags::IN)?;
    Ok(epoll)
}

/// The timeout of epoll for a wait. Adds a millisecond, because the clock of epoll rounds down.
pub(crate) fn epoll_timeout(wait_ms: u64) -> Option<Timespec> {
    Timespec::try_from(Duration::from_millis(wait_ms.saturating_add(1))).ok()
}

/// A duration in milliseconds.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
