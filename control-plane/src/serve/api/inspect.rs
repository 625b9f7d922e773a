//! The `Inspect` service: it shows people the state of this replica.

use std::{
    collections::{BTreeSet, VecDeque},
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{Stream, StreamExt as _, stream};
use headgate_core::{Change, Endpoint, Placement, ServiceKey, ServicePort};
use headgate_proto::v1::{self, inspect_server::Inspect};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::wait::CheckedWait;
use crate::{
    identity::{Expiry, Peer},
    metrics::kind_name,
    model::Problem,
    objects::SourceKind,
    serve::{
        barrier::Barrier,
        context::{Lifecycle, audit_object, milliseconds, unix_ms},
        everywhere::Everywhere,
        fleet::Fleet,
        overview::Overview,
        verification::Verifier,
    },
    store::{NoPod, PodName, Store, WatchCursor, positions_to_wire},
};

/// The number of changes that a watcher reads from the store at a time.
const WATCH_PAGE: usize = 256;

/// The service `headgate.v1.Inspect`.
pub(crate) struct Inspector {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) everywhere: Arc<Everywhere>,
    pub(crate) barrier: Arc<Barrier>,
    pub(crate) overview: Arc<Overview>,
    pub(crate) verifier: Arc<Verifier>,
}

pub(super) type Items<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The maximum size of the problems in a status, in bytes. Clients accept answers of up to 4 MiB.
const MAX_PROBLEM_BYTES: usize = 1 << 20;

/// The maximum number of problems of nodes in a status. `ListAgents` has those of all nodes.
const MAX_NODE_PROBLEMS: usize = 100;

/// Converts as many problems as fit into an answer. A last entry counts the others.
fn problems_to_wire(problems: &[Problem]) -> Vec<v1::Problem> {
    let mut shown = Vec::new();
    let mut bytes = 0;
    for Problem { object, field, message, origin } in problems {
        bytes += object.len() + field.len() + message.len() + origin.len() + 32;
        if bytes > MAX_PROBLEM_BYTES {
            let more = problems.len() - shown.len();
            let message = format!("{more} more problems are not shown: fix the problems that are shown first");
            shown.push(v1::Problem { message, ..v1::Problem::default() });
            break;
        }
        let (object, field) = (object.clone(), field.clone());
        shown.push(v1::Problem { object, field, message: message.clone(), origin: origin.clone() });
    }
    shown
}

/// Returns the problems of one object. `problems` is sorted by object.
fn problems_of<'a>(problems: &'a [Problem], object: &str) -> &'a [Problem] {
    let begin = problems.partition_point(|problem| problem.object.as_str() < object);
    let rest = problems.get(begin..).unwrap_or_default();
    let count = rest.partition_point(|problem| problem.object == object);
    rest.get(..count).unwrap_or_default()
}

#[tonic::async_trait]
impl Inspect for Inspector {
    type ListServicesStream = Items<v1::ServiceInfo>;
    type ListEndpointsStream = Items<v1::EndpointInfo>;
    type ListAgentsStream = Items<v1::AgentInfo>;
    type WatchStream = Items<v1::WatchEvent>;
    type WatchAgentsStream = Items<v1::AgentsChange>;
    type WaitStream = Items<v1::WaitAnswer>;
    type QueryNodeStream = Items<v1::NodeAnswer>;
    type DrainPodStream = Items<v1::BarrierAnswer>;
    type VerifyNodesStream = Items<v1::VerifyNodesResponse>;

    async fn get_status(
        &self,
        request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        let v1::GetStatusRequest { only_this_replica, last_changes } = request.into_inner();
        let fleet = &self.fleet;
        let context = &fleet.context;
        let counts = context.store.counts();
        let (conflicts, unready) = context.store.conflicts_and_unready();
        let last_changes = usize::try_from(last_changes).unwrap_or(usize::MAX);
        let others = if only_this_replica { Vec::new() } else { self.others(last_changes > 0).await };
        let (mut fleet_info, mut problems) = self.fleet_info((!only_this_replica).then_some(&others[..]));
        fleet_info.last_changes = match only_this_replica {
            true => self.overview.changes_here(last_changes),
            false => self.changes_everywhere(last_changes, &others, fleet_info.nodes),
        };
        problems.extend(context.store.conflict_problems());
        problems.extend(fleet.all().iter().flat_map(|agent| agent.problems()).take(MAX_NODE_PROBLEMS));
        problems.extend(fleet.rejected());
        problems.extend_from_slice(&context.store.present_problems());
        problems.sort_unstable();
        // Other replicas have the same problems of Nodes.
        problems.dedup();
        Ok(Response::new(v1::GetStatusResponse {
            replica: context.settings.replica_name.clone(),
            epoch: format!("{:016x}", context.store.epoch()),
            version: counts.version,
            build: env!("CARGO_PKG_VERSION").into(),
            source: context.settings.source_name.clone(),
            synced: context.store.is_synced(),
            source_age_ms: milliseconds(context.store.source_age()),
            source_state: context.store.source_state().to_string(),
            source_problem: context.store.source_problem().unwrap_or_default(),
            services: counts.services as u64,
            endpoints: counts.endpoints as u64,
            nodes: counts.nodes as u64,
            agents: fleet.len() as u64,
            problems: problems_to_wire(&problems),
            fleet: Some(fleet_info),
            source_ages: context.store.source_ages().into_iter().map(source_age).collect(),
            positions: {
                let positions = context.store.changed_positions().into_iter();
                positions_to_wire(positions.filter(|(kind, _)| kind.is_comparable()))
            },
            replicas: self.replica_infos(others),
            conflicts: conflicts as u64,
            services_without_ready_endpoints: unready as u64,
            certificate_not_after_unix_ms: context.metrics.certificate_not_after_unix_ms(),
            balance_limit: u64::try_from(context.metrics.balance_limit.get()).unwrap_or_default(),
        }))
    }

    async fn list_services(
        &self,
        request: Request<v1::ListServicesRequest>,
    ) -> Result<Response<Self::ListServicesStream>, Status> {
        audit_object(&request, &[&request.get_ref().namespace, &request.get_ref().name]);
        let v1::ListServicesRequest { namespace, name } = request.into_inner();
        let store = Arc::clone(&self.fleet.context.store);
        let keys = store.keys(|key| matches(key, &namespace, &name));
        let services = stream::iter(keys).filter_map(move |key| {
            let service = service_info(&store, &key);
            async move { service.map(Ok) }
        });
        Ok(Response::new(Box::pin(services)))
    }

    async fn list_endpoints(
        &self,
        request: Request<v1::ListEndpointsRequest>,
    ) -> Result<Response<Self::ListEndpointsStream>, Status> {
        audit_object(&request, &[&request.get_ref().namespace, &request.get_ref().name]);
        let v1::ListEndpointsRequest { namespace, name } = request.into_inner();
        let store = Arc::clone(&self.fleet.context.store);
        let keys = store.keys(|key| matches(key, &namespace, &name));
        if keys.is_empty() && !name.is_empty() {
            return Err(Status::not_found(format!(
                "neither Service {namespace}/{name} nor an endpoint of this Service exists"
            )));
        }
        let endpoints = stream::iter(keys).flat_map(move |key| {
            let endpoints = store.endpoints(&key).into_iter();
            stream::iter(endpoints.map(move |(endpoint, version)| Ok(endpoint_info(&key, &endpoint, version))))
        });
        Ok(Response::new(Box::pin(endpoints)))
    }

    async fn list_agents(
        &self,
        request: Request<v1::ListAgentsRequest>,
    ) -> Result<Response<Self::ListAgentsStream>, Status> {
        audit_object(&request, &[&request.get_ref().node]);
        let v1::ListAgentsRequest { node, only_this_replica } = request.into_inner();
        let agents = match only_this_replica {
            true => self.agents_here(&node),
            false => self.agents(&node).await,
        };
        Ok(Response::new(Box::pin(stream::iter(agents.into_iter().map(Ok)))))
    }

    async fn watch_agents(
        &self,
        request: Request<v1::WatchAgentsRequest>,
    ) -> Result<Response<Self::WatchAgentsStream>, Status> {
        let expiry = request.extensions().get::<Peer>().and_then(Peer::expiry);
        let watcher = self.overview.watch(request.into_inner())?;
        let messages = stream::unfold(Some(watcher), |watcher| async move {
            let mut watcher = watcher?;
            let next = watcher.next().await?;
            let goes_on = next.is_ok();
            Some((next, goes_on.then_some(watcher)))
        });
        Ok(Response::new(Box::pin(messages.take_until(Expiry::passed(expiry)))))
    }

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let expiry = request.extensions().get::<Peer>().and_then(Peer::expiry);
        audit_object(&request, &[&request.get_ref().namespace, &request.get_ref().name]);
        let v1::WatchRequest { namespace, name } = request.into_inner();
        let store = Arc::clone(&self.fleet.context.store);
        let watcher = Watcher {
            head: store.head(),
            lifecycle: self.fleet.context.lifecycle.subscribe(),
            cursor: store.watch_cursor(),
            page: VecDeque::new(),
            expiry,
            namespace,
            name,
            store,
        };
        let events = stream::unfold(watcher, |mut watcher| async move { Some((watcher.next().await?, watcher)) });
        Ok(Response::new(Box::pin(events)))
    }

    async fn wait(&self, request: Request<v1::WaitRequest>) -> Result<Response<Self::WaitStream>, Status> {
        let expiry = request.extensions().get::<Peer>().and_then(Peer::expiry);
        audit_object(&request, &[&request.get_ref().namespace, &request.get_ref().name]);
        let wait = CheckedWait::new(request.into_inner())?;
        let (fleet, everywhere) = (Arc::clone(&self.fleet), Arc::clone(&self.everywhere));
        let answer = async move {
            tokio::select! {
                answer = wait.answer(&fleet, &everywhere) => Ok(answer),
                () = Expiry::passed(expiry) => Err(match expiry.and_then(Expiry::due) {
                    Some(denied) => denied.into(),
                    None => Status::unauthenticated("the certificate has expired"),
                }),
            }
        };
        Ok(Response::new(Box::pin(stream::once(answer))))
    }

    async fn query_node(
        &self,
        request: Request<v1::QueryNodeRequest>,
    ) -> Result<Response<Self::QueryNodeStream>, Status> {
        audit_object(&request, &[&request.get_ref().node]);
        let v1::QueryNodeRequest { node, query, only_this_replica } = request.into_inner();
        let Some(query) = query.filter(|query| query.kind.is_some()) else {
            let text = "QueryNodeRequest.query: must have a kind that this replica knows; upgrade the control plane if the kind is new";
            return Err(Status::invalid_argument(text));
        };
        if !only_this_replica && let Some(mut client) = self.elsewhere(&node)? {
            let request = v1::QueryNodeRequest { node, query: Some(query), only_this_replica: true };
            return Ok(Response::new(Box::pin(client.query_node(request).await?.into_inner())));
        }
        let asked = self.fleet.ask(&node, query)?;
        let parts = stream::unfold(asked, |mut asked| async move { Some((asked.next().await?, asked)) });
        Ok(Response::new(Box::pin(parts)))
    }

    async fn drain_pod(&self, request: Request<v1::DrainPodRequest>) -> Result<Response<Self::DrainPodStream>, Status> {
        audit_object(&request, &[&request.get_ref().namespace, &request.get_ref().name]);
        let v1::DrainPodRequest { namespace, name, timeout_ms, silent_ms, uid } = request.into_inner();
        if namespace.is_empty() || name.is_empty() {
            return Err(Status::invalid_argument("namespace and name: both are required"));
        }
        let or = |value: u64, default: u64| if value == 0 { default } else { value };
        let request = v1::BarrierRequest {
            pod_namespace: namespace,
            pod_name: name,
            timeout_ms: or(timeout_ms, 25_000),
            silent_ms: or(silent_ms, 20_000),
            pod_uid: uid,
            ..v1::BarrierRequest::default()
        };
        let barrier = Arc::clone(&self.barrier);
        let answer = async move { Ok(barrier.answer(None, request).await) };
        Ok(Response::new(Box::pin(stream::once(answer))))
    }

    async fn verify_nodes(
        &self,
        request: Request<v1::VerifyNodesRequest>,
    ) -> Result<Response<Self::VerifyNodesStream>, Status> {
        let expiry = request.extensions().get::<Peer>().and_then(Peer::expiry);
        audit_object(&request, &[&request.get_ref().node]);
        let v1::VerifyNodesRequest { node, only_this_replica } = request.into_inner();
        let ended = Expiry::passed(expiry);
        if node.is_empty() {
            let nodes = match only_this_replica {
                true => self.verifier.all().boxed(),
                false => self.verify_all().await,
            };
            return Ok(Response::new(Box::pin(nodes.map(Ok).take_until(ended))));
        }
        if !only_this_replica && let Some(mut client) = self.elsewhere(&node)? {
            let request = v1::VerifyNodesRequest { node, only_this_replica: true };
            return Ok(Response::new(Box::pin(client.verify_nodes(request).await?.into_inner().take_until(ended))));
        }
        let verifier = Arc::clone(&self.verifier);
        let answer = async move {
            let verification = Some(verifier.node(&node).await?);
            Ok(v1::VerifyNodesResponse { verification, ..v1::VerifyNodesResponse::default() })
        };
        Ok(Response::new(Box::pin(stream::once(answer).take_until(ended))))
    }

    async fn find_pod(&self, request: Request<v1::FindPodRequest>) -> Result<Response<v1::PodInfo>, Status> {
        let v1::FindPodRequest { namespace, name, address } = request.get_ref();
        audit_object(&request, &[namespace, name, address]);
        let v1::FindPodRequest { namespace, name, address } = request.into_inner();
        let pod = match (namespace.is_empty() || name.is_empty(), address.parse()) {
            (false, _) => PodName::Named(namespace, name),
            (true, Ok(address)) => PodName::Address(namespace, address),
            (true, Err(_)) => return Err(Status::invalid_argument("give namespace and name, or an IP address")),
        };
        let found = self.fleet.context.store.pod(&pod, "").map_err(|problem| match problem {
            NoPod::Unknown | NoPod::OnlyRemoved => Status::not_found("no endpoint belongs to this pod"),
            NoPod::Ambiguous => Status::failed_precondition("several pods share this address or name"),
        })?;
        let addresses: BTreeSet<IpAddr> = found.endpoints.iter().map(|(_, address)| *address).collect();
        let addresses = addresses.iter().map(IpAddr::to_string).collect();
        let node = found.node.as_deref().unwrap_or_default().to_owned();
        Ok(Response::new(v1::PodInfo { addresses, node }))
    }
}

fn source_age((kind, age): (SourceKind, Duration)) -> v1::SourceAge {
    v1::SourceAge { kind: kind_name(kind).into(), age_ms: milliseconds(age) }
}

fn matches(key: &ServiceKey, namespace: &str, name: &str) -> bool {
    (namespace.is_empty() || key.namespace == namespace) && (name.is_empty() || key.name == name)
}

/// The state of a `Watch` request: a cursor into the log, and the changes that were read with it.
struct Watcher {
    store: Arc<Store>,
    head: watch::Receiver<u64>,
    lifecycle: watch::Receiver<Lifecycle>,
    cursor: WatchCursor,
    page: VecDeque<(u64, Change)>,
    expiry: Option<Expiry>,
    namespace: String,
    name: String,
}

impl Watcher {
    async fn next(&mut self) -> Option<Result<v1::WatchEvent, Status>> {
        loop {
            if let Some(denied) = self.expiry.and_then(Expiry::due) {
                return Some(Err(denied.into()));
            }
            while let Some((version, change)) = self.page.pop_front() {
                if let Some(event) = self.event(version, change) {
                    return Some(Ok(event));
                }
            }
            self.head.borrow_and_update();
            let page = self.store.watch_page(self.cursor, WATCH_PAGE);
            if page.is_incomplete {
                let message =
                    "the watch fell behind, and the replica no longer has every change: list again, and watch again";
                return Some(Err(Status::data_loss(message)));
            }
            self.cursor = page.next;
            if !page.changes.is_empty() {
                self.page = page.changes.into_iter().flat_map(by_state).collect();
                continue;
            }
            tokio::select! {
                changed = self.head.changed() => changed.ok()?,
                () = Expiry::passed(self.expiry) => {}
                ended = self.lifecycle.wait_for(|lifecycle| *lifecycle != Lifecycle::Serving) => {
                    drop(ended.ok()?);
                    return Some(Err(Status::unavailable("this replica stops")));
                }
            }
        }
    }

    fn event(&self, version: u64, change: Change) -> Option<v1::WatchEvent> {
        let key = match &change {
            Change::Service(service) => &service.key,
            Change::RemoveService(key) | Change::Endpoint(key, _) | Change::RemoveEndpoint(key, _) => key,
            Change::ServiceCidr(_) | Change::RemoveServiceCidr(_) => return None,
        };
        if !matches(key, &self.namespace, &self.name) {
            return None;
        }
        let (namespace, name) = (key.namespace.to_string(), key.name.to_string());
        let gone = |namespace, name| v1::ServiceInfo { namespace, name, version, ..Default::default() };
        let (action, service, endpoint) = match change {
            // `None`: the Service was removed after the page was read, a separate change.
            Change::Service(service) => ("changed", Some(service_info(&self.store, &service.key)?), None),
            Change::RemoveService(_) => ("removed", Some(gone(namespace, name)), None),
            Change::Endpoint(key, endpoint) => ("changed", None, Some(endpoint_info(&key, &endpoint, version))),
            Change::RemoveEndpoint(_, address) => {
                let address = address.to_string();
                let endpoint = v1::EndpointInfo { namespace, name, address, version, ..Default::default() };
                ("removed", None, Some(endpoint))
            }
            Change::ServiceCidr(_) | Change::RemoveServiceCidr(_) => return None,
        };
        Some(v1::WatchEvent { version, unix_ms: unix_ms(SystemTime::now()), action: action.into(), service, endpoint })
    }
}

/// Splits a change of an endpoint into one for each group of ports with equal state.
fn by_state((version, change): (u64, Change)) -> Vec<(u64, Change)> {
    match change {
        Change::Endpoint(key, endpoint) => {
            let groups = endpoint.by_state().into_iter();
            groups.map(|endpoint| (version, Change::Endpoint(key.clone(), endpoint))).collect()
        }
        change => vec![(version, change)],
    }
}

fn service_info(store: &Store, key: &ServiceKey) -> Option<v1::ServiceInfo> {
    let detail = store.service(key)?;
    let service = &detail.service;
    let port = |port: &ServicePort| v1::ServicePortInfo {
        name: port.name.to_string(),
        protocol: port.protocol.to_string(),
        port: port.port.into(),
        node_port: port.node_port.into(),
    };
    Some(v1::ServiceInfo {
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
        cluster_ips: texts(&service.cluster_ips),
        external_ips: texts(&service.external_ips),
        load_balancer_ips: texts(&service.load_balancer_ips),
        ports: service.ports.iter().map(port).collect(),
        internal_traffic_policy: service.internal_traffic_policy.to_string(),
        external_traffic_policy: service.external_traffic_policy.to_string(),
        session_affinity_timeout_seconds: service.session_affinity.map_or(0, |affinity| affinity.timeout_seconds),
        load_balancer_source_ranges: texts(&service.load_balancer_source_ranges),
        health_check_node_port: service.health_check_node_port.into(),
        endpoints: count(detail.endpoints),
        ready_endpoints: count(detail.ready_endpoints),
        version: detail.version,
        conflicts: detail.conflicts.clone(),
        load_balancing: service.load_balancing.to_string(),
        proxy_protocol: service.proxy_protocol.map(|version| version.to_string()).unwrap_or_default(),
        max_connections: service.max_connections,
        scheduler: service.scheduler.to_string(),
        health_check: service.health_check.to_string(),
        health_check_interval_ms: service.health_check_interval_ms,
        problems: problems_to_wire(problems_of(&store.present_problems(), &format!("Service {key}"))),
    })
}

fn texts<T: ToString>(items: &[T]) -> Vec<String> {
    items.iter().map(ToString::to_string).collect()
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn endpoint_info(key: &ServiceKey, endpoint: &Endpoint, version: u64) -> v1::EndpointInfo {
    let port = |port: &headgate_core::EndpointPort| {
        let text = format!("{} {}/{}", port.name, port.port, port.protocol);
        text.trim_start().to_owned()
    };
    let Placement { node, zone, hints, weight } = &*endpoint.placement;
    let hints = hints.as_deref();
    v1::EndpointInfo {
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
        address: endpoint.address.to_string(),
        ports: endpoint.ports.iter().map(port).collect(),
        ready: endpoint.conditions.ready,
        serving: endpoint.conditions.serving,
        terminating: endpoint.conditions.terminating,
        node: node.as_deref().unwrap_or_default().to_owned(),
        zone: zone.as_deref().unwrap_or_default().to_owned(),
        hint_zones: hints.map_or_else(Vec::new, |hints| texts(&hints.zones)),
        hint_nodes: hints.map_or_else(Vec::new, |hints| texts(&hints.nodes)),
        weight: weight.get(),
        version,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_with_too_many_problems_is_cut_to_fit_an_answer() {
        let problem = |n: usize| Problem {
            object: format!("Service prod/web-{n}"),
            field: "spec.ports".into(),
            message: "a Service needs at least one port".repeat(4),
            origin: "web.yaml".into(),
        };
        let problems: Vec<Problem> = (0..100_000).map(problem).collect();
        let wire = problems_to_wire(&problems);
        let bytes: usize = wire.iter().map(prost::Message::encoded_len).sum();
        assert!(bytes < 2 << 20, "{bytes}");
        let hidden = problems.len() - (wire.len() - 1);
        assert_eq!(wire.last().map(|last| last.message.starts_with(&format!("{hidden} more"))), Some(true));
        assert_eq!(problems_to_wire(&problems[..10]).len(), 10);
    }
}
