//! Verifies the kernel in the background, in two ways. One plans a full sync without writing it; it
//! does not find a mistake of the code that renders rules. The other one shares no code with it: it
//! compares the table that is decoded from the kernel with the one that the state asks for.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    Dirty, Family, NodeFacts, ServiceKey, State, StateSource,
    digest::Digests,
    explain::{Mode, NodeSettings},
    forwarding::{self, Table},
};
use headgate_oracle::{Comparer, Comparison};
use tracing::{error, info, warn};

use super::{Reconciler, UNDECIDED_BEFORE_FULL_SYNC};
use crate::{
    cpu_time,
    dataplane::{DataplaneError, ErrorKind, RulesDifferences, mode_of},
    memory,
    state::progress::Verification,
};

/// The pause after a verification, as a multiple of its processor time: half a percent of a core.
const PAUSE_FACTOR: u32 = 200;

/// The number of Services that are compared while the lock of the state is held.
const SERVICES_AT_ONCE: usize = 256;

/// The maximum number of differences that the log names after one verification.
const MAX_LOGGED: usize = 5;

/// If a full sync has not removed what a verification found, another one follows after this time,
/// because another program may have made the same change again.
const REPAIR_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// When the kernel is verified, and what could not be repaired.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    /// When the next verification without a request may begin.
    next: Option<Instant>,
    /// What the last verification found and a full sync should have removed: differences, and rules
    /// that the decoder does not understand.
    repaired: BTreeSet<String>,
    /// When the last full sync was requested.
    repaired_at: Option<Instant>,
}

/// The part of a verification that needs the state.
type Compared = (Comparison, Option<Digests>);

/// The state for a verification of the rules. Before each part of the plan, the loop does what is
/// due. Once the result says nothing, the rest of the plan is empty.
struct Interleaved<'a>(RefCell<&'a mut Reconciler>);

impl StateSource for Interleaved<'_> {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        let mut reconciler = self.0.borrow_mut();
        reconciler.serve_meanwhile();
        if !reconciler.is_void() {
            reconciler.shared.look(read);
        }
    }
}

impl Reconciler {
    /// Reads the rules in the kernel, plans everything anew, and requests a full sync if something
    /// differs that no change explains, or if too many verifications had no result. Between parts
    /// of the plan, does what is due. Does nothing if a full sync follows anyway.
    pub(super) fn verify_rules(&mut self) {
        if self.done.is_none() || self.shared.needs_full() {
            return;
        }
        let (started, before) = (self.now(), cpu_time::of_thread_and_children());
        (self.is_verifying, self.programmed_meanwhile) = (true, Some(Dirty::default()));
        self.undecided += 1;
        let found = self.compare_rules();
        self.is_verifying = false;
        let now = self.now();
        let used = cpu_time_since(before).unwrap_or(now - started);
        self.verify_rules_at = now + self.timing.rules_period.max(used * PAUSE_FACTOR);
        memory::give_back();
        let programmed = self.programmed_meanwhile.take().filter(|_| !self.unfinished.needs_full);
        let changed = programmed.and_then(|mut changed| {
            changed.merge(self.unfinished.dirty.clone());
            self.shared.with_unprogrammed(|_, _, waiting| changed.merge(waiting.clone()))?;
            Some(changed)
        });
        match (found, changed) {
            (Ok(found), Some(changed)) => self.decide(found, &changed),
            // All rules may have changed, so the result says nothing.
            (Ok(_), None) => {}
            (Err(error), _) => {
                self.metrics.verifications_failed.inc();
                warn!(%error, "could not verify the rules");
                if error.kind != ErrorKind::Retry {
                    self.undecided = UNDECIDED_BEFORE_FULL_SYNC;
                }
            }
        }
        if self.undecided >= UNDECIDED_BEFORE_FULL_SYNC {
            info!("making a full sync, because verifications of the rules had no result");
            self.repair();
        }
    }

    /// Returns what differs in both families.
    fn compare_rules(&mut self) -> Result<RulesDifferences, DataplaneError> {
        let mut all = RulesDifferences::default();
        for family in Family::BOTH {
            if self.is_void() {
                break;
            }
            let Some(verification) = self.dataplane.verification(family)? else { continue };
            let found = verification(&Interleaved(RefCell::new(&mut *self)));
            all.count = all.count.saturating_add(found.count);
            all.services.extend(found.services);
            all.is_redivided |= found.is_redivided;
        }
        Ok(all)
    }

    /// True if the verification of the rules that is under way cannot have a result any more.
    fn is_void(&self) -> bool {
        self.programmed_meanwhile.is_none() || self.unfinished.needs_full || self.shared.needs_full()
    }

    /// Does one thing that is due while the rules are verified.
    fn serve_meanwhile(&mut self) {
        if self.is_void() {
            return;
        }
        let wake = self.shared.due(self.done, self.pace, self.times().first(), self.now());
        if wake.is_some_and(|wake| !self.step(wake)) {
            // The loop ends when it sees the signal again, and verifies nothing before.
            self.shared.stop();
            (self.programmed_meanwhile, self.done) = (None, None);
        }
    }

    /// Requests a full sync if something differs that the changes since then do not explain.
    fn decide(&mut self, found: RulesDifferences, changed: &Dirty) {
        let RulesDifferences { mut count, mut services, is_redivided } = found;
        if count == 0 {
            self.undecided = 0;
        }
        services.retain(|service| !changed.services.contains(service));
        if !changed.is_empty() {
            // What belongs to no service may belong to a change. A later verification, or the full
            // sync after several of them, decides.
            count = u32::try_from(services.len()).unwrap_or(u32::MAX);
        }
        if is_redivided {
            info!("making a full sync, which divides the rules among chains anew");
            self.unfinished.needs_full = true;
            self.done = None;
        }
        if count > 0 {
            self.undecided = 0;
            self.metrics.repairs.inc();
            self.metrics.dataplane.drift.inc_by(count.into());
            warn!(differences = count, "another program removed or changed Headgate's rules; making a full sync");
            services.iter().take(MAX_LOGGED).for_each(|service| warn!(%service, "rules of this service differ"));
            self.repair();
        }
    }

    /// True when a verification without a request may begin.
    pub(super) fn is_table_due(&self) -> bool {
        self.done.is_some() && self.pauses.next.is_none_or(|next| next <= self.now())
    }

    /// Verifies the kernel, publishes the result, requests a full sync if it differs.
    pub(super) fn verify_table(&mut self) {
        let request = self.shared.verifications_requested();
        let Some(target) = self.progress.borrow().programmed.as_ref().map(|programmed| programmed.target) else {
            return;
        };
        let facts = Arc::new(self.shared.with_facts(|_, facts| facts.clone()));
        let (at, started, before) = (Instant::now(), self.now(), cpu_time::of_thread_and_children());
        let mut compared = self.read_and_compare();
        if let Ok((comparison, _)) = &mut compared
            && comparison.total > 0
            && self.is_standby()
        {
            // The other proxy may have written while its rules were read.
            match self.read_and_compare() {
                Ok((again, _)) => comparison.keep_common(&again),
                Err(error) => compared = Err(error),
            }
        }
        let (cpu_time, now) = (cpu_time_since(before), self.now());
        self.pauses.next = Some(now + cpu_time.unwrap_or(now - started) * PAUSE_FACTOR);
        let (comparison, found, error) = match compared {
            Ok((comparison, found)) => {
                self.record_differences(&comparison);
                (comparison, found, None)
            }
            Err(error) => {
                self.metrics.verified("failed");
                warn!(%error, "could not verify what the kernel forwards");
                (Comparison::default(), None, Some(error))
            }
        };
        let verification = Verification {
            at,
            request,
            target,
            comparison: comparison.into(),
            found: found.map(Arc::new),
            facts,
            cpu_time,
            error,
            shadow: self.is_standby().then(|| self.waits.report(now)),
        };
        self.progress.send_modify(|progress| progress.verification = Some(verification.into()));
    }

    fn read_and_compare(&mut self) -> Result<Compared, String> {
        let tables = self.dataplane.decode().map_err(|error| error.to_string())?;
        self.compare_tables(tables, None)
            .ok_or_else(|| "the node or its settings changed, and the rules are written anew".to_owned())
    }

    /// Compares the tables of the kernel with the state: for all Services, or only for some. Leaves
    /// out Services that changed since the last sync, that wait for another proxy, and whose rules
    /// the kernel rejects. Returns `None` if all rules are about to change.
    pub(super) fn compare_tables(
        &self,
        mut tables: Vec<Table>,
        only: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Option<Compared> {
        let settings = self.expected_settings();
        let is_known = |key: &ServiceKey| {
            let Self { unfinished, quarantine, waits, .. } = self;
            let is_wanted = only.map_or_else(|| !waits.contains(key), |only| only.contains(key));
            is_wanted && !unfinished.dirty.services.contains(key) && !quarantine.concerns(key)
        };
        if self.is_standby() {
            // A proxy has no rules of a family without Services.
            let is_used = |family| self.shared.with_state(|state| state.demand().of(family).services > 0);
            tables.retain(|table| is_used(table.family));
        }
        let keys = self.shared.keys();
        let (mut all, mut digests) = (Comparison::default(), Digests::default());
        let is_broken = tables.iter().any(Table::is_broken);
        for mut table in tables {
            self.shared.with_facts(|state, facts| {
                table.unverified = forwarding::unverified(state, facts, &settings, table.family);
                table.hashes(state.frontends()).for_each(|(bucket, hash)| digests.add(bucket, hash));
            });
            let mut comparer = Comparer::new(table, &settings);
            for keys in keys.chunks(SERVICES_AT_ONCE) {
                self.shared.with_unprogrammed(|state, facts, dirty| {
                    let is_verified = |key: &ServiceKey| is_known(key) && !dirty.services.contains(key);
                    comparer.services(state, facts, &settings, keys, &is_verified);
                })?;
            }
            let compared = self.shared.with_unprogrammed(|state, _, dirty| {
                let is_verified = |key: &ServiceKey| is_known(key) && !dirty.services.contains(key);
                let is_settled = dirty.is_empty() && self.unfinished.dirty.is_empty();
                let is_settled = is_settled && self.waits.is_settled(self.now());
                comparer.finish(state, &is_verified, is_settled)
            })?;
            all.merge(compared);
        }
        Some((all, (!is_broken && !self.is_standby()).then_some(digests)))
    }

    pub(super) fn expected_settings(&self) -> NodeSettings {
        self.inputs.borrow().settings(mode_of(self.dataplane.name()).unwrap_or(Mode::Iptables))
    }

    /// Logs and counts differences, and requests a full sync, which also removes rules that the
    /// decoder does not understand. If a finding stays, the next full sync for it follows after
    /// [`REPAIR_AGAIN_AFTER`].
    fn record_differences(&mut self, comparison: &Comparison) {
        self.metrics.verified(if comparison.total == 0 { "equal" } else { "drift" });
        let sentences: BTreeSet<String> = comparison.differences.iter().map(ToString::to_string).collect();
        comparison.not_understood.iter().take(MAX_LOGGED).for_each(|sentence| warn!("{sentence}"));
        sentences
            .iter()
            .take(MAX_LOGGED)
            .for_each(|sentence| warn!("the kernel does not do what the state asks for: {sentence}"));
        if self.is_standby() {
            // They are the other proxy's.
            return;
        }
        self.metrics.dataplane.drift.inc_by(comparison.total);
        comparison.services().iter().for_each(|service| self.metrics.drifted(service));
        let mut findings = sentences;
        findings.extend(comparison.not_understood.iter().cloned());
        let (differences, not_understood) = (comparison.total, comparison.not_understood.len());
        let is_new = !findings.is_subset(&self.pauses.repaired);
        let is_old = self.pauses.repaired_at.is_none_or(|at| self.now() - at >= REPAIR_AGAIN_AFTER);
        if is_new || (is_old && !findings.is_empty()) {
            warn!(differences, not_understood, "making a full sync");
            self.metrics.repairs.inc();
            self.repair();
            self.pauses.repaired_at = Some(self.now());
        } else if !findings.is_empty() {
            error!(differences, not_understood, "a full sync has not removed what this verification found");
        }
        self.pauses.repaired = findings;
    }
}

/// The processor time of this thread and its children since `before`.
pub(super) fn cpu_time_since(before: Option<Duration>) -> Option<Duration> {
    Some(cpu_time::of_thread_and_children()?.saturating_sub(before?))
}
