//! What wakes one stream, and tells it what concerns it alone.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    task::Waker,
};

use futures::task::AtomicWaker;
use tokio::time::Instant;

use super::Visit;

/// Wakes the task that serves a stream. What concerns all streams alike, such as a new version,
/// comes by [`super::Visits`] instead.
#[derive(Debug)]
pub(crate) struct Signal {
    waker: AtomicWaker,
    node_changed: AtomicBool,
}

impl Signal {
    /// A signal of a stream that has not been told its node yet.
    pub(crate) fn new() -> Self {
        Self { waker: AtomicWaker::new(), node_changed: AtomicBool::new(true) }
    }

    /// Says which task to wake. To be called before the task looks for what there is to do.
    pub(crate) fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Has the stream's task look for what there is to do.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// The stream's own node is another than it was.
    pub(crate) fn change_node(&self) {
        self.node_changed.store(true, Ordering::Release);
        self.wake();
    }

    /// True once after each change of the node, and at the beginning.
    pub(crate) fn take_node_change(&self) -> bool {
        // The usual answer costs no write to memory that others read.
        self.node_changed.load(Ordering::Acquire) && self.node_changed.swap(false, Ordering::AcqRel)
    }
}

impl Visit for Signal {
    fn visit(&self, _: Instant) {
        self.wake();
    }
}
