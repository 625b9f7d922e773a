//! The kernel of the in-memory dataplane, and the functions with which a test observes and controls
//! it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use headgate_core::{NodeFacts, ServiceKey, digest::Digests, forwarding, view::ServicePortView};
use headgate_node_agent::dataplane::{DataplaneError, KernelHandle};

use super::forwarding_of;

/// A call of the dataplane that reached the kernel. Services are written as `namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A full sync wrote a state with these digests for this node.
    Full(Digests, NodeFacts),
    /// A plan for these services was written, from a state with these digests.
    Apply(Vec<String>, Digests),
    /// A search for faulty services examined these services; `None` means all services.
    FindFaults(Option<Vec<String>>),
    /// The table was checked.
    Check,
    /// The table was read for a verification.
    Verify,
    /// The table was removed.
    Cleanup,
}

pub(super) type Table = BTreeMap<Arc<ServiceKey>, Vec<ServicePortView>>;

/// The in-memory kernel. The test reads the calls that the kernel received, and sets the results of
/// later calls. Clones share one kernel.
#[derive(Debug, Clone, Default)]
pub struct Control(Arc<(Mutex<Script>, Condvar)>);

#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) table: Table,
    calls: Vec<Call>,
    /// The number of dumps for verifications of what the kernel forwards, and the tables that they
    /// found, each with the number of the last dump that found it.
    dumps: (usize, Vec<(usize, Table)>),
    failures: VecDeque<DataplaneError>,
    pub(super) verdicts: VecDeque<bool>,
    /// True from [`Control::flush`] until a full sync.
    pub(super) is_flushed: bool,
    held: bool,
    pub(super) degraded: Vec<String>,
    pub(super) rejected: BTreeSet<String>,
    pub(super) quarantined: BTreeSet<Arc<ServiceKey>>,
    pub(super) maintenance_due_at: Option<Instant>,
}

impl Control {
    /// The finished calls in order, including failed calls.
    pub fn calls(&self) -> Vec<Call> {
        self.script().calls.clone()
    }

    /// Makes the next call fail with `error`. Several calls of this function make several following
    /// calls fail, in order.
    pub fn fail_next(&self, error: DataplaneError) {
        self.script().failures.push_back(error);
    }

    /// Makes all following calls succeed, also those that [`Self::fail_next`] made fail.
    pub fn recover(&self) {
        self.script().failures.clear();
    }

    /// Sets the result of the next check: true when the table is intact, which is the default.
    /// Several calls set the results of several following checks, in order.
    pub fn next_verdict(&self, intact: bool) {
        self.script().verdicts.push_back(intact);
    }

    /// Makes the dataplane report `sentence` as a degradation from now on.
    pub fn degrade(&self, sentence: &str) {
        self.script().degraded.push(sentence.to_owned());
    }

    /// Removes a service, as another program would. Checks do not find this, and verifications do.
    pub fn forget(&self, service: &str) {
        self.script().table.retain(|key, _| key.to_string() != service);
    }

    /// Makes the kernel reject `services`, and no others, from now on.
    pub fn reject(&self, services: &[&str]) {
        self.script().rejected = services.iter().map(|service| (*service).to_owned()).collect();
    }

    /// The services that are quarantined.
    pub fn quarantined(&self) -> Vec<String> {
        self.script().quarantined.iter().map(ToString::to_string).collect()
    }

    /// Makes maintenance due now, once.
    pub fn needs_maintenance(&self) {
        self.script().maintenance_due_at = Some(Instant::now());
    }

    /// Makes calls wait in the kernel while `held` is true.
    pub fn hold(&self, held: bool) {
        self.script().held = held;
        self.0.1.notify_all();
    }

    /// Waits until `enough` returns true for the finished calls. Returns false if the wait takes
    /// longer than `guard`.
    #[must_use]
    pub fn wait_for(&self, guard: Duration, enough: impl Fn(&[Call]) -> bool) -> bool {
        let waited = self.0.1.wait_timeout_while(self.script(), guard, |script| !enough(&script.calls));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a verification of what the kernel forwards dumps the table now.
    pub(super) fn note_dump(&self) {
        let mut script = self.script();
        let Script { table, dumps: (count, found), .. } = &mut *script;
        *count += 1;
        match found.last_mut() {
            Some((last, same)) if same == table => *last = *count,
            _ => found.push((*count, table.clone())),
        }
    }

    /// Executes a call in the kernel: waits while calls are held, records the call, and returns the
    /// next error that the test has set.
    pub(super) fn work(&self, call: Call) -> Result<MutexGuard<'_, Script>, DataplaneError> {
        let script = self.0.1.wait_while(self.script(), |script| script.held);
        let mut script = script.unwrap_or_else(PoisonError::into_inner);
        script.calls.push(call);
        self.0.1.notify_all();
        script.failures.pop_front().map_or(Ok(script), Err)
    }
}

/// What only a simulation of whole machines uses.
#[allow(dead_code)]
impl Control {
    /// The number of finished calls.
    pub fn changes(&self) -> usize {
        self.script().calls.len()
    }

    /// Removes a service, or everything, as another program or a boot would. Checks find this
    /// until a full sync.
    pub fn flush(&self, service: Option<&str>) {
        let mut script = self.script();
        script.table.retain(|key, _| service.is_some_and(|service| key.to_string() != service));
        script.is_flushed = true;
    }

    /// The number of dumps for verifications of what the kernel forwards.
    pub fn dumps(&self) -> usize {
        self.script().dumps.0
    }

    /// What the table forwarded in each dump after the first `count`. Equal dumps in a row are one.
    pub fn dumped_since(&self, count: usize) -> Vec<forwarding::Table> {
        let found = &self.script().dumps.1;
        found.iter().filter(|(last, _)| *last > count).map(|(_, table)| forwarding_of(table)).collect()
    }

    /// True from [`Self::flush`] until a full sync.
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        self.script().is_flushed
    }
}

impl KernelHandle for Control {}
