//! Closing a connection that a server of a library's reads.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    task::Context,
};

use futures::task::AtomicWaker;

/// Closes one connection, by whoever has a reference.
#[derive(Debug, Default)]
pub(crate) struct Closer {
    is_closed: AtomicBool,
    reader: AtomicWaker,
}

impl Closer {
    /// Has the connection closed.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.reader.wake();
    }

    /// True when the connection is to be closed; otherwise whoever reads it is woken when it is.
    pub(crate) fn poll_closed(&self, cx: &Context<'_>) -> bool {
        self.reader.register(cx.waker());
        self.is_closed.load(Ordering::Acquire)
    }
}
