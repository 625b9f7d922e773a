//! The one state, between the session that changes it and the reconcile loop that programs it.
//!
//! The state is held once. The session applies a step under the lock; the loop plans under it, and does the kernel's work outside. What changes
//! while the kernel is busy gathers in one set of dirty keys: each is planned once, at its newest value.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError},
    time::Instant,
};

use headgate_core::{Dirty, Node, State, view::NodeFacts};
use headgate_proto::v1;

use crate::session::held::{Held, Step};

/// What a sync brings the kernel to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Epoch of the replica that numbered the version.
    pub epoch: u64,
    /// Version of the state.
    pub version: u64,
    /// The stream on which the node's revision came, counted from 1.
    pub stream: u64,
    /// `OwnNode.revision` on that stream; 0 before the first.
    pub node_revision: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Shared {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug)]
struct Inner {
    held: Held,
    node_name: String,
    facts: NodeFacts,
    stream: u64,
    node_revision: u64,
    dirty: Dirty,
    needs_full: bool,
    /// Counts everything that a sync has to answer for.
    generation: u64,
    stop: bool,
}

impl Inner {
    fn target(&self) -> Option<Target> {
        let (epoch, version) = self.held.position()?;
        Some(Target { epoch, version, stream: self.stream, node_revision: self.node_revision })
    }
}

/// Why [`Shared::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The agent stops.
    Stop,
    /// There is something to program.
    Work,
    /// Nothing to program, and it is time to verify.
    Verify,
}

/// What is to be done, with the state that it is to be done from. Given out under the lock.
#[derive(Debug)]
pub(crate) struct Work<'a> {
    /// The shared state.
    pub(crate) state: &'a State,
    /// What is known of the node.
    pub(crate) facts: &'a NodeFacts,
    /// Services to plan anew.
    pub(crate) dirty: Dirty,
    /// Everything has to be planned anew: the first sync, or the node changed.
    pub(crate) needs_full: bool,
    /// What the kernel will be at.
    pub(crate) target: Target,
    /// For [`Shared::wait`].
    pub(crate) generation: u64,
}

impl Shared {
    /// An empty state for the agent of a node.
    #[must_use]
    pub fn new(node_name: &str) -> Self {
        let inner = Inner {
            held: Held::default(),
            node_name: node_name.to_owned(),
            facts: NodeFacts::named(node_name),
            stream: 0,
            node_revision: 0,
            dirty: Dirty::default(),
            needs_full: true,
            generation: 0,
            stop: false,
        };
        Self { inner: Mutex::new(inner), changed: Condvar::new() }
    }

    /// A new stream begins. Returns what `Hello` says of the state, epoch and version of it, and the number of the stream.
    #[must_use]
    pub fn begin_stream(&self) -> (Option<v1::Resume>, Option<(u64, u64)>, u64) {
        let mut inner = self.lock();
        inner.stream += 1;
        inner.node_revision = 0;
        (inner.held.resume(), inner.held.position(), inner.stream)
    }

    /// Applies a step, and wakes the reconcile loop. Waits for the lock, which a full sync holds for as long as the kernel takes: not for
    /// async tasks.
    pub fn apply(&self, step: Step) {
        self.apply_locked(&mut self.lock(), step);
    }

    /// The same, unless it would have to wait: then it gives the step back.
    #[must_use]
    pub fn try_apply(&self, step: Step) -> Option<Step> {
        match self.inner.try_lock() {
            Ok(mut inner) => self.apply_locked(&mut inner, step),
            Err(TryLockError::Poisoned(poisoned)) => self.apply_locked(&mut poisoned.into_inner(), step),
            Err(TryLockError::WouldBlock) => return Some(step),
        }
        None
    }

    fn apply_locked(&self, inner: &mut Inner, step: Step) {
        let Inner { held, dirty, .. } = inner;
        held.apply(step, dirty);
        inner.generation += 1;
        self.changed.notify_all();
    }

    /// Takes what the stream says of the node. Whatever depends on it is planned anew when it differs.
    pub fn set_node(&self, revision: u64, node: Option<&Node>) {
        let mut inner = self.lock();
        let facts = NodeFacts::of(&inner.node_name, node);
        if facts != inner.facts {
            inner.facts = facts;
            inner.needs_full = true;
        }
        inner.node_revision = revision;
        inner.generation += 1;
        self.changed.notify_all();
    }

    /// Epoch and version of the state; `None` before the first complete snapshot.
    #[must_use]
    pub fn position(&self) -> Option<(u64, u64)> {
        self.lock().held.position()
    }

    /// Looks at the state under the lock; for tests and diagnosis.
    pub fn with_state<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(self.lock().held.state())
    }

    /// Ends the reconcile loop, after what it is at.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Waits for something to do that is not answered for by generation `done`, not before `not_before`; or until `verify_at` when there is
    /// nothing. Before the first complete snapshot there is never anything to do.
    pub(crate) fn wait(&self, done: Option<u64>, not_before: Instant, verify_at: Instant) -> Wake {
        let mut inner = self.lock();
        loop {
            if inner.stop {
                return Wake::Stop;
            }
            let due = match (inner.held.position(), Some(inner.generation) == done) {
                (None, _) => None,
                (Some(_), false) => Some((Wake::Work, not_before)),
                (Some(_), true) => Some((Wake::Verify, verify_at)),
            };
            inner = match due {
                None => self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Some((wake, at)) => {
                    let left = at.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return wake;
                    }
                    self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Hands out what is to be done and forgets it; `None` before the first complete snapshot. The lock is held while `plan` runs.
    pub(crate) fn take<T>(&self, plan: impl FnOnce(Work<'_>) -> T) -> Option<T> {
        let mut inner = self.lock();
        let target = inner.target()?;
        let dirty = std::mem::take(&mut inner.dirty);
        let needs_full = std::mem::take(&mut inner.needs_full);
        let Inner { held, facts, generation, .. } = &*inner;
        Some(plan(Work { state: held.state(), facts, dirty, needs_full, target, generation: *generation }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic while planning ends the agent (see `run`); until then the state is as good as it was.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
