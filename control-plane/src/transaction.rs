//! What a source hands to the store: one consistent step.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use headgate_core::{Change, Node};
use tokio::sync::watch;

/// A change of the shared state and what set it off.
#[derive(Debug, Clone, PartialEq)]
pub struct TriggeredChange {
    /// The resource at its new value, or the key that is gone.
    pub change: Change,
    /// Oldest `endpoints.kubernetes.io/last-change-trigger-time` behind an endpoint's change,
    /// milliseconds since the Unix epoch; 0 when unknown.
    pub trigger_unix_ms: u64,
}

/// A change of a Node, which only that node's agent receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeChange {
    /// Added or changed.
    Apply(Node),
    /// Gone.
    Remove(Arc<str>),
}

/// The kinds whose positions are told apart.
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
    /// A folder of manifests, which has one position for everything.
    Files,
}

impl SourceKind {
    /// True when replicas of one source count alike. A folder's position is the clock of whoever
    /// reads it.
    #[must_use]
    pub fn is_comparable(self) -> bool {
        self != Self::Files
    }

    /// True when its position says how new the resources are that every agent receives.
    #[must_use]
    pub fn has_shared_resources(self) -> bool {
        self != Self::Nodes
    }

    /// True when its position says how new Nodes are.
    #[must_use]
    pub fn has_nodes(self) -> bool {
        matches!(self, Self::Nodes | Self::Files)
    }
}

/// One step of the source. Changes are grouped by service; what is added comes before what refers
/// to it, removals come last.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Transaction {
    /// Changes for every agent.
    pub changes: Vec<TriggeredChange>,
    /// Changes for single agents.
    pub nodes: Vec<NodeChange>,
    /// Where the source now stands, for the kinds of which something changed (Kubernetes: the
    /// resourceVersion).
    pub positions: Vec<(SourceKind, u64)>,
    /// Likewise for kinds that moved on without a change (Kubernetes: bookmarks). A replica that
    /// has been told less has missed nothing, so agents do not learn of these.
    pub bookmarks: Vec<(SourceKind, u64)>,
    /// When the oldest change came from the source; `None`: just now.
    pub received: Option<SystemTime>,
}

/// Something in the source that is not served as written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Such as `Service prod/web`.
    pub object: String,
    /// Such as `spec.ports[0].port`; empty for the object as a whole.
    pub field: String,
    /// What is wrong and what to do about it.
    pub message: String,
    /// Such as `web.yaml, document 2`; empty for the Kubernetes API.
    pub origin: String,
}

/// Where a source puts what it reads. The store is the one that counts; tests use a list. No call
/// waits.
pub trait Sink: Send + Sync + 'static {
    /// Applies one step. Called in the order of the source, by one task at a time.
    fn commit(&self, transaction: Transaction);

    /// Every kind has been listed once and committed: serving may begin. Called once.
    fn synced(&self);

    /// The source has just shown that what was handed on of a kind is current: by a complete list,
    /// a change or a bookmark.
    fn heard(&self, kind: SourceKind);

    /// Whether the source can be heard: `Some` says why it cannot, `None` that it can again. Until
    /// the first call it can.
    fn cut_off(&self, problem: Option<String>);

    /// Whether a request to the source has failed or is late, so that it may soon be cut off.
    /// Agents of other replicas are not invited meanwhile.
    fn doubted(&self, is_doubted: bool) {
        let _ = is_doubted;
    }

    /// Replaces the list of all present problems. Sorted.
    fn problems(&self, problems: Vec<Problem>);

    /// Positions that agents have seen at other replicas and that the source has not reached here,
    /// the last one of each kind; wakes when an agent asks. A source that can find out at once how
    /// far it has come does so then.
    fn wanted_positions(&self) -> watch::Receiver<BTreeMap<SourceKind, u64>>;

    /// A refused object, a dropped watch, an answer that made no sense: counted by a short, bounded
    /// reason such as `watch_expired` or `malformed_object`.
    fn count_error(&self, kind: SourceKind, reason: &'static str);
}
