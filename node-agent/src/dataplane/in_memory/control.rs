//! The kernel of the dataplane in memory, and how a test sees and changes what happens to it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use headgate_core::{
    ServiceKey,
    digest::Digests,
    view::{NodeFacts, ServicePortView},
};

use super::super::{DataplaneError, Fault, KernelHandle};

/// What was asked of the dataplane. Services are `namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A full sync wrote a state with these digests, on this node.
    Full(Digests, NodeFacts),
    /// A plan for these services, of a state with these digests, was applied.
    Apply(Vec<String>, Digests),
    /// The services at fault were searched among these, or among all.
    FindFaults(Option<Vec<String>>),
    /// The table was checked.
    Check,
    /// The table was removed.
    Cleanup,
}

pub(super) type Table = BTreeMap<Arc<ServiceKey>, Vec<ServicePortView>>;

/// The kernel, and the test's side: what happened, and what is to happen. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct Control(Arc<(Mutex<Script>, Condvar)>);

#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) table: Table,
    calls: Vec<Call>,
    failures: VecDeque<DataplaneError>,
    pub(super) verdicts: VecDeque<bool>,
    held: bool,
    pub(super) degraded: Vec<String>,
    pub(super) rejected: BTreeSet<String>,
    pub(super) quarantined: BTreeSet<Arc<ServiceKey>>,
    pub(super) deferred: Option<Vec<Fault>>,
}

impl Control {
    /// The calls that have ended, failed ones included, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.script().calls.clone()
    }

    /// Lets the next call that reaches the kernel fail; called several times, the next several.
    pub fn fail_next(&self, error: DataplaneError) {
        self.script().failures.push_back(error);
    }

    /// Lets the next check answer so; without it the answer is true.
    pub fn next_verdict(&self, intact: bool) {
        self.script().verdicts.push_back(intact);
    }

    /// From now on the dataplane says that it runs below what was asked for.
    pub fn degrade(&self, sentence: &str) {
        self.script().degraded.push(sentence.to_owned());
    }

    /// From now on the kernel rejects these services, and no others.
    pub fn reject(&self, services: &[&str]) {
        self.script().rejected = services.iter().map(|service| (*service).to_owned()).collect();
    }

    /// The services that are quarantined.
    #[must_use]
    pub fn quarantined(&self) -> Vec<String> {
        self.script().quarantined.iter().map(ToString::to_string).collect()
    }

    /// From now on the kernel rejects these parts of services, and takes the rest.
    pub fn defer(&self, parts: Vec<Fault>) {
        self.script().deferred = Some(parts);
    }

    /// While set, the kernel's work does not end.
    pub fn hold(&self, held: bool) {
        self.script().held = held;
        self.0.1.notify_all();
    }

    /// Waits until `enough` is true of the calls; false after `guard`.
    #[must_use]
    pub fn wait_for(&self, guard: Duration, enough: impl Fn(&[Call]) -> bool) -> bool {
        let waited = self.0.1.wait_timeout_while(self.script(), guard, |script| !enough(&script.calls));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel's side of a call.
    pub(super) fn work(&self, call: Call) -> Result<MutexGuard<'_, Script>, DataplaneError> {
        let script = self.0.1.wait_while(self.script(), |script| script.held);
        let mut script = script.unwrap_or_else(PoisonError::into_inner);
        script.calls.push(call);
        self.0.1.notify_all();
        script.failures.pop_front().map_or(Ok(script), Err)
    }
}

impl KernelHandle for Control {}
