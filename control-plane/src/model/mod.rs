//! Turns events of Kubernetes objects into changes of the shared state, and into problems. The
//! model uses no I/O and no clock.
//!
//! If all objects are valid, the result depends only on the present objects, and not on the order
//! of events. The cost of an event is proportional to what the event changes: after a change of a
//! slice, only the addresses that differ are visited. Changes accumulate until
//! [`Model::take`] is called. That method leaves out objects that have returned to their
//! old value. `object_set.rs` describes the treatment of invalid objects.

mod annotations;
mod cidrs;
mod endpoints;
mod external_ips;
mod gates;
mod intern;
mod node_selector;
mod nodes;
mod object_set;
mod parse;
mod problems;
mod services;
mod size;
mod slices;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
    sync::Arc,
};

use headgate_core::{Change, ServiceCidr, ServiceKey};

use self::{
    endpoints::Endpoints,
    intern::Interner,
    nodes::SelectedNode,
    object_set::{ObjectSet, Outcome, Reading},
    problems::{Findings, MAX_SHOWN, Problems, Subject, and_more},
    size::Fitted,
};
pub use self::{external_ips::ExternalIps, node_selector::NodeSelector, size::ServiceBudget};
use crate::{
    objects::{GateState, Object, ObjectKey, ObjectKind, Pod, PodId},
    transaction::{NodeChange, Problem, Transaction, TriggeredChange},
};

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

/// The objects in use, and the changes that have not been taken yet.
#[derive(Debug, Default)]
pub struct Model {
    services: ObjectSet<ServiceKey, Fitted>,
    endpoints: Endpoints,
    nodes: ObjectSet<Arc<str>, SelectedNode>,
    agent_nodes: NodeSelector,
    external_ips: ExternalIps,
    service_cidrs: ObjectSet<Box<str>, ServiceCidr>,
    problems: Problems,
    /// The addresses about which the slices of a service contradict each other.
    conflicts: BTreeMap<ServiceKey, BTreeMap<IpAddr, endpoints::Conflict>>,
    /// The objects that are invalid as a whole.
    invalid: BTreeSet<ObjectKey>,
    interner: Interner,
}

impl Model {
    /// Creates an empty model that also reads pods with the readiness gate of Headgate.
    #[must_use]
    pub fn with_gates() -> Self {
        let mut model = Self::default();
        model.endpoints.gates.turn_on();
        model
    }

    /// Sets which Nodes should have an agent. Call this method before the first event.
    #[must_use]
    pub fn with_agent_nodes(self, agent_nodes: NodeSelector) -> Self {
        Self { agent_nodes, ..self }
    }

    /// Sets how much one Service may ask of every node. Call this method before the first event.
    #[must_use]
    pub fn with_service_budget(mut self, service_budget: ServiceBudget) -> Self {
        self.endpoints.budget = service_budget;
        self
    }

    /// Sets which externalIPs Services may have. Call this method before the first event.
    #[must_use]
    pub fn with_external_ips(self, external_ips: ExternalIps) -> Self {
        Self { external_ips, ..self }
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
    pub(crate) fn take_unlogged_problems(&mut self) -> Vec<Problem> {
        self.problems.take_unlogged()
    }

    /// The first object that is invalid as a whole. For such an object, a model with another
    /// history may hold another version in use (`object_set.rs`).
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
        let node = |(name, node)| match node {
            Some((node, true)) => NodeChange::Apply(node),
            Some((node, false)) => NodeChange::ApplyExcluded(node),
            None => NodeChange::Remove(name),
        };
        let nodes = self.nodes.take_changes().into_iter().map(node).collect();
        let (pods, gates) = (self.endpoints.take_pods(), self.endpoints.gates.take());
        Transaction { changes, nodes, pods, gates, ..Transaction::default() }
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
                let Reading { value, findings } = services::read(object, &self.external_ips, self.endpoints.budget);
                self.put_service(key, Reading { value: value.map(Fitted::from), findings })
            }
            Object::EndpointSlice(object) => {
                let reading = slices::read(object, &mut self.interner);
                self.endpoints.put(key, reading, trigger_is_new, &mut self.interner)
            }
            Object::Node(object) => {
                let reading = nodes::read(object, &self.agent_nodes, &mut self.interner);
                self.nodes.put(self.interner.name(&key.name), reading)
            }
            Object::ServiceCidr(object) => self.service_cidrs.put(key.name.clone(), cidrs::read(object)),
            Object::Pod(pod) => self.put_pod(key, Some(pod)),
        };
        self.report(key, outcome, origin)
    }

    /// Removes an object if there are no findings. Otherwise treats it as an invalid object without
    /// a usable value.
    fn put_nothing(&mut self, key: &ObjectKey, findings: Findings, origin: &str) -> usize {
        let outcome = match key.kind {
            ObjectKind::Service => self.put_service(key, Reading { value: None, findings }),
            ObjectKind::EndpointSlice => {
                self.endpoints.put(key, Reading { value: None, findings }, false, &mut self.interner)
            }
            ObjectKind::Node => self.nodes.put(self.interner.name(&key.name), Reading { value: None, findings }),
            ObjectKind::ServiceCidr => self.service_cidrs.put(key.name.clone(), Reading { value: None, findings }),
            ObjectKind::Pod => Outcome { findings, ..self.put_pod(key, None) },
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

    /// Applies a version of a pod, or its removal. A pod without UID cannot be told from the next
    /// pod of its name, so it has no effect.
    fn put_pod(&mut self, key: &ObjectKey, pod: Option<&Pod>) -> Outcome {
        let gated = pod.and_then(|pod| {
            let uid = Some(pod.metadata.uid.as_str()).filter(|uid| !uid.is_empty())?;
            let id = PodId::new(uid, &pod.metadata.name).in_namespace(&key.namespace);
            Some((id, uid, pod.gate_state()?))
        });
        let old = self.endpoints.gates.id(key);
        let new = gated.map(|(id, ..)| id);
        let change = |gates: &mut gates::Gates| {
            if old != new {
                gates.release(key);
            }
            if let Some((id, uid, state)) = gated {
                gates.set(key, id, uid, state);
            }
        };
        let is_on = self.endpoints.gates.is_on();
        if is_on {
            let pods: BTreeSet<PodId> = old.into_iter().chain(new).collect();
            self.endpoints.change_gates(pods, change, &mut self.interner);
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
        for (service, address, conflict) in self.endpoints.take_conflicts() {
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
        for service in self.endpoints.take_resized() {
            let (endpoints, budget) = (self.endpoints.counts(&service), self.endpoints.budget);
            let message = self.services.amend(&service, |fitted| fitted.fit(endpoints, budget)).flatten();
            let object = format!("Service {service}");
            let field = "spec.externalIPs".to_owned();
            let problem = message.map(|message| Problem { object, field, message, ..Problem::default() });
            new_problems += self.problems.set(Subject::Addresses(service), problem.into_iter().collect());
        }
        for (service, excess) in self.endpoints.take_excesses() {
            let problem = excess.map(|endpoints::Excess { endpoint_ports, left_out, first }| Problem {
                object: format!("Service {service}"),
                field: "endpoints".to_owned(),
                message: format!(
                    "its EndpointSlices have {endpoint_ports} endpoint ports (each address with each port of its slice, or of the Service \
                     if it has more), and a Service may have {}: give \
                     fewer endpoints or ports, divide the Service, or raise --service-budget of the control plane; {left_out} of the slices, \
                     such as {first}, are left out",
                    self.endpoints.budget.endpoint_ports
                ),
                ..Problem::default()
            });
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
