//! An observer that computes one value per service and sends changed values to a task, once the
//! rules are in the kernel.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use headgate_core::{NodeFacts, ServiceKey, State};
use tokio::sync::mpsc;

use super::{Observer, Scope};

/// Services whose value changed, with the new value. `None` means that the service no longer has a
/// value.
pub type Changes<T> = BTreeMap<Arc<ServiceKey>, Option<T>>;

/// Computes the value of one service. The cost must depend on the size of that service only.
pub type Find<T> = fn(&State, &Arc<ServiceKey>, &NodeFacts) -> Option<T>;

/// The observer that sends the changes.
#[derive(Debug)]
pub struct Follower<T> {
    find: Find<T>,
    /// The values that were sent.
    pub(crate) sent: HashMap<Arc<ServiceKey>, T>,
    planned: Changes<T>,
    changes: mpsc::UnboundedSender<Changes<T>>,
}

impl<T> Follower<T> {
    /// Returns a follower, and the receiver of the changes, for a task.
    #[must_use]
    pub fn new(find: Find<T>) -> (Self, mpsc::UnboundedReceiver<Changes<T>>) {
        let (changes, receiver) = mpsc::unbounded_channel();
        (Self { find, sent: HashMap::new(), planned: Changes::new(), changes }, receiver)
    }
}

impl<T: PartialEq> Follower<T> {
    fn plan_service(&mut self, state: &State, key: &Arc<ServiceKey>, node: &NodeFacts) {
        let found = (self.find)(state, key, node);
        if found.as_ref() != self.sent.get(key) {
            self.planned.insert(Arc::clone(key), found);
        }
    }
}

impl<T: PartialEq + Clone + Send> Observer for Follower<T> {
    fn plan(&mut self, state: &State, node: &NodeFacts, scope: Scope<'_>) {
        self.planned.clear();
        match scope {
            Scope::Services(services) => services.iter().for_each(|key| self.plan_service(state, key, node)),
            Scope::All => {
                let gone: Vec<_> = self.sent.keys().filter(|key| state.entry(key).is_none()).cloned().collect();
                state.entries().map(|(key, _)| key).chain(&gone).for_each(|key| self.plan_service(state, key, node));
            }
        }
    }

    fn applied(&mut self) {
        if self.planned.is_empty() {
            return;
        }
        let changes = std::mem::take(&mut self.planned);
        for (key, value) in &changes {
            match value {
                Some(value) => drop(self.sent.insert(Arc::clone(key), value.clone())),
                None => drop(self.sent.remove(key)),
            }
        }
        // Sending fails only while the agent stops.
        let _ = self.changes.send(changes);
    }

    /// Sends the values of the state from disk at once, so that the tasks also work on a node that
    /// restarts while no control plane can be reached.
    fn restored(&mut self, state: &State, node: &NodeFacts) {
        self.plan(state, node, Scope::All);
        self.applied();
    }
}
