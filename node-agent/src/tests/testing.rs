//! A replica in memory, for tests. The replica numbers changes and answers a `Hello` as the
//! protocol says.
#![allow(clippy::unwrap_used)]

use std::{collections::HashSet, net::IpAddr, sync::Arc};

use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Placement, Protocol, Service, ServiceCidr, ServiceKey, ServicePort, State,
    digest,
};
use headgate_proto::{
    ChangesBuilder, References, digests_from_wire,
    v1::{self, server_message::Body, welcome::ResumeMode},
};

use crate::state::{Snapshot, StateUpdate, all_buckets};

/// An update of epoch 1 that changes these resources.
pub(crate) fn update(version: u64, changes: Vec<Change>) -> StateUpdate {
    StateUpdate { epoch: 1, version, changes, ..StateUpdate::default() }
}

/// An update of epoch 1 that replaces everything that the agent holds.
pub(crate) fn snapshot(version: u64, changes: Vec<Change>) -> StateUpdate {
    let snapshot = Some(Snapshot { buckets: all_buckets(), rejected: HashSet::new() });
    StateUpdate { snapshot, ..update(version, changes) }
}

/// A replica in memory.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) epoch: u64,
    pub(crate) state: State,
    log: Vec<Vec<Change>>,
    /// Maximum number of changes in one message. Larger batches and snapshots are split.
    pub(crate) per_message: usize,
}

impl Replica {
    pub(crate) fn new(epoch: u64, per_message: usize) -> Self {
        Self { epoch, state: State::default(), log: Vec::new(), per_message }
    }

    pub(crate) fn version(&self) -> u64 {
        self.log.len() as u64
    }

    /// Commits a batch. Keeps only the last of several changes to one key, like the compacted log
    /// of a control plane.
    pub(crate) fn commit(&mut self, changes: Vec<Change>) {
        let mut kept: Vec<Change> = Vec::new();
        for change in changes.into_iter().rev() {
            if !kept.iter().any(|later| same_key(later, &change)) {
                kept.push(change);
            }
        }
        kept.reverse();
        for change in &kept {
            self.state.apply(change.clone(), &mut Dirty::default());
        }
        self.log.push(kept);
    }

    /// All messages that a stream with this resume point would carry up to the present version.
    pub(crate) fn stream(&self, resume: Option<&v1::Resume>) -> Vec<v1::ServerMessage> {
        let digests = resume.and_then(|resume| digests_from_wire(resume.digests.as_ref()?));
        match (resume, digests) {
            (Some(resume), _) if resume.epoch == self.epoch && resume.version <= self.version() => {
                let mut messages = vec![self.welcome(ResumeMode::Log)];
                messages.extend(self.batches_after(resume.version));
                messages
            }
            (_, Some(held)) => {
                let buckets = self.state.digests().differing(&held);
                let mut messages = vec![self.welcome(ResumeMode::Digests)];
                messages.extend(self.snapshot(|bucket| buckets.contains(&bucket), buckets.clone()));
                messages
            }
            _ => {
                let mut messages = vec![self.welcome(ResumeMode::Full)];
                messages.extend(self.snapshot(|_| true, Vec::new()));
                messages
            }
        }
    }

    pub(crate) fn welcome(&self, mode: ResumeMode) -> v1::ServerMessage {
        message(Body::Welcome(v1::Welcome {
            replica: "test".into(),
            epoch: self.epoch,
            resume: mode.into(),
            heartbeat_interval_ms: 60_000,
            behind_wait_ms: 0,
            head_version: Some(self.version()),
            source_state: v1::SourceState::Following.into(),
            replicas: Vec::new(),
        }))
    }

    pub(crate) fn batches_after(&self, version: u64) -> Vec<v1::ServerMessage> {
        let mut messages = Vec::new();
        for (changes, previous) in self.log.iter().zip(0..).skip(usize::try_from(version).unwrap()) {
            let parts: Vec<&[Change]> = changes.chunks(self.per_message).collect();
            for (i, part) in parts.iter().enumerate() {
                let version = if i + 1 == parts.len() { previous + 1 } else { previous };
                messages.push(batch(previous, version, part));
            }
        }
        messages
    }

    fn snapshot(&self, include: impl Fn(u16) -> bool, buckets: Vec<u16>) -> Vec<v1::ServerMessage> {
        let mut changes = Vec::new();
        for (key, entry) in self.state.entries().filter(|(key, _)| include(digest::service_bucket(key))) {
            changes.extend(entry.service().cloned().map(Change::from));
            let endpoints = entry.endpoints().values().cloned();
            changes.extend(endpoints.map(|endpoint| Change::Endpoint((**key).clone(), endpoint)));
        }
        let service_cidrs = self.state.service_cidrs().filter(|held| include(digest::service_cidr_bucket(&held.name)));
        changes.extend(service_cidrs.cloned().map(Change::ServiceCidr));
        let mut messages: Vec<_> = changes.chunks(self.per_message).map(chunk).collect();
        messages.push(end(self.version(), buckets.into_iter().map(u32::from).collect(), changes.len() as u64));
        messages
    }
}

fn same_key(a: &Change, b: &Change) -> bool {
    fn identity(change: &Change) -> (u8, Option<&ServiceKey>, String) {
        match change {
            Change::Service(service) => (0, Some(&service.key), String::new()),
            Change::RemoveService(key) => (0, Some(key), String::new()),
            Change::Endpoint(key, endpoint) => (1, Some(key), endpoint.address.to_string()),
            Change::RemoveEndpoint(key, address) => (1, Some(key), address.to_string()),
            Change::ServiceCidr(service_cidr) => (2, None, service_cidr.name.to_string()),
            Change::RemoveServiceCidr(name) => (2, None, name.to_string()),
        }
    }
    identity(a) == identity(b)
}

pub(crate) fn message(body: Body) -> v1::ServerMessage {
    v1::ServerMessage { body: Some(body) }
}

pub(crate) fn batch(previous_version: u64, version: u64, changes: &[Change]) -> v1::ServerMessage {
    let positions = vec![v1::SourcePosition { kind: v1::source_position::Kind::Files.into(), position: version }];
    message(Body::Batch(v1::Batch {
        follows_version: (previous_version + 1 != version).then_some(previous_version),
        version,
        positions,
        changes: Some(wire(changes)),
        endpoint_slices_position: 0,
        acknowledge_at_once: false,
    }))
}

pub(crate) fn chunk(changes: &[Change]) -> v1::ServerMessage {
    message(Body::SnapshotChunk(v1::SnapshotChunk { changes: Some(wire(changes)) }))
}

pub(crate) fn end(version: u64, buckets: Vec<u32>, resource_count: u64) -> v1::ServerMessage {
    let positions = vec![v1::SourcePosition { kind: v1::source_position::Kind::Files.into(), position: version }];
    message(Body::SnapshotEnd(v1::SnapshotEnd { version, positions, buckets, resource_count }))
}

pub(crate) fn wire(changes: &[Change]) -> v1::Changes {
    let mut builder = ChangesBuilder::default();
    changes.iter().for_each(|change| builder.push(change, 0, References::default()));
    builder.finish()
}

pub(crate) fn key(name: &str) -> ServiceKey {
    ServiceKey::new("prod", name)
}

pub(crate) fn service(name: &str, port: u16) -> Change {
    let last = name.bytes().fold(1, |sum: u8, byte| sum.wrapping_mul(31).wrapping_add(byte));
    let ports = vec![ServicePort { name: "http".into(), protocol: Protocol::Tcp, port, node_port: 0 }];
    Change::from(Service::new(key(name), vec![IpAddr::from([10, 96, 0, last])], ports))
}

pub(crate) fn endpoint(name: &str, last: u8, port: u16) -> Change {
    let ports: Arc<[EndpointPort]> = vec![EndpointPort::new("http", Protocol::Tcp, port)].into();
    let mut endpoint = Endpoint::new(IpAddr::from([10, 1, 0, last]), ports);
    endpoint.placement = Placement::on(&format!("node-{}", last % 3)).into();
    Change::Endpoint(key(name), endpoint)
}

pub(crate) fn no_endpoint(name: &str, last: u8) -> Change {
    Change::RemoveEndpoint(key(name), IpAddr::from([10, 1, 0, last]))
}

pub(crate) fn service_cidr(name: &str, third: u8) -> Change {
    let cidr = ipnet::IpNet::new(IpAddr::from([10, 96, third, 0]), 24).unwrap();
    Change::ServiceCidr(ServiceCidr { name: name.into(), cidrs: vec![cidr] })
}
