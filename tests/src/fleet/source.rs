//! The source of the replicas: an API server, stand-in or real, with a cluster whose objects have
//! realistic sizes.

use std::{
    collections::BTreeSet,
    env,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result};
use futures::{TryStreamExt as _, stream};
use headgate_core::{
    Change, Conditions, Dirty, Endpoint, State,
    digest::{Digests, service_bucket},
};
use http::Method;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::runtime::{self, Runtime};

use super::latency::Timetable;
use crate::{
    apiserver::{ASSETS_VARIABLE, ApiServer, ApiUnderTest, Kind},
    bench::workload,
    testbed::netns::Namespace,
};

/// The number of objects that are created at a real server at the same time.
const CREATED_AT_ONCE: usize = 16;
/// The trigger of slices that have not changed yet. It is so old that it does not count.
const OLD_TRIGGER: &str = "2026-01-01T00:00:00Z";

/// [`Source::start`] or [`Source::start_from_environment`].
pub type StartSource = fn(&Namespace, Arc<Timetable>, u32, u32) -> Result<Source>;

/// A change of endpoints that was written.
#[derive(Debug, Clone, Copy)]
pub struct Written {
    /// The number of the Service.
    pub service: u32,
    /// The resourceVersion of the EndpointSlice.
    pub version: u64,
    /// The time just before the write.
    pub at: Instant,
    /// The same time as milliseconds since the Unix epoch. The slice has it as its trigger.
    pub trigger_unix_ms: u64,
}

enum Server {
    StandIn(ApiServer),
    Real(RealServer),
}

/// A real API server, and a runtime whose only worker is in the server's namespace.
struct RealServer {
    api: Arc<ApiUnderTest>,
    runtime: Runtime,
}

impl RealServer {
    fn start(namespace: &Namespace) -> Result<Self> {
        // The worker inherits the namespace of the thread that starts it.
        let build = || Ok(runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?);
        let runtime = namespace.run(build)?;
        let api = runtime.block_on(runtime.spawn(ApiUnderTest::real()))??;
        Ok(Self { api: Arc::new(api.context("no real API server")?), runtime })
    }

    fn run<T: Send + 'static>(&self, work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
        self.runtime.block_on(self.runtime.spawn(work))?
    }

    fn create_all(&self, services: u32, endpoints: u32) -> Result<()> {
        let api = Arc::clone(&self.api);
        self.run(async move {
            api.ensure_namespace(&workload::key(0).namespace).await?;
            let create = |number: u32| {
                let api = Arc::clone(&api);
                async move {
                    let mut service = service_object(number);
                    // The server chooses the addresses, because some of its range are reserved.
                    if let Some(spec) = service["spec"].as_object_mut() {
                        spec.retain(|field, _| !field.starts_with("clusterIP"));
                    }
                    api.create(&service).await?;
                    api.create(&slice_object(number, endpoints, true, OLD_TRIGGER)).await
                }
            };
            stream::iter((0..services).map(Ok)).try_for_each_concurrent(CREATED_AT_ONCE, create).await
        })
    }

    /// Replaces an EndpointSlice, and returns its version.
    fn replace(&self, slice: Value) -> Result<u64> {
        let api = Arc::clone(&self.api);
        self.run(async move {
            let text = |field: &str| slice["metadata"][field].as_str().unwrap_or_default();
            let path = Kind::EndpointSlice.object_path(text("namespace"), text("name"));
            version_of(&api.send(Method::PUT, &path, Some(&slice)).await?)
        })
    }
}

fn version_of(object: &Value) -> Result<u64> {
    let text = object["metadata"]["resourceVersion"].as_str().context("the written object has no version")?;
    text.parse().with_context(|| format!("the written object has the version {text}"))
}

/// The API server and its cluster.
pub struct Source {
    server: Server,
    timetable: Arc<Timetable>,
    services: u32,
    endpoints: u32,
    changes: u32,
    /// The Services whose first endpoint is not ready.
    unready: BTreeSet<u32>,
    written: Vec<Written>,
}

impl Source {
    /// Starts a stand-in API server in `namespace`, on its loopback address, with `services`
    /// Services of `endpoints` endpoints each.
    ///
    /// # Errors
    /// The server does not start.
    pub fn start(namespace: &Namespace, timetable: Arc<Timetable>, services: u32, endpoints: u32) -> Result<Self> {
        let api = namespace.run(|| Ok(ApiServer::start()?))?;
        for number in 0..services {
            apply(&api, service_object(number))?;
            apply(&api, slice_object(number, endpoints, true, OLD_TRIGGER))?;
        }
        Ok(Self::of(Server::StandIn(api), timetable, services, endpoints))
    }

    /// As [`Self::start`], with a real API server if [`ASSETS_VARIABLE`] names its folder.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_from_environment(
        namespace: &Namespace,
        timetable: Arc<Timetable>,
        services: u32,
        endpoints: u32,
    ) -> Result<Self> {
        if env::var_os(ASSETS_VARIABLE).is_none_or(|folder| folder.is_empty()) {
            return Self::start(namespace, timetable, services, endpoints);
        }
        let server = RealServer::start(namespace)?;
        server.create_all(services, endpoints)?;
        Ok(Self::of(Server::Real(server), timetable, services, endpoints))
    }

    fn of(server: Server, timetable: Arc<Timetable>, services: u32, endpoints: u32) -> Self {
        let (changes, unready, written) = (0, BTreeSet::new(), Vec::new());
        Self { server, timetable, services, endpoints, changes, unready, written }
    }

    /// The stand-in API server.
    ///
    /// # Panics
    /// The API server is real.
    #[must_use]
    pub fn api(&self) -> &ApiServer {
        match &self.server {
            Server::StandIn(api) => api,
            Server::Real(_) => panic!("the API server is real"),
        }
    }

    /// `stand-in` or `kube-apiserver`.
    #[must_use]
    pub fn server_name(&self) -> &'static str {
        match &self.server {
            Server::StandIn(_) => "stand-in",
            Server::Real(server) => server.api.name(),
        }
    }

    /// The text of a kubeconfig file for the API server.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        match &self.server {
            Server::StandIn(api) => api.kubeconfig(),
            Server::Real(server) => server.api.kubeconfig(),
        }
    }

    /// The times of writes and receipts.
    #[must_use]
    pub fn timetable(&self) -> &Timetable {
        &self.timetable
    }

    /// The changes so far.
    #[must_use]
    pub fn written(&self) -> &[Written] {
        &self.written
    }

    /// The number of Services.
    #[must_use]
    pub fn services(&self) -> u32 {
        self.services
    }

    /// The number of resources that an agent holds when it has everything.
    #[must_use]
    pub fn resources(&self) -> u64 {
        u64::from(self.services) * u64::from(self.endpoints + 1)
    }

    /// Makes the next endpoint change: the first endpoint of the next Service becomes unready, or
    /// ready again. Returns the change's version.
    ///
    /// # Errors
    /// The API server refuses the object, which is a defect.
    pub fn change(&mut self) -> Result<u64> {
        // A prime step spreads successive changes over the cluster.
        let number = (u64::from(self.changes) * 7_919 % u64::from(self.services.max(1))) as u32;
        self.changes += 1;
        self.toggle(number)
    }

    /// Changes the readiness of the first endpoint of the Service with this number, and returns the
    /// change's version. Records the time of the write; in the timetable only if the server is the
    /// stand-in, because the versions of a real server are not known before.
    ///
    /// # Errors
    /// The API server refuses the object, which is a defect.
    pub fn toggle(&mut self, number: u32) -> Result<u64> {
        if !self.unready.remove(&number) {
            self.unready.insert(number);
        }
        let (at, now) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH)?);
        let trigger = Timestamp::from_millisecond(i64::try_from(now.as_millis())?)?.to_string();
        let object = slice_object(number, self.endpoints, !self.unready.contains(&number), &trigger);
        let version = match &self.server {
            Server::StandIn(api) => {
                self.timetable.write(api.version() + 1);
                apply(api, object)?
            }
            Server::Real(server) => server.replace(object)?,
        };
        let trigger_unix_ms = u64::try_from(now.as_millis())?;
        self.written.push(Written { service: number, version, at, trigger_unix_ms });
        Ok(version)
    }

    /// The digest buckets of these Services, and the number of resources in these buckets.
    #[must_use]
    pub fn buckets_of(&self, services: &[u32]) -> (BTreeSet<u16>, u64) {
        let bucket = |number: &u32| service_bucket(&workload::key(*number));
        let buckets: BTreeSet<u16> = services.iter().map(bucket).collect();
        let inside = (0..self.services).filter(|number| buckets.contains(&bucket(number))).count() as u64;
        (buckets, inside * u64::from(self.endpoints + 1))
    }

    /// Makes changes at a constant rate for some time. If changes are late, the next changes follow
    /// without a pause. Returns the number of changes, and the version of the last change, or 0
    /// without changes.
    ///
    /// # Errors
    /// The API server refuses an object, which is a defect.
    pub fn change_for(&mut self, time: Duration, per_second: u32) -> Result<(u32, u64)> {
        let start = Instant::now();
        let interval = Duration::from_secs(1) / per_second.max(1);
        let (mut version, mut count) = (0, 0);
        while interval * count < time {
            std::thread::sleep((start + interval * count).saturating_duration_since(Instant::now()));
            version = self.change()?;
            count += 1;
        }
        Ok((count, version))
    }

    /// The digests of an agent that has everything, if the server is the stand-in. The digests are
    /// computed from the written objects, not from the served objects.
    #[must_use]
    pub fn digests(&self) -> Digests {
        let mut state = State::default();
        for change in workload::changes(self.services, self.endpoints) {
            state.apply(change, &mut Dirty::default());
        }
        for number in &self.unready {
            let mut endpoint = workload::endpoint(*number, 0);
            endpoint.conditions = Conditions { ready: false, serving: false, terminating: false };
            state.apply(Change::Endpoint(workload::key(*number), endpoint), &mut Dirty::default());
        }
        state.digests().clone()
    }
}

/// Writes an object to the stand-in, and returns its version.
fn apply(api: &ApiServer, object: Value) -> Result<u64> {
    let version = api.version() + 1;
    // There are no other writers, so the write gets the next version.
    let written = api.apply(object).map_err(|failure| anyhow::anyhow!("writing to the API: {failure:?}"))?;
    let found = version_of(&written)?;
    anyhow::ensure!(found == version, "the write got version {found}, expected {version}");
    Ok(version)
}

/// Namespace and name of the pod of an endpoint of a Service.
#[must_use]
pub fn pod_name(service: u32, endpoint: u32) -> (String, String) {
    let key = workload::key(service);
    (key.namespace.to_string(), format!("{}-7d4b9c6f5-x{endpoint:04}", key.name))
}

fn owner(kind: &str, name: &str) -> Value {
    json!([{
        "apiVersion": "v1", "kind": kind, "name": name, "uid": "c9b7e2f4-1f60-4f0e-a3f5-2f1d6f0c9b10", "controller": true,
        "blockOwnerDeletion": true,
    }])
}

fn service_object(number: u32) -> Value {
    let (key, ip) = (workload::key(number), workload::cluster_ip(number).to_string());
    let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {
            "clusterIP": ip, "clusterIPs": [ip], "internalTrafficPolicy": "Cluster", "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack", "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
            "selector": {"app": name}, "sessionAffinity": "None", "type": "ClusterIP",
        },
        "status": {"loadBalancer": {}},
    })
}

fn slice_object(number: u32, endpoints: u32, is_first_ready: bool, trigger: &str) -> Value {
    let key = workload::key(number);
    let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
    let endpoint = |i: u32| {
        let Endpoint { address, placement, .. } = workload::endpoint(number, i);
        let ready = is_first_ready || i > 0;
        json!({
            "addresses": [address], "conditions": {"ready": ready, "serving": ready, "terminating": false},
            "nodeName": placement.node, "zone": placement.zone,
            "targetRef": {
                "kind": "Pod", "namespace": namespace, "name": pod_name(number, i).1,
                "uid": "0b0f4d5e-3c52-4c0e-9a77-d9a1f5b8c1aa",
            },
        })
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": format!("{name}-x7k2p"), "namespace": namespace, "generateName": format!("{name}-"),
            "labels": {
                "kubernetes.io/service-name": name,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": trigger},
            "ownerReferences": owner("Service", name),
        },
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>(),
    })
}
