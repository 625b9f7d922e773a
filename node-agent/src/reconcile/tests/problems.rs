//! Tests problems of a proxy, which begin and end at any time.

use headgate_userspace::ConnectionList;

use super::*;
use crate::dataplane::{self, ConnectionProxy, ProxyCounts};

/// A proxy that only reports problems.
#[derive(Default)]
struct Reporter(Mutex<Option<dataplane::TryWake>>);

impl std::fmt::Debug for Reporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reporter")
    }
}

impl ConnectionProxy for Reporter {
    fn drain(&self, _limit: Duration) -> u64 {
        0
    }

    fn counts(&self) -> ProxyCounts {
        ProxyCounts::default()
    }

    fn connections(&self, _service: Option<&ServiceKey>, _limit: usize) -> ConnectionList {
        ConnectionList::default()
    }

    fn follow_problems(&self, wake: dataplane::TryWake) {
        *self.0.lock().unwrap() = Some(wake);
    }
}

#[test]
fn a_problem_of_the_proxy_is_published_at_once() {
    let (dataplane, control) = in_memory::dataplane();
    let reporter = Arc::new(Reporter::default());
    let dataplane = dataplane.with_proxy(Arc::clone(&reporter) as Arc<dyn ConnectionProxy>);
    let run = Loop::of(Box::new(dataplane), control, AgentState::new("node-1"), timing());
    let until = Instant::now() + GUARD;
    let wake = loop {
        if let Some(wake) = reporter.0.lock().unwrap().take() {
            break wake;
        }
        assert!(Instant::now() < until, "the loop does not follow the proxy");
        std::thread::sleep(Duration::from_millis(1));
    };
    let problem = |sentence: &str| {
        run.control.degrade(sentence);
        while !wake() {
            std::thread::sleep(Duration::from_millis(1));
        }
        run.wait_progress(|progress| progress.status.degraded.last().is_some_and(|last| last == sentence));
    };
    // The loop publishes the first problem at its start or later. The others come while it waits,
    // and while no control plane has answered.
    ["the gate is open", "a thread hangs", "the kernel does not answer"].into_iter().for_each(problem);
    assert_eq!(run.control.calls(), [], "the loop touched the kernel");
    // A thread that must not wait does not wait for the lock.
    assert!(!run.shared.with_state(|_| wake()));
}
