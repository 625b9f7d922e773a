//! The changes that a source passes to the store, and the trait [`Sink`] that receives them.

use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc, time::Instant};

use headgate_core::{Change, Node, ServiceKey};
use tokio::sync::watch;

use crate::objects::PodId;

/// A change of the shared state, with the time of the event that triggered the change.
#[derive(Debug, Clone, PartialEq)]
pub struct TriggeredChange {
    /// The new value of a resource, or the key of a removed resource.
    pub change: Change,
    /// The oldest `endpoints.kubernetes.io/last-change-trigger-time` of the slices that caused the
    /// change of an endpoint, in milliseconds since the Unix epoch; 0 when unknown.
    pub trigger_unix_ms: u64,
}

/// A change of a Node, which only that node's agent receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeChange {
    /// The Node was added or changed.
    Apply(Node),
    /// As above, and `--agent-nodes` does not select the Node: nobody waits for its agent.
    ApplyExcluded(Node),
    /// The Node of this name was removed.
    Remove(Arc<str>),
}

/// The pod of an endpoint has changed. Agents do not receive pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodChange {
    /// The service of the endpoint.
    pub service: ServiceKey,
    /// The address of the endpoint.
    pub address: IpAddr,
    /// The pod and its node; `None` if the endpoint was removed or belongs to no pod any more.
    pub pod: Option<(PodId, Option<Arc<str>>)>,
}

/// A pod with the readiness gate of Headgate waits, or waits no longer. Agents do not receive this.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateChange {
    /// The pod.
    pub pod: PodId,
    /// The names of the pod; `None` if the pod does not wait any more.
    pub waiting: Option<Arc<GatedPod>>,
}

/// The names of a pod with the readiness gate of Headgate.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GatedPod {
    /// `metadata.namespace`.
    pub namespace: Box<str>,
    /// `metadata.name`.
    pub name: Box<str>,
    /// `metadata.uid`.
    pub uid: Box<str>,
}

impl fmt::Display for GatedPod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The kinds of objects. The source has a position for each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SourceKind {
    /// Services.
    Services,
    /// EndpointSlices.
    EndpointSlices,
    /// Nodes.
    Nodes,
    /// ServiceCIDRs.
    ServiceCidrs,
    /// Pods with the readiness gate of Headgate, which only `--ready-everywhere` reads.
    Pods,
    /// A folder of manifests, which has one position for all its objects.
    Files,
}

impl SourceKind {
    /// True when replicas that follow the same source have comparable positions. The position of a
    /// folder is a time on the clock of the machine that reads the folder, so two replicas cannot
    /// compare such positions.
    #[must_use]
    pub fn is_comparable(self) -> bool {
        self != Self::Files
    }

    /// True when the kind includes resources that every agent receives.
    #[must_use]
    pub fn has_shared_resources(self) -> bool {
        self != Self::Nodes
    }

    /// True when the kind includes Nodes.
    #[must_use]
    pub fn has_nodes(self) -> bool {
        matches!(self, Self::Nodes | Self::Files)
    }
}

/// One step of the source. Changes are grouped by Service. A new endpoint precedes its Service.
/// Removed Services and ServiceCIDRs are last.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Transaction {
    /// Changes for every agent.
    pub changes: Vec<TriggeredChange>,
    /// Changes for single agents.
    pub nodes: Vec<NodeChange>,
    /// The pools of changed Nodes; `None` without one, or without the Node.
    pub pools: Vec<(Arc<str>, Option<Arc<str>>)>,
    /// Changed pods of endpoints.
    pub pods: Vec<PodChange>,
    /// Changed pods with the readiness gate of Headgate.
    pub gates: Vec<GateChange>,
    /// The new position of each kind that has changed. With the Kubernetes API, a position is a
    /// resourceVersion.
    pub positions: Vec<(SourceKind, u64)>,
    /// The new position of each kind whose position moved without a change. Kubernetes reports such
    /// positions in bookmarks. These positions are not sent to agents, because an agent with an
    /// older position has missed nothing.
    pub bookmarks: Vec<(SourceKind, u64)>,
    /// When the oldest change arrived from the source; `None` means now.
    pub received: Option<Instant>,
}

/// An object, or a part of an object, that is rejected or has no effect.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Problem {
    /// The object, such as `Service prod/web`.
    pub object: String,
    /// The field, such as `spec.ports[0].port`; empty for the object as a whole.
    pub field: String,
    /// What is wrong and what to do about it.
    pub message: String,
    /// The place, such as `web.yaml, document 2`; empty for the Kubernetes API.
    pub origin: String,
}

/// Receives what a source reads. The store implements this trait, and some tests implement it with
/// a list. No method blocks.
pub trait Sink: Send + Sync + 'static {
    /// Applies one step. The steps arrive in the order of the source, one at a time.
    fn commit(&self, transaction: Transaction);

    /// Every kind has been listed and committed, so serving may begin. A source calls this method
    /// once.
    fn synced(&self);

    /// The source has just shown that the committed objects of a kind are current: it sent a
    /// complete list, a change or a bookmark, or a version that shows that nothing has changed.
    fn heard(&self, kind: SourceKind);

    /// Sets whether the source is cut off: `Some` gives the reason, and `None` means that changes
    /// arrive again. Before the first call the source counts as not cut off.
    fn cut_off(&self, problem: Option<String>);

    /// Sets whether a request to the source has failed or is late, so that the source may soon be
    /// cut off. Agents of other replicas do not move to this replica while the source is in doubt.
    fn doubted(&self, is_doubted: bool) {
        let _ = is_doubted;
    }

    /// Replaces the list of all present problems. The list is sorted.
    fn problems(&self, problems: Vec<Problem>);

    /// For each kind, the last position that an agent has seen and this replica had not reached.
    /// The agent saw the position at another replica. The receiver wakes when a position is added.
    /// A source with a server then asks the server for the server's current position.
    fn wanted_positions(&self) -> watch::Receiver<BTreeMap<SourceKind, u64>>;

    /// Counts a refused object, a lost watch or an invalid answer. `reason` is a value of a small
    /// fixed set, such as `watch_expired` or `malformed_object`.
    fn count_error(&self, kind: SourceKind, reason: &'static str);
}
