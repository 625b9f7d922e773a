//! The requests of one agent for the drain barrier, and the answers that wait to be sent
//! (discovery.proto, section 18).

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use headgate_proto::v1;
use tokio::task::AbortHandle;

/// The maximum number of requests on a stream that are not answered, or whose answers are not sent.
/// An agent that keeps to the contract never has more, because it counts a request until it has the
/// answer.
pub(crate) const MAX_OPEN: usize = 1_024;

/// The requests and answers of one stream.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// True if an answer waits. Each visit of the stream reads this value without a lock.
    has_unsent: AtomicBool,
    open: Mutex<OpenRequests>,
}

#[derive(Debug, Default)]
struct OpenRequests {
    running: HashMap<u64, AbortHandle>,
    unsent: VecDeque<v1::BarrierAnswer>,
}

impl Answers {
    /// Starts the work for a request. Returns false if the stream has too many requests.
    pub(crate) fn begin(&self, id: u64, start: impl FnOnce() -> AbortHandle) -> bool {
        let mut open = self.open();
        let is_accepted = open.running.len() + open.unsent.len() < MAX_OPEN;
        if is_accepted {
            // The work cannot end before the lock is released.
            open.running.insert(id, start());
        }
        is_accepted
    }

    /// Adds the answer to a request. The caller wakes the stream.
    pub(crate) fn finish(&self, answer: v1::BarrierAnswer) {
        let mut open = self.open();
        if open.running.remove(&answer.id).is_some() {
            open.unsent.push_back(answer);
            self.has_unsent.store(true, Ordering::Release);
        }
    }

    /// Ends a request without an answer.
    pub(crate) fn cancel(&self, id: u64) {
        let mut open = self.open();
        if let Some(handle) = open.running.remove(&id) {
            handle.abort();
        }
        open.unsent.retain(|answer| answer.id != id);
    }

    /// Returns the next answer to send.
    pub(crate) fn take(&self) -> Option<v1::BarrierAnswer> {
        if !self.has_unsent.load(Ordering::Acquire) {
            return None;
        }
        let mut open = self.open();
        let next = open.unsent.pop_front();
        self.has_unsent.store(!open.unsent.is_empty(), Ordering::Release);
        next
    }

    /// Ends all requests, because the stream has ended.
    pub(super) fn close(&self) {
        let OpenRequests { running, .. } = std::mem::take(&mut *self.open());
        running.values().for_each(AbortHandle::abort);
    }

    fn open(&self) -> MutexGuard<'_, OpenRequests> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
