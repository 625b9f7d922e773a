//! Follows the notifications of nftables on a thread, so that changes by other programs are
//! repaired at once. The kernel leaves out changes of this agent.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use headgate_core::Family;
use nftables_netlink::{Changed, Monitor, NftablesError, Observed, Presence, TableName};
use tokio::sync::watch;
use tracing::warn;

use super::{
    super::{WakeLoop, metrics::DataplaneMetrics},
    elements::is_filled_by_proxy,
    layout::{picks::is_clients_map, table_name},
};
use crate::{
    backoff::{Backoff, Jitter},
    interfaces::readiness,
};

/// Buffer of unread notifications. If it overflows, the agent compares its tables with the kernel.
const RECEIVE_BUFFER_BYTES: u32 = 1 << 20;
/// How long the thread gathers further changes before it wakes the reconcile loop.
const GATHER: Duration = Duration::from_millis(20);
/// The pauses after each wake. A program that changes the tables in a loop makes the pauses grow.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30), Jitter::None);
/// After this time without a change, the pauses begin again with the shortest one.
const QUIET: Duration = Duration::from_secs(60);

/// What the thread has seen since the last full sync.
#[derive(Debug, Default)]
struct Seen {
    /// The first change of each family's table, as a sentence.
    changes: HashMap<Family, String>,
    /// The families whose notifications may have been lost.
    lost: Vec<Family>,
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the family and a sentence, if another program made this change and rules may be missing.
type Sign = fn(&Changed) -> Option<(Family, String)>;

/// Counts the beginnings and the ends of full syncs, so that those who follow the kernel can tell
/// the syncs of this agent from the changes of other programs.
#[derive(Debug, Clone, Default)]
pub(in crate::dataplane) struct Syncs(Arc<AtomicU64>);

impl Syncs {
    /// Notes that a full sync begins or ends.
    pub(in crate::dataplane) fn note(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Odd during a full sync.
    pub(in crate::dataplane) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether no full sync ran since the count was `before`.
    pub(in crate::dataplane) fn are_none_since(&self, before: u64) -> bool {
        before.is_multiple_of(2) && self.count() == before
    }
}

/// The thread, and what it has seen. The thread ends when this value is dropped.
#[derive(Debug)]
pub(in crate::dataplane) struct Watch {
    seen: Arc<Mutex<Seen>>,
    _stop: watch::Sender<()>,
}

impl Watch {
    /// Starts the thread in the network namespace of the caller, for the changes that `sign` turns
    /// into sentences. The changes of the connection `own_port` do not count. Without such a
    /// connection, `syncs` tells when notifications are lost because of a sync of this agent.
    /// Errors: the kernel does not accept the subscription, or the system cannot start the thread.
    pub(in crate::dataplane) fn start(
        own_port: Option<u32>,
        syncs: Syncs,
        sign: Sign,
        wake: WakeLoop,
        metrics: DataplaneMetrics,
    ) -> Result<Self, io::Error> {
        let seen = Arc::<Mutex<Seen>>::default();
        let (stop, mut stopped) = watch::channel(());
        let follower = WatchThread { seen: Arc::clone(&seen), own_port, syncs, sign, wake, metrics };
        let monitor = follower.open().map_err(io::Error::other)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name("nftables".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped.changed() => {}
                    () = follower.run(monitor) => {}
                }
            });
        })?;
        Ok(Self { seen, _stop: stop })
    }

    /// The first change that another program made to the table of a family since the last call of
    /// [`Self::forget`], as a sentence.
    pub(super) fn foreign_change(&self, family: Family) -> Option<String> {
        lock(&self.seen).changes.get(&family).cloned()
    }

    /// Whether notifications about the table of a family may have been lost since the last call.
    pub(super) fn take_lost(&self, family: Family) -> bool {
        let mut seen = lock(&self.seen);
        let before = seen.lost.len();
        seen.lost.retain(|lost| *lost != family);
        seen.lost.len() < before
    }

    /// Forgets what was seen about a family. The caller makes a full sync of the family afterwards.
    pub(super) fn forget(&self, family: Family) {
        lock(&self.seen).changes.remove(&family);
        self.take_lost(family);
    }
}

struct WatchThread {
    seen: Arc<Mutex<Seen>>,
    own_port: Option<u32>,
    syncs: Syncs,
    sign: Sign,
    wake: WakeLoop,
    metrics: DataplaneMetrics,
}

impl WatchThread {
    fn open(&self) -> Result<Monitor, NftablesError> {
        match self.own_port {
            Some(port) => Monitor::open_without(port, RECEIVE_BUFFER_BYTES),
            None => Monitor::open(RECEIVE_BUFFER_BYTES),
        }
    }

    async fn run(self, monitor: Monitor) {
        let (mut opened, mut failures) = (Ok(monitor), Backoff::default());
        loop {
            let Err(error) = self.follow(opened, &mut failures).await;
            let pause = failures.next_pause();
            warn!(%error, pause_ms = pause.as_millis(), "cannot follow the changes of nftables");
            tokio::time::sleep(pause).await;
            opened = self.open();
            self.lose();
        }
    }

    /// Wakes the reconcile loop after each change.
    async fn follow(
        &self,
        opened: Result<Monitor, NftablesError>,
        failures: &mut Backoff,
    ) -> Result<std::convert::Infallible, io::Error> {
        let mut monitor = opened.map_err(io::Error::other)?;
        let readable = readiness(&monitor)?;
        let (mut pauses, mut last_wake, mut syncs) = (PAUSES, Instant::now(), self.syncs.count());
        if !lock(&self.seen).lost.is_empty() {
            (self.wake)();
        }
        loop {
            readable.readable().await?.clear_ready();
            if !self.read(&mut monitor, &mut syncs).map_err(io::Error::other)? {
                continue;
            }
            failures.reset();
            tokio::time::sleep(GATHER).await;
            self.read(&mut monitor, &mut syncs).map_err(io::Error::other)?;
            if last_wake.elapsed() > QUIET {
                pauses.reset();
            }
            last_wake = Instant::now();
            (self.wake)();
            tokio::time::sleep(pauses.next_pause()).await;
        }
    }

    /// Reads what is there. Returns true if another program changed our tables, or may have.
    /// `syncs` is the count of full syncs at which everything was read.
    fn read(&self, monitor: &mut Monitor, syncs: &mut u64) -> Result<bool, NftablesError> {
        let mut is_changed = false;
        loop {
            match monitor.read()? {
                Observed::Nothing => {
                    *syncs = self.syncs.count();
                    return Ok(is_changed);
                }
                Observed::Lost => {
                    self.lose();
                    is_changed |= self.syncs.are_none_since(*syncs);
                }
                Observed::Events(events) => {
                    for (family, sentence) in events.iter().filter_map(|event| (self.sign)(&event.what)) {
                        self.metrics.foreign_changes.inc();
                        lock(&self.seen).changes.entry(family).or_insert(sentence);
                        is_changed = true;
                    }
                }
            }
        }
    }

    fn lose(&self) {
        self.metrics.notifications_lost.inc();
        lock(&self.seen).lost = Family::BOTH.into();
    }
}

/// The family whose table changed, and the change as a sentence.
pub(super) fn foreign_change(change: &Changed) -> Option<(Family, String)> {
    let verb = |presence: Presence| match presence {
        Presence::Present => "added or changed",
        Presence::Absent => "deleted",
    };
    let (table, presence, what): (&TableName, Presence, String) = match change {
        Changed::Table(presence, table) => (&table.name, *presence, "the table".to_owned()),
        Changed::Chain(presence, chain) => (&chain.table, *presence, format!("the chain {} of the table", chain.name)),
        Changed::Rule { presence, table, chain, .. } => {
            (table, *presence, format!("a rule of the chain {chain} of the table"))
        }
        Changed::Set(presence, set) if !is_clients_map(&set.name) => {
            (&set.table, *presence, format!("the set {} of the table", set.name))
        }
        // Rules add and delete the clients with ClientIP affinity.
        Changed::Elements { presence, table, set, elements } if !is_clients_map(set) && !is_filled_by_proxy(set) => {
            let keys: Vec<String> = elements.iter().take(3).map(|element| element.key.to_string()).collect();
            (table, *presence, format!("elements ({}) of the set {set} of the table", keys.join(", ")))
        }
        _ => return None,
    };
    let family = Family::BOTH.into_iter().find(|family| table_name(*family) == *table)?;
    Some((family, format!("another program {} {what} {table}", verb(presence))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_sync_explains_changes_while_it_runs_and_afterwards() {
        let syncs = Syncs::default();
        let before = syncs.count();
        assert!(syncs.are_none_since(before));
        syncs.note();
        let during = syncs.count();
        assert!(!syncs.are_none_since(before) && !syncs.are_none_since(during));
        syncs.note();
        assert!(!syncs.are_none_since(before) && !syncs.are_none_since(during));
        assert!(syncs.are_none_since(syncs.count()));
    }
}
