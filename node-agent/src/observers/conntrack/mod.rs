//! Deletes stale UDP flows from the kernel's connection tracking table, after the rules are in
//! place.
//!
//! [`headgate_core::conntrack`] decides which flows are stale. This module lists the UDP flows over
//! netlink, and deletes the stale flows. This work runs in a separate thread, so that a large table
//! does not delay programming. A failed pass is repeated until it succeeds. Each repetition
//! includes the changes that arrived in the meantime.

mod sweep;
pub mod wire;

pub use sweep::{NodeAddresses, SweepError, Swept, sweep};

use std::{
    io,
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use headgate_core::{
    Family, NodeFacts, Protocol, State,
    conntrack::{Cleanup, CleanupPlan, Tracker},
    forwarding::Table,
};
use prometheus_client::metrics::{counter::Counter, family::Family as Labelled, histogram::Histogram};
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::{
    backoff::Backoff,
    interfaces::Interfaces,
    metric_registry::{AGENT, KUBE_PROXY, Labels, MetricRegistry, family_label, sync_histogram},
    node_inputs::NodeInputs,
    observers::{Observer, Scope},
};

/// Metrics of the cleanup. `duration` and `deleted` have kube-proxy's names and meanings.
#[derive(Debug, Clone)]
pub struct ConntrackMetrics {
    duration: Labelled<Labels<1>, Histogram>,
    deleted: Labelled<Labels<1>, Counter>,
    failed: Labelled<Labels<1>, Counter>,
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
    /// Registers all metrics of the cleanup.
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
}

/// The observer that passes cleanup rules to the thread that deletes stale flows.
#[derive(Debug)]
pub struct ConntrackCleaner {
    tracker: Tracker,
    planned: Option<CleanupPlan>,
    worker: Worker,
}

impl ConntrackCleaner {
    /// Starts the thread, which works in the network namespace of the caller. `inputs` provides the
    /// addresses that answer NodePorts, and `interfaces` provides all addresses of the node.
    /// `earlier` is the state of the last run, so that flows to what was removed since end, too.
    ///
    /// # Errors
    /// The operating system cannot start a thread.
    pub fn start(
        metrics: ConntrackMetrics,
        inputs: watch::Receiver<NodeInputs>,
        interfaces: Interfaces,
        earlier: &State,
    ) -> io::Result<Self> {
        let passes = Passes { metrics, inputs, interfaces };
        let mut cleaner = Self::with(Worker::start(move |cleanup| passes.pass(cleanup))?);
        cleaner.tracker.remember(earlier);
        Ok(cleaner)
    }

    fn with(worker: Worker) -> Self {
        Self { tracker: Tracker::default(), planned: None, worker }
    }
}

impl Observer for ConntrackCleaner {
    fn found(&mut self, tables: &[Table]) {
        let entries = tables.iter().flat_map(|table| &table.entries);
        let udp = entries.filter(|(frontend, _)| frontend.protocol() == Protocol::Udp);
        self.tracker.remember_rules(udp.map(|(frontend, entry)| (*frontend, entry.endpoints().into_iter().collect())));
    }

    fn plan(&mut self, state: &State, _node: &NodeFacts, scope: Scope<'_>) {
        self.planned = Some(match scope {
            Scope::All => self.tracker.plan_all(state),
            Scope::Services(services) => self.tracker.plan(state, services),
        });
    }

    fn applied(&mut self) {
        if let Some(plan) = self.planned.take() {
            self.worker.hand_over(self.tracker.commit(plan));
        }
    }
}

/// The thread that deletes stale flows. Dropping the worker stops the thread after the current
/// pass.
#[derive(Debug)]
struct Worker {
    cleanups: Option<mpsc::Sender<Cleanup>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread. The thread calls `pass` for each cleanup, and repeats the call until the
    /// pass succeeds.
    fn start(pass: impl FnMut(&Cleanup) -> Result<(), SweepError> + Send + 'static) -> io::Result<Self> {
        let (cleanups, arrived) = mpsc::channel();
        let thread = thread::Builder::new().name("conntrack".into()).spawn(move || work(&arrived, pass))?;
        Ok(Self { cleanups: Some(cleanups), thread: Some(thread) })
    }

    fn hand_over(&self, cleanup: Cleanup) {
        let is_needed = cleanup.rules().next().is_some();
        if let Some(cleanups) = self.cleanups.as_ref().filter(|_| is_needed) {
            // Sending fails only after a panic of the thread, which `drop` reports.
            let _ = cleanups.send(cleanup);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.cleanups = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            warn!("the thread that cleans the connection tracking table panicked; this is a defect of the agent");
        }
    }
}

fn work(arrived: &mpsc::Receiver<Cleanup>, mut pass: impl FnMut(&Cleanup) -> Result<(), SweepError>) {
    let mut pending = Pending::default();
    loop {
        let newer = match pending.due_at {
            Some(at) => arrived.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => arrived.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match newer {
            Ok(newer) => pending.add(newer, Instant::now()),
            Err(RecvTimeoutError::Timeout) => pending.done(pass(&pending.cleanup), Instant::now()),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// The cleanup that the next pass makes, and its time.
#[derive(Debug, Default)]
struct Pending {
    cleanup: Cleanup,
    /// `None` if there is nothing to clean up.
    due_at: Option<Instant>,
    backoff: Backoff,
}

impl Pending {
    fn add(&mut self, newer: Cleanup, now: Instant) {
        self.cleanup.merge(newer);
        self.due_at = (!self.cleanup.is_empty()).then(|| self.due_at.unwrap_or(now));
    }

    fn done(&mut self, result: Result<(), SweepError>, now: Instant) {
        match result {
            Ok(()) => *self = Self::default(),
            Err(error) => {
                self.due_at = Some(now + self.backoff.next_pause());
                let attempts = self.backoff.attempts();
                warn!(%error, attempts, "stale UDP flows may be left; the cleanup is tried again");
            }
        }
    }
}

/// Makes passes over the connection tracking table, and records each pass in metrics and log.
struct Passes {
    metrics: ConntrackMetrics,
    inputs: watch::Receiver<NodeInputs>,
    interfaces: Interfaces,
}

impl Passes {
    fn pass(&self, cleanup: &Cleanup) -> Result<(), SweepError> {
        let interfaces = self.interfaces.borrow().clone();
        let addresses = NodeAddresses::of(cleanup, &self.inputs.borrow(), interfaces.as_deref())?;
        let mut result = Ok(());
        for family in Family::BOTH {
            let (mut swept, started) = (Swept::default(), Instant::now());
            let done = sweep(cleanup, family, &addresses, &mut swept);
            self.record(family, swept, started.elapsed(), done.is_err());
            // A failure in one family does not prevent the pass over the other family.
            result = result.and(done);
        }
        result
    }

    fn record(&self, family: Family, swept: Swept, took: Duration, has_failed: bool) {
        let label = family_label(family);
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
            warn!(%family, "the kernel interrupted every listing of the connection tracking table; a stale UDP flow may be left");
        }
    }
}

#[cfg(test)]
mod tests;
