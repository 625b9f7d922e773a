//! What follows the rules without being rules: cleanup of connection tracking, health-check node ports.
//!
//! A companion looks at the state while a step is planned, and acts once the step's rules are in the kernel. It never keeps programming waiting: whatever
//! takes time or may fail goes to a thread or task of its own, which tries again by itself.

use std::{collections::BTreeSet, fmt, sync::Arc};

use headgate_core::{Family, ServiceKey, State, iptables::NodePortAddresses, view::NodeFacts};

/// What a step programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// Everything: the first sync, and repairs.
    All,
    /// These services.
    Services(&'a BTreeSet<Arc<ServiceKey>>),
}

/// Runs beside the backend, on the reconcile loop's thread.
pub trait Companion: Send {
    /// A step is planned. The state's lock is held: computes only. When an earlier step failed, its services are among this one's.
    fn plan(&mut self, state: &State, node: &NodeFacts, scope: Scope<'_>);

    /// The rules of the step that was planned last are in the kernel.
    fn applied(&mut self);
}

/// Which of the node's addresses answer NodePorts, as resolved now.
#[derive(Clone)]
pub struct NodePorts(Arc<dyn Fn(Family) -> NodePortAddresses + Send + Sync>);

impl NodePorts {
    /// All addresses.
    #[must_use]
    pub fn all() -> Self {
        Self::new(|_| NodePortAddresses::All)
    }

    /// Asks `resolve` every time that they matter.
    pub fn new(resolve: impl Fn(Family) -> NodePortAddresses + Send + Sync + 'static) -> Self {
        Self(Arc::new(resolve))
    }

    /// Those of a family.
    #[must_use]
    pub fn of(&self, family: Family) -> NodePortAddresses {
        (self.0)(family)
    }
}

impl fmt::Debug for NodePorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(Family::BOTH.map(|family| self.of(family))).finish()
    }
}
