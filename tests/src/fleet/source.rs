//! The source of the replicas: a stand-in API server with a cluster whose objects have realistic
//! sizes.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use headgate_core::{
    Change, Conditions, Dirty, Endpoint, State,
    digest::{Digests, service_bucket},
};
use serde_json::{Value, json};

use super::latency::Timetable;
use crate::{apiserver::ApiServer, bench::workload, testbed::netns::Namespace};

/// The API server and its cluster.
pub struct Source {
    api: ApiServer,
    timetable: Arc<Timetable>,
    services: u32,
    endpoints: u32,
    changes: u32,
    /// The Services whose first endpoint is not ready.
    unready: BTreeSet<u32>,
}

impl Source {
    /// Starts the API server in `namespace`, on its loopback address, with `services` Services of
    /// `endpoints` endpoints each.
    ///
    /// # Errors
    /// The server does not start.
    pub fn start(namespace: &Namespace, timetable: Arc<Timetable>, services: u32, endpoints: u32) -> Result<Self> {
        let api = namespace.run(|| Ok(ApiServer::start()?))?;
        let source = Self { api, timetable, services, endpoints, changes: 0, unready: BTreeSet::new() };
        for number in 0..services {
            source.apply(service_object(number))?;
            source.apply(source.slice_object(number))?;
        }
        Ok(source)
    }

    /// The API server.
    #[must_use]
    pub fn api(&self) -> &ApiServer {
        &self.api
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

    fn apply(&self, object: Value) -> Result<u64> {
        let version = self.api.version() + 1;
        // There are no other writers, so the write gets the next version.
        let written = self.api.apply(object).map_err(|failure| anyhow::anyhow!("writing to the API: {failure:?}"))?;
        let text = written["metadata"]["resourceVersion"].as_str().context("the written object has no version")?;
        anyhow::ensure!(text == version.to_string(), "the write got version {text}, expected {version}");
        Ok(version)
    }

    fn slice_object(&self, number: u32) -> Value {
        slice_object(number, self.endpoints, !self.unready.contains(&number))
    }

    /// Makes the next endpoint change: the first endpoint of the next Service becomes unready, or
    /// ready again. Returns the change's version, and records its time in the timetable.
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
    /// change's version.
    ///
    /// # Errors
    /// The API server refuses the object, which is a defect.
    pub fn toggle(&mut self, number: u32) -> Result<u64> {
        if !self.unready.remove(&number) {
            self.unready.insert(number);
        }
        let object = self.slice_object(number);
        self.timetable.write(self.api.version() + 1);
        self.apply(object)
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
    /// without a pause. Returns the number of changes, and the version of the last change.
    ///
    /// # Errors
    /// The API server refuses an object, which is a defect.
    pub fn change_for(&mut self, time: Duration, per_second: u32) -> Result<(u32, u64)> {
        let start = Instant::now();
        let interval = Duration::from_secs(1) / per_second.max(1);
        let mut version = self.api.version();
        let mut count = 0;
        while interval * count < time {
            std::thread::sleep((start + interval * count).saturating_duration_since(Instant::now()));
            version = self.change()?;
            count += 1;
        }
        Ok((count, version))
    }

    /// The digests of an agent that has everything. The digests are computed from the written
    /// objects, not from the served objects.
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

fn slice_object(number: u32, endpoints: u32, is_first_ready: bool) -> Value {
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
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"},
            "ownerReferences": owner("Service", name),
        },
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>(),
    })
}
