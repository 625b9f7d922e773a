#![allow(clippy::unwrap_used)]
use std::{
    sync::{Mutex, mpsc},
    time::Duration,
};

use super::*;
use crate::{
    backoff::{Backoff, Jitter},
    dataplane::{
        DataplaneError, ErrorKind,
        in_memory::{self, Control},
    },
    reconcile::{Reconciler, SyncMetrics, Timing},
    state::AgentState,
    testing::{endpoint, service, snapshot, update},
};

/// Longest time that a test waits before it fails.
const GUARD: Duration = Duration::from_secs(30);

/// Sends, for each applied step, the scope that was planned last and the number of calls that the
/// dataplane had received by then.
struct Recorder {
    control: Control,
    planned: Arc<Mutex<Vec<String>>>,
    applied: mpsc::Sender<(Vec<String>, usize)>,
}

impl Observer for Recorder {
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

// rows: 85
#[test]
fn observers_act_after_the_rules_are_in_place_and_failed_steps_are_included_later() {
    let (dataplane, control) = in_memory::dataplane();
    let shared = Arc::new(AgentState::new("node-1"));
    let backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(5), Jitter::Full);
    let timing = Timing { sync_period: Duration::from_secs(3600), backoff, ..Timing::default() };
    let (mut reconciler, _progress) =
        Reconciler::new(Box::new(dataplane), Arc::clone(&shared), SyncMetrics::default(), timing);
    let (applied, steps) = mpsc::channel();
    let recorder = Recorder { control: control.clone(), planned: Arc::default(), applied };
    reconciler.observers = vec![Box::new(recorder)];
    let thread = std::thread::spawn(|| reconciler.run());

    shared.apply(snapshot(1, vec![service("web", 80), service("db", 5432)]));
    assert_eq!(steps.recv_timeout(GUARD).unwrap(), (vec!["all".to_owned()], 1));
    // The first attempt fails. The second is a full sync, so it includes these services.
    control.hold(true);
    control.fail_next(DataplaneError::new(ErrorKind::Retry, "another process holds the lock"));
    shared.apply(update(2, vec![endpoint("web", 1, 8080)]));
    control.hold(false);
    assert_eq!(steps.recv_timeout(GUARD).unwrap(), (vec!["all".to_owned()], 3));
    shared.stop();
    thread.join().unwrap();
    assert!(steps.try_recv().is_err(), "another step was applied");
}
