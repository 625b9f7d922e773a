//! Turns events of Kubernetes objects into changes of the shared state, and into problems. The
//! model uses no I/O and no clock.
//!
//! If all objects are valid, the result depends only on the present objects, and not on the order
//! of events. The cost of an event is proportional to what the event changes: after a change of a
//! slice, only the addresses that differ are visited. Changes accumulate until
//! [`Model::take`] is called. That method leaves out objects that have returned to their
//! old value. `parse.rs` describes the treatment of invalid objects.

mod cidrs;
mod endpoints;
mod external_ips;
mod node_selector;
mod nodes;
mod parse;
mod services;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fmt,
    net::IpAddr,
    sync::Arc,
    time::Instant,
};

use headgate_core::{Change, Node, ServiceCidr, ServiceKey};
use tokio::sync::watch;

use self::{
    endpoints::Endpoints,
    endpoints::Interner,
    nodes::SelectedNode,
    parse::{Findings, Fitted, MAX_SHOWN, ObjectSet, Outcome, Problems, Reading, Subject, and_more},
};
use crate::objects::{GateState, Object, ObjectKey, ObjectKind, Pod, PodId, SourceKind};

pub use self::{external_ips::ExternalIps, node_selector::NodeSelector};

/// One event of a source, about one object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// The object was added or changed.
    Apply(Box<Object>),
    /// The object exists, but it cannot be decoded.
    Undecodable {
        /// The object.
        key: ObjectKey,
        /// The field, such as `spec.ports[0].port`; empty if the field is unknown.
        field: String,
        /// What is wrong.
        message: String,
    },
    /// The object was deleted.
    Delete(ObjectKey),
}

impl Event {
    /// The key of the object.
    #[must_use]
    pub fn key(&self) -> ObjectKey {
        match self {
            Self::Apply(object) => object.key(),
            Self::Undecodable { key, .. } | Self::Delete(key) => key.clone(),
        }
    }
}

/// What a model reads, and how much objects may ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSettings {
    /// Whether to read pods with the readiness gate of Headgate.
    pub reads_pods: bool,
    /// Which Nodes should have an agent.
    pub agent_nodes: NodeSelector,
    /// How much one Service may ask of every node: the most endpoint ports of its EndpointSlices,
    /// as a fifth of this number, the most [frontends](Service::frontend_count), and, as its
    /// fourfold, the most destinations in one family: endpoints of [virtual
    /// servers](Service::virtual_servers). A node needs about five rules or elements of maps for a
    /// frontend, one or two for an endpoint port, and in mode IPVS one for a destination.
    pub service_budget: u32,
    /// Which externalIPs Services may have.
    pub external_ips: ExternalIps,
}

impl ModelSettings {
    /// The default of `service_budget`.
    pub const SERVICE_BUDGET: u32 = 50_000;

    /// The largest `service_budget`. Agents accept what the control plane sends: this is their
    /// limit of [endpoint ports](headgate_core::view::MAX_PORT_ENDPOINTS), four times this is that
    /// of [destinations](headgate_core::view::MAX_DESTINATIONS), and a fifth is below
    /// [`Service::MAX_FRONTENDS`].
    pub const MAX_SERVICE_BUDGET: u32 = 65_536;

    /// The most endpoint ports of a Service.
    fn endpoint_ports(&self) -> usize {
        self.service_budget as usize
    }

    /// The most frontends of a Service.
    fn frontends(&self) -> usize {
        self.endpoint_ports() / 5
    }

    /// The most destinations of a Service in one family. The ClusterIP and the NodePort of each
    /// port take at most half of them.
    fn destinations(&self) -> usize {
        self.endpoint_ports() * 4
    }
}

impl Default for ModelSettings {
    fn default() -> Self {
        let (agent_nodes, external_ips) = (NodeSelector::default(), ExternalIps::default());
        Self { reads_pods: false, agent_nodes, service_budget: Self::SERVICE_BUDGET, external_ips }
    }
}

/// The objects in use, and the changes that have not been taken yet.
#[derive(Debug, Default)]
pub struct Model {
    settings: Arc<ModelSettings>,
    services: ObjectSet<ServiceKey, Fitted>,
    endpoints: Endpoints,
    nodes: ObjectSet<Arc<str>, SelectedNode>,
    service_cidrs: ObjectSet<Box<str>, ServiceCidr>,
    problems: Problems,
    /// The addresses about which the slices of a service contradict each other.
    conflicts: BTreeMap<ServiceKey, BTreeMap<IpAddr, endpoints::Conflict>>,
    /// The objects that are invalid as a whole.
    invalid: BTreeSet<ObjectKey>,
    interner: Interner,
}

impl Model {
    /// Creates an empty model.
    #[must_use]
    pub fn new(settings: ModelSettings) -> Self {
        let settings = Arc::new(settings);
        let mut model = Self { settings: Arc::clone(&settings), ..Self::default() };
        model.endpoints.settings = settings;
        model
    }

    /// Applies one event. `origin` is the place of the object, such as `web.yaml, document 2`;
    /// empty for the Kubernetes API.
    ///
    /// Returns the number of new problems.
    pub fn event(&mut self, event: Event, origin: &str) -> usize {
        self.take_in(event, origin, true)
    }

    /// Applies a complete list of the objects of a kind. Objects that are not in the list are
    /// removed. Deletions in the list are ignored.
    ///
    /// Returns the number of new problems.
    pub fn replace(&mut self, kind: ObjectKind, listed: Vec<Event>) -> usize {
        let mut gone: HashSet<ObjectKey> = self.keys(kind).into_iter().collect();
        let mut new_problems = 0;
        for event in listed {
            if !matches!(event, Event::Delete(_)) {
                gone.remove(&event.key());
                new_problems += self.take_in(event, "", false);
            }
        }
        for key in gone {
            new_problems += self.take_in(Event::Delete(key), "", false);
        }
        new_problems
    }

    /// Replaces the problems of a location that is not an object, such as a file. An empty list
    /// removes the location's problems.
    ///
    /// Returns the number of new problems.
    pub fn set_location_problems(&mut self, location: &str, problems: Vec<Problem>) -> usize {
        self.problems.set(Subject::Location(location.to_owned()), problems)
    }

    /// The sorted list of all problems, if it has changed since the last call.
    pub fn take_problems(&mut self) -> Option<Vec<Problem>> {
        self.problems.take()
    }

    /// For each change since the last call that brought problems, the first of them, for the log.
    fn take_unlogged_problems(&mut self) -> Vec<Problem> {
        self.problems.take_unlogged()
    }

    /// Logs the new problems, one line for each object and change, each with the fields that are
    /// not empty. Passes the list of all problems to the sink if it has changed.
    pub(crate) fn show_problems(&mut self, sink: &dyn Sink) {
        for Problem { object, field, message, origin } in self.take_unlogged_problems() {
            let [object, field, origin] =
                [&object, &field, &origin].map(|text| (!text.is_empty()).then_some(text.as_str()));
            tracing::warn!(object, field, origin, "{message}");
        }
        if let Some(problems) = self.take_problems() {
            sink.problems(problems);
        }
    }

    /// The first object that is invalid as a whole. For such an object, a model with another
    /// history may hold another version in use (`parse.rs`).
    #[must_use]
    pub fn invalid(&self) -> Option<&ObjectKey> {
        self.invalid.first()
    }

    /// Everything that has changed since the last call, without positions. Changes are grouped by
    /// service. A new endpoint precedes its service. Removals of Services are last, together with
    /// the removals of their endpoints and of ServiceCIDRs.
    pub fn take(&mut self) -> Transaction {
        let (mut changes, mut gone, mut removals) = (Vec::new(), Vec::new(), Vec::new());
        for (name, service_cidr) in self.service_cidrs.take_changes() {
            match service_cidr {
                Some(service_cidr) => changes.push(untriggered(Change::ServiceCidr(service_cidr))),
                None => removals.push(untriggered(Change::RemoveServiceCidr(name.as_ref().into()))),
            }
        }
        let mut services: BTreeMap<_, _> = self.services.take_changes().into_iter().collect();
        let mut endpoints = self.endpoints.take_changes(&mut self.interner);
        let keys: BTreeSet<ServiceKey> = services.keys().chain(endpoints.keys()).cloned().collect();
        for key in keys {
            let of_service = endpoints.remove(&key).unwrap_or_default().into_iter();
            let (added, removed): (Vec<_>, Vec<_>) =
                of_service.partition(|change| matches!(change.change, Change::Endpoint(..)));
            changes.extend(added);
            match services.remove(&key) {
                Some(None) => {
                    gone.push(untriggered(Change::RemoveService(key)));
                    gone.extend(removed);
                    continue;
                }
                Some(Some(fitted)) => changes.push(untriggered(Change::from(fitted.service))),
                None => {}
            }
            changes.extend(removed);
        }
        changes.append(&mut gone);
        changes.append(&mut removals);
        let mut pools = Vec::new();
        let node = |(name, node): (Arc<str>, Option<SelectedNode>)| {
            pools.push((Arc::clone(&name), node.as_ref().and_then(|(.., pool)| pool.clone())));
            match node {
                Some((node, true, _)) => NodeChange::Apply(node),
                Some((node, false, _)) => NodeChange::ApplyExcluded(node),
                None => NodeChange::Remove(name),
            }
        };
        let nodes = self.nodes.take_changes().into_iter().map(node).collect();
        let (pods, gates) = (self.endpoints.take_pods(), self.endpoints.gates.take());
        Transaction { changes, nodes, pools, pods, gates, ..Transaction::default() }
    }

    /// Whether an event is about a pod that neither waits nor has waited, so that it has no effect.
    #[must_use]
    pub fn ignores(&self, event: &Event) -> bool {
        let is_held = |key: &ObjectKey| self.endpoints.gates.id(key).is_some();
        match event {
            Event::Apply(object) => match &**object {
                Object::Pod(pod) => {
                    !matches!(pod.gate_state(), Some(GateState::Waiting | GateState::Programmed))
                        && !is_held(&object.key())
                }
                _ => false,
            },
            Event::Delete(key) => key.kind == ObjectKind::Pod && !is_held(key),
            Event::Undecodable { .. } => false,
        }
    }

    /// The objects of a kind that are in use or have problems.
    fn keys(&self, kind: ObjectKind) -> Vec<ObjectKey> {
        let mut keys: Vec<ObjectKey> = match kind {
            ObjectKind::Service => {
                self.services.keys().map(|key| ObjectKey::new(kind, &key.namespace, &key.name)).collect()
            }
            ObjectKind::EndpointSlice => self.endpoints.slice_keys().cloned().collect(),
            ObjectKind::Node => self.nodes.keys().map(|name| ObjectKey::new(kind, "", name)).collect(),
            ObjectKind::ServiceCidr => self.service_cidrs.keys().map(|name| ObjectKey::new(kind, "", name)).collect(),
            ObjectKind::Pod => self.endpoints.gates.keys().cloned().collect(),
        };
        keys.extend(self.problems.objects().filter(|key| key.kind == kind).cloned());
        keys
    }

    fn take_in(&mut self, event: Event, origin: &str, trigger_is_new: bool) -> usize {
        let key = event.key();
        match event {
            Event::Apply(object) => self.put_object(&key, &object, origin, trigger_is_new),
            Event::Undecodable { field, message, .. } => {
                let mut findings = Findings::default();
                findings.object(field, message);
                self.put_nothing(&key, findings, origin)
            }
            Event::Delete(_) => self.put_nothing(&key, Findings::default(), origin),
        }
    }

    fn put_object(&mut self, key: &ObjectKey, object: &Object, origin: &str, trigger_is_new: bool) -> usize {
        let outcome = match object {
            Object::Service(object) => {
                let Reading { value, findings } = services::read(object, &self.settings);
                self.put_service(key, Reading { value: value.map(Fitted::from), findings })
            }
            Object::EndpointSlice(object) => {
                let reading = endpoints::read(object, &mut self.interner);
                self.endpoints.put(key, reading, trigger_is_new, &mut self.interner)
            }
            Object::Node(object) => {
                let reading = nodes::read(object, &self.settings.agent_nodes, &mut self.interner);
                self.nodes.put(self.interner.name(&key.name), reading)
            }
            Object::ServiceCidr(object) => self.service_cidrs.put(key.name.clone(), cidrs::read(object)),
            Object::Pod(pod) => self.put_pod(key, Some(pod), trigger_is_new),
        };
        self.report(key, outcome, origin)
    }

    /// Removes an object without findings. Otherwise it is invalid, without a usable value.
    fn put_nothing(&mut self, key: &ObjectKey, findings: Findings, origin: &str) -> usize {
        let outcome = match key.kind {
            ObjectKind::Service => self.put_service(key, Reading { value: None, findings }),
            ObjectKind::EndpointSlice => {
                self.endpoints.put(key, Reading { value: None, findings }, false, &mut self.interner)
            }
            ObjectKind::Node => self.nodes.put(self.interner.name(&key.name), Reading { value: None, findings }),
            ObjectKind::ServiceCidr => self.service_cidrs.put(key.name.clone(), Reading { value: None, findings }),
            ObjectKind::Pod => Outcome { findings, ..self.put_pod(key, None, false) },
        };
        self.report(key, outcome, origin)
    }

    fn put_service(&mut self, key: &ObjectKey, reading: Reading<Fitted>) -> Outcome {
        let service = service_key(key);
        let outcome = self.services.put(service.clone(), reading);
        let ports = self.services.get(&service).map_or(0, |fitted| fitted.service.ports.len());
        self.endpoints.set_service_ports(service, ports, &mut self.interner);
        outcome
    }

    /// Applies a version of a pod, or its removal. A pod without UID has no effect.
    fn put_pod(&mut self, key: &ObjectKey, pod: Option<&Pod>, trigger_is_new: bool) -> Outcome {
        let waits_since = pod.filter(|_| trigger_is_new).map_or(0, |pod| parse::unix_ms(pod.waits_since()));
        let gated = pod.and_then(|pod| {
            let uid = Some(pod.metadata.uid.as_str()).filter(|uid| !uid.is_empty())?;
            let id = PodId::new(uid, &pod.metadata.name).in_namespace(&key.namespace);
            Some((id, uid, pod.gate_state()?))
        });
        let old = self.endpoints.gates.id(key);
        let new = gated.map(|(id, ..)| id);
        let change = |gates: &mut endpoints::Gates| {
            if old != new {
                gates.release(key);
            }
            if let Some((id, uid, state)) = gated {
                gates.set(key, id, uid, state);
            }
        };
        if self.settings.reads_pods {
            let pods: BTreeSet<PodId> = old.into_iter().chain(new).collect();
            self.endpoints.change_gates(pods, change, waits_since, &mut self.interner);
        }
        Outcome { findings: Findings::default(), consequence: "it is not treated as ready early" }
    }

    fn report(&mut self, key: &ObjectKey, Outcome { findings, consequence }: Outcome, origin: &str) -> usize {
        if findings.is_fit() {
            self.invalid.remove(key);
        } else {
            self.invalid.insert(key.clone());
        }
        let problems = findings.into_problems(key, origin, consequence);
        self.problems.set(Subject::Object(key.clone()), problems) + self.report_conflicts() + self.report_budgets()
    }

    fn report_conflicts(&mut self) -> usize {
        let mut services = BTreeSet::new();
        for (service, address, conflict) in std::mem::take(&mut self.endpoints.conflicts) {
            let of_service = self.conflicts.entry(service.clone()).or_default();
            match conflict {
                Some(conflict) => drop(of_service.insert(address, conflict)),
                None => drop(of_service.remove(&address)),
            }
            if of_service.is_empty() {
                self.conflicts.remove(&service);
            }
            services.insert(service);
        }
        let mut new_problems = 0;
        for service in services {
            let all = self.conflicts.get(&service);
            let object = format!("Service {service}");
            let problem = |(address, [used, other]): (&IpAddr, &endpoints::Conflict)| Problem {
                object: object.clone(),
                field: format!("endpoint {address}"),
                message: format!(
                    "{used} and {other} list the same port of this endpoint with different conditions, node, zone or hints, or give the \
                     endpoint too many ports together: keep the endpoint in only one of these slices; {used} is used"
                ),
                ..Problem::default()
            };
            let more = all.map_or(0, BTreeMap::len).saturating_sub(MAX_SHOWN);
            let shown = all.into_iter().flatten().take(MAX_SHOWN).map(problem);
            let problems = shown.chain(and_more(&object, "", more)).collect();
            new_problems += self.problems.set(Subject::Slices(service), problems);
        }
        new_problems
    }

    fn report_budgets(&mut self) -> usize {
        let mut new_problems = 0;
        for service in std::mem::take(&mut self.endpoints.resized) {
            let (endpoints, most) = (self.endpoints.counts(&service), self.settings.destinations());
            let message = self.services.amend(&service, |fitted| fitted.fit(endpoints, most)).flatten();
            let (object, field) = (format!("Service {service}"), "spec.externalIPs".to_owned());
            let problem = message.map(|message| Problem { object, field, message, ..Problem::default() });
            new_problems += self.problems.set(Subject::Addresses(service), problem.into_iter().collect());
        }
        for (service, problem) in std::mem::take(&mut self.endpoints.excesses) {
            new_problems += self.problems.set(Subject::Budget(service), problem.into_iter().collect());
        }
        new_problems
    }
}

fn service_key(key: &ObjectKey) -> ServiceKey {
    ServiceKey::new(&key.namespace, &key.name)
}

fn untriggered(change: Change) -> TriggeredChange {
    TriggeredChange { change, trigger_unix_ms: 0 }
}

// The changes that a source passes to the store, and the trait [`Sink`] that receives them.

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
