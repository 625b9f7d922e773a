//! A sink that keeps everything, for tests of sources.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use headgate_control_plane::{
    model::{NodeChange, Problem, Sink, Transaction},
    objects::SourceKind,
};
use headgate_core::{Change, Dirty, Node, ServiceKey, State};
use tokio::sync::watch;

/// A guard against hanging. No test asserts on time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Everything that the sink has received.
#[derive(Default)]
pub(crate) struct Collected {
    /// The state after all changes.
    pub(crate) state: State,
    /// All Nodes.
    pub(crate) nodes: BTreeMap<Arc<str>, Node>,
    /// The last position of each kind.
    pub(crate) positions: BTreeMap<SourceKind, u64>,
    /// The number of positions that were lower than the previous position of the kind.
    pub(crate) went_back: u64,
    /// The current problems.
    pub(crate) problems: Vec<Problem>,
    /// The number of errors by kind and reason.
    pub(crate) errors: BTreeMap<(SourceKind, &'static str), u64>,
    /// The number of calls of `heard` for each kind.
    pub(crate) heard: BTreeMap<SourceKind, u64>,
    /// The reason why the source is cut off. `None` if the source is not cut off.
    pub(crate) cut_off: Option<String>,
    /// Every reason why the source was cut off, in order.
    pub(crate) cut_offs: Vec<String>,
    /// Every key that was removed, in order.
    pub(crate) removed: Vec<String>,
    /// The number of commits, including empty commits.
    pub(crate) commits: u64,
    /// The number of changes in each commit that is not empty.
    pub(crate) commit_sizes: Vec<usize>,
    /// The number of calls of `synced`.
    pub(crate) synced: u64,
}

impl Collected {
    /// The number of errors of all kinds for a reason.
    pub(crate) fn errors_for(&self, reason: &str) -> u64 {
        self.errors.iter().filter(|((_, counted), _)| *counted == reason).map(|(_, count)| count).sum()
    }

    /// The addresses of a Service's endpoints.
    pub(crate) fn endpoints(&self, namespace: &str, name: &str) -> Vec<String> {
        let entry = self.state.entry(&ServiceKey::new(namespace, name));
        entry.map(|entry| entry.endpoints().keys().map(ToString::to_string).collect()).unwrap_or_default()
    }

    /// Whether a Service is served.
    pub(crate) fn serves(&self, namespace: &str, name: &str) -> bool {
        self.state.entry(&ServiceKey::new(namespace, name)).is_some_and(|entry| entry.service().is_some())
    }

    /// Each problem as one text.
    pub(crate) fn problem_texts(&self) -> Vec<String> {
        self.problems.iter().map(|p| format!("{} | {} | {} | {}", p.origin, p.object, p.field, p.message)).collect()
    }
}

/// A sink that collects everything.
#[derive(Default)]
pub(crate) struct CollectingSink(Mutex<Collected>, watch::Sender<BTreeMap<SourceKind, u64>>);

impl CollectingSink {
    /// Reads what the sink has collected.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Collected) -> T) -> T {
        look(&self.0.lock().unwrap())
    }

    /// Asks the source to check whether it has reached `position`. The store asks in this way for
    /// an agent that has seen `position` at another replica.
    pub(crate) fn want(&self, kind: SourceKind, position: u64) {
        self.1.send_modify(|wanted| {
            wanted.insert(kind, position);
        });
    }

    /// Waits until a condition holds. After [`PATIENCE`], panics with `what` and a summary of the
    /// collection.
    pub(crate) async fn until(&self, what: &str, mut condition: impl FnMut(&Collected) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !self.look(&mut condition) {
            let summary = self.look(|c| {
                format!(
                    "{} services, {} endpoints, errors {:?}, problems {:?}",
                    c.state.service_count(),
                    c.state.endpoint_count(),
                    c.errors,
                    c.problem_texts()
                )
            });
            assert!(Instant::now() < until, "timed out waiting until {what}: {summary}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Sink for CollectingSink {
    fn commit(&self, transaction: Transaction) {
        let mut collected = self.0.lock().unwrap();
        collected.commits += 1;
        let size = transaction.changes.len() + transaction.nodes.len();
        if size > 0 {
            collected.commit_sizes.push(size);
        }
        for change in transaction.changes {
            match &change.change {
                Change::RemoveService(key) => collected.removed.push(format!("Service {key}")),
                Change::RemoveEndpoint(key, address) => collected.removed.push(format!("Endpoint {key} {address}")),
                Change::RemoveServiceCidr(name) => collected.removed.push(format!("ServiceCIDR {name}")),
                _ => {}
            }
            let text = format!("{change:?}");
            assert!(
                collected.state.apply(change.change, &mut Dirty::default()),
                "a change without an effect was committed: {text}"
            );
        }
        for change in transaction.nodes {
            match change {
                NodeChange::Apply(node) | NodeChange::ApplyExcluded(node) => {
                    drop(collected.nodes.insert(node.name.clone(), node));
                }
                NodeChange::Remove(name) => {
                    collected.removed.push(format!("Node {name}"));
                    assert!(collected.nodes.remove(&name).is_some());
                }
            }
        }
        for (kind, position) in transaction.positions.into_iter().chain(transaction.bookmarks) {
            let before = collected.positions.insert(kind, position);
            collected.went_back += u64::from(before.is_some_and(|before| before > position));
        }
    }

    fn synced(&self) {
        self.0.lock().unwrap().synced += 1;
    }

    fn heard(&self, kind: SourceKind) {
        *self.0.lock().unwrap().heard.entry(kind).or_default() += 1;
    }

    fn cut_off(&self, problem: Option<String>) {
        let mut collected = self.0.lock().unwrap();
        collected.cut_offs.extend(problem.clone());
        collected.cut_off = problem;
    }

    fn wanted_positions(&self) -> watch::Receiver<BTreeMap<SourceKind, u64>> {
        self.1.subscribe()
    }

    fn problems(&self, problems: Vec<Problem>) {
        assert!(problems.is_sorted());
        self.0.lock().unwrap().problems = problems;
    }

    fn count_error(&self, kind: SourceKind, reason: &'static str) {
        *self.0.lock().unwrap().errors.entry((kind, reason)).or_default() += 1;
    }
}
