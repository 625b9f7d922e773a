//! The signal that wakes one stream, and reports that the Node of the stream's agent changed.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    task::Waker,
};

use futures::task::AtomicWaker;
use tokio::time::Instant;

use super::Visit;

/// Wakes the task that serves a stream, for events that concern only this stream. For events that
/// concern all streams, such as a new version, [`super::Visits`] visits every stream.
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
