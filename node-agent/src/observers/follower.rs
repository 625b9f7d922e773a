//! What a task follows of each service: a value that the state and the node give, told once it has
//! changed and the rules are in place.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use headgate_core::{ServiceKey, State, view::NodeFacts};
use tokio::sync::Notify;

use super::{Observer, Scope};

/// Services whose value changed; `None` where there is none any more.
pub type Changes<T> = BTreeMap<Arc<ServiceKey>, Option<T>>;

/// What the task has not taken up yet: each service once, at its newest.
#[derive(Debug)]
pub struct Mailbox<T> {
    changes: Mutex<Changes<T>>,
    arrived: Notify,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Self { changes: Mutex::new(Changes::new()), arrived: Notify::new() }
    }
}

impl<T> Mailbox<T> {
    fn put(&self, changes: Changes<T>) {
        self.lock().extend(changes);
        self.arrived.notify_one();
    }

    /// Waits until there is something, and takes it.
    pub(crate) async fn take(&self) -> Changes<T> {
        loop {
            let changes = std::mem::take(&mut *self.lock());
            if !changes.is_empty() {
                return changes;
            }
            self.arrived.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Changes<T>> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a service's value is found; at the cost of that service.
pub type Find<T> = fn(&State, &Arc<ServiceKey>, &NodeFacts) -> Option<T>;

/// The observer that puts changes into the mailbox.
#[derive(Debug)]
pub struct Follower<T> {
    find: Find<T>,
    /// What the task was told.
    pub(crate) told: HashMap<Arc<ServiceKey>, T>,
    planned: Changes<T>,
    mailbox: Arc<Mailbox<T>>,
}

impl<T> Follower<T> {
    /// A follower, and the mailbox for the task.
    #[must_use]
    pub fn new(find: Find<T>) -> (Self, Arc<Mailbox<T>>) {
        let mailbox = Arc::new(Mailbox::default());
        let follower = Self { find, told: HashMap::new(), planned: Changes::new(), mailbox: Arc::clone(&mailbox) };
        (follower, mailbox)
    }
}

impl<T: PartialEq> Follower<T> {
    fn plan_service(&mut self, state: &State, key: &Arc<ServiceKey>, node: &NodeFacts) {
        let found = (self.find)(state, key, node);
        if found.as_ref() != self.told.get(key) {
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
                let gone: Vec<_> = self.told.keys().filter(|key| state.entry(key).is_none()).cloned().collect();
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
                Some(value) => drop(self.told.insert(Arc::clone(key), value.clone())),
                None => drop(self.told.remove(key)),
            }
        }
        self.mailbox.put(changes);
    }

    /// Nothing waits for the control plane: a node that restarts while it is away does its part all
    /// the same.
    fn restored(&mut self, state: &State, node: &NodeFacts) {
        self.plan(state, node, Scope::All);
        self.applied();
    }
}
