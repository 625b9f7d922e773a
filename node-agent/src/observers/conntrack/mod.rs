//! UDP flows that lead nowhere are deleted from the kernel's connection tracking table, after the
//! rules are in place.
//!
//! What is stale, [`headgate_core::conntrack`] decides. Here it is looked for over netlink,
//! filtered by the kernel, on a thread of its own: however long the table, programming goes on. A
//! pass that fails is tried again until it succeeds, with what changed since.

mod sweep;
pub mod wire;

pub use sweep::{NodeAddresses, SweepError, Swept, sweep};

use std::{
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use headgate_core::{
    Family, State,
    conntrack::{Cleanup, CleanupPlan, Tracker},
    view::NodeFacts,
};
use prometheus_client::metrics::{counter::Counter, family::Family as Labelled, histogram::Histogram};
use tracing::{debug, info, warn};

use crate::{
    backoff::Backoff,
    metric_registry::{AGENT, FamilyLabel, KUBE_PROXY, MetricRegistry, sync_histogram},
    observers::{NodePorts, Observer, Scope},
};

/// What is counted. The first two have kube-proxy's names and meaning.
#[derive(Debug, Clone)]
pub struct ConntrackMetrics {
    duration: Labelled<FamilyLabel, Histogram>,
    deleted: Labelled<FamilyLabel, Counter>,
    failed: Labelled<FamilyLabel, Counter>,
}

impl Default for ConntrackMetrics {
    fn default() -> Self {
        Self {
            duration: Labelled::new_with_constructor(sync_histogram),
            deleted: Labelled::default(),
            failed: Labelled::default(),
        }
    }
}

impl ConntrackMetrics {
    /// Registers all of them.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let labels = "ip_family";
        let mut add = registry.adder(KUBE_PROXY);
        let help = "Time that a pass over the connection tracking table took";
        add.histogram("conntrack_reconciler_sync_duration_seconds", labels, help, self.duration.clone());
        let help = "Stale UDP entries that were deleted from the connection tracking table";
        add.counter("conntrack_reconciler_deleted_entries", labels, help, self.deleted.clone());
        let help = "Passes over the connection tracking table that failed and are tried again";
        registry.adder(AGENT).counter("conntrack_passes_failed", labels, help, self.failed.clone());
    }

    /// Entries deleted so far, both families.
    #[must_use]
    pub fn deleted(&self) -> u64 {
        Family::BOTH.into_iter().map(|family| self.deleted.get_or_create(&FamilyLabel::of(family)).get()).sum()
    }
}

/// The observer that hands stale flows to the thread that deletes them.
#[derive(Debug)]
pub struct ConntrackCleaner {
    tracker: Tracker,
    planned: Option<CleanupPlan>,
    planned_all: bool,
    // A full sync may program a newer state than the one that was planned from: the services that
    // changed meanwhile are in the next step.
    followed_full: bool,
    worker: Worker,
}

impl ConntrackCleaner {
    /// Starts the thread, which works in the network namespace of the caller. `node_ports` says
    /// which of the node's addresses have NodePorts.
    ///
    /// # Errors
    /// The system gives us no thread.
    pub fn start(metrics: ConntrackMetrics, node_ports: NodePorts) -> io::Result<Self> {
        let passes = Passes { metrics, node_ports };
        let worker = Worker::start(move |cleanup| passes.pass(cleanup))?;
        Ok(Self::with(worker))
    }

    fn with(worker: Worker) -> Self {
        Self { tracker: Tracker::default(), planned: None, planned_all: false, followed_full: false, worker }
    }
}

impl Observer for ConntrackCleaner {
    fn plan(&mut self, state: &State, _node: &NodeFacts, scope: Scope<'_>) {
        self.planned_all = matches!(scope, Scope::All);
        self.planned = Some(match scope {
            Scope::All => self.tracker.plan_all(state),
            Scope::Services(services) if self.followed_full => self.tracker.plan_unknown(state, services),
            Scope::Services(services) => self.tracker.plan(state, services),
        });
    }

    fn applied(&mut self) {
        if let Some(plan) = self.planned.take() {
            self.worker.hand_over(self.tracker.commit(plan));
            self.followed_full = self.planned_all;
        }
    }
}

/// The thread, and what it is to do. Ends when dropped, after the pass that it is at.
#[derive(Debug)]
struct Worker {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Inbox {
    inner: Mutex<Orders>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Orders {
    // What came while a pass was made: the pass, should it fail, is corrected by it.
    newer: Cleanup,
    stop: bool,
}

impl Worker {
    /// `pass` is called with what is to be cleaned until it succeeds.
    fn start(pass: impl FnMut(&Cleanup) -> Result<(), SweepError> + Send + 'static) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::default());
        let of_thread = Arc::clone(&inbox);
        let thread = thread::Builder::new().name("conntrack".into()).spawn(move || work(&of_thread, pass))?;
        Ok(Self { inbox, thread: Some(thread) })
    }

    fn hand_over(&self, cleanup: Cleanup) {
        if cleanup.rules().next().is_some() {
            self.inbox.lock().newer.merge_queued(cleanup);
            self.inbox.arrived.notify_one();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.inbox.lock().stop = true;
        self.inbox.arrived.notify_one();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            warn!("the thread that cleans the connection tracking table panicked; this is a defect of the agent");
        }
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is something to do, and not before `not_before`. False means stop.
    fn wait(&self, pending: &mut Cleanup, not_before: Option<Instant>) -> bool {
        let mut orders = self.lock();
        loop {
            if orders.stop {
                return false;
            }
            pending.merge(std::mem::take(&mut orders.newer));
            let pause = not_before.map(|at| at.saturating_duration_since(Instant::now())).unwrap_or_default();
            orders = if pending.is_empty() {
                self.arrived.wait(orders).unwrap_or_else(PoisonError::into_inner)
            } else if pause.is_zero() {
                return true;
            } else {
                self.arrived.wait_timeout(orders, pause).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }
}

fn work(inbox: &Inbox, mut pass: impl FnMut(&Cleanup) -> Result<(), SweepError>) {
    let (mut pending, mut not_before, mut backoff) = (Cleanup::default(), None, Backoff::default());
    while inbox.wait(&mut pending, not_before) {
        not_before = match pass(&pending) {
            Ok(()) => {
                pending = Cleanup::default();
                backoff.reset();
                None
            }
            Err(error) => {
                let pause = backoff.next_pause();
                warn!(%error, attempts = backoff.attempts(), "stale UDP flows may be left; trying again");
                Some(Instant::now() + pause)
            }
        };
    }
}

/// Passes over the kernel's table.
struct Passes {
    metrics: ConntrackMetrics,
    node_ports: NodePorts,
}

impl Passes {
    fn pass(&self, cleanup: &Cleanup) -> Result<(), SweepError> {
        let addresses = NodeAddresses::read(cleanup, &self.node_ports)?;
        let mut result = Ok(());
        for family in Family::BOTH {
            let (mut swept, started) = (Swept::default(), Instant::now());
            let done = sweep(cleanup, family, &addresses, &mut swept);
            self.tell(family, swept, started.elapsed(), done.is_err());
            // The other family gets its turn all the same.
            result = result.and(done);
        }
        result
    }

    fn tell(&self, family: Family, swept: Swept, took: Duration, has_failed: bool) {
        let label = FamilyLabel::of(family);
        if has_failed {
            self.metrics.failed.get_or_create(&label).inc();
        }
        if swept.lists == 0 {
            return;
        }
        self.metrics.duration.get_or_create(&label).observe(took.as_secs_f64());
        self.metrics.deleted.get_or_create(&label).inc_by(swept.deleted);
        let Swept { lists, listed, deleted, incomplete } = swept;
        let took_ms = took.as_millis();
        if deleted > 0 {
            info!(%family, deleted, lists, listed, took_ms, "deleted stale UDP flows");
        } else {
            debug!(%family, lists, listed, took_ms, "no stale UDP flows");
        }
        if incomplete > 0 {
            warn!(%family, "the connection tracking table changed its shape while it was listed; a stale UDP flow may be left");
        }
    }
}

#[cfg(test)]
mod tests;
