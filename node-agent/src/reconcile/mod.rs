//! The loop that programs the state into the kernel, on a thread of its own, because calls to the
//! kernel block. It writes nothing before it has a complete snapshot, or a state from disk, which
//! it programs only if rules are missing or after a replica has brought it up to date. A version is
//! reported when everything up to it is in the kernel. A failed step is followed by a pause and a
//! full sync.

pub mod metrics;
mod shadow;
mod steps;
#[cfg(test)]
mod tests;
mod verification;

use std::{
    collections::BTreeSet,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{Demand, Dirty, Family, ServiceKey};
use headgate_proto::v1;
use tokio::sync::watch;
use tracing::{debug, error, info, warn};

use crate::{
    backoff::{Backoff, Jitter},
    dataplane::{
        DataplaneError, Degradation, ErrorKind, FamilyStatistics, Fault, Finding, NodeDataplane, Report, standby,
        with_names,
    },
    interfaces::Interfaces,
    memory,
    node_inputs::{NodeInputs, NodeSettings},
    observers::{Observer, Scope},
    state::{
        AfterFailure, AgentState, Pace, Wake, Work,
        progress::{Failure, Programmed, Progress, Target},
    },
};
use steps::{Quarantine, Reached, Steps};

pub use metrics::{SyncKind, SyncMetrics};

/// Shortest pause between a failed attempt and an attempt that includes newer changes.
const CHANGE_PAUSE: Duration = Duration::from_millis(200);
/// [`CHANGE_PAUSE`] is at least this many times the duration of the failed attempt, so that a
/// kernel that rejects everything is busy for at most a fifth of the time.
const CHANGE_PAUSE_FACTOR: u32 = 4;
/// Number of consecutive failed checks after which the loop makes a full sync without one.
const FAILED_CHECKS_BEFORE_FULL_SYNC: u32 = 2;
/// Number of consecutive verifications of the rules without a result after which the loop makes a
/// full sync. It needs no result, because it writes whatever differs.
const UNDECIDED_BEFORE_FULL_SYNC: u32 = 2;

/// Periods and pauses of the loop.
#[derive(Debug, Clone)]
pub struct Timing {
    /// Shortest time between the starts of two syncs.
    pub min_sync_period: Duration,
    /// Time between two checks of the rules.
    pub sync_period: Duration,
    /// Shortest time between two verifications of the rules. Their cost extends this time.
    pub rules_period: Duration,
    /// Pauses after failures.
    pub backoff: Backoff,
    /// Pauses before an unchanged service in quarantine is tried again. Jitter spreads them.
    pub quarantine: Backoff,
    /// Returns the present time.
    pub clock: fn() -> Instant,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            min_sync_period: Duration::ZERO,
            sync_period: Duration::from_secs(30),
            rules_period: Duration::ZERO,
            backoff: Backoff::default(),
            quarantine: Backoff::new(Duration::from_secs(60), Duration::from_secs(3600), Jitter::Half),
            clock: || tokio::time::Instant::now().into_std(),
        }
    }
}

/// The pause after a failed look for the rules of an earlier run.
const EARLIER_RUN_RETRY: Duration = Duration::from_secs(1);

/// Work that the loop has taken from the state and that is not in the kernel yet.
#[derive(Debug, Default)]
struct Unfinished {
    dirty: Dirty,
    steps: Steps,
    needs_full: bool,
    /// See [`Failure::is_lost`].
    is_lost: bool,
    /// Quarantined services that changed, so that the loop must try them again.
    to_retry: BTreeSet<Arc<ServiceKey>>,
}

/// The loop. Create it with [`Self::new`], and call [`Self::run`] in a separate thread.
pub struct Reconciler {
    pub(crate) dataplane: Box<dyn NodeDataplane>,
    /// The loop calls them at each step.
    pub(crate) observers: Vec<Box<dyn Observer>>,
    shared: Arc<AgentState>,
    metrics: SyncMetrics,
    progress: watch::Sender<Progress>,
    timing: Timing,
    unfinished: Unfinished,
    quarantine: Quarantine,
    failures: Backoff,
    /// Settings whose meaning depends on the Node and on the interfaces of the machine.
    pub(crate) node_settings: NodeSettings,
    /// The addresses of the node's interfaces. Signal [`Wake::Interfaces`] after a change.
    pub(crate) interfaces: Interfaces,
    /// Another service proxy that works on the node beside this agent. The loop reports it at its
    /// next step.
    pub(crate) beside: watch::Receiver<Option<String>>,
    inputs: watch::Sender<NodeInputs>,
    /// True if the Node was known when `inputs` were resolved.
    is_node_known: bool,
    /// The generation of the state that the last sync programmed. `None` requests another sync.
    done: Option<u64>,
    pace: Pace,
    check_at: Instant,
    /// Number of failed checks since the last successful check.
    failed_checks: u32,
    /// When the next verification of the rules may begin.
    verify_rules_at: Instant,
    /// True if the last verification of the rules began earlier, because notifications were lost.
    was_early: bool,
    /// Number of verifications of the rules, and of losses of notifications, since a verification
    /// had a result and since the last full sync.
    undecided: u32,
    /// True while the rules are verified.
    is_verifying: bool,
    pauses: verification::Pauses,
    /// In standby: the changes that the other proxy has not programmed.
    waits: shadow::Waits,
    /// What syncs have programmed since a verification of the rules read the kernel. `None` if
    /// anything may have changed since then.
    programmed_meanwhile: Option<Dirty>,
    /// True if the first sync tells the observers which rules it found. This takes as long as a
    /// verification, so it is only for an agent that does not know the state of the last run.
    pub(crate) has_unknown_rules: bool,
    summary: Summary,
}

impl Reconciler {
    /// Returns a loop that programs `shared` with `dataplane`, and a receiver of its progress.
    pub fn new(
        dataplane: Box<dyn NodeDataplane>,
        shared: Arc<AgentState>,
        metrics: SyncMetrics,
        timing: Timing,
    ) -> (Self, watch::Receiver<Progress>) {
        metrics.set_mode(dataplane.name(), dataplane.reason());
        let (progress, receiver) = watch::channel(Progress {
            status: status(dataplane.as_ref(), &Demand::default()),
            mode_reason: dataplane.reason().map(Into::into),
            ..Progress::default()
        });
        let now = (timing.clock)();
        let (check_at, verify_rules_at) = (now + timing.sync_period, now + timing.rules_period);
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
            interfaces: watch::channel(None).1,
            beside: watch::channel(None).1,
            inputs: watch::channel(NodeInputs::default()).0,
            is_node_known: false,
            done: None,
            pace: Pace { not_before: now, after_failure: None },
            check_at,
            failed_checks: 0,
            verify_rules_at,
            was_early: false,
            undecided: 0,
            is_verifying: false,
            pauses: verification::Pauses::default(),
            waits: shadow::Waits::default(),
            programmed_meanwhile: None,
            has_unknown_rules: false,
            summary: Summary::default(),
        };
        (reconciler, receiver)
    }

    /// True if rules depend on the addresses of the node's interfaces.
    pub fn needs_interfaces(&self) -> bool {
        self.node_settings.needs_interfaces() || self.dataplane.needs_interfaces()
    }

    /// The inputs that rules need in addition to the state, as the loop last resolved them.
    pub fn inputs(&self) -> watch::Receiver<NodeInputs> {
        self.inputs.subscribe()
    }

    /// Runs until [`AgentState::stop`]. The rules stay in the kernel.
    pub fn run(mut self) {
        // The runtime is only for the waits: the steps block.
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_time().build() {
            Ok(runtime) => runtime,
            Err(error) => return error!(%error, "the reconcile loop cannot wait"),
        };
        self.begin();
        loop {
            let wake = runtime.block_on(self.shared.wait(self.done, self.pace, self.times().first()));
            if !self.step(wake) {
                return;
            }
        }
    }

    /// Like [`Self::run`], as a task of the caller's runtime, for a dataplane that does not block.
    pub async fn follow(mut self) {
        self.begin();
        loop {
            let wake = self.shared.wait(self.done, self.pace, self.times().first()).await;
            if !self.step(wake) {
                return;
            }
        }
    }

    fn begin(&mut self) {
        let shared = Arc::clone(&self.shared);
        self.dataplane.follow(Arc::new(move || shared.signal(Wake::Rules)), self.metrics.dataplane.clone());
        if let Some(proxy) = self.dataplane.proxy() {
            let shared = Arc::clone(&self.shared);
            proxy.follow_problems(Arc::new(move || shared.try_signal(Wake::Problems)));
        }
        self.resolve_inputs();
        self.publish_status();
        if self.shared.is_unconfirmed() {
            self.check_at = self.now();
        }
    }

    /// Does what is due after `wake`. Returns false at the end.
    fn step(&mut self, wake: Wake) -> bool {
        let now = self.now();
        match due(wake, self.shared.is_unconfirmed(), self.times(), now) {
            Due::Stop => return false,
            Due::Publish => {}
            Due::Inputs => self.resolve_inputs(),
            Due::Sync => {
                self.sync();
                // Changes that arrive all the time must not delay what is due by time.
                if !self.unfinished.needs_full && self.times().first() <= self.now() {
                    return self.step(Wake::Verify);
                }
            }
            Due::EarlierRun => self.check_rules_of_earlier_run(),
            Due::Check => self.check(),
            Due::VerifyTable => self.verify_table(),
            Due::Look => self.look(),
            Due::Maintain => self.maintain(now),
            Due::Retry => self.retry(&self.quarantine.due(now)),
        }
        self.publish_status();
        self.summary.log(self.now());
        true
    }

    fn now(&self) -> Instant {
        (self.timing.clock)()
    }

    /// True if another proxy programs the node.
    fn is_standby(&self) -> bool {
        self.dataplane.name() == standby::NAME
    }

    fn times(&self) -> Times {
        let Self { check_at, quarantine, summary, waits, .. } = self;
        let (retry, log) = (quarantine.next_due(), summary.due_at());
        let look = if self.is_standby() { waits.due_at() } else { None };
        Times { check: *check_at, maintain: self.maintain_at(), retry, log, look }
    }

    fn sync(&mut self) {
        let started = self.now();
        if self.unfinished.needs_full || self.shared.needs_full() {
            self.resolve_inputs();
        }
        let Self { dataplane, observers, shared, unfinished, quarantine, .. } = self;
        if mem::take(&mut self.has_unknown_rules) {
            match dataplane.decode() {
                Ok(tables) => observers.iter_mut().for_each(|observer| observer.found(&tables)),
                Err(error) => info!(%error, "the rules of the last run are unknown"),
            }
        }
        let attempt = shared.take(|work| begin(dataplane.as_mut(), observers, work, unfinished, quarantine, started));
        let Some((reached, kind)) = attempt else { return };
        let result = match kind {
            SyncKind::Nothing => Ok(Report::default()),
            SyncKind::Partial => self.dataplane.apply(),
            // The dataplane locks the state itself, for a few services at a time.
            SyncKind::Full => self.dataplane.sync_full(&*self.shared),
        };
        self.pace = Pace { not_before: started + self.timing.min_sync_period, after_failure: None };
        self.programmed_meanwhile =
            self.programmed_meanwhile.take().filter(|_| kind != SyncKind::Full && result.is_ok());
        if let Some(programmed) = &mut self.programmed_meanwhile {
            programmed.merge(self.unfinished.steps.part.clone());
        }
        if kind == SyncKind::Partial && self.is_standby() {
            let services = self.unfinished.steps.part.services.clone();
            let since = self.shared.backlog().taken_since().unwrap_or(started);
            self.note_changed(&services, since);
        }
        let now = self.now();
        match result {
            Ok(report) => {
                self.succeeded(reached, kind, &report, now - started);
                let to_retry = mem::take(&mut self.unfinished.to_retry);
                self.retry(&to_retry);
            }
            Err(error) if error.kind == ErrorKind::Rejected && self.quarantine_rejected(kind, &error) => {
                // Program all other services at once, without the quarantined services.
                self.metrics.failed(kind, &error.families);
                self.done = None;
                self.unfinished.needs_full = true;
            }
            Err(error) if error.kind == ErrorKind::PlanAgain => {
                info!("{error}");
                // The work stays unfinished. The next step repeats the work and reports it, so that
                // observers miss no change.
                self.plan_again(error.services);
            }
            Err(error) => self.failed(reached, kind, now - started, &error),
        }
    }

    /// Makes the next step plan these services as changed.
    fn plan_again(&mut self, services: BTreeSet<Arc<ServiceKey>>) {
        self.unfinished.dirty.services.extend(services);
        self.done = None;
    }

    /// Records the services that the kernel accepts in part.
    fn record_deferred(&mut self) {
        let Some(parts) = self.dataplane.deferred() else { return };
        for Fault { service, family, reason } in self.quarantine.set_partial(parts) {
            self.metrics.service_rejections.inc();
            warn!(%service, %family, reason, "the kernel rejects a part of a service; the rest of the service is programmed");
        }
    }

    /// Finds the services at fault and quarantines them. Returns false if the search fails or finds
    /// no new service: the step has then failed.
    fn quarantine_rejected(&mut self, kind: SyncKind, error: &DataplaneError) -> bool {
        let suspects = (kind == SyncKind::Partial).then_some(&self.unfinished.steps.part.services);
        let faults = match self.dataplane.find_faults(&*self.shared, suspects, &error.families) {
            Ok(faults) => faults,
            Err(search) => {
                warn!(%error, %search, "the kernel rejects some rules, and the search for their services failed");
                return false;
            }
        };
        for Fault { service, family, reason } in &faults {
            warn!(%service, %family, reason, "the kernel rejects the rules of a service; it is quarantined and keeps its last good rules, if any");
        }
        let before = self.quarantine.all().len();
        self.metrics.service_rejections.inc_by(self.quarantine.add(faults, self.now()) as u64);
        let all = self.quarantine.all();
        self.dataplane.set_quarantined(&all);
        // The step did not contain services that were in quarantine already, so these services
        // cannot be the reason for its failure.
        all.len() > before
    }

    /// Tries quarantined services again. The next sync programs those that the kernel now accepts.
    fn retry(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        if services.is_empty() {
            return;
        }
        // The search may write chains of these services.
        self.programmed_meanwhile = None;
        match self.dataplane.find_faults(&*self.shared, Some(services), &[]) {
            Ok(faults) => {
                let rejected: BTreeSet<_> = faults.iter().map(|fault| Arc::clone(&fault.service)).collect();
                self.quarantine.renew(faults, self.now());
                let accepted: BTreeSet<_> = services.difference(&rejected).cloned().collect();
                if !accepted.is_empty() {
                    self.quarantine.release(&accepted);
                    self.unfinished.dirty.services.extend(accepted);
                    self.done = None;
                }
                self.dataplane.set_quarantined(&self.quarantine.all());
                self.publish_rejections();
            }
            Err(error) => {
                warn!(%error, "could not try quarantined services again");
                self.quarantine.postpone(services, self.now());
            }
        }
    }

    fn publish_rejections(&self) {
        self.progress.send_if_modified(|progress| self.set_rejections(progress));
    }

    /// Writes the rejected services into `progress`. Returns true if the list changed. While
    /// changes wait, no service leaves the list: its rules must be in the kernel first.
    fn set_rejections(&self, progress: &mut Progress) -> bool {
        self.metrics.services_rejected.set(i64::try_from(self.quarantine.len()).unwrap_or(i64::MAX));
        let mut now = self.quarantine.rejections();
        if !self.unfinished.dirty.is_empty() {
            let rejected: BTreeSet<String> = now.iter().map(|one| one.resource.clone()).collect();
            let earlier = progress.rejections.iter().filter(|one| !rejected.contains(&one.resource));
            now.extend(earlier.cloned());
        }
        now.sort_by(|one, other| one.resource.cmp(&other.resource));
        let is_new = *progress.rejections != *now;
        if is_new {
            progress.rejections = now.into();
        }
        is_new
    }

    /// Records a step that succeeded at `now`, and publishes what the kernel has.
    fn succeeded(&mut self, now: Reached, kind: SyncKind, report: &Report, took: Duration) {
        for warning in &report.warnings {
            warn!("{warning}");
        }
        if self.progress.borrow().failure.is_some() {
            info!(version = now.target.version, attempts = self.failures.attempts(), "programmed after failures");
            self.failures.reset();
        }
        let Unfinished { dirty, steps, needs_full, is_lost, .. } = &mut self.unfinished;
        let (is_complete, ended) = steps.succeeded(dirty, report);
        (*needs_full, *is_lost) = (false, false);
        let is_settled = dirty.is_empty() && !steps.has_rest();
        self.done = is_settled.then_some(now.generation);
        if is_complete {
            self.observers.iter_mut().for_each(|observer| observer.applied());
        }
        self.record_deferred();
        let statistics = self.dataplane.statistics();
        let reached = if is_settled { Some(now) } else { ended };
        let triggers = if is_settled { self.shared.backlog().succeeded(&families(&statistics)) } else { Vec::new() };
        self.metrics.succeeded(kind, took, report, &statistics, &triggers);
        self.summary.add(now.target.version, report, took);
        let Some(Reached { target, generation, at }) = reached else {
            // The rest of the round follows at once.
            self.pace.not_before = self.now();
            return;
        };
        self.shared.backlog().advanced(at);
        self.metrics.version_programmed.set(target.version);
        let Report { services_planned, objects_written, .. } = *report;
        let programmed = Some(Programmed { target, generation, took, services_planned, objects_written });
        let counts_packets = statistics.iter().any(|family| family.statistics.counts_packets);
        self.metrics.counts_packets.set(counts_packets.into());
        let left_out = self.shared.left_out();
        self.progress.send_modify(|progress| {
            progress.programmed = programmed;
            progress.failure = None;
            if *progress.left_out != *left_out {
                progress.left_out = left_out.into();
            }
            self.set_rejections(progress);
        });
        if kind == SyncKind::Full {
            // A full sync reads more than a check.
            self.check_at = self.now() + self.timing.sync_period;
            self.undecided = 0;
            // The progress is published first, so that no ACK waits for this call.
            memory::give_back();
        }
    }

    fn failed(&mut self, at: Reached, kind: SyncKind, took: Duration, error: &DataplaneError) {
        let Reached { target, generation, .. } = at;
        self.done = None;
        // The dataplane's record already includes the failed plan, so planning again would give
        // nothing. A full sync reads the kernel.
        self.unfinished.needs_full = true;
        let now = self.now();
        let (pause, retry_changed_at) = match error.kind {
            ErrorKind::Retry | ErrorKind::PlanAgain | ErrorKind::NeedsFullSync | ErrorKind::Rejected => {
                (self.failures.next_pause(), now + CHANGE_PAUSE.max(took * CHANGE_PAUSE_FACTOR))
            }
            // Only a change on the machine helps, so the longest pause applies.
            ErrorKind::Fatal | ErrorKind::Unavailable => {
                // This call counts the attempt.
                let _ = self.failures.next_pause();
                (self.failures.longest(), now + self.failures.longest())
            }
        };
        let attempts = self.failures.attempts();
        error!(%error, version = target.version, attempts, pause_ms = pause.as_millis(), "could not program the kernel");
        self.pace.after_failure = Some(AfterFailure { generation, retry_at: now + pause, retry_changed_at });
        self.shared.backlog().failed(&error.families, &families(&self.dataplane.statistics()));
        self.metrics.failed(kind, &error.families);
        self.progress.send_modify(|progress| {
            let programmed = progress.programmed.as_ref().map(|programmed| programmed.target);
            let is_repair =
                |programmed: Target| programmed.epoch == target.epoch && target.version <= programmed.version;
            self.unfinished.is_lost |= programmed.is_some_and(is_repair);
            let is_lost = self.unfinished.is_lost;
            progress.failure = Some(Failure { target, is_lost, error: error.message.clone(), attempts });
        });
    }

    /// Decides what to do with a state from disk before a control plane has answered. Rules of an
    /// earlier run are at least as new as this state, and stay. If rules are missing, as after a
    /// reboot, the state is programmed at once.
    fn check_rules_of_earlier_run(&mut self) {
        self.check_at = self.now() + self.timing.sync_period;
        match self.dataplane.check() {
            Ok(Finding::Intact | Finding::Unknown) => {
                info!(
                    "the rules of the last run are in place, and the agent does not change them until a control plane answers"
                );
                self.shared.backlog().found_in_place();
                let Self { shared, observers, .. } = self;
                shared.with_facts(|state, node| {
                    observers.iter_mut().for_each(|observer| observer.restored(state, node));
                });
                return;
            }
            Ok(Finding::Changed(sentence)) => {
                info!(
                    "rules are missing ({sentence}); programming the last good state without waiting for a control plane"
                );
            }
            Err(error) => {
                self.metrics.verifications_failed.inc();
                warn!(%error, "could not find out whether the rules of the last run are in place; the agent looks again in a second, and changes no rules until a control plane answers");
                // The rules may be newer than the state.
                self.check_at = self.now() + EARLIER_RUN_RETRY;
                return;
            }
        }
        self.shared.program_unconfirmed();
    }

    /// Publishes the name of the dataplane and the problems that the operator has to fix, if the
    /// name or the problems changed.
    fn publish_status(&self) {
        let demand = self.shared.with_state(|state| *state.demand());
        let mut now = status(self.dataplane.as_ref(), &demand);
        let unchecked = self.shared.unchecked().into_iter();
        let unchecked = unchecked.map(|(reason, services)| Degradation { sentence: reason.to_owned(), services });
        now.degraded.extend(unchecked.map(with_names));
        now.degraded.extend(self.node_settings.complaints(self.is_node_known, &self.inputs.borrow(), &demand));
        now.degraded.extend(self.beside.borrow().as_ref().map(|other| {
            format!("{other} runs on this node, and its rules and those of Headgate may both take effect: stop {other}, or start the agent with --on-other-proxy=yield")
        }));
        self.metrics.degraded_modes.set(i64::try_from(now.degraded.len()).unwrap_or(i64::MAX));
        self.progress.send_if_modified(|progress| {
            let is_new = progress.status != now;
            if is_new {
                let known = &progress.status.degraded;
                now.degraded.iter().filter(|new| !known.contains(new)).for_each(|sentence| warn!("{sentence}"));
                progress.status = now;
            }
            is_new
        });
    }

    /// Resolves the settings that depend on the Node and on the interfaces of the machine. Requests
    /// a full sync if rules depend on the changed inputs.
    fn resolve_inputs(&mut self) {
        let interfaces = if self.needs_interfaces() { self.interfaces.borrow().clone() } else { Some([].into()) };
        // Until the addresses are known, the inputs stay as they are.
        let Some(interfaces) = interfaces else { return };
        let node = self.shared.node();
        let inputs = self.node_settings.resolve(node.as_ref(), &interfaces);
        self.is_node_known = node.is_some();
        if inputs == *self.inputs.borrow() {
            return;
        }
        info!(addresses_of_interfaces = inputs.interfaces.len(), "node addresses or pod ranges changed");
        debug!(?inputs, "the new node addresses and pod ranges");
        if self.dataplane.configure(&inputs) {
            self.unfinished.needs_full = true;
            self.done = None;
        }
        self.shared.set_dialled(Arc::clone(&inputs.dialled));
        self.inputs.send_replace(inputs);
    }

    /// The time of the dataplane's next maintenance. `None` while none is pending, while a full
    /// sync is, which does the same work, and while the rules of an earlier run stay.
    fn maintain_at(&self) -> Option<Instant> {
        let is_off = self.unfinished.needs_full || self.shared.is_unconfirmed();
        self.dataplane.maintain_at().filter(|_| !is_off)
    }

    fn maintain(&mut self, now: Instant) {
        self.programmed_meanwhile = None;
        match self.dataplane.maintain(now) {
            Ok(()) => {}
            Err(error) if error.kind == ErrorKind::PlanAgain => {
                info!("{error}");
                self.plan_again(error.services);
            }
            Err(error) => {
                warn!(%error, "maintenance of the rules failed; making a full sync");
                self.repair();
            }
        }
        self.record_deferred();
        self.publish_rejections();
    }

    /// Looks for signs that somebody removed rules. If it is time, compares all rules and verifies
    /// what the kernel forwards. Lost notifications bring the comparison forward, once per pause.
    fn check(&mut self) {
        self.check_at = self.now() + self.timing.sync_period;
        let checked = self.dataplane.check();
        self.failed_checks = if checked.is_err() { self.failed_checks + 1 } else { 0 };
        match checked {
            Ok(Finding::Changed(sentence)) => {
                warn!("{sentence}; another program removed or changed Headgate's rules; making a full sync");
                self.metrics.repairs.inc();
                self.repair();
            }
            Ok(Finding::Unknown) if self.is_verifying || self.done.is_none() => self.repair(),
            Ok(_) if self.is_verifying => {}
            Ok(sign) => {
                let (is_unknown, is_due) = (sign == Finding::Unknown, self.verify_rules_at <= self.now());
                self.undecided += u32::from(is_unknown);
                if is_due || (is_unknown && !self.was_early) {
                    self.was_early = !is_due;
                    self.verify_rules();
                }
                if self.is_table_due() {
                    self.verify_table();
                }
            }
            Err(error) => {
                self.metrics.verifications_failed.inc();
                warn!(%error, failed = self.failed_checks, "could not check the rules");
                if self.failed_checks >= FAILED_CHECKS_BEFORE_FULL_SYNC {
                    self.failed_checks = 0;
                    self.repair();
                }
            }
        }
    }

    /// Makes the next sync a full sync, because the kernel may lack programmed rules.
    fn repair(&mut self) {
        self.unfinished.needs_full = true;
        self.unfinished.is_lost = true;
        self.done = None;
    }
}

/// The families that the dataplane programs. An empty list means both families.
fn families(statistics: &[FamilyStatistics]) -> Vec<Family> {
    statistics.iter().map(|statistics| statistics.family).collect()
}

fn status(dataplane: &dyn NodeDataplane, demand: &Demand) -> v1::AgentStatus {
    v1::AgentStatus { backend: dataplane.name().to_owned(), degraded: dataplane.degraded(demand), verified: None }
}

/// Plans a step of new work and of the work that earlier steps left unfinished.
fn begin(
    dataplane: &mut dyn NodeDataplane,
    observers: &mut [Box<dyn Observer>],
    work: Work<'_>,
    unfinished: &mut Unfinished,
    quarantine: &mut Quarantine,
    at: Instant,
) -> (Reached, SyncKind) {
    let Work { state, facts, dirty: changed, target, generation, .. } = work;
    let (now, Unfinished { dirty, steps, to_retry, needs_full, .. }) = (Reached { target, generation, at }, unfinished);
    to_retry.extend(quarantine.among(&changed.services));
    *needs_full |= work.needs_full;
    if *needs_full {
        // The changed services may be gone.
        quarantine.weigh(state, state.entries().map(|(key, _)| key).chain(&dirty.services).chain(&changed.services));
        (*dirty, *steps) = (Dirty::default(), Steps::default());
        observers.iter_mut().for_each(|observer| observer.plan(state, facts, Scope::All));
        return (now, SyncKind::Full);
    }
    quarantine.weigh(state, &changed.services);
    dirty.merge(changed);
    steps.choose(dirty, state, dataplane.objects_at_once(), now);
    observers.iter_mut().for_each(|observer| observer.plan(state, facts, Scope::Services(&steps.part.services)));
    if dirty.is_empty() && !steps.has_rest() {
        return (now, SyncKind::Nothing);
    }
    dataplane.plan(state, facts, &steps.part);
    (now, SyncKind::Partial)
}

// Says in the log what was programmed, without a line for each change.

/// The shortest time between two lines.
const PERIOD: Duration = Duration::from_secs(10);

/// What syncs have written since the last line.
#[derive(Debug, Default)]
struct Summary {
    version: u64,
    syncs: u64,
    services: u64,
    objects: u64,
    took: Duration,
    last_line: Option<Instant>,
}

impl Summary {
    /// Adds a sync that succeeded, if it wrote something.
    fn add(&mut self, version: u64, report: &Report, took: Duration) {
        if report.objects_written > 0 {
            self.version = version;
            self.syncs += 1;
            self.services += u64::from(report.services_planned);
            self.objects += u64::from(report.objects_written);
            self.took += took;
        }
    }

    /// When the next line is due. `None` if there is nothing to say, or no line was written yet:
    /// the loop calls [`Self::log`] after each sync, which writes the first line at once.
    fn due_at(&self) -> Option<Instant> {
        self.last_line.filter(|_| self.syncs > 0).map(|at| at + PERIOD)
    }

    /// Writes the line, if it is due. Then [`Self::due_at`] is later than `now`.
    fn log(&mut self, now: Instant) {
        let Self { version, syncs, services, objects, took, last_line } = *self;
        if syncs > 0 && last_line.is_none_or(|at| at + PERIOD <= now) {
            info!(version, syncs, services, objects, took_ms = took.as_millis(), "programmed");
            *self = Self { last_line: Some(now), ..Self::default() };
        }
    }
}

// What the loop does next, as a function of the state's signals and the time.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    /// End.
    Stop,
    /// Only publish what changed, and write the line of the log that is due.
    Publish,
    /// Resolve the node's inputs again.
    Inputs,
    /// Program changes.
    Sync,
    /// Find out whether the rules of an earlier run are in place.
    EarlierRun,
    /// Check the rules.
    Check,
    /// Verify what the kernel forwards.
    VerifyTable,
    /// In standby: see whether the rules of the other proxy agree with changes.
    Look,
    /// The dataplane's work that is due.
    Maintain,
    /// Try quarantined services again.
    Retry,
}

/// When work is due that no signal announces.
#[derive(Debug, Clone, Copy)]
struct Times {
    check: Instant,
    maintain: Option<Instant>,
    retry: Option<Instant>,
    log: Option<Instant>,
    look: Option<Instant>,
}

impl Times {
    /// The earliest of these times.
    fn first(&self) -> Instant {
        [self.maintain, self.retry, self.log, self.look].into_iter().flatten().fold(self.check, Instant::min)
    }
}

/// Decides what the loop does at `now` after `wake`. `is_unconfirmed` is true while the rules of an
/// earlier run must stay.
fn due(wake: Wake, is_unconfirmed: bool, times: Times, now: Instant) -> Due {
    match wake {
        Wake::Stop => Due::Stop,
        Wake::Interfaces => Due::Inputs,
        Wake::Problems => Due::Publish,
        Wake::Work => Due::Sync,
        Wake::Requested => Due::VerifyTable,
        Wake::Rules | Wake::Verify if is_unconfirmed => Due::EarlierRun,
        Wake::Rules => Due::Check,
        Wake::Verify => {
            let Times { check, maintain, retry, look, .. } = times;
            let times = [(maintain, Due::Maintain), (look, Due::Look), (Some(check), Due::Check), (retry, Due::Retry)];
            let first = times.into_iter().find(|(at, _)| at.is_some_and(|at| at <= now));
            first.map_or(Due::Publish, |(_, due)| due)
        }
    }
}

#[cfg(test)]
mod schedule_tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_due_depends_on_the_wake_and_the_times() {
        let now = Instant::now();
        let (past, future) = (now.checked_sub(Duration::from_secs(1)).unwrap(), now + Duration::from_secs(1));
        let times = |check, maintain, retry| Times { check, maintain, retry, log: Some(past), look: None };
        let nothing = times(future, None, None);
        let all = times(past, Some(past), Some(past));
        for (wake, is_unconfirmed, times, expected) in [
            (Wake::Stop, true, all, Due::Stop),
            (Wake::Interfaces, true, all, Due::Inputs),
            (Wake::Problems, true, all, Due::Publish),
            (Wake::Work, false, all, Due::Sync),
            (Wake::Requested, false, all, Due::VerifyTable),
            (Wake::Rules, true, nothing, Due::EarlierRun),
            (Wake::Verify, true, nothing, Due::EarlierRun),
            (Wake::Rules, false, nothing, Due::Check),
            (Wake::Verify, false, nothing, Due::Publish),
            (Wake::Verify, false, all, Due::Maintain),
            (Wake::Verify, false, times(past, Some(future), Some(past)), Due::Check),
            (Wake::Verify, false, times(now, None, None), Due::Check),
            (Wake::Verify, false, times(future, Some(future), Some(past)), Due::Retry),
            (Wake::Verify, false, times(future, Some(now), Some(past)), Due::Maintain),
        ] {
            assert_eq!(due(wake, is_unconfirmed, times, now), expected, "{wake:?} {is_unconfirmed} {times:?}");
        }
        assert_eq!((nothing.first(), times(future, Some(now), None).first()), (past, past));
        assert_eq!(Times { log: None, ..times(future, Some(now), None) }.first(), now);
    }
}
