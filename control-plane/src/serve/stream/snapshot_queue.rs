//! The queue of streams that wait to send a snapshot.
//!
//! A stream that sends a snapshot keeps its current encoded bucket in memory, and some kilobytes in
//! its connection. After an outage all agents may need a snapshot at the same time. Streams are
//! served in order, so that memory is bounded and the first agents are done soon. A slow reader
//! does not block other streams: while other streams wait, the turn of a stream ends after
//! [`TURN`]. The stream then moves to the end of the queue and keeps its cursor.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use headgate_core::digest::BUCKETS;
use tokio::time::Instant;

use crate::{
    metrics::{Metrics, level},
    serve::context::{Signal, Visit},
};

/// The most buckets of all snapshots that are sent at a time: 64 full ones, or more others.
const MAX_BUCKETS_IN_FLIGHT: usize = 64 * BUCKETS;

/// How long a stream may send its snapshot while other streams wait.
const TURN: Duration = Duration::from_secs(5);

/// The snapshots that are being sent, and the streams that wait.
#[derive(Debug)]
pub(crate) struct SnapshotQueue {
    queue: Mutex<SnapshotTurns>,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct SnapshotTurns {
    free_buckets: usize,
    next_ticket: u64,
    /// The waiting streams by ticket: the number of buckets, and how to wake the stream.
    waiting: BTreeMap<u64, (usize, Weak<Signal>)>,
    /// The snapshots being sent, by ticket: buckets, and the end of the turn, in order.
    admitted: BTreeMap<u64, (usize, Instant)>,
}

/// A stream's place in the queue, or its turn, until [`SnapshotQueue::leave`].
#[derive(Debug, Default)]
pub(crate) struct Ticket(Option<u64>);

impl SnapshotQueue {
    /// Returns a queue that admits [`MAX_BUCKETS_IN_FLIGHT`] buckets.
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        Self::with_limit(MAX_BUCKETS_IN_FLIGHT, metrics)
    }

    fn with_limit(free_buckets: usize, metrics: Arc<Metrics>) -> Self {
        let (waiting, admitted) = (BTreeMap::new(), BTreeMap::new());
        let queue = SnapshotTurns { free_buckets, next_ticket: 0, waiting, admitted };
        Self { queue: Mutex::new(queue), metrics }
    }

    /// Returns true if a stream may begin or continue a snapshot of `buckets` buckets. Otherwise
    /// the stream is in the queue, and `signal` is woken when the stream's turn begins.
    pub(crate) fn may_continue(&self, ticket: &mut Ticket, buckets: usize, signal: &Arc<Signal>, now: Instant) -> bool {
        let mut queue = self.queue();
        if let Some(number) = ticket.0 {
            if queue.admitted.contains_key(&number) {
                return true;
            }
            if queue.waiting.contains_key(&number) {
                return false;
            }
            // The turn of this ticket has ended, so the stream needs a new ticket.
        }
        let number = queue.next_ticket;
        queue.next_ticket += 1;
        ticket.0 = Some(number);
        queue.waiting.insert(number, (buckets, Arc::downgrade(signal)));
        queue.admit(now, Some(number));
        self.publish(&queue);
        let is_admitted = queue.admitted.contains_key(&number);
        if !is_admitted {
            self.metrics.snapshots_waited.inc();
        }
        is_admitted
    }

    /// Ends the turn of a ticket, or its place in the queue, if it has one.
    pub(crate) fn leave(&self, ticket: &mut Ticket, now: Instant) {
        let Some(number) = ticket.0.take() else { return };
        let mut queue = self.queue();
        queue.end_turn(number);
        queue.waiting.remove(&number);
        queue.admit(now, None);
        self.publish(&queue);
    }

    fn publish(&self, queue: &SnapshotTurns) {
        self.metrics.snapshots_in_flight.set(level(queue.admitted.len()));
        self.metrics.snapshots_waiting.set(level(queue.waiting.len()));
    }

    fn queue(&self) -> MutexGuard<'_, SnapshotTurns> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Visit for SnapshotQueue {
    /// Ends turns whose time is over, if other streams wait.
    fn visit(&self, now: Instant) {
        let mut queue = self.queue();
        if !queue.waiting.is_empty() {
            queue.admit(now, None);
            self.publish(&queue);
        }
    }
}

impl SnapshotTurns {
    /// Frees the buckets of a snapshot that is being sent.
    fn end_turn(&mut self, ticket: u64) {
        if let Some((buckets, _)) = self.admitted.remove(&ticket) {
            self.free_buckets += buckets;
        }
    }

    /// Admits streams while there is room, and wakes them, except the caller with `own`.
    fn admit(&mut self, now: Instant, own: Option<u64>) {
        while let Some(first) = self.waiting.first_entry() {
            // A snapshot that is larger than the limit is sent alone.
            if first.get().0 > self.free_buckets
                && let Some((oldest, (_, end))) = self.admitted.first_key_value()
            {
                let (oldest, is_over) = (*oldest, *end <= now);
                if !is_over {
                    return;
                }
                self.end_turn(oldest);
                continue;
            }
            let (ticket, (buckets, signal)) = first.remove_entry();
            let buckets = buckets.min(self.free_buckets);
            self.free_buckets -= buckets;
            self.admitted.insert(ticket, (buckets, now + TURN));
            if own != Some(ticket)
                && let Some(signal) = signal.upgrade()
            {
                signal.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct QueueRig {
        queue: SnapshotQueue,
        now: Instant,
    }

    struct SlowReader(Ticket, Arc<Signal>);

    impl SlowReader {
        fn new() -> Self {
            Self(Ticket::default(), Arc::new(Signal::new()))
        }
    }

    impl QueueRig {
        fn new(limit: usize) -> Self {
            Self { queue: SnapshotQueue::with_limit(limit, Arc::default()), now: Instant::now() }
        }

        fn ask(&self, reader: &mut SlowReader, buckets: usize) -> bool {
            self.queue.may_continue(&mut reader.0, buckets, &reader.1, self.now)
        }

        /// The numbers of admitted and waiting streams, and of free buckets.
        fn levels(&self) -> (usize, usize, usize) {
            let queue = self.queue.queue();
            (queue.admitted.len(), queue.waiting.len(), queue.free_buckets)
        }
    }

    #[test]
    fn a_slow_reader_moves_to_the_end_of_the_queue_when_others_wait() {
        let mut rig = QueueRig::new(10);
        let (mut slow, mut next) = (SlowReader::new(), SlowReader::new());
        assert!(rig.ask(&mut slow, 10));
        rig.now += TURN * 3;
        assert!(rig.ask(&mut slow, 10), "no other stream waits");
        assert!(rig.ask(&mut next, 10), "the turn of the slow reader is over");
        assert!(!rig.ask(&mut slow, 10));
        rig.now += TURN / 2;
        rig.queue.visit(rig.now);
        assert!(rig.ask(&mut next, 10) && !rig.ask(&mut slow, 10), "the turn is not over");
        rig.now += TURN;
        rig.queue.visit(rig.now);
        assert!(rig.ask(&mut slow, 10) && !rig.ask(&mut next, 10));
        assert_eq!(rig.levels(), (1, 1, 0));
    }

    #[test]
    fn a_snapshot_that_is_larger_than_the_limit_is_sent_alone() {
        let rig = QueueRig::new(10);
        let (mut large, mut small) = (SlowReader::new(), SlowReader::new());
        assert!(rig.ask(&mut large, 50) && !rig.ask(&mut small, 1));
        rig.queue.leave(&mut large.0, rig.now);
        assert!(rig.ask(&mut small, 1));
        rig.queue.leave(&mut small.0, rig.now);
        assert_eq!(rig.levels(), (0, 0, 10));
    }
}
