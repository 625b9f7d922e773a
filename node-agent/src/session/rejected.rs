//! Remembers which received resources the agent has rejected, so that the agent can withdraw each
//! rejection when the resource is usable again.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use headgate_core::{Change, ServiceKey, digest};
use headgate_proto::v1::{self, welcome::ResumeMode};

use crate::state::held::Snapshot;

/// Maximum number of rejections that the agent remembers: more than the endpoints of the largest
/// Services. The agent does not withdraw rejections beyond this number; they end with the stream.
const MAX_KEPT: usize = 16_384;

/// The rejections in force, by the resource's name as in [`v1::Rejection`].
#[derive(Debug, Default)]
pub(super) struct Rejected {
    kept: BTreeMap<String, v1::Rejection>,
    /// The number of rejections that `kept` could not hold, or more: a resource that is rejected
    /// again counts again.
    forgotten: u64,
}

impl Rejected {
    /// Returns the rejections to repeat on a stream that begins with this resume mode. After a
    /// resume by log, the replica does not send the rejected resources again.
    pub(super) fn begin(&self, mode: ResumeMode) -> Vec<v1::Rejection> {
        if mode == ResumeMode::Log { self.kept.values().cloned().collect() } else { Vec::new() }
    }

    /// Drops all rejections except the rejections of the Node. The caller calls this function when
    /// the first snapshot of a stream is complete: this snapshot contains every rejected resource
    /// that still differs. The caller must not drop the rejections earlier, because the stream may
    /// break and the next stream may resume by log.
    pub(super) fn resumed(&mut self) {
        self.kept.retain(|resource, _| is_node(resource));
        self.forgotten = 0;
    }

    /// True if a rejection of the resource is in force.
    pub(super) fn contains(&self, resource: &str) -> bool {
        self.kept.contains_key(resource)
    }

    /// The number of rejections in force, or more.
    pub(super) fn count(&self) -> u64 {
        self.forgotten + self.kept.len() as u64
    }

    /// True if rejections that are not remembered may be in force.
    pub(super) fn has_forgotten(&self) -> bool {
        self.forgotten > 0
    }

    /// True if a rejection is in force for a resource that a resume by log does not send again.
    /// Rejections of the agent's own Node are ignored, because every stream sends the Node.
    pub(super) fn has_resources(&self) -> bool {
        self.has_forgotten() || self.kept.keys().any(|resource| !is_node(resource))
    }

    /// Records the rejections of a step. Returns the resources whose rejections end, because the
    /// step contains a usable value or removes the resource. The cost is negligible while no
    /// rejection is in force.
    pub(super) fn step(
        &mut self,
        rejections: &[v1::Rejection],
        changes: &[Change],
        snapshot: Option<&Snapshot>,
    ) -> Vec<String> {
        let ended = if self.kept.is_empty() { Vec::new() } else { self.ended(rejections, changes, snapshot) };
        ended.iter().for_each(|resource| drop(self.kept.remove(resource)));
        for rejection in rejections {
            if self.kept.len() < MAX_KEPT || self.kept.contains_key(&rejection.resource) {
                self.kept.insert(rejection.resource.clone(), rejection.clone());
            } else {
                self.forgotten += 1;
            }
        }
        ended
    }

    fn ended(&self, rejections: &[v1::Rejection], changes: &[Change], snapshot: Option<&Snapshot>) -> Vec<String> {
        let again: HashSet<&str> = rejections.iter().map(|rejection| rejection.resource.as_str()).collect();
        let named = changes.iter().flat_map(names).filter(|resource| self.contains(resource));
        let mut ended: BTreeSet<String> = named.collect();
        // A snapshot contains everything in its buckets. A resource that is not in the snapshot no
        // longer exists.
        let is_replaced = |resource: &str| {
            snapshot.is_some_and(|snapshot| match bucket(resource) {
                Some(bucket) => snapshot.buckets.contains(bucket),
                None => snapshot.buckets.len() == digest::BUCKETS,
            })
        };
        if snapshot.is_some() {
            ended.extend(self.kept.keys().filter(|resource| is_replaced(resource)).cloned());
        }
        ended.into_iter().filter(|resource| !again.contains(resource.as_str())).collect()
    }

    /// Removes the rejections of the agent's own Node, and returns the names under which the Node
    /// was rejected.
    pub(super) fn node_is_usable(&mut self) -> Vec<String> {
        let nodes: Vec<String> = self.kept.keys().filter(|resource| is_node(resource)).cloned().collect();
        nodes.iter().for_each(|resource| drop(self.kept.remove(resource)));
        nodes
    }
}

fn is_node(resource: &str) -> bool {
    resource.starts_with("Node ")
}

/// The names under which the resource of a change may have been rejected.
fn names(change: &Change) -> Vec<String> {
    let of_endpoint = |key: &ServiceKey, address: &dyn std::fmt::Display| {
        vec![
            format!("Endpoint {key} {address}"),
            format!("Endpoint {key}"),
            format!("endpoints of service {}", key.name),
        ]
    };
    match change {
        Change::Service(service) => vec![format!("Service {}", service.key)],
        Change::RemoveService(key) => vec![format!("Service {key}")],
        Change::Endpoint(key, endpoint) => of_endpoint(key, &endpoint.address),
        Change::RemoveEndpoint(key, address) => of_endpoint(key, address),
        Change::ServiceCidr(service_cidr) => vec![format!("ServiceCIDR {}", service_cidr.name)],
        Change::RemoveServiceCidr(name) => vec![format!("ServiceCIDR {name}")],
    }
}

/// The bucket of a rejected resource; `None` if the name of the resource does not determine the
/// bucket.
fn bucket(resource: &str) -> Option<u16> {
    let (kind, rest) = resource.split_once(' ')?;
    if kind == "ServiceCIDR" {
        return Some(digest::service_cidr_bucket(rest));
    }
    if kind != "Service" && kind != "Endpoint" {
        return None;
    }
    let (namespace, name) = rest.split(' ').next()?.split_once('/')?;
    Some(digest::service_bucket(&ServiceKey::new(namespace, name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        state::held::Buckets,
        testing::{endpoint, key, no_endpoint, service, service_cidr},
    };

    fn rejection(resource: &str) -> v1::Rejection {
        v1::Rejection { resource: resource.into(), field: "ports".into(), reason: "port 0".into() }
    }

    fn rejected(resources: &[&str]) -> Rejected {
        let mut rejected = Rejected::default();
        let rejections: Vec<_> = resources.iter().map(|resource| rejection(resource)).collect();
        assert!(rejected.step(&rejections, &[], None).is_empty());
        rejected
    }

    #[test]
    fn a_rejection_ends_with_a_usable_value_or_a_removal_of_its_resource() {
        let web = format!("Service {}", key("web"));
        let db = format!("Service {}", key("db"));
        let address = format!("Endpoint {} 10.1.0.1", key("web"));
        for (resource, change) in [
            (web.as_str(), service("web", 80)),
            (&web, Change::RemoveService(key("web"))),
            ("ServiceCIDR kubernetes", service_cidr("kubernetes", 0)),
            ("ServiceCIDR kubernetes", Change::RemoveServiceCidr("kubernetes".into())),
        ] {
            let mut rejected = rejected(&[&web, &db, &address, "ServiceCIDR kubernetes"]);
            assert_eq!(rejected.step(&[], std::slice::from_ref(&change), None), [resource]);
            assert!(!rejected.contains(resource) && rejected.contains(&db));
            assert!(rejected.step(&[], &[change], None).is_empty(), "the rejection is withdrawn only once");
        }
        let Change::Endpoint(_, held) = endpoint("web", 1, 80) else { unreachable!() };
        let named = format!("Endpoint {} {}", key("web"), held.address);
        for change in [endpoint("web", 1, 80), no_endpoint("web", 1)] {
            assert_eq!(rejected(&[&named, &web]).step(&[], &[change], None), [named.as_str()]);
        }
    }

    #[test]
    fn a_resource_that_is_rejected_again_stays_rejected_with_the_newer_reason() {
        let web = format!("Service {}", key("web"));
        let mut rejected = rejected(&[&web]);
        let newer = v1::Rejection { reason: "port 70000".into(), ..rejection(&web) };
        assert!(rejected.step(std::slice::from_ref(&newer), &[], None).is_empty());
        assert_eq!(
            rejected.begin(ResumeMode::Log),
            [newer],
            "a resume by log does not send the resource again, so the rejection is repeated"
        );
        assert!(rejected.begin(ResumeMode::Digests).is_empty(), "a resume by digests sends the resource again");
        assert!(rejected.contains(&web), "the stream may break before the snapshot is complete");
        rejected.resumed();
        assert!(!rejected.contains(&web));
    }

    #[test]
    fn a_snapshot_ends_the_rejections_in_the_buckets_that_it_replaces() {
        let (web, db) = (format!("Service {}", key("web")), format!("Endpoint {} 10.1.0.1", key("db")));
        let snapshot = |buckets| Snapshot { buckets, rejected: HashSet::new() };
        let only_web = snapshot(Buckets::Some([digest::service_bucket(&key("web"))].into()));
        let mut rejected = rejected(&[&web, &db, "removed Service"]);
        assert_eq!(rejected.step(&[], &[], Some(&only_web)), [web.as_str()]);
        let mut left = rejected.step(&[], &[], Some(&snapshot(Buckets::All)));
        left.sort();
        assert_eq!(left, [db.as_str(), "removed Service"]);
    }

    #[test]
    fn the_number_of_remembered_rejections_is_bounded() {
        let rejections: Vec<_> = (0..MAX_KEPT + 100).map(|i| rejection(&format!("Service ns/s{i}"))).collect();
        let mut rejected = Rejected::default();
        rejected.step(&rejections, &[], None);
        assert_eq!(rejected.begin(ResumeMode::Log).len(), MAX_KEPT);
        assert_eq!((rejected.has_forgotten(), rejected.count()), (true, rejections.len() as u64));
        // All remembered rejections end. The rejections that are not remembered are still in force.
        let changes: Vec<_> =
            (0..MAX_KEPT + 50).map(|i| Change::RemoveService(ServiceKey::new("ns", &format!("s{i}")))).collect();
        assert_eq!(rejected.step(&[], &changes, None).len(), MAX_KEPT);
        assert!(rejected.has_forgotten() && rejected.has_resources() && rejected.count() == 100);
        rejected.resumed();
        assert!(!rejected.has_forgotten() && !rejected.has_resources() && rejected.count() == 0);
    }
}
