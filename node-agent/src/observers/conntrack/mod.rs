//! Deletes stale UDP flows ([`headgate_core::conntrack`]) over netlink, after the rules are in
//! place, on a thread of its own. A failed pass is repeated, with the changes that arrived
//! meanwhile.

#[cfg(test)]
mod tests;
pub mod wire;

use std::{
    collections::HashSet,
    io,
    net::{IpAddr, Ipv4Addr},
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use headgate_core::{
    Family, NodeFacts, Protocol, State,
    conntrack::{Cleanup, CleanupPlan, Tracker},
    forwarding::Table,
    iptables::NodePortAddresses,
};
use headgate_netlink::{BATCH_REQUESTS, Connection, Dumped, NetlinkError, Refusal, Request};
use prometheus_client::metrics::{counter::Counter, family::Family as Labelled, histogram::Histogram};
use tokio::sync::watch;
use tracing::{debug, info, warn};

use super::{Observer, Scope};
use crate::{
    backoff::Backoff,
    interfaces::Interfaces,
    metric_registry::{AGENT, FAMILY_LABELS, KUBE_PROXY, Labels, metrics, sync_histogram},
    node_inputs::NodeInputs,
};
use wire::UdpEntry;

metrics! {
    /// Metrics of the cleanup.
    pub struct ConntrackMetrics {}
    KUBE_PROXY {
        duration: Labelled<Labels<1>, Histogram> = "conntrack_reconciler_sync_duration_seconds" ["ip_family"],
            "Time that a pass over the connection tracking table took", Labelled::new_with_constructor(sync_histogram);
        deleted: Labelled<Labels<1>, Counter> = "conntrack_reconciler_deleted_entries" ["ip_family"],
            "Stale UDP entries that were deleted from the connection tracking table";
    }
    AGENT {
        failed: Labelled<Labels<1>, Counter> = "conntrack_passes_failed" ["ip_family"],
            "Passes over the connection tracking table that failed and are tried again";
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
    /// Errors: the operating system cannot start a thread.
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

/// The thread that deletes stale flows. Dropping it stops the thread after a pass.
#[derive(Debug)]
struct Worker {
    cleanups: Option<mpsc::Sender<Cleanup>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread. It calls `pass` for each cleanup, until the pass succeeds.
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
        let label = FAMILY_LABELS[family as usize];
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

// One pass over the connection tracking table: deletes a family's stale UDP entries.

/// Maximum number of attempts to get one list that the kernel does not interrupt. After the last
/// attempt, the pass continues with the entries that it has read.
const ATTEMPTS: u32 = 5;

/// Why a pass was not finished.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// A netlink request for a list failed.
    #[error("cannot read the connection tracking table: {0}")]
    List(#[source] NetlinkError),
    /// A netlink batch of deletions failed as a whole.
    #[error("cannot delete stale UDP entries of the connection tracking table: {0}")]
    Delete(#[source] NetlinkError),
    /// The kernel rejected some deletions.
    #[error("the kernel did not delete {count} stale UDP entries of the connection tracking table: {last}")]
    Kept {
        /// Number of entries that stay.
        count: u64,
        /// The error of the last entry that stays.
        last: Refusal,
    },
    /// The addresses of the node's interfaces, which NodePorts need, are not known yet.
    #[error("the addresses of the node's interfaces are not known yet")]
    Addresses,
}

/// Counts of one pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Lists that were requested.
    pub lists: u64,
    /// Entries that the kernel listed.
    pub listed: u64,
    /// Entries deleted.
    pub deleted: u64,
    /// Lists that stayed incomplete, because the kernel interrupted every attempt.
    pub incomplete: u64,
}

/// The node's own addresses that answer NodePorts.
#[derive(Debug, Default)]
pub struct NodeAddresses {
    own: HashSet<IpAddr>,
}

impl NodeAddresses {
    /// Selects the addresses if the cleanup has rules for NodePorts. Otherwise the result is empty.
    /// `interfaces` are the addresses of the node's interfaces, or `None` while they are not known.
    /// Errors: [`SweepError::Addresses`] if the addresses of the interfaces are needed but not
    /// known yet.
    pub fn of(cleanup: &Cleanup, inputs: &NodeInputs, interfaces: Option<&[IpAddr]>) -> Result<Self, SweepError> {
        if !cleanup.needs_node_addresses() {
            return Ok(Self::default());
        }
        let mut own = HashSet::new();
        for family in Family::BOTH {
            match inputs.node_ports(family) {
                NodePortAddresses::Only(addresses) => own.extend(addresses),
                NodePortAddresses::All => {
                    let all = interfaces.ok_or(SweepError::Addresses)?;
                    own.extend(all.iter().filter(|address| Family::of(**address) == family));
                    if family == Family::V4 {
                        own.insert(LOCALHOST);
                    }
                }
            }
        }
        Ok(Self { own })
    }

    fn contains(&self, address: IpAddr) -> bool {
        // All of 127.0.0.0/8 is local, although `lo` has only 127.0.0.1.
        let is_loopback = address.is_ipv4() && address.is_loopback();
        self.own.contains(&address) || (is_loopback && self.own.contains(&LOCALHOST))
    }
}

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Deletes the stale flows of a family, and adds to the counts in `swept`.
/// Errors: stale flows may be left. `swept` counts the deleted flows. The caller should retry.
pub fn sweep(
    cleanup: &Cleanup,
    family: Family,
    addresses: &NodeAddresses,
    swept: &mut Swept,
) -> Result<(), SweepError> {
    if !cleanup.concerns(family) {
        return Ok(());
    }
    let mut deletions = Deletions::open()?;
    for attempt in 1..=ATTEMPTS {
        let mut result = Ok(());
        swept.lists += 1;
        let dumped = Connection::open(libc::NETLINK_NETFILTER).and_then(|mut connection| {
            connection.dump(wire::list(family), |kind, payload| {
                let Some(entry) = (kind == wire::MESSAGE_NEW).then(|| UdpEntry::parse(payload)).flatten() else {
                    return;
                };
                swept.listed += 1;
                let (original, answered_by) = (entry.original_destination, entry.reply_source);
                if result.is_ok() && cleanup.is_stale(original, answered_by, |address| addresses.contains(address)) {
                    // Batches are sent while the list is read, so that memory stays bounded.
                    result = deletions.push(entry.delete(), swept);
                }
            })
        });
        result?;
        match dumped {
            Ok(Dumped::Whole) => break,
            Ok(Dumped::Interrupted) => swept.incomplete += u64::from(attempt == ATTEMPTS),
            Err(error) if error.is_transient() && attempt < ATTEMPTS => {}
            Err(error) => return Err(SweepError::List(error)),
        }
    }
    deletions.flush(swept)?;
    deletions.kept.map_or(Ok(()), |(count, last)| Err(SweepError::Kept { count, last }))
}

struct Deletions {
    connection: Connection,
    waiting: Vec<Request>,
    kept: Option<(u64, Refusal)>,
}

impl Deletions {
    fn open() -> Result<Self, SweepError> {
        let connection = Connection::open(libc::NETLINK_NETFILTER).map_err(SweepError::Delete)?;
        Ok(Self { connection, waiting: Vec::new(), kept: None })
    }

    fn push(&mut self, request: Request, swept: &mut Swept) -> Result<(), SweepError> {
        self.waiting.push(request);
        if self.waiting.len() < BATCH_REQUESTS { Ok(()) } else { self.flush(swept) }
    }

    fn flush(&mut self, swept: &mut Swept) -> Result<(), SweepError> {
        let requests = std::mem::take(&mut self.waiting);
        swept.deleted += requests.len() as u64;
        let kept = &mut self.kept;
        let result = self.connection.execute(requests, |_, refusal| {
            swept.deleted = swept.deleted.saturating_sub(1);
            // ENOENT: the entry expired meanwhile, or an interrupted list contained it, too.
            if refusal.code != libc::ENOENT {
                let count = kept.as_ref().map_or(0, |(count, _)| *count) + 1;
                *kept = Some((count, refusal));
            }
        });
        result.map_err(SweepError::Delete)
    }
}
