//! The state that the session changes and the reconcile loop programs: [`AgentState`] shares one
//! [`Held`]. One lock protects the only copy: the session holds it while it applies a step, the
//! loop while it plans, and nobody while the kernel is written. Meanwhile changed services collect
//! in one set of keys.

pub mod progress;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    time::Instant,
};

use headgate_core::{
    Change, Dirty, Family, Node, NodeFacts, Protocol, Service, ServiceKey, State, StateSource,
    addresses::DialPolicy,
    digest::{self, BUCKETS, Digests},
    frontends::{Conflict, Frontend},
};
use headgate_proto::{digests_to_wire, node_to_wire, reserved_to_wire, v1};
use tokio::{
    sync::{Notify, watch},
    time::timeout_at,
};
use tracing::{error, info};

use crate::node_inputs::node_addresses;
use progress::{Backlog, Target, Trigger};

/// The number of Services that are hashed while the lock is held.
const SERVICES_AT_ONCE: usize = 256;

/// The maximum number of Services that are reported because they lack something that is reserved.
const MAX_LEFT_OUT: usize = 1_000;

/// The operator's settings about the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodePolicy {
    /// An address of the node that takes precedence over the addresses in the Node.
    pub bind_address: Option<IpAddr>,
    /// True if rules leave out externalIPs.
    pub ignores_external_ips: bool,
    /// True if the node itself holds every address of a Service, as in mode IPVS.
    pub holds_service_addresses: bool,
    /// The time until which syncs wait for the Node, if rules depend on it.
    pub node_awaited_until: Option<Instant>,
}

/// The state of the agent. The session and the reconcile loop share it.
#[derive(Debug)]
pub struct AgentState {
    backlog: Arc<Backlog>,
    inner: Mutex<Shared>,
    /// Wakes the reconcile loop, which alone waits.
    changed: Notify,
    unchecked: Mutex<Unchecked>,
    /// Where the replicas are, as a replica announced last.
    replicas: watch::Sender<BTreeSet<SocketAddr>>,
}

/// The Services that have fewer health checks than they ask for, by the reason.
pub(crate) type Unchecked = BTreeMap<&'static str, BTreeSet<Arc<ServiceKey>>>;

/// What the state may lack, although its positions include it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Lack {
    Nothing,
    /// The state is from disk, and changes may have followed before the last run ended.
    Changes,
    /// Also, the rules in the kernel may have these changes, so that no sync may program the state.
    ChangesOfRules,
}

#[derive(Debug)]
struct Shared {
    held: Held,
    lack: Lack,
    node: Option<Node>,
    /// The facts about this node that rules depend on, computed from `node` and `policy`.
    facts: NodeFacts,
    policy: NodePolicy,
    /// Where the agent connects, by name. No Service gets these addresses and ports.
    targets: BTreeMap<String, BTreeSet<(Protocol, SocketAddr)>>,
    /// The number of the current stream, from 1.
    stream: u64,
    /// `OwnNode.revision` of the Node that the current stream sent last, else 0.
    node_revision: u64,
    dirty: Dirty,
    /// True if the next sync must be a full sync.
    needs_full: bool,
    /// What [`AgentState::wait`] has to report besides changes of the state.
    signals: BTreeSet<Wake>,
    verifications_requested: u64,
    /// Counts the updates that a sync must program.
    generation: u64,
}

impl Shared {
    fn point(&self) -> Option<v1::Resume> {
        let point = self.held.point()?;
        Some(if self.lack == Lack::Nothing { point } else { v1::Resume { epoch: 0, ..point } })
    }

    /// The state that a sync programs now; `None` before the first complete snapshot.
    fn target(&self) -> Option<Target> {
        let (epoch, version) = self.held.position()?;
        Some(Target { epoch, version, stream: self.stream, node_revision: self.node_revision })
    }

    /// The facts of a Node, with the operator's policy applied.
    fn facts_of(&self, node: Option<&Node>) -> NodeFacts {
        let facts = NodeFacts::of(&self.facts.name, node);
        let NodePolicy { bind_address, ignores_external_ips, .. } = self.policy;
        let addresses = node_addresses(&facts.addresses, bind_address);
        let (failing, dialled) = (self.facts.failing.clone(), Arc::clone(&self.facts.dialled));
        NodeFacts { addresses, ignores_external_ips, failing, dialled, ..facts }
    }

    fn own_node(&self) -> v1::OwnNode {
        let Held { node_position: position, reserved, .. } = &self.held;
        let (node, position) = (self.node.as_ref().map(node_to_wire), *position);
        v1::OwnNode { revision: 0, node, position, reserved: reserved_to_wire(reserved) }
    }

    /// Reserves what the replica names, and where the agent connects.
    fn reserve(&mut self) {
        let Self { held, targets, facts, policy, dirty, .. } = self;
        let own = targets.values().flatten().flat_map(|(protocol, at)| {
            let address = at.ip().to_canonical();
            // Without a Node, the addresses of this node are not known.
            let may_be_own = address.is_loopback() || facts.addresses.is_empty() || facts.addresses.contains(&address);
            let node_port = Frontend::NodePort(Family::of(address), *protocol, at.port());
            [Some(Frontend::Address(address, *protocol, at.port())), may_be_own.then_some(node_port)]
        });
        let all = held.reserved.iter().copied().chain(own.flatten()).collect();
        held.state.reserve(&all, policy.holds_service_addresses, dirty);
    }

    /// Returns what the reconcile loop does next, and when. Takes out a signal that it returns.
    /// `None` if only a signal ends the wait.
    fn next(&mut self, done: Option<u64>, pace: Pace, verify_at: Instant, now: Instant) -> Option<(Wake, Instant)> {
        let has_state = self.held.position().is_some();
        let may_program = has_state && self.lack != Lack::ChangesOfRules;
        let is_due = |wake: &Wake| match wake {
            Wake::Rules => has_state,
            // Changes that arrive all the time must not delay a request without end: Services that
            // wait for a sync are not verified.
            Wake::Requested => may_program && done.is_some(),
            _ => true,
        };
        if let Some(wake) = self.signals.iter().copied().find(is_due) {
            self.signals.remove(&wake);
            return Some((wake, now));
        }
        let work = self.work_at(done, pace).map(|at| (Wake::Work, at));
        work.or_else(|| has_state.then_some((Wake::Verify, verify_at)))
    }

    /// The earliest time to program changes newer than generation `done`. `None` if there are none,
    /// or if they may not be programmed.
    fn work_at(&self, done: Option<u64>, pace: Pace) -> Option<Instant> {
        let may_program = self.held.position().is_some() && self.lack != Lack::ChangesOfRules;
        let is_node_known = self.node.is_some() || self.node_revision != 0;
        let node_awaited_until = self.policy.node_awaited_until.filter(|_| !is_node_known);
        let at = pace.next(self.generation);
        (may_program && Some(self.generation) != done).then(|| node_awaited_until.map_or(at, |until| at.max(until)))
    }
}

impl StateSource for AgentState {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        let inner = self.lock();
        read(inner.held.state(), &inner.facts, &inner.dirty);
    }
}

/// Why [`AgentState::wait`] returns. What comes first is reported first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wake {
    /// The agent stops.
    Stop,
    /// The addresses of the node's interfaces changed.
    Interfaces,
    /// The problems of the dataplane changed.
    Problems,
    /// Another program may have changed the rules.
    Rules,
    /// A verification of the kernel was requested.
    Requested,
    /// Changes must be programmed.
    Work,
    /// No changes must be programmed, and it is time to verify the rules.
    Verify,
}

/// When the next sync may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// The earliest time for any sync.
    pub(crate) not_before: Instant,
    /// Further limits after a failed sync.
    pub(crate) after_failure: Option<AfterFailure>,
}

/// When the next sync may begin after a failed sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AfterFailure {
    /// The generation that the sync failed to program.
    pub(crate) generation: u64,
    /// When to try this generation again.
    pub(crate) retry_at: Instant,
    /// When to try again if newer changes have arrived. Newer changes may remove the cause of the
    /// failure, so this time may be earlier than `retry_at`.
    pub(crate) retry_changed_at: Instant,
}

impl Pace {
    /// The earliest time for a sync of `generation`.
    pub(crate) fn next(&self, generation: u64) -> Instant {
        let after_failure = self.after_failure.map(|failed| {
            if failed.generation == generation { failed.retry_at } else { failed.retry_changed_at.min(failed.retry_at) }
        });
        after_failure.map_or(self.not_before, |at| at.max(self.not_before))
    }
}

/// The work to plan. The state is locked while this value exists.
#[derive(Debug)]
pub(crate) struct Work<'a> {
    /// The shared state.
    pub(crate) state: &'a State,
    /// The facts about this node that rules depend on.
    pub(crate) facts: &'a NodeFacts,
    /// Services to plan.
    pub(crate) dirty: Dirty,
    /// True if all services must be planned, because the sync is the first sync, or because the
    /// node or its settings changed.
    pub(crate) needs_full: bool,
    /// The state that the sync programs.
    pub(crate) target: Target,
    /// The generation to pass to [`AgentState::wait`] after a success.
    pub(crate) generation: u64,
}

/// A moment of the state, to write to disk.
#[derive(Debug)]
pub(crate) struct SavePoint {
    /// The number of the stream.
    pub(crate) stream: u64,
    /// Counts the updates that a sync must program.
    pub(crate) generation: u64,
    /// See [`Held::point`].
    pub(crate) point: v1::Resume,
    /// What the agent holds of its own Node.
    pub(crate) node: v1::OwnNode,
}

/// Runs `work`, which may block, on a thread for such work.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    // Such a task can only be cancelled together with the runtime.
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
}

impl AgentState {
    /// Runs `work`, which waits for the lock of the state: at once if the lock is free, else on a
    /// thread that may block, because the planning of a full sync may hold the lock for a while.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        if self.try_lock().is_some() {
            return work(self);
        }
        let state = Arc::clone(self);
        blocking(move || work(&state)).await
    }

    /// An empty state for the agent of a node.
    pub fn new(node_name: &str) -> Self {
        Self::restored(node_name, Restored::default())
    }

    /// A state that begins with a state from disk.
    pub fn restored(node_name: &str, restored: Restored) -> Self {
        let Restored { held, node, may_be_behind } = restored;
        let backlog = Arc::<Backlog>::default();
        node.iter().for_each(|node| backlog.set_node(node));
        let inner = Shared {
            held,
            lack: if may_be_behind { Lack::ChangesOfRules } else { Lack::Nothing },
            facts: NodeFacts::of(node_name, node.as_ref()),
            node,
            policy: NodePolicy::default(),
            targets: BTreeMap::new(),
            stream: 0,
            node_revision: 0,
            dirty: Dirty::default(),
            needs_full: true,
            signals: BTreeSet::new(),
            verifications_requested: 0,
            generation: 0,
        };
        let (changed, unchecked, replicas) = (Notify::new(), Mutex::default(), watch::Sender::default());
        Self { backlog, inner: Mutex::new(inner), changed, unchecked, replicas }
    }

    /// Sets the operator's settings about the node, before the first sync.
    pub fn set_policy(&self, policy: NodePolicy) {
        let mut inner = self.lock();
        inner.policy = policy;
        inner.facts = inner.facts_of(inner.node.as_ref());
        inner.reserve();
    }

    /// Reserves the addresses and ports to which a name leads, so that no Service gets them. A
    /// later call with the same name replaces them. Waits for the lock, as [`Self::apply`] does.
    pub fn depends_on(&self, name: &str, addresses: BTreeSet<(Protocol, SocketAddr)>) {
        let mut inner = self.lock();
        if inner.targets.get(name) != Some(&addresses) {
            inner.targets.insert(name.to_owned(), addresses);
            inner.reserve();
            if !inner.dirty.is_empty() {
                self.backlog.queue_other();
                inner.generation += 1;
                self.changed.notify_one();
            }
        }
    }

    /// Replaces the addresses of replicas, which no Service gets. Waits for the lock.
    pub fn set_replicas(&self, replicas: BTreeSet<SocketAddr>) {
        self.depends_on("announced replicas", replicas.iter().map(|at| (Protocol::Tcp, *at)).collect());
        self.replicas.send_if_modified(|known| {
            let is_new = *known != replicas;
            *known = replicas;
            is_new
        });
    }

    /// The addresses of replicas, as a replica announced last.
    pub(crate) fn replicas(&self) -> watch::Receiver<BTreeSet<SocketAddr>> {
        self.replicas.subscribe()
    }

    /// The Service that has this address and port.
    pub(crate) fn owner_of(&self, (protocol, at): (Protocol, SocketAddr)) -> Option<(ServiceKey, IpAddr)> {
        let inner = self.lock();
        let owner = inner.held.state.frontends().owner(&Frontend::Address(at.ip(), protocol, at.port()))?;
        Some((owner.clone(), at.ip()))
    }

    /// The Services that lack something because it is reserved, except what the replica has
    /// reserved itself, for NACKs. At most [`MAX_LEFT_OUT`].
    pub(crate) fn left_out(&self) -> Vec<v1::Rejection> {
        let inner = self.lock();
        let conflicts = inner.held.state.frontends().reserved_conflicts(&inner.held.reserved);
        let rejection = |(key, conflict): (&Arc<ServiceKey>, Conflict<'_>)| {
            let (resource, field) = (format!("Service {key}"), conflict.field().to_owned());
            v1::Rejection { resource, field, reason: conflict.to_string() }
        };
        conflicts.take(MAX_LEFT_OUT).map(rejection).collect()
    }

    /// If no control plane answers, and a Service lacks something reserved, rules of an earlier run
    /// may give it to the Service, so that nobody can hear the agent. Then a state from disk may be
    /// programmed.
    pub(crate) fn free_reserved(&self) {
        let mut inner = self.lock();
        let has_conflict = inner.held.state.frontends().reserved_conflicts(&BTreeSet::new()).next().is_some();
        if has_conflict && inner.lack == Lack::ChangesOfRules {
            info!(
                "a Service may have taken an address of the control plane, so that no control plane can answer; programming the last good state"
            );
            inner.lack = Lack::Changes;
            self.changed.notify_one();
        }
    }

    /// The changes that are not in the kernel yet.
    pub fn backlog(&self) -> &Arc<Backlog> {
        &self.backlog
    }

    /// The last known value of the agent's own Node. If deleted, with `going_away`.
    pub fn node(&self) -> Option<Node> {
        self.lock().node.clone()
    }

    /// What the agent holds of its own Node, as [`v1::NodeView`] states it.
    pub(crate) fn own_node(&self) -> v1::OwnNode {
        self.lock().own_node()
    }

    /// Begins a new stream. Returns the resume point for `Hello`, the epoch and version of the held
    /// state, and the number of the stream.
    pub fn begin_stream(&self) -> (Option<v1::Resume>, Option<(u64, u64)>, u64) {
        let mut inner = self.lock();
        inner.stream += 1;
        inner.node_revision = 0;
        (inner.held.resume(), inner.held.position(), inner.stream)
    }

    /// Applies a step, and wakes the reconcile loop. May block while a full sync is planned,
    /// because planning holds the lock; an async task must call [`Self::try_apply`] instead.
    pub fn apply(&self, step: StateUpdate) {
        self.apply_locked(&mut self.lock(), step);
    }

    /// Like [`Self::apply`], but returns the step instead of waiting when the lock is held.
    pub fn try_apply(&self, step: StateUpdate) -> Option<StateUpdate> {
        match self.try_lock() {
            Some(mut inner) => self.apply_locked(&mut inner, step),
            None => return Some(step),
        }
        None
    }

    fn apply_locked(&self, inner: &mut Shared, step: StateUpdate) {
        self.backlog.queue(&step.changes, &step.triggers);
        let Shared { held, dirty, .. } = inner;
        held.apply(step, dirty);
        inner.generation += 1;
        self.changed.notify_one();
    }

    /// Changes the node's facts about some services. `change` returns these services, which the
    /// next sync plans again. May block, like [`Self::apply`].
    pub fn change_facts(&self, change: impl FnOnce(&mut NodeFacts) -> BTreeSet<Arc<ServiceKey>>) {
        let mut inner = self.lock();
        let services = change(&mut inner.facts);
        if !services.is_empty() {
            inner.dirty.services.extend(services);
            self.backlog.queue_other();
            inner.generation += 1;
            self.changed.notify_one();
        }
    }

    /// The Services that have fewer health checks than they ask for, by the reason.
    pub(crate) fn unchecked(&self) -> Unchecked {
        self.unchecked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets why a Service has fewer health checks than it asks for; `None` if it has all of them.
    /// Returns true if this is news.
    pub(crate) fn set_unchecked(&self, key: &Arc<ServiceKey>, reason: Option<&'static str>) -> bool {
        let mut unchecked = self.unchecked.lock().unwrap_or_else(PoisonError::into_inner);
        let before = unchecked.iter().find(|(_, services)| services.contains(key)).map(|(reason, _)| *reason);
        unchecked.retain(|_, services| !(services.remove(key) && services.is_empty()));
        reason.map(|reason| unchecked.entry(reason).or_default().insert(Arc::clone(key)));
        before != reason
    }

    /// Sets the addresses that programs of the node connect to. If they change in mode userspace,
    /// the next sync is a full sync. In the other modes, only health checks depend on them.
    pub(crate) fn set_dialled(&self, dialled: Arc<DialPolicy>) {
        let mut inner = self.lock();
        if inner.facts.dialled != dialled {
            inner.needs_full |= dialled.has_proxy;
            inner.facts.dialled = dialled;
            inner.generation += 1;
            let Shared { held, dirty, .. } = &mut *inner;
            let checked =
                held.state().entries().filter(|(_, entry)| entry.service().is_some_and(Service::is_checked_by_tcp));
            dirty.services.extend(checked.map(|(key, _)| Arc::clone(key)));
            self.backlog.queue_other();
            self.changed.notify_one();
        }
    }

    /// Stores the agent's own Node. If rules depend on what changed, the next sync is a full sync.
    /// Without a Node, the rules keep the values of the last one, as in kube-proxy, because the
    /// machine still runs; it is marked as going away, also on disk.
    pub fn set_node(&self, own: &OwnNode) {
        let OwnNode { revision, node, position, reserved } = own;
        let mut inner = self.lock();
        let node = node.clone().or_else(|| inner.node.clone().map(|last| Node { going_away: true, ..last }));
        node.iter().for_each(|node| self.backlog.set_node(node));
        let facts = inner.facts_of(node.as_ref());
        let pod_cidrs = |node: &Option<Node>| node.as_ref().map(|node| node.pod_cidrs.clone());
        if facts != inner.facts || pod_cidrs(&node) != pod_cidrs(&inner.node) {
            inner.facts = facts;
            inner.needs_full = true;
            self.backlog.queue_other();
        }
        if inner.node != node || inner.held.node_position != *position {
            inner.node = node;
            inner.held.node_position = *position;
        }
        inner.held.reserved.clone_from(reserved);
        inner.reserve();
        inner.node_revision = *revision;
        inner.generation += 1;
        self.changed.notify_one();
    }

    /// Makes [`Self::wait`] return this, once. Waits for the lock, as [`Self::apply`] does.
    pub(crate) fn signal(&self, wake: Wake) {
        self.lock().signals.insert(wake);
        self.changed.notify_one();
    }

    /// Like [`Self::signal`], but returns false instead of waiting when the lock is held.
    pub(crate) fn try_signal(&self, wake: Wake) -> bool {
        let signalled = self.try_lock().map(|mut inner| inner.signals.insert(wake));
        self.changed.notify_one();
        signalled.is_some()
    }

    /// Requests a verification of the kernel: the reconcile loop reads the kernel and compares what
    /// it forwards with the state. Returns the number of the request. The request is answered when
    /// [`crate::state::progress::Verification::request`] has reached this number. Requests that
    /// wait together are answered together. Before the first sync, no request is answered. Waits
    /// for the lock, as [`Self::apply`] does.
    pub fn request_verification(&self) -> u64 {
        let mut inner = self.lock();
        inner.verifications_requested += 1;
        inner.signals.insert(Wake::Requested);
        self.changed.notify_one();
        inner.verifications_requested
    }

    pub(crate) fn verifications_requested(&self) -> u64 {
        self.lock().verifications_requested
    }

    /// Notes that the state is as new as the control plane's state was at the start of the stream.
    /// Syncs may program it from now on.
    pub fn confirm(&self) {
        self.lock().lack = Lack::Nothing;
        self.changed.notify_one();
    }

    /// Allows syncs to program the state from disk, because the kernel has no rules. The state may
    /// still lack what its positions include.
    pub fn program_unconfirmed(&self) {
        let mut inner = self.lock();
        inner.lack = inner.lack.min(Lack::Changes);
        self.changed.notify_one();
    }

    /// True while the state is from disk and may not be programmed.
    pub fn is_unconfirmed(&self) -> bool {
        self.lock().lack == Lack::ChangesOfRules
    }

    /// Epoch and version of the state; `None` before the first complete snapshot.
    pub fn position(&self) -> Option<(u64, u64)> {
        self.lock().held.position()
    }

    /// See [`Held::point`]. The epoch is 0 also until a state from disk is confirmed, because it
    /// may lack what its positions include.
    pub fn point(&self) -> Option<v1::Resume> {
        self.lock().point()
    }

    /// Calls `read` with the state while the lock is held.
    pub fn with_state<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(self.lock().held.state())
    }

    /// Calls `read` with the state and the node's facts while the lock is held.
    pub(crate) fn with_facts<T>(&self, read: impl FnOnce(&State, &NodeFacts) -> T) -> T {
        let inner = self.lock();
        read(inner.held.state(), &inner.facts)
    }

    /// Calls `read` with the state, the node's facts and the Services that wait to be programmed,
    /// while the lock is held. Returns `None` if everything must be programmed anew.
    pub(crate) fn with_unprogrammed<T>(&self, read: impl FnOnce(&State, &NodeFacts, &Dirty) -> T) -> Option<T> {
        let inner = self.lock();
        (!inner.needs_full).then(|| read(inner.held.state(), &inner.facts, &inner.dirty))
    }

    /// Computes the digests of the resources anew, with the epoch and version of the start.
    /// Releases the lock between groups of Services, so buckets that change later may have any
    /// digest. Logs and corrects wrong digests. The cost grows with the number of resources.
    pub(crate) fn renewed_digests(&self) -> ((u64, u64), Digests) {
        let moment = |inner: &Shared| (inner.held.position(), inner.generation);
        let before = moment(&self.lock());
        let keys = self.keys();
        let mut digests = Digests::default();
        for keys in keys.chunks(SERVICES_AT_ONCE) {
            self.with_state(|state| state.digest_services(keys, &mut digests));
        }
        let mut inner = self.lock();
        inner.held.state().digest_service_cidrs(&mut digests);
        if moment(&inner) == before && *inner.held.state().digests() != digests && !inner.held.state.renew_digests() {
            error!(
                "the digests of the agent's resources were wrong, and are computed anew: memory was damaged, or the agent has a defect"
            );
        }
        (before.0.unwrap_or_default(), digests)
    }

    pub(crate) fn keys(&self) -> Vec<Arc<ServiceKey>> {
        self.with_state(|state| state.entries().map(|(key, _)| Arc::clone(key)).collect())
    }

    /// Ends the reconcile loop after its current sync.
    pub fn stop(&self) {
        self.signal(Wake::Stop);
    }

    /// Waits until changes newer than generation `done` may be programmed, as `pace` allows, or
    /// for a signal. Without such changes, waits until `verify_at`. Before the first complete
    /// snapshot, only [`Self::signal`] ends the wait. Only one caller may wait at a time.
    pub(crate) async fn wait(&self, done: Option<u64>, pace: Pace, verify_at: Instant) -> Wake {
        loop {
            let now = tokio::time::Instant::now().into_std();
            let next = self.lock().next(done, pace, verify_at, now);
            // A change since then ends the wait at once, because `Notify` keeps it for one waiter.
            let changed = self.changed.notified();
            match next {
                None => changed.await,
                Some((wake, at)) if at <= now => return wake,
                Some((_, at)) => _ = timeout_at(at.into(), changed).await,
            }
        }
    }

    /// Calls `plan` with the changes since the last call, and clears the list of changes. Returns
    /// `None` before the first complete snapshot. Holds the lock while `plan` runs.
    pub(crate) fn take<T>(&self, plan: impl FnOnce(Work<'_>) -> T) -> Option<T> {
        let mut inner = self.lock();
        let target = inner.target()?;
        let dirty = std::mem::take(&mut inner.dirty);
        let needs_full = std::mem::take(&mut inner.needs_full);
        self.backlog.take();
        let Shared { held, facts, generation, .. } = &*inner;
        Some(plan(Work { state: held.state(), facts, dirty, needs_full, target, generation: *generation }))
    }

    /// True when a change of the state or of the node requires a full sync.
    pub(crate) fn needs_full(&self) -> bool {
        self.lock().needs_full
    }

    /// What [`Self::wait`] would return at `now`. `None` if it would wait.
    pub(crate) fn due(&self, done: Option<u64>, pace: Pace, due_at: Instant, now: Instant) -> Option<Wake> {
        let next = self.lock().next(done, pace, due_at, now);
        next.filter(|(_, at)| *at <= now).map(|(wake, _)| wake)
    }

    /// True when changes have arrived since this generation.
    pub(crate) fn has_moved_since(&self, generation: Option<u64>) -> bool {
        let inner = self.lock();
        inner.held.position().is_some() && Some(inner.generation) != generation
    }

    /// See [`Held::positions`].
    pub(crate) fn positions(&self) -> Vec<v1::SourcePosition> {
        self.lock().held.positions()
    }

    /// What a file says besides resources; `None` before the first complete snapshot.
    pub(crate) fn save_point(&self) -> Option<SavePoint> {
        let inner = self.lock();
        let point = inner.point()?;
        Some(SavePoint { stream: inner.stream, generation: inner.generation, node: inner.own_node(), point })
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // A panic while planning ends the agent (see `run`). A panic does not damage the state,
        // because planning only reads the state.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Shared>> {
        match self.inner.try_lock() {
            Ok(inner) => Some(inner),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

// The state that the agent holds, and how a step of the stream changes it.

/// One step: all changes that bring the held state to another version.
#[derive(Debug, Default)]
pub struct StateUpdate {
    /// The epoch of the replica that sent the step.
    pub epoch: u64,
    /// The version of the state after the step.
    pub version: u64,
    /// Positions of the source. The positions of a snapshot replace all earlier positions.
    pub positions: Vec<v1::SourcePosition>,
    /// Changed and removed resources.
    pub changes: Vec<Change>,
    /// The triggers of the changes of endpoints.
    pub triggers: Vec<Trigger>,
    /// `Some` when the changes contain complete buckets. All other resources that the agent holds
    /// in these buckets are removed.
    pub snapshot: Option<Snapshot>,
    /// True when the agent rejects a resource that the replica has at this version, so the state
    /// lacks the replica's value.
    pub has_rejections: bool,
}

/// The agent's own Node, as the replica sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnNode {
    /// `OwnNode.revision` of the stream.
    pub revision: u64,
    /// The Node; `None` when the source has no Node with the name of this agent's node.
    pub node: Option<Node>,
    /// The source's position at the last change of this Node; `None` if the replica did not send
    /// this position.
    pub position: Option<v1::SourcePosition>,
    /// What no Service gets.
    pub reserved: BTreeSet<Frontend>,
}

/// A state that was read from disk.
#[derive(Debug, Default)]
pub struct Restored {
    /// The resources, with their version and positions.
    pub held: Held,
    /// The agent's own Node.
    pub node: Option<Node>,
    /// True if the rules in the kernel may be newer than this state.
    pub may_be_behind: bool,
}

/// The buckets that a snapshot replaces, and the resources that the agent rejected.
#[derive(Debug)]
pub struct Snapshot {
    /// The buckets that are replaced.
    pub buckets: HashSet<u16>,
    /// Resources that the snapshot carried and that the agent rejected, named as in
    /// [`v1::Rejection`]. The agent keeps their last good values instead of removing them.
    pub rejected: HashSet<String>,
}

pub(crate) fn all_buckets() -> HashSet<u16> {
    (0..=u16::MAX).take(BUCKETS).collect()
}

/// The shared state, with its version and positions. A rejected resource keeps its last good value
/// here, so the digests of its bucket differ, and the next resume by digests sends it again.
#[derive(Debug, Default)]
pub struct Held {
    pub(crate) state: State,
    /// Epoch and version; `None` before the first complete snapshot.
    position: Option<(u64, u64)>,
    /// The position of the source for each kind of resource.
    sources: BTreeMap<i32, u64>,
    /// The source's position at the last change of the agent's own Node. A replica whose Nodes are
    /// behind this position does not send an older Node.
    pub node_position: Option<v1::SourcePosition>,
    /// What no Service gets, as the replica said last.
    pub reserved: BTreeSet<Frontend>,
    has_rejections: bool,
}

/// The version of the program, which is written to disk with the state.
const AGENT_VERSION: &str = env!("CARGO_PKG_VERSION");

impl Held {
    /// A state that was read from disk, with the version and positions of `point`.
    pub fn restored(state: State, point: &v1::Resume) -> Self {
        // Another version of the program may have ignored fields that this one uses, which the log
        // would not send again. Epoch 0 makes the replica compare digests.
        let epoch = if point.agent_version == AGENT_VERSION { point.epoch } else { 0 };
        let sources = point.positions.iter().map(|source| (source.kind, source.position)).collect();
        Self { state, position: Some((epoch, point.version)), sources, ..Self::default() }
    }

    /// Makes sure that the positions are not lower than these positions, which the kernel's rules
    /// may have reached.
    pub fn raise_positions(&mut self, positions: &[v1::SourcePosition]) {
        for source in positions {
            let known = if source.kind == i32::from(v1::source_position::Kind::Nodes) {
                &mut self.node_position.get_or_insert(*source).position
            } else {
                self.sources.entry(source.kind).or_default()
            };
            *known = source.position.max(*known);
        }
    }

    /// The held resources.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Epoch and version; `None` before the first complete snapshot.
    pub fn position(&self) -> Option<(u64, u64)> {
        self.position
    }

    /// The positions of the source, with the position of the agent's own Node.
    pub fn positions(&self) -> Vec<v1::SourcePosition> {
        let mut sources = self.sources.clone();
        if let Some(v1::SourcePosition { kind, position }) = self.node_position {
            let known = sources.entry(kind).or_default();
            *known = position.max(*known);
        }
        positions_to_wire(&sources)
    }

    /// Returns the description of the held state for `Hello`. Returns `None` when the agent holds
    /// neither a state nor positions.
    pub fn resume(&self) -> Option<v1::Resume> {
        let positions = self.positions();
        match self.position {
            Some((epoch, version)) => {
                let digests = Some(digests_to_wire(self.state.digests()));
                Some(v1::Resume { epoch, version, positions, digests, ..v1::Resume::default() })
            }
            // Without a snapshot, the position of the Node may be known, and those of the last run.
            None => (!positions.is_empty()).then(|| v1::Resume { positions, ..v1::Resume::default() }),
        }
    }

    /// Returns the version and positions to write to disk, for [`Self::restored`]; `None` before
    /// the first complete snapshot. If a resource is rejected, the epoch is 0: the log would not
    /// send it again.
    pub fn point(&self) -> Option<v1::Resume> {
        let (epoch, version) = self.position?;
        Some(v1::Resume {
            epoch: if self.has_rejections { 0 } else { epoch },
            version,
            positions: positions_to_wire(&self.sources),
            digests: None,
            agent_version: AGENT_VERSION.to_owned(),
        })
    }

    /// Applies a step, and adds the affected services to `dirty`.
    pub fn apply(&mut self, step: StateUpdate, dirty: &mut Dirty) {
        // Removals are applied last, so that a new resource exists before the resource that it
        // replaces is removed.
        let removals = step.snapshot.as_ref().map(|snapshot| self.removals(snapshot, &step.changes));
        for change in in_parts(step.changes).chain(removals.into_iter().flatten()) {
            self.state.apply(change, dirty);
        }
        if step.snapshot.is_some() {
            self.sources.clear();
        }
        let known = step.positions.iter().filter(|source| source.kind != 0);
        self.sources.extend(known.map(|source| (source.kind, source.position)));
        self.position = Some((step.epoch, step.version));
        self.has_rejections = step.has_rejections;
    }

    /// Returns removals of all resources that the agent holds in the snapshot's buckets and that
    /// the snapshot did not carry. The cost grows with the number of all held resources.
    fn removals(&self, snapshot: &Snapshot, changes: &[Change]) -> Vec<Change> {
        let mut removals = Vec::new();
        let holds_nothing = self.state.entries().next().is_none() && self.state.service_cidrs().next().is_none();
        if snapshot.buckets.is_empty() || holds_nothing {
            return removals;
        }
        let carried = Carried::of(changes);
        let rejected = &snapshot.rejected;
        let is_rejected = |name: &dyn Fn() -> String| !rejected.is_empty() && rejected.contains(&name());
        for (key, entry) in self.state.entries() {
            if !snapshot.buckets.contains(&digest::service_bucket(key)) {
                continue;
            }
            let is_gone = entry.service().is_some() && !carried.services.contains(&**key);
            if is_gone && !is_rejected(&|| format!("Service {key}")) {
                removals.push(Change::RemoveService((**key).clone()));
            }
            let carried_endpoints = carried.endpoints.get(&**key);
            let group = || format!("endpoints of service {}", key.name);
            for address in entry.endpoints().keys() {
                let is_gone = !carried_endpoints.is_some_and(|addresses| addresses.contains(address));
                if is_gone && !is_rejected(&|| format!("Endpoint {key} {address}")) && !is_rejected(&group) {
                    removals.push(Change::RemoveEndpoint((**key).clone(), *address));
                }
            }
        }
        for held in self.state.service_cidrs() {
            let in_bucket = snapshot.buckets.contains(&digest::service_cidr_bucket(&held.name));
            let is_gone = in_bucket && !carried.service_cidrs.contains(held.name.as_str());
            if is_gone && !is_rejected(&|| format!("ServiceCIDR {}", held.name)) {
                removals.push(Change::RemoveServiceCidr(held.name.clone()));
            }
        }
        removals
    }
}

fn positions_to_wire(sources: &BTreeMap<i32, u64>) -> Vec<v1::SourcePosition> {
    sources.iter().map(|(kind, position)| v1::SourcePosition { kind: *kind, position: *position }).collect()
}

/// The number of changes whose memory is freed together.
const CHANGES_IN_A_PART: usize = 4096;

/// Iterates over changes in order, and frees their memory part by part. Therefore memory never
/// holds both a whole snapshot and the whole state that is built from this snapshot.
fn in_parts(mut changes: Vec<Change>) -> impl Iterator<Item = Change> {
    let mut parts = Vec::new();
    while changes.len() > CHANGES_IN_A_PART {
        let start = (changes.len() - 1) / CHANGES_IN_A_PART * CHANGES_IN_A_PART;
        parts.push(changes.split_off(start));
        changes.shrink_to_fit();
    }
    parts.push(changes);
    // The first part was pushed last.
    std::iter::from_fn(move || parts.pop()).flatten()
}

/// The keys of the resources that a snapshot carried.
#[derive(Default)]
struct Carried<'a> {
    services: HashSet<&'a ServiceKey>,
    endpoints: HashMap<&'a ServiceKey, HashSet<IpAddr>>,
    service_cidrs: HashSet<&'a str>,
}

impl<'a> Carried<'a> {
    fn of(changes: &'a [Change]) -> Self {
        let mut carried = Self::default();
        for change in changes {
            match change {
                Change::Service(service) => {
                    carried.services.insert(&service.key);
                }
                Change::Endpoint(key, endpoint) => {
                    carried.endpoints.entry(key).or_default().insert(endpoint.address);
                }
                Change::ServiceCidr(service_cidr) => {
                    carried.service_cidrs.insert(&service_cidr.name);
                }
                // A snapshot carries no removals: the session machine rejects a snapshot with a
                // removal.
                Change::RemoveService(_) | Change::RemoveEndpoint(..) | Change::RemoveServiceCidr(_) => {}
            }
        }
        carried
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use headgate_core::{Service, ServicePort};

    use super::*;

    /// A Service claims where the agent connects, and then what the replica reserves. It gets each
    /// back afterwards.
    #[test]
    fn the_agent_reserves_where_it_connects_and_what_the_replica_names() {
        let port = |port| ServicePort { name: "".into(), protocol: Protocol::Tcp, port, node_port: port };
        let key = ServiceKey::new("tenant", "hostile");
        let mut service = Service::new(key.clone(), vec![[10, 96, 0, 1].into()], vec![port(80), port(7443)]);
        service.external_ips = vec![[192, 0, 2, 1].into()];
        let state = AgentState::new("node-1");
        state.apply(StateUpdate { epoch: 1, version: 1, changes: vec![service.into()], ..StateUpdate::default() });
        let at = |port| Frontend::Address([192, 0, 2, 1].into(), Protocol::Tcp, port);
        let owns = |frontend| state.with_state(|state| state.frontends().owns(&key, &frontend));
        let node_port = Frontend::NodePort(Family::V4, Protocol::Tcp, 7443);
        let dirty = || std::mem::take(&mut state.lock().dirty).services.len();
        assert!(owns(at(7443)) && dirty() == 1 && state.left_out().is_empty());

        let generation = state.lock().generation;
        state.depends_on("cp", [(Protocol::Tcp, ([192, 0, 2, 1], 7443).into())].into());
        assert_eq!((owns(at(7443)), owns(at(80)), owns(node_port), dirty()), (false, true, false, 1));
        assert_eq!(state.lock().generation, generation + 1);
        let [address, of_node] = &state.left_out()[..] else { panic!("{:?}", state.left_out()) };
        assert_eq!((address.resource.as_str(), address.field.as_str()), ("Service tenant/hostile", "spec.externalIPs"));
        assert!(address.reason.starts_with("192.0.2.1 port 7443/TCP is reserved, "), "{}", address.reason);
        assert_eq!(of_node.field, "spec.ports", "without a Node, the address may be one of this node");

        // The address is no address of the Node, and the replica has reserved it too.
        let (name, addresses) = ("node-1".into(), vec![[192, 0, 2, 2].into()]);
        let node = Node { name, zone: None, pod_cidrs: Vec::new(), addresses, going_away: false };
        let own = |reserved| OwnNode { revision: 1, node: Some(node.clone()), position: None, reserved };
        state.set_node(&own([at(7443)].into()));
        assert_eq!((owns(at(7443)), owns(node_port), state.left_out().len()), (false, true, 0));
        state.depends_on("cp", BTreeSet::new());
        assert!(!owns(at(7443)));
        state.set_policy(NodePolicy { holds_service_addresses: true, ..NodePolicy::default() });
        assert_eq!((owns(at(80)), state.left_out().len()), (false, 1), "the replica does not know the mode");
        dirty();
        state.set_node(&own(BTreeSet::new()));
        assert_eq!((owns(at(7443)), owns(at(80)), dirty()), (true, true, 1));
    }

    /// After a crash, rules in the kernel may give a Service what the agent needs to hear anything.
    #[test]
    fn a_state_from_disk_is_programmed_if_a_service_may_have_taken_the_control_planes_address() {
        let port = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 7443, node_port: 0 };
        let mut service = Service::new(ServiceKey::new("t", "h"), vec![[10, 96, 0, 1].into()], vec![port]);
        service.external_ips = vec![[192, 0, 2, 1].into()];
        let mut held = Held::default();
        let update = StateUpdate { epoch: 1, version: 1, changes: vec![service.into()], ..StateUpdate::default() };
        held.apply(update, &mut Dirty::default());
        let state = AgentState::restored("node-1", Restored { held, may_be_behind: true, ..Restored::default() });
        state.free_reserved();
        assert!(state.is_unconfirmed(), "no Service claims anything that is reserved");
        state.depends_on("cp", [(Protocol::Tcp, ([192, 0, 2, 1], 7443).into())].into());
        assert!(state.is_unconfirmed());
        state.free_reserved();
        assert!(!state.is_unconfirmed());
    }

    /// The agent warns if its own rules lead to its name server.
    #[test]
    fn a_name_server_that_is_a_service_is_found_although_it_is_reserved() {
        let port = ServicePort { name: "".into(), protocol: Protocol::Udp, port: 53, node_port: 0 };
        let key = ServiceKey::new("kube-system", "kube-dns");
        let service = Service::new(key.clone(), vec![[10, 96, 0, 10].into()], vec![port]);
        let state = AgentState::new("node-1");
        state.apply(StateUpdate { epoch: 1, version: 1, changes: vec![service.into()], ..StateUpdate::default() });
        let [server, other] = [10, 11].map(|last| (Protocol::Udp, SocketAddr::from(([10, 96, 0, last], 53))));
        state.depends_on("name servers", [server, other].into());
        assert_eq!(state.owner_of(server), Some((key, [10, 96, 0, 10].into())));
        assert_eq!(state.owner_of(other), None);
    }

    #[test]
    fn signals_come_before_work_in_their_order_and_each_once() {
        let now = Instant::now();
        let pace = Pace { not_before: now, after_failure: None };
        let state = AgentState::new("node-1");
        for wake in [Wake::Requested, Wake::Rules, Wake::Problems, Wake::Interfaces, Wake::Stop, Wake::Stop] {
            state.signal(wake);
        }
        let next = |done| state.lock().next(done, pace, now + Duration::from_secs(30), now);
        for wake in [Wake::Stop, Wake::Interfaces, Wake::Problems] {
            assert_eq!(next(None), Some((wake, now)));
        }
        assert_eq!(next(None), None, "the agent holds no state");
        state.apply(StateUpdate { epoch: 1, version: 1, ..StateUpdate::default() });
        assert_eq!(next(None), Some((Wake::Rules, now)));
        assert_eq!(next(None), Some((Wake::Work, now)), "nothing is programmed that could be verified");
        assert_eq!(next(Some(0)), Some((Wake::Requested, now)), "changes do not delay a request");
        assert_eq!(next(Some(0)), Some((Wake::Work, now)));
        assert_eq!(next(Some(1)), Some((Wake::Verify, now + Duration::from_secs(30))));
    }
}

#[cfg(test)]
mod wait_tests {
    #![allow(clippy::unwrap_used)]
    use std::{sync::mpsc, time::Duration};

    use futures::FutureExt as _;
    use tokio::{runtime::Builder, time::timeout};

    use super::*;

    #[test]
    fn a_wait_misses_no_signal() {
        let state = Arc::new(AgentState::new("node-1"));
        let (seen, next) = mpsc::channel();
        let signaller = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            for _ in 0..10_000 {
                signaller.signal(Wake::Problems);
                next.recv().unwrap();
            }
            signaller.stop();
        });
        let (now, guard) = (Instant::now(), Duration::from_secs(30));
        let pace = Pace { not_before: now, after_failure: None };
        Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
            while timeout(guard, state.wait(None, pace, now + guard)).await.unwrap() == Wake::Problems {
                seen.send(()).unwrap();
            }
        });
        thread.join().unwrap();
    }

    #[tokio::test]
    async fn work_runs_at_once_unless_the_state_is_locked() {
        let state = Arc::new(AgentState::new("node-1"));
        assert_eq!(state.blocking(AgentState::position).now_or_never(), Some(None));
        let locked = state.lock();
        let mut later = Box::pin(state.blocking(AgentState::position));
        assert_eq!(later.as_mut().now_or_never(), None);
        drop(locked);
        assert_eq!(later.await, None);
    }
}
