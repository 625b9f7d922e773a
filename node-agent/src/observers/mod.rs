//! Work that follows each change of the rules: the cleanup of connection tracking, health-check
//! node ports, and endpoint checks. An observer reads the state while a step is planned, and acts
//! once its rules are in the kernel. Slow or fallible work runs in a thread or task of its own.

pub mod conntrack;
pub mod endpoint_checks;
pub mod health_check_ports;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use headgate_core::{NodeFacts, Service, ServiceKey, State, forwarding::Table};
use tokio::sync::watch;

/// The services that a step programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// All services, as in the first sync and in repairs.
    All,
    /// Only these services.
    Services(&'a BTreeSet<Arc<ServiceKey>>),
}

/// Work that follows each change of the rules. The reconcile loop calls observers on its thread.
pub trait Observer: Send {
    /// Reads the state for a step that is being planned. The caller holds the lock of the state, so
    /// this method must only compute. If the previous step failed, `scope` includes the services of
    /// that step.
    fn plan(&mut self, state: &State, node: &NodeFacts, scope: Scope<'_>);

    /// Does the work of the step that was planned last. The caller calls this method when the rules
    /// of this step are in the kernel.
    fn applied(&mut self);

    /// Gets what the kernel forwards before the first step, if the state of the last run is unknown
    /// or may be older than the rules.
    fn found(&mut self, _tables: &[Table]) {}

    /// Does the work for a state from disk, repeatedly, while the rules of an earlier run are in
    /// place and no control plane has confirmed the state, which may be older than the rules.
    fn restored(&mut self, _state: &State, _node: &NodeFacts) {}
}

// An observer that sends changed values of services to a task, once the rules are in the kernel.

/// Services whose value changed, with the new value. `None`: there is none any more.
pub type Changes<T> = BTreeMap<Arc<ServiceKey>, Option<T>>;

/// Changes that the task has not received yet. Each service appears once, with its newest value.
#[derive(Debug)]
pub struct Mailbox<T> {
    waiting: watch::Sender<Changes<T>>,
    arrived: watch::Receiver<Changes<T>>,
}

impl<T> Mailbox<T> {
    /// Waits until changes have arrived, and takes them out.
    pub(crate) async fn take(&mut self) -> Changes<T> {
        // This cannot fail, because the mailbox also holds the sender.
        let _ = self.arrived.changed().await;
        let mut taken = Changes::new();
        self.waiting.send_if_modified(|waiting| {
            taken = std::mem::take(waiting);
            false
        });
        taken
    }
}

/// Computes the value of one service. The cost must depend on the size of that service only.
type Find<T> = Box<dyn Fn(&State, &Arc<ServiceKey>, &NodeFacts) -> Option<T> + Send>;

/// The observer that sends the changes.
pub struct Follower<T> {
    concerns: fn(&Service) -> bool,
    find: Find<T>,
    /// The values that were sent.
    pub(crate) sent: HashMap<Arc<ServiceKey>, T>,
    planned: Changes<T>,
    mailbox: watch::Sender<Changes<T>>,
}

impl<T> Follower<T> {
    /// Returns a follower of the Services that `concerns` accepts, and the mailbox from which the
    /// task takes the changes.
    pub fn new(
        concerns: fn(&Service) -> bool,
        find: impl Fn(&State, &Arc<ServiceKey>, &NodeFacts) -> Option<T> + Send + 'static,
    ) -> (Self, Mailbox<T>) {
        let (waiting, arrived) = watch::channel(Changes::new());
        let follower = Self {
            concerns,
            find: Box::new(find),
            sent: HashMap::new(),
            planned: Changes::new(),
            mailbox: waiting.clone(),
        };
        (follower, Mailbox { waiting, arrived })
    }
}

impl<T: PartialEq> Follower<T> {
    fn plan_service(&mut self, state: &State, key: &Arc<ServiceKey>, node: &NodeFacts) {
        let service = state.entry(key).and_then(|entry| entry.service());
        let found = service.filter(|service| (self.concerns)(service)).and_then(|_| (self.find)(state, key, node));
        if found.as_ref() != self.sent.get(key) {
            self.planned.insert(Arc::clone(key), found);
        }
    }
}

impl<T: PartialEq + Clone + Send + Sync> Observer for Follower<T> {
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
        self.mailbox.send_modify(|waiting| waiting.extend(changes));
    }

    /// Sends the values of the state from disk at once, so that the tasks also work on a node that
    /// restarts while no control plane can be reached.
    fn restored(&mut self, state: &State, node: &NodeFacts) {
        self.plan(state, node, Scope::All);
        self.applied();
    }
}
