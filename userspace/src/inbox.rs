//! Commands for a thread that waits in epoll.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Mutex, PoisonError},
};

use rustix::event::{EventfdFlags, eventfd};

/// The commands of a thread, and the descriptor that wakes the thread.
#[derive(Debug)]
pub(crate) struct Inbox<C> {
    commands: Mutex<VecDeque<C>>,
    wake: OwnedFd,
}

impl<C> Inbox<C> {
    pub(crate) fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self { commands: Mutex::default(), wake })
    }

    /// The descriptor that is readable while commands wait.
    pub(crate) fn wake(&self) -> &OwnedFd {
        &self.wake
    }

    pub(crate) fn send(&self, command: C) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        // The write fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    pub(crate) fn take(&self) -> VecDeque<C> {
        // The read fails only when nobody wrote, and then there is nothing to reset.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        std::mem::take(&mut self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
