#![allow(clippy::unwrap_used)]
use std::{
    sync::{Mutex, mpsc},
    time::Duration,
};

use headgate_core::Change;

use super::*;
use crate::{
    dataplane::{
        DataplaneError, ErrorKind,
        fake::{FakeControl, FakeDataplane},
    },
    metrics::Metrics,
    reconcile::{Reconciler, Timing},
    session::{
        backoff::Backoff,
        held::{Buckets, Snapshot, Step},
        testing::{endpoint, service},
    },
    shared::Shared,
};

/// Only ever waited for when a test fails.
const GUARD: Duration = Duration::from_secs(30);

/// Tells, for each step that was applied, what was planned last and how many calls of the backend had ended by then.
struct Recorder {
    control: FakeControl,
    planned: Arc<Mutex<Vec<String>>>,
    applied: mpsc::Sender<(Vec<String>, usize)>,
}

impl Companion for Recorder {
    fn plan(&mut self, _state: &State, _node: &NodeFacts, scope: Scope<'_>) {
        *self.planned.lock().unwrap() = match scope {
            Scope::All => vec!["all".to_owned()],
            Scope::Services(services) => services.iter().map(ToString::to_string).collect(),
        };
    }

    fn applied(&mut self) {
        let planned = std::mem::take(&mut *self.planned.lock().unwrap());
        self.applied.send((planned, self.control.calls().len())).unwrap();
    }
}

fn step(shared: &Shared, version: u64, changes: Vec<Change>) {
    let snapshot = (version == 1).then(|| Snapshot { buckets: Buckets::All, rejected: Default::default() });
    shared.apply(Step {
        epoch: 1,
        version,
        positions: Vec::new(),
        changes,
        triggers: Vec::new(),
        snapshot,
        has_rejections: false,
    });
}

// rows: 85
#[test]
fn companions_act_once_the_rules_are_in_place_and_forget_no_failed_step() {
    let (backend, control) = FakeDataplane::new();
    let shared = Arc::new(Shared::new("node-1"));
    let backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(5));
    let timing = Timing { sync_period: Duration::from_secs(3600), backoff, ..Timing::default() };
    let (reconciler, _progress) =
        Reconciler::new(Box::new(backend), Arc::clone(&shared), Arc::new(Metrics::default()), timing);
    let (applied, steps) = mpsc::channel();
    let recorder = Recorder { control: control.clone(), planned: Arc::default(), applied };
    let reconciler = reconciler.with_companions(vec![Box::new(recorder)]);
    let thread = std::thread::spawn(|| reconciler.run());

    step(&shared, 1, vec![service("web", 80), service("db", 5432)]);
    assert_eq!(steps.recv_timeout(GUARD).unwrap(), (vec!["all".to_owned()], 1));
    // The kernel refuses the first attempt; what it was about is part of the second, which looks at everything.
    control.hold(true);
    control.fail_next(DataplaneError::new(ErrorKind::Retry, "another process holds the lock"));
    step(&shared, 2, vec![endpoint("web", 1, 8080)]);
    control.hold(false);
    assert_eq!(steps.recv_timeout(GUARD).unwrap(), (vec!["all".to_owned()], 3));
    shared.stop();
    thread.join().unwrap();
    assert!(steps.try_recv().is_err(), "nothing else was applied");
}
