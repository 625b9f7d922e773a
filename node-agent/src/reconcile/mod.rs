//! The loop that brings the kernel to the state, on a thread of its own: the kernel's work is
//! synchronous.
//!
//! Nothing is written before the first complete snapshot, or a checked state from disk. A version
//! is reported as programmed when everything up to it is in the kernel. After a failed apply and a
//! pause, everything is compared with the kernel, and what differs is programmed.

pub mod metrics;
mod quarantine;

pub use metrics::{SyncKind, SyncMetrics};

use self::quarantine::Quarantine;

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{Demand, Dirty, Family, ServiceKey, State, iptables::RenderConfig};
use headgate_proto::v1;
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::{
    backoff::{Backoff, Jitter},
    dataplane::{DataplaneError, ErrorKind, FamilyStatistics, Fault, NodeDataplane, Report},
    memory,
    node_inputs::{NodeInputs, NodeSettings, interface_addresses},
    observers::{Observer, Scope},
    progress::{Failure, Programmed, Progress, Target},
    state::{AfterFailure, AgentState, Pace, Wake, Work},
};

/// Something new is tried so long after a failure, or after so many times what the failed attempt
/// took: a kernel that fails for ever is busy with it for a fifth of the time at most, however much
/// changes.
const NEWS_PAUSE: Duration = Duration::from_millis(200);
const NEWS_PAUSE_FACTOR: u32 = 4;
/// After so many looks at the rules that failed, one after the other, everything is programmed
/// anew, which looks by other means. Rules that somebody removed must not stay away for as long as
/// nobody can tell.
const FAILED_LOOKS_BEFORE_FULL_SYNC: u32 = 2;

/// When the loop does what.
#[derive(Debug, Clone)]
pub struct Timing {
    /// Shortest time between the beginnings of two syncs.
    pub min_sync_period: Duration,
    /// Time between verifications.
    pub sync_period: Duration,
    /// Time between two syncs of everything without any reason, as a net below the net: while the
    /// cluster is small.
    pub full_sync_period: Duration,
    /// Pauses after failures.
    pub backoff: Backoff,
    /// Pauses before a service in quarantine is tried again without having changed. Half jitter, so
    /// that the services are not tried all at once.
    pub quarantine: Backoff,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            min_sync_period: Duration::ZERO,
            sync_period: Duration::from_secs(30),
            full_sync_period: Duration::from_secs(3600),
            backoff: Backoff::default(),
            quarantine: Backoff::new(Duration::from_secs(60), Duration::from_secs(3600), Jitter::Half),
        }
    }
}

/// What was taken up and is not in the kernel yet.
#[derive(Debug, Default)]
struct Unfinished {
    dirty: Dirty,
    needs_full: bool,
    /// Services that changed since they were quarantined.
    retried: BTreeSet<Arc<ServiceKey>>,
}

/// The loop. Build it, then give [`Self::run`] a thread.
pub struct Reconciler {
    dataplane: Box<dyn NodeDataplane>,
    observers: Vec<Box<dyn Observer>>,
    shared: Arc<AgentState>,
    metrics: SyncMetrics,
    progress: watch::Sender<Progress>,
    timing: Timing,
    unfinished: Unfinished,
    quarantine: Quarantine,
    failures: Backoff,
    node_settings: NodeSettings,
    inputs: watch::Sender<NodeInputs>,
    /// The node was known when `inputs` were resolved.
    is_node_known: bool,
    done: Option<u64>,
    pace: Pace,
    verify_at: Instant,
    /// Looks at the rules that failed since the last one that succeeded.
    failed_looks: u32,
    /// When everything is to be looked at anew.
    full_sync_at: Instant,
}

/// One step, between planning and applying.
struct Attempt {
    target: Target,
    generation: u64,
    kind: SyncKind,
    job: Job,
}

enum Job {
    /// The state changed, the rules do not.
    Nothing,
    /// Writes what the dataplane has planned.
    Apply,
    /// Looks at the state by itself: the lock is not held while the kernel is read and written.
    Full,
}

impl Reconciler {
    /// A loop that programs `shared` by `dataplane`; what it reaches is seen at the receiver.
    #[must_use]
    pub fn new(
        dataplane: Box<dyn NodeDataplane>,
        shared: Arc<AgentState>,
        metrics: SyncMetrics,
        timing: Timing,
    ) -> (Self, watch::Receiver<Progress>) {
        let (progress, receiver) =
            watch::channel(Progress { status: status(dataplane.as_ref(), &Demand::default()), ..Progress::default() });
        let now = Instant::now();
        let (verify_at, full_sync_at) = (now + timing.sync_period, now + timing.full_sync_period);
        let failures = timing.backoff.clone();
        let unfinished = Unfinished::default();
        let quarantine = Quarantine::new(timing.quarantine.clone());
        let reconciler = Self {
            dataplane,
            observers: Vec::new(),
            shared,
            metrics,
            progress,
            timing,
            unfinished,
            quarantine,
            failures,
            node_settings: NodeSettings::default(),
            inputs: watch::channel(NodeInputs::default()).0,
            is_node_known: false,
            done: None,
            pace: Pace { not_before: now, after_failure: None },
            verify_at,
            failed_looks: 0,
            full_sync_at,
        };
        (reconciler, receiver)
    }

    /// Settings that resolve to different rules as the node and its interfaces change.
    #[must_use]
    pub fn with_node_settings(mut self, settings: NodeSettings) -> Self {
        self.node_settings = settings;
        self
    }

    /// What rules depend on besides the state: as it was for the last sync.
    #[must_use]
    pub fn inputs(&self) -> watch::Receiver<NodeInputs> {
        self.inputs.subscribe()
    }

    /// What is to follow the rules.
    #[must_use]
    pub fn with_observers(mut self, observers: Vec<Box<dyn Observer>>) -> Self {
        self.observers = observers;
        self
    }

    /// Runs until [`AgentState::stop`]. Rules stay in the kernel.
    pub fn run(mut self) {
        self.resolve_inputs();
        self.tell_status();
        if self.shared.is_unconfirmed() {
            self.verify_at = Instant::now();
        }
        loop {
            let due = [self.quarantine.next_due(), self.maintain_at()];
            let verify_at = due.into_iter().flatten().fold(self.verify_at, Instant::min);
            match self.shared.wait(self.done, self.pace, verify_at) {
                Wake::Stop => return,
                Wake::Work => self.sync(),
                Wake::Verify if self.shared.is_unconfirmed() => self.look_before_control_plane(),
                Wake::Verify if self.maintain_at().is_some_and(|due| due <= Instant::now()) => self.maintain(),
                Wake::Verify if Instant::now() < self.verify_at => self.retry(&self.quarantine.due()),
                Wake::Verify => self.verify(),
            }
            self.tell_status();
        }
    }

    fn sync(&mut self) {
        let started = Instant::now();
        if self.unfinished.needs_full || self.shared.needs_full() {
            self.resolve_inputs();
        }
        let Self { dataplane, observers, shared, unfinished, quarantine, .. } = self;
        let Some(attempt) = shared.take(|work| begin(dataplane.as_mut(), observers, work, unfinished, quarantine))
        else {
            return;
        };
        let Attempt { target, generation, kind, job } = attempt;
        let result = match job {
            Job::Nothing => Ok(Report::default()),
            Job::Apply => self.dataplane.apply(),
            Job::Full => self.dataplane.sync_full(&*self.shared),
        };
        self.pace = Pace { not_before: started + self.timing.min_sync_period, after_failure: None };
        self.verify_at = Instant::now() + self.timing.sync_period;
        match result {
            Ok(report) => {
                self.succeeded(target, generation, kind, &report, started.elapsed());
                let retried = std::mem::take(&mut self.unfinished.retried);
                self.retry(&retried);
            }
            Err(error) if error.kind == ErrorKind::Rejected && self.quarantine_rejected(kind, &error) => {
                // Without them everything else goes in at once.
                self.metrics.failed(kind, &error.families);
                self.done = None;
                self.unfinished.needs_full = true;
            }
            Err(error) if error.kind == ErrorKind::PlanAgain => {
                info!("{error}");
                // What was to be done stays to be done, so that whoever follows the rules misses
                // nothing, and is reported with the next step.
                self.plan_again(error.services);
            }
            Err(error) => self.failed(target, generation, kind, started.elapsed(), &error),
        }
    }

    /// Has the next step plan these services as changed.
    fn plan_again(&mut self, services: BTreeSet<Arc<ServiceKey>>) {
        self.unfinished.dirty.services.extend(services);
        self.done = None;
    }

    /// Takes note of what the kernel refuses of services while it takes the rest.
    fn note_deferred(&mut self) {
        let Some(parts) = self.dataplane.deferred() else { return };
        for Fault { service, family, reason } in self.quarantine.set_partial(parts) {
            self.metrics.service_refusals.inc();
            warn!(%service, %family, reason, "the kernel rejects a part of a service; the rest of it is programmed");
        }
    }

    /// Finds the services at fault and sets them aside. False when there are none, or they cannot
    /// be found: then the step has failed as a whole.
    fn quarantine_rejected(&mut self, kind: SyncKind, error: &DataplaneError) -> bool {
        let suspects = (kind == SyncKind::Partial).then_some(&self.unfinished.dirty.services);
        let refused = match self.dataplane.find_faults(&*self.shared, suspects, &error.families) {
            Ok(refused) => refused,
            Err(search) => {
                warn!(%error, %search, "the kernel rejects some rules, and the search for their services failed");
                return false;
            }
        };
        for Fault { service, family, reason } in &refused {
            warn!(%service, %family, reason, "the kernel rejects the rules of a service; it is quarantined and keeps its last good rules, if any");
        }
        let before = self.quarantine.all().len();
        self.metrics.service_refusals.inc_by(self.quarantine.add(refused) as u64);
        let all = self.quarantine.all();
        self.dataplane.set_quarantined(&all);
        // Whatever is set aside already cannot be what this step failed for.
        all.len() > before
    }

    /// Tries services again whose rules were refused. Those that are taken now are programmed by
    /// the next sync.
    fn retry(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        if services.is_empty() {
            return;
        }
        match self.dataplane.find_faults(&*self.shared, Some(services), &[]) {
            Ok(refused) => {
                let still: BTreeSet<_> = refused.iter().map(|refused| Arc::clone(&refused.service)).collect();
                self.quarantine.renew(refused);
                let taken: BTreeSet<_> = services.difference(&still).cloned().collect();
                if !taken.is_empty() {
                    self.quarantine.release(&taken);
                    self.unfinished.dirty.services.extend(taken);
                    self.done = None;
                }
                self.dataplane.set_quarantined(&self.quarantine.all());
                self.tell_refused();
            }
            Err(error) => {
                warn!(%error, "quarantined services cannot be tried again now");
                self.quarantine.postpone(services);
            }
        }
    }

    /// Publishes which services are refused. Those that are not any more are told of with the step
    /// that programs them.
    fn tell_refused(&self) {
        self.metrics.services_refused.set(i64::try_from(self.quarantine.len()).unwrap_or(i64::MAX));
        let now = self.quarantine.rejections();
        self.progress.send_if_modified(|progress| {
            let is_new = self.unfinished.dirty.is_empty() && *progress.refused != *now;
            if is_new {
                progress.refused = now.into();
            }
            is_new
        });
    }

    fn succeeded(&mut self, target: Target, generation: u64, kind: SyncKind, report: &Report, took: Duration) {
        for warning in &report.warnings {
            warn!("{warning}");
        }
        if self.failures.attempts() > 0 {
            info!(version = target.version, attempts = self.failures.attempts(), "programmed after failures");
        }
        self.done = Some(generation);
        let retried = std::mem::take(&mut self.unfinished.retried);
        self.unfinished = Unfinished { retried, ..Unfinished::default() };
        if kind == SyncKind::Full {
            self.full_sync_at = Instant::now() + self.timing.full_sync_period;
        }
        self.observers.iter_mut().for_each(|observer| observer.applied());
        self.failures.reset();
        self.note_deferred();
        let statistics = self.dataplane.statistics();
        let triggers = self.shared.backlog().succeeded(&families(&statistics));
        self.metrics.succeeded(kind, took, report, &statistics, &triggers);
        self.metrics.version_programmed.set(target.version);
        let Report { services_planned, objects_written, .. } = *report;
        let programmed = Some(Programmed { target, generation, took, services_planned, objects_written });
        let refused = self.quarantine.rejections();
        let counts_packets = statistics.iter().any(|family| family.statistics.counts_packets);
        self.metrics.counts_packets.set(counts_packets.into());
        self.metrics.services_refused.set(i64::try_from(self.quarantine.len()).unwrap_or(i64::MAX));
        self.progress.send_modify(|progress| {
            progress.programmed = programmed;
            progress.failure = None;
            if *progress.refused != *refused {
                progress.refused = refused.into();
            }
        });
        if kind == SyncKind::Full {
            // After the report, so that no ACK waits for it.
            memory::give_back();
        }
    }

    fn failed(&mut self, target: Target, generation: u64, kind: SyncKind, took: Duration, error: &DataplaneError) {
        self.done = None;
        // Planning has moved the dataplane's idea of the kernel on, whatever became of the plan:
        // the same services planned again would come out as nothing to do. Only a full sync looks
        // at the kernel, and it writes no more than what differs.
        self.unfinished.needs_full = true;
        let now = Instant::now();
        let (pause, with_news_at) = match error.kind {
            ErrorKind::Retry | ErrorKind::PlanAgain | ErrorKind::NeedsFullSync | ErrorKind::Rejected => {
                (self.failures.next_pause(), now + NEWS_PAUSE.max(took * NEWS_PAUSE_FACTOR))
            }
            // Only a change to the machine helps: look again as rarely as we ever do.
            ErrorKind::Fatal | ErrorKind::Unavailable => {
                let _ = self.failures.next_pause();
                (self.failures.longest(), now + self.failures.longest())
            }
        };
        let attempts = self.failures.attempts();
        error!(%error, version = target.version, attempts, pause_ms = pause.as_millis(), "could not program the kernel");
        self.pace.after_failure = Some(AfterFailure { generation, retry_at: now + pause, with_news_at });
        self.shared.backlog().failed(&error.families, &families(&self.dataplane.statistics()));
        self.metrics.failed(kind, &error.families);
        let failure = Some(Failure { target, error: error.message.clone(), attempts });
        self.progress.send_modify(|progress| progress.failure = failure);
    }

    /// The state is from disk. Rules that an earlier run left in the kernel are at least as new,
    /// since the disk follows the kernel: they stay until a control plane has answered. Where they
    /// are missing, as after a reboot, the state from disk is programmed at once.
    fn look_before_control_plane(&mut self) {
        self.verify_at = Instant::now() + self.timing.sync_period;
        match self.dataplane.has_rules() {
            Ok(true) => {
                info!("the rules of the last run are in place, and stay as they are until a control plane answers");
                self.shared.backlog().found_in_place();
                let Self { shared, observers, .. } = self;
                shared.with_facts(|state, node| {
                    observers.iter_mut().for_each(|observer| observer.restored(state, node));
                });
                return;
            }
            Ok(false) => {
                info!("rules are missing: programming the last good state, without waiting for a control plane");
            }
            Err(error) => {
                self.metrics.verifications_failed.inc();
                warn!(%error, "could not look at the rules: programming the last good state");
            }
        }
        self.shared.confirm();
    }

    /// Publishes what the dataplane says of itself, when that has changed.
    fn tell_status(&self) {
        let demand = self.shared.with_state(|state| *state.demand());
        let mut now = status(self.dataplane.as_ref(), &demand);
        now.degraded.extend(self.node_settings.complaints(self.is_node_known, &self.inputs.borrow(), &demand));
        self.metrics.degraded_modes.set(i64::try_from(now.degraded.len()).unwrap_or(i64::MAX));
        self.progress.send_if_modified(|progress| {
            let is_new = progress.status != now;
            if is_new {
                now.degraded.iter().for_each(|sentence| warn!("{sentence}"));
                progress.status = now;
            }
            is_new
        });
    }

    /// A look at all rules, not only at those whose absence shows that somebody flushed tables. It
    /// reads the kernel, so it is left out in large clusters, as kube-proxy does.
    fn is_full_sync_due(&self) -> bool {
        Instant::now() >= self.full_sync_at
            && self.shared.with_state(State::endpoint_count) <= RenderConfig::CLASSIC_MAX_ENDPOINTS
    }

    /// Resolves what depends on the node and its interfaces, and has everything programmed anew
    /// when rules change by it.
    fn resolve_inputs(&mut self) {
        let needs_interfaces = self.node_settings.needs_interfaces() || self.dataplane.needs_interfaces();
        let interfaces = if needs_interfaces { interface_addresses() } else { Ok(Vec::new()) };
        let interfaces = match interfaces {
            Ok(interfaces) => interfaces,
            Err(error) => {
                warn!(%error, "could not read the addresses of the interfaces; NodePorts stay on those that were there");
                return;
            }
        };
        let node = self.shared.node();
        let inputs = self.node_settings.resolve(node.as_ref(), &interfaces);
        self.is_node_known = node.is_some();
        if inputs == *self.inputs.borrow() {
            return;
        }
        info!(?inputs, "node addresses or pod ranges changed");
        if self.dataplane.configure(&inputs) {
            self.unfinished.needs_full = true;
            self.done = None;
        }
        self.inputs.send_replace(inputs);
    }

    /// When the dataplane has maintenance to do: not while it is about to put everything in order.
    fn maintain_at(&mut self) -> Option<Instant> {
        self.dataplane.maintain_at().filter(|_| !self.unfinished.needs_full)
    }

    fn maintain(&mut self) {
        match self.dataplane.maintain() {
            Ok(()) => {}
            Err(error) if error.kind == ErrorKind::PlanAgain => {
                info!("{error}");
                self.plan_again(error.services);
            }
            Err(error) => {
                warn!(%error, "programming everything anew");
                self.unfinished.needs_full = true;
                self.done = None;
            }
        }
        self.note_deferred();
        self.tell_refused();
    }

    fn verify(&mut self) {
        self.verify_at = Instant::now() + self.timing.sync_period;
        self.resolve_inputs();
        let verified = self.dataplane.verify();
        self.failed_looks = if verified.is_err() { self.failed_looks + 1 } else { 0 };
        let needs_full = match verified {
            Ok(true) => self.is_full_sync_due(),
            Ok(false) => {
                warn!("somebody else removed or changed our rules; programming everything anew");
                self.metrics.repairs.inc();
                true
            }
            Err(error) => {
                self.metrics.verifications_failed.inc();
                warn!(%error, failed = self.failed_looks, "could not verify the rules");
                self.failed_looks >= FAILED_LOOKS_BEFORE_FULL_SYNC
            }
        };
        if needs_full {
            self.failed_looks = 0;
            self.unfinished.needs_full = true;
            self.done = None;
        }
    }
}

/// The families that are programmed; none means both.
fn families(statistics: &[FamilyStatistics]) -> Vec<Family> {
    statistics.iter().map(|statistics| statistics.family).collect()
}

fn status(dataplane: &dyn NodeDataplane, demand: &Demand) -> v1::AgentStatus {
    v1::AgentStatus { backend: dataplane.name().to_owned(), degraded: dataplane.degraded(demand) }
}

/// Takes the work up, together with what an earlier attempt left unfinished, and plans it.
fn begin(
    dataplane: &mut dyn NodeDataplane,
    observers: &mut [Box<dyn Observer>],
    work: Work<'_>,
    unfinished: &mut Unfinished,
    quarantine: &Quarantine,
) -> Attempt {
    unfinished.retried.extend(quarantine.among(&work.dirty.services));
    unfinished.dirty.merge(work.dirty);
    unfinished.needs_full |= work.needs_full;
    let scope = if unfinished.needs_full { Scope::All } else { Scope::Services(&unfinished.dirty.services) };
    observers.iter_mut().for_each(|observer| observer.plan(work.state, work.facts, scope));
    let (kind, job) = if unfinished.needs_full {
        unfinished.dirty = Dirty::default();
        (SyncKind::Full, Job::Full)
    } else if unfinished.dirty.is_empty() {
        (SyncKind::Nothing, Job::Nothing)
    } else {
        dataplane.plan(work.state, work.facts, &unfinished.dirty);
        (SyncKind::Partial, Job::Apply)
    };
    Attempt { target: work.target, generation: work.generation, kind, job }
}

#[cfg(test)]
mod tests;
