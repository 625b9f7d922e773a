//! The one state, between the session that changes it and the reconcile loop that programs it.
//!
//! The state is held once. The session applies a step under the lock; the loop plans under it, and
//! does the kernel's work outside. What changes while the kernel is busy gathers in one set of
//! dirty keys: each is planned once, at its newest value.

pub mod backlog;
pub mod held;
pub mod source;
pub mod unsaved;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError},
    time::Instant,
};

use headgate_core::{Dirty, Node, ServiceKey, State, view::NodeFacts};
use headgate_proto::{node_to_wire, v1};

use crate::{
    node_inputs::node_addresses,
    progress::Target,
    state::{
        backlog::Backlog,
        held::{Held, OwnNode, Restored, StateUpdate},
        source::StateSource,
        unsaved::{Keys, Unsaved, UnsavedChanges},
    },
};

/// What the operator configured about the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodePolicy {
    /// An address of the node, before what the Node says.
    pub bind_address: Option<IpAddr>,
    /// externalIPs are left alone.
    pub ignores_external_ips: bool,
}

/// See the module.
#[derive(Debug)]
pub struct AgentState {
    backlog: Arc<Backlog>,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug)]
struct Inner {
    held: Held,
    /// The state is from disk, and no control plane has brought it up to date yet: the kernel may
    /// have rules that are newer.
    is_unconfirmed: bool,
    node_name: String,
    node: Option<Node>,
    is_node_saved: bool,
    facts: NodeFacts,
    policy: NodePolicy,
    /// Until then, nothing is programmed before the node is known.
    node_awaited_until: Option<Instant>,
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

    /// Facts of a node, under the operator's policy.
    fn facts_of(&self, node: Option<&Node>) -> NodeFacts {
        let facts = NodeFacts::of(&self.node_name, node);
        let NodePolicy { bind_address, ignores_external_ips } = self.policy;
        let addresses = node_addresses(&facts.addresses, bind_address);
        NodeFacts { addresses, ignores_external_ips, failing: self.facts.failing.clone(), ..facts }
    }

    /// The moment before which nothing is programmed for want of the node; any past one when it is
    /// known.
    fn node_awaited(&self) -> Instant {
        let is_known = self.node.is_some() || self.node_revision != 0;
        self.node_awaited_until.filter(|_| !is_known).unwrap_or_else(Instant::now)
    }

    fn own_node(&self) -> v1::OwnNode {
        let node = self.node.as_ref().map(node_to_wire);
        v1::OwnNode { revision: 0, node, position: self.held.node_position() }
    }
}

impl StateSource for AgentState {
    fn look(&self, plan: &mut dyn FnMut(&State, &NodeFacts)) {
        self.with_facts(plan);
    }
}

/// Why [`AgentState::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The agent stops.
    Stop,
    /// There is something to program.
    Work,
    /// Nothing to program, and it is time to verify.
    Verify,
}

/// When the next sync may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// In any case.
    pub(crate) not_before: Instant,
    /// After a failure.
    pub(crate) after_failure: Option<AfterFailure>,
}

/// When what has failed is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AfterFailure {
    /// The generation that could not be programmed.
    pub(crate) generation: u64,
    /// When it is tried again as it was.
    pub(crate) retry_at: Instant,
    /// When it is tried again together with something new, which may be just what helps.
    pub(crate) with_news_at: Instant,
}

impl Pace {
    pub(crate) fn next(&self, generation: u64) -> Instant {
        let after_failure = self.after_failure.map(|failed| {
            if failed.generation == generation { failed.retry_at } else { failed.with_news_at.min(failed.retry_at) }
        });
        after_failure.map_or(self.not_before, |at| at.max(self.not_before))
    }
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
    /// For [`AgentState::wait`].
    pub(crate) generation: u64,
}

impl AgentState {
    /// An empty state for the agent of a node.
    #[must_use]
    pub fn new(node_name: &str) -> Self {
        Self::with(node_name, Held::default(), None, false)
    }

    /// A state that is written to disk; what was read from there, if anything.
    #[must_use]
    pub fn persistent(node_name: &str, restored: Option<Restored>) -> Self {
        let is_unconfirmed = restored.is_some();
        let (mut held, node) = restored.map_or_else(Default::default, |Restored { held, node }| (held, node));
        *held.unsaved_mut() = if is_unconfirmed { Unsaved::Some(Keys::default()) } else { Unsaved::Everything };
        Self::with(node_name, held, node, is_unconfirmed)
    }

    fn with(node_name: &str, held: Held, node: Option<Node>, is_unconfirmed: bool) -> Self {
        let backlog = Arc::<Backlog>::default();
        node.iter().for_each(|node| backlog.set_node(node));
        let inner = Inner {
            held,
            is_unconfirmed,
            node_name: node_name.to_owned(),
            facts: NodeFacts::of(node_name, node.as_ref()),
            node,
            is_node_saved: true,
            policy: NodePolicy::default(),
            node_awaited_until: None,
            stream: 0,
            node_revision: 0,
            dirty: Dirty::default(),
            needs_full: true,
            generation: 0,
            stop: false,
        };
        Self { backlog, inner: Mutex::new(inner), changed: Condvar::new() }
    }

    /// Takes what the operator configured about the node.
    pub fn set_policy(&self, policy: NodePolicy) {
        let mut inner = self.lock();
        inner.policy = policy;
        inner.facts = inner.facts_of(inner.node.as_ref());
        inner.needs_full = true;
    }

    /// Nothing is programmed before the node is known, or that moment has come.
    pub fn await_node(&self, until: Instant) {
        self.lock().node_awaited_until = Some(until);
    }

    /// What has come and is not in the kernel yet.
    #[must_use]
    pub fn backlog(&self) -> &Arc<Backlog> {
        &self.backlog
    }

    /// The agent's own node, as it was last known; `going_away` when it has been deleted since.
    #[must_use]
    pub fn node(&self) -> Option<Node> {
        self.lock().node.clone()
    }

    /// A new stream begins. Returns what `Hello` says of the state, epoch and version of it, and
    /// the number of the stream.
    #[must_use]
    pub fn begin_stream(&self) -> (Option<v1::Resume>, Option<(u64, u64)>, u64) {
        let mut inner = self.lock();
        inner.stream += 1;
        inner.node_revision = 0;
        (inner.held.resume(), inner.held.position(), inner.stream)
    }

    /// Applies a step, and wakes the reconcile loop. Waits for the lock, which planning a full sync
    /// holds for a while: not for async tasks.
    pub fn apply(&self, step: StateUpdate) {
        self.apply_locked(&mut self.lock(), step);
    }

    /// The same, unless it would have to wait: then it gives the step back.
    #[must_use]
    pub fn try_apply(&self, step: StateUpdate) -> Option<StateUpdate> {
        match self.inner.try_lock() {
            Ok(mut inner) => self.apply_locked(&mut inner, step),
            Err(TryLockError::Poisoned(poisoned)) => self.apply_locked(&mut poisoned.into_inner(), step),
            Err(TryLockError::WouldBlock) => return Some(step),
        }
        None
    }

    fn apply_locked(&self, inner: &mut Inner, step: StateUpdate) {
        self.backlog.queue(&step.changes, &step.triggers);
        let Inner { held, dirty, .. } = inner;
        held.apply(step, dirty);
        inner.generation += 1;
        self.changed.notify_all();
    }

    /// Changes the node's facts for single services. `change` returns these services, and they are
    /// planned again. Waits for the lock, as [`Self::apply`] does.
    pub fn change_facts(&self, change: impl FnOnce(&mut NodeFacts) -> BTreeSet<Arc<ServiceKey>>) {
        let mut inner = self.lock();
        let services = change(&mut inner.facts);
        if !services.is_empty() {
            inner.dirty.services.extend(services);
            self.backlog.queue_other();
            inner.generation += 1;
            self.changed.notify_all();
        }
    }

    /// Takes what the stream says of the node. Whatever depends on it is planned anew when it
    /// differs.
    ///
    /// `None`: the source has no such Node. The rules keep the values of the last Node, as
    /// kube-proxy's do: the machine still runs. It is only marked as going away, on disk as well,
    /// so that load balancers send it nothing new, and the next Node replaces it.
    pub fn set_node(&self, own: &OwnNode) {
        let OwnNode { revision, node, position } = own;
        let mut inner = self.lock();
        let node = node.clone().or_else(|| inner.node.clone().map(|last| Node { going_away: true, ..last }));
        node.iter().for_each(|node| self.backlog.set_node(node));
        let facts = inner.facts_of(node.as_ref());
        let pod_cidrs = |node: &Option<Node>| node.as_ref().map(|node| node.pod_cidrs.clone()).unwrap_or_default();
        if facts != inner.facts || pod_cidrs(&node) != pod_cidrs(&inner.node) {
            inner.facts = facts;
            inner.needs_full = true;
            self.backlog.queue_other();
        }
        if inner.node != node || inner.held.node_position() != *position {
            inner.node = node;
            inner.held.set_node_position(*position);
            inner.is_node_saved = false;
        }
        inner.node_revision = *revision;
        inner.generation += 1;
        self.changed.notify_all();
    }

    /// The state is what is to be programmed: it is as new as the control plane's was when the
    /// stream began, or the kernel has no rules that could be newer.
    pub fn confirm(&self) {
        let mut inner = self.lock();
        if std::mem::take(&mut inner.is_unconfirmed) {
            self.changed.notify_all();
        }
    }

    /// The state is from disk, and nobody has said yet that it is to be programmed.
    #[must_use]
    pub fn is_unconfirmed(&self) -> bool {
        self.lock().is_unconfirmed
    }

    /// Epoch and version of the state; `None` before the first complete snapshot.
    #[must_use]
    pub fn position(&self) -> Option<(u64, u64)> {
        self.lock().held.position()
    }

    /// As [`Held::point`], without digests.
    #[must_use]
    pub fn point(&self) -> Option<v1::Resume> {
        self.lock().held.point(false)
    }

    /// Looks at the state under the lock; for tests and diagnosis.
    pub fn with_state<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(self.lock().held.state())
    }

    /// Looks at the state, and at what is known of the node, under the lock.
    pub(crate) fn with_facts<T>(&self, look: impl FnOnce(&State, &NodeFacts) -> T) -> T {
        let inner = self.lock();
        look(inner.held.state(), &inner.facts)
    }

    /// Ends the reconcile loop, after what it is at.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Waits for something to do that is not answered for by generation `done`, as `pace` allows;
    /// or until `verify_at` when there is nothing. Before the first complete snapshot there is
    /// never anything to do.
    pub(crate) fn wait(&self, done: Option<u64>, pace: Pace, verify_at: Instant) -> Wake {
        let mut inner = self.lock();
        loop {
            if inner.stop {
                return Wake::Stop;
            }
            let is_done = Some(inner.generation) == done || inner.is_unconfirmed;
            let due = match (inner.held.position(), is_done) {
                (None, _) => None,
                (Some(_), false) => Some((Wake::Work, pace.next(inner.generation).max(inner.node_awaited()))),
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

    /// Hands out what is to be done and forgets it; `None` before the first complete snapshot. The
    /// lock is held while `plan` runs.
    pub(crate) fn take<T>(&self, plan: impl FnOnce(Work<'_>) -> T) -> Option<T> {
        let mut inner = self.lock();
        let target = inner.target()?;
        let dirty = std::mem::take(&mut inner.dirty);
        let needs_full = std::mem::take(&mut inner.needs_full);
        self.backlog.take();
        let Inner { held, facts, generation, .. } = &*inner;
        Some(plan(Work { state: held.state(), facts, dirty, needs_full, target, generation: *generation }))
    }

    /// The next sync has to be a full one, as far as the state and the node are concerned.
    pub(crate) fn needs_full(&self) -> bool {
        self.lock().needs_full
    }

    /// Something has come since this generation.
    pub(crate) fn has_moved_since(&self, generation: Option<u64>) -> bool {
        let inner = self.lock();
        inner.held.position().is_some() && Some(inner.generation) != generation
    }

    /// What is not on disk yet, which the caller takes over: from now on it is his to write. With
    /// the digests of the state, if asked for. `None` when that is everything.
    pub(crate) fn take_unsaved(&self, with_digests: bool) -> Option<UnsavedChanges> {
        let mut inner = self.lock();
        let point = inner.held.point(with_digests)?;
        let Unsaved::Some(keys) = inner.held.unsaved_mut() else { return None };
        let keys = std::mem::take(keys);
        let changes = unsaved::to_wire(keys.changes(inner.held.state()));
        let node = (!std::mem::replace(&mut inner.is_node_saved, true)).then(|| inner.own_node());
        Some(UnsavedChanges { generation: inner.generation, changes, node, point })
    }

    /// Everything is going to be written, service by service: takes note of what changes from now
    /// on. Returns the services there are.
    pub(crate) fn begin_saving(&self) -> Vec<Arc<ServiceKey>> {
        let mut inner = self.lock();
        *inner.held.unsaved_mut() = Unsaved::Some(Keys::of_service_cidrs(inner.held.state()));
        inner.is_node_saved = false;
        inner.held.state().entries().map(|(key, _)| Arc::clone(key)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic while planning ends the agent (see `run`); until then the state is as good as it
        // was.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
