//! The loop with a real ledger, and a kernel of iptables in memory.

#[path = "../../../../crates/core/tests/fake_kernel/iptables.rs"]
mod fake_kernel;

use std::{cell::Cell, collections::VecDeque, sync::LazyLock};

use futures::FutureExt as _;
use headgate_core::{
    forwarding,
    iptables::{ExistingTables, RenderConfig, RulesLedger, RulesTable, Script, ruleset},
};

use self::fake_kernel::FakeKernel;
use super::*;
use crate::{
    dataplane::{RulesDifferences, RulesVerification},
    metric_registry::MetricRegistry,
};

/// A dataplane with a real ledger and a kernel in memory.
struct LedgerFamily {
    ledger: RulesLedger,
    /// Called before a verification reads the state, with the number of earlier calls.
    during: During,
    /// What the next checks find. Later checks find nothing.
    findings: Findings,
    /// If set, the next plan of changed Services sees another state: the ledger and the kernel then
    /// agree, and both are wrong.
    corruption: Arc<Mutex<Option<State>>>,
}

type During = Arc<Mutex<dyn FnMut(usize) + Send>>;
type Findings = Arc<Mutex<VecDeque<Result<Finding, DataplaneError>>>>;

/// Calls `during` before each part of a plan.
struct Interrupted<'a>(&'a dyn StateSource, During, Cell<usize>);

impl StateSource for Interrupted<'_> {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        (self.1.lock().unwrap())(self.2.replace(self.2.get() + 1));
        self.0.look(read);
    }
}

struct LedgerKernel(Arc<Mutex<FakeKernel>>);

impl KernelHandle for LedgerKernel {}

impl Dataplane for LedgerFamily {
    type Kernel = LedgerKernel;
    type Plan = Script;

    fn family(&self) -> Family {
        Family::V4
    }

    fn sync(&mut self, kernel: &mut LedgerKernel, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let mut kernel = kernel.0.lock().unwrap();
        let (script, _) = self.ledger.full(source, existing(&kernel));
        kernel.restore(&script.to_string()).unwrap();
        Ok(Report::default())
    }

    fn verification(&mut self, kernel: &mut LedgerKernel) -> Result<RulesVerification, DataplaneError> {
        let found = existing(&kernel.0.lock().unwrap());
        let (mut ledger, during) = (self.ledger.fresh(), Arc::clone(&self.during));
        Ok(Box::new(move |source| {
            let (script, _) = ledger.full(&Interrupted(source, during, Cell::new(0)), found);
            let services = script.services().iter().cloned().collect();
            let count = script.chains_written() + script.chains_deleted();
            RulesDifferences { count, services, is_redivided: false }
        }))
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Script {
        let corrupt = self.corruption.lock().unwrap().take();
        self.ledger.changed(corrupt.as_ref().unwrap_or(state), node, dirty).0
    }

    fn apply(&mut self, kernel: &mut LedgerKernel, script: Script) -> Result<Report, DataplaneError> {
        kernel.0.lock().unwrap().restore(&script.to_string()).unwrap();
        Ok(Report::default())
    }

    fn check(&mut self, _: &mut LedgerKernel) -> Result<Finding, DataplaneError> {
        self.findings.lock().unwrap().pop_front().unwrap_or(Ok(Finding::Intact))
    }

    fn decode(&mut self, kernel: &mut LedgerKernel) -> Result<forwarding::Table, DataplaneError> {
        let mut rules = headgate_oracle::iptables::Rules::default();
        let kernel = kernel.0.lock().unwrap();
        RulesTable::ALL.iter().for_each(|table| kernel.save(*table).lines().for_each(|line| rules.line(line)));
        Ok(headgate_oracle::iptables::decode(&rules, Family::V4, None, &BTreeSet::new()))
    }
}

fn existing(kernel: &FakeKernel) -> ExistingTables {
    ExistingTables::parse(&RulesTable::ALL.map(|table| kernel.save(table)).concat())
}

fn ledger_loop(kernel: &Arc<Mutex<FakeKernel>>, corruption: &Arc<Mutex<Option<State>>>, timing: Timing) -> Loop {
    let during: During = Arc::new(Mutex::new(|_| ()));
    let dataplane = ledger_dataplane(kernel, corruption, &during, &Findings::default());
    Loop::of(dataplane, in_memory::dataplane().1, AgentState::new("node-1"), timing)
}

fn ledger_dataplane(
    kernel: &Arc<Mutex<FakeKernel>>,
    corruption: &Arc<Mutex<Option<State>>>,
    during: &During,
    findings: &Findings,
) -> Box<dyn NodeDataplane> {
    let make = |family| LedgerFamily {
        ledger: RulesLedger::new(ruleset(RenderConfig::new(family))),
        during: Arc::clone(during),
        findings: Arc::clone(findings),
        corruption: Arc::clone(corruption),
    };
    let handle = LedgerKernel(Arc::clone(kernel));
    Box::new(DualStack::assemble("ledger", handle, Vec::new(), vec![Family::V4], make))
}

/// Requests a verification, and returns the differences.
fn verified(run: &Loop) -> Vec<String> {
    let request = run.shared.request_verification();
    let is_answer = |progress: &Progress| progress.verification.as_ref().is_some_and(|one| one.request >= request);
    let verification = run.wait_progress(is_answer).verification.unwrap();
    assert_eq!(verification.error, None);
    verification.comparison.differences.iter().map(ToString::to_string).collect()
}

#[test]
fn a_verification_finds_a_wrong_ledger_and_a_changed_kernel_and_repairs_both() {
    let kernel = Arc::new(Mutex::new(FakeKernel::default()));
    let corruption = Arc::new(Mutex::new(None));
    // Only requests verify, so that the test sees each result.
    let run = ledger_loop(&kernel, &corruption, Timing { sync_period: Duration::from_secs(3600), ..timing() });
    run.snapshot(1, vec![service("web", 80), endpoint("web", 1, 8080), service("db", 5432), endpoint("db", 9, 5432)]);
    run.wait_programmed(1);
    assert_eq!(verified(&run), Vec::<String>::new());

    // The ledger plans another endpoint than the state has.
    let mut wrong = State::default();
    for change in [service("web", 80), endpoint("web", 7, 8080)] {
        wrong.apply(change, &mut Dirty::default());
    }
    *corruption.lock().unwrap() = Some(wrong);
    run.batch(2, vec![endpoint("web", 2, 8080)]);
    run.wait_programmed(2);
    let differences = verified(&run);
    assert_eq!(differences.len(), 1, "{differences:?}");
    assert!(differences[0].starts_with("Service prod/web: connections to "), "{differences:?}");
    // A full sync has repaired the kernel and the ledger.
    run.batch(3, vec![endpoint("db", 8, 5432)]);
    run.wait_programmed(3);
    assert_eq!(verified(&run), Vec::<String>::new());
    let nat = kernel.lock().unwrap().save(RulesTable::Nat);
    assert_eq!(nat.matches("DNAT --to-destination").count(), 4, "{nat}");

    // Another program deletes a rule.
    let save = kernel.lock().unwrap().save(RulesTable::Nat);
    let rule = save.lines().find(|line| line.contains("DNAT --to-destination")).unwrap();
    kernel.lock().unwrap().restore(&format!("*nat\n-D {}\nCOMMIT\n", rule.trim_start_matches("-A "))).unwrap();
    let differences = verified(&run);
    let are_of_services = differences.iter().all(|one| one.starts_with("Service prod/"));
    assert!(!differences.is_empty() && are_of_services, "{differences:?}");
    run.batch(4, vec![endpoint("db", 7, 5432)]);
    run.wait_programmed(4);
    assert_eq!(verified(&run), Vec::<String>::new());
    let mut registry = MetricRegistry::default();
    run.metrics.register(&mut registry);
    let text = registry.encode(false);
    assert!(text.contains("service_drift_total{namespace=\"prod\",service=\"web\"} "), "{text}");
    assert!(text.contains("headgate_agent_forwarding_verifications_total{result=\"drift\"} 2"), "{text}");
}

#[test]
fn a_verification_makes_one_full_sync_for_each_rule_that_it_does_not_understand() {
    let kernel = Arc::new(Mutex::new(FakeKernel::default()));
    let timing = Timing { sync_period: Duration::from_secs(3600), ..timing() };
    let run = ledger_loop(&kernel, &Arc::default(), timing);
    let repairs = || run.metrics.repairs.get();
    run.snapshot(1, vec![service("web", 80), endpoint("web", 1, 8080)]);
    run.wait_programmed(1);
    let foreign = "KUBE-SERVICES -p tcp -m tcp --dport 80:81 -j DNAT --to-destination 192.0.2.9:80";
    let insert = |rule: &str| kernel.lock().unwrap().restore(&format!("*nat\n-I {rule}\nCOMMIT\n")).unwrap();
    // A full sync does not remove the rules of other programs in front of Headgate's.
    insert("PREROUTING -j ACCEPT");
    insert(foreign);
    let differences = verified(&run);
    assert!(!differences.is_empty());
    run.batch(2, vec![endpoint("web", 2, 8080)]);
    run.wait_programmed(2);
    assert!(!kernel.lock().unwrap().save(RulesTable::Nat).contains(foreign));
    assert_eq!(repairs(), 1);
    // The differences name another endpoint now.
    assert_ne!(verified(&run), differences);
    assert_eq!(repairs(), 2);
    run.batch(3, vec![service("db", 5432)]);
    run.wait_programmed(3);
    assert!(!verified(&run).is_empty());
    assert_eq!(repairs(), 2, "a full sync does not follow again for the same findings");
    insert(foreign);
    verified(&run);
    assert_eq!(repairs(), 3);
    run.batch(4, vec![endpoint("web", 3, 8080)]);
    run.wait_programmed(4);
    assert!(!kernel.lock().unwrap().save(RulesTable::Nat).contains(foreign));
}

/// A loop that the test steps.
struct Stepped {
    reconciler: Reconciler,
    kernel: Arc<Mutex<FakeKernel>>,
    metrics: SyncMetrics,
}

impl Stepped {
    /// Steps until the kernel has 900 Services. While the rules are verified, `during` gets the
    /// state and the kernel, and the number of times that the verification has read the state.
    fn new(
        findings: impl IntoIterator<Item = Result<Finding, DataplaneError>>,
        mut during: impl FnMut(&AgentState, &Mutex<FakeKernel>, usize) + Send + 'static,
    ) -> Self {
        let (kernel, shared) = (Arc::new(Mutex::new(FakeKernel::default())), Arc::new(AgentState::new("node-1")));
        let (seen, state) = (Arc::clone(&kernel), Arc::clone(&shared));
        let during: During = Arc::new(Mutex::new(move |parts| during(&state, &seen, parts)));
        let findings: Findings = Arc::new(Mutex::new(findings.into_iter().collect()));
        let dataplane = ledger_dataplane(&kernel, &Arc::default(), &during, &findings);
        let metrics = SyncMetrics::default();
        let (mut reconciler, _) = Reconciler::new(dataplane, Arc::clone(&shared), metrics.clone(), timing());
        let add = |number| {
            let name = format!("svc{number:03}");
            [service(&name, 80), endpoint(&name, if number == 3 { 33 } else { 1 }, 8080)]
        };
        shared.apply(snapshot(1, (0..900).flat_map(add).collect()));
        reconciler.begin();
        reconciler.step(Wake::Work);
        Self { reconciler, kernel, metrics }
    }

    /// Removes the rule of Service svc003, as another program would.
    fn remove_rule(&self) {
        let mut kernel = self.kernel.lock().unwrap();
        let saved = kernel.save(RulesTable::Nat);
        let is_of_service = |line: &&str| line.ends_with(" --to-destination 10.1.0.33:8080");
        let rule = saved.lines().find(is_of_service).unwrap().trim_start_matches("-A ");
        kernel.restore(&format!("*nat\n-D {rule}\nCOMMIT\n")).unwrap();
    }

    /// The number of DNAT rules in the kernel.
    fn translations(&self) -> usize {
        self.kernel.lock().unwrap().save(RulesTable::Nat).matches("DNAT --to-destination").count()
    }

    /// The numbers of repairs and of differences.
    fn found(&self) -> (u64, u64) {
        (self.metrics.repairs.get(), self.metrics.dataplane.drift.get())
    }
}

#[test]
fn changes_are_programmed_while_the_rules_are_verified_and_are_not_differences() {
    let programmed = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&programmed);
    let during = move |state: &AgentState, kernel: &Mutex<FakeKernel>, parts| {
        let change = match parts {
            // Services of the first part and of the last part, which are planned later.
            2 => vec![endpoint("svc000", 2, 8080), endpoint("svc899", 2, 8080)],
            // The first part is planned already.
            4 => vec![endpoint("svc001", 2, 8080), no_endpoint("svc000", 1), no_endpoint("svc899", 1)],
            _ => Vec::new(),
        };
        if !change.is_empty() {
            state.apply(update(parts as u64, change));
        }
        let nat = kernel.lock().unwrap().save(RulesTable::Nat);
        seen.lock().unwrap().push(nat.lines().filter(|line| line.contains("DNAT --to-destination")).count());
    };
    let mut run = Stepped::new([], during);
    run.reconciler.verify_rules();
    // The plan reads the state for its layout, for its list of Services, and for four parts.
    assert_eq!(*programmed.lock().unwrap(), [900, 900, 900, 902, 902, 901], "changes wait for the end");
    assert_eq!(run.found(), (0, 0), "changes count as differences");
}

#[test]
fn what_another_program_changed_is_found_although_other_services_change_meanwhile() {
    let found = |changed: &'static str| {
        let mut run = Stepped::new([], change_at(2, changed));
        run.remove_rule();
        run.reconciler.verify_rules();
        let found = run.found();
        assert_eq!(run.reconciler.unfinished.needs_full, found.0 > 0, "each difference leads to a full sync");
        found
    };
    assert_eq!(found("svc004"), (1, 1));
    assert_eq!(found("svc003"), (0, 0), "the change may explain the difference");
}

/// Changes a Service when a verification has read the state `at` times.
fn change_at(at: usize, name: &'static str) -> impl FnMut(&AgentState, &Mutex<FakeKernel>, usize) + Send {
    let mut version = 1;
    move |state, _, parts| {
        if parts == at {
            version += 1;
            state.apply(update(version, vec![endpoint(name, u8::try_from(version).unwrap(), 8080)]));
        }
    }
}

#[test]
fn a_full_sync_follows_when_changes_hide_differences_in_each_verification() {
    // The time stands still, so that a slow machine does not use up the pause.
    static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);
    let mut run = Stepped::new([], change_at(5, "svc003"));
    run.reconciler.timing.clock = || *NOW;
    run.remove_rule();
    run.reconciler.timing.rules_period = Duration::ZERO;
    run.reconciler.verify_rules();
    assert!(!run.reconciler.unfinished.needs_full);
    assert!(run.reconciler.verify_rules_at > run.reconciler.now(), "there is no pause");
    run.reconciler.step(Wake::Work);
    run.remove_rule();
    run.reconciler.verify_rules();
    assert_eq!((run.reconciler.unfinished.needs_full, run.found()), (true, (0, 0)));
    run.reconciler.step(Wake::Work);
    // Two changes have added endpoints.
    assert_eq!((run.translations(), run.reconciler.undecided), (902, 0));
}

#[test]
fn lost_notifications_lead_to_one_verification_at_once_and_without_its_result_to_a_full_sync() {
    let lost = || Ok(Finding::Unknown);
    let verifications = Arc::new(Mutex::new(0));
    let seen = Arc::clone(&verifications);
    let count = move |_: &AgentState, _: &Mutex<FakeKernel>, parts| *seen.lock().unwrap() += u32::from(parts == 0);
    let mut run = Stepped::new([lost(), lost()], count);
    for _ in 0..2 {
        run.reconciler.check();
        assert_eq!(*verifications.lock().unwrap(), 1);
    }

    let mut run = Stepped::new([lost()], change_at(5, "svc003"));
    run.remove_rule();
    run.reconciler.check();
    assert_eq!((run.reconciler.unfinished.needs_full, run.found()), (true, (0, 0)));
}

#[test]
fn notifications_are_not_lost_twice_when_the_check_of_another_family_fails() {
    let findings: Findings = Arc::new(Mutex::new([Ok(Finding::Unknown), Err(retry())].into()));
    let make = |family| LedgerFamily {
        ledger: RulesLedger::new(ruleset(RenderConfig::new(family))),
        during: Arc::new(Mutex::new(|_| ())),
        findings: Arc::clone(&findings),
        corruption: Arc::default(),
    };
    let families = vec![Family::V4, Family::V4];
    let mut dataplane = DualStack::assemble("ledger", LedgerKernel(Arc::default()), Vec::new(), families, make);
    assert_eq!(dataplane.check(), Ok(Finding::Unknown));
    findings.lock().unwrap().extend([Ok(Finding::Intact), Err(retry())]);
    assert_eq!(dataplane.check().unwrap_err().kind, ErrorKind::Retry);
}

#[test]
fn signals_are_served_while_the_rules_are_verified() {
    let after = |wake, finding| {
        let mut run = Stepped::new([finding], move |state, _, parts| {
            if parts == 2 {
                state.signal(wake);
            }
        });
        // The rest of the plan would find this.
        run.remove_rule();
        run.reconciler.verify_rules();
        run
    };
    let run = after(Wake::Rules, Ok(Finding::Changed("a chain is missing".into())));
    assert_eq!((run.reconciler.unfinished.needs_full, run.found()), (true, (1, 0)));
    let run = after(Wake::Rules, Ok(Finding::Unknown));
    assert_eq!((run.reconciler.unfinished.needs_full, run.found()), (true, (0, 0)));
    let mut run = after(Wake::Stop, Ok(Finding::Intact));
    assert_eq!((run.reconciler.unfinished.needs_full, run.found()), (false, (0, 0)));
    let Reconciler { shared, done, pace, check_at, .. } = &run.reconciler;
    let wake = shared.wait(*done, *pace, *check_at).now_or_never().unwrap();
    assert_eq!(wake, Wake::Stop);
    assert!(!run.reconciler.step(wake), "the loop goes on");
}
