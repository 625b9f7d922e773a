//! The resources that the agent or its kernel rejects, and what the replica has to hear of them
//! (`discovery.proto`, rule 7).

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use headgate_core::{Change, ServiceKey, digest};
use headgate_proto::{
    MAX_AGENT_MESSAGE_BYTES,
    v1::{self, welcome::ResumeMode},
};
use prost::Message as _;

use crate::state::held::Snapshot;

/// Maximum number of received resources whose rejections the agent remembers: more than the
/// endpoints of the largest Services. Further ones only count in `Nack.in_force`, until the stream
/// ends.
const MAX_KEPT: usize = 16_384;
/// Maximum number of names that wait to be sent. Further ones only count in `Nack.in_force`.
const MAX_CHANGED: usize = 2 * MAX_KEPT;
/// Maximum length of a text in a message. Longer texts are cut.
pub(super) const MAX_TEXT_BYTES: usize = 1024;
/// Maximum size of the items of one NACK: half of the maximum message size, which leaves room for
/// the other fields.
const NACK_BYTES: usize = MAX_AGENT_MESSAGE_BYTES / 2;

/// The rejections in force, by the resource's name as in [`v1::Rejection`].
#[derive(Debug, Default)]
pub(super) struct Rejections {
    /// Received resources that the agent cannot use.
    received: BTreeMap<String, v1::Rejection>,
    /// The number of rejections that `received` could not hold, or more: a resource that is
    /// rejected again counts again.
    forgotten: u64,
    /// The number of ended rejections whose names `changed` could not hold. The replica still
    /// remembers them, so they count until the stream ends.
    lost_withdrawals: u64,
    /// Services whose rules the kernel rejects, or that lack a reserved address and port.
    by_node: BTreeMap<String, v1::Rejection>,
    /// Resources whose rejections began, changed or ended since the replica heard of them.
    changed: BTreeSet<String>,
    /// True if the replica has to hear of `changed`, or of another number of rejections.
    is_due: bool,
    /// The version at the last change.
    version: u64,
    /// True until the first snapshot of a stream is complete. No rejection of an earlier stream is
    /// in force meanwhile.
    is_resuming: bool,
}

impl Rejections {
    /// Begins a stream at a version. After a resume by log, the replica does not send the rejected
    /// resources again, so the agent repeats the rejections.
    pub(super) fn begin(&mut self, mode: ResumeMode, version: u64) {
        let is_resuming = mode != ResumeMode::Log;
        let changed = if is_resuming { BTreeSet::new() } else { self.received.keys().cloned().collect() };
        let (received, forgotten, is_due) = (mem::take(&mut self.received), self.forgotten, !changed.is_empty());
        *self = Self { received, forgotten, changed, is_due, version, is_resuming, ..Self::default() };
    }

    /// Forgets what waits for the replica of the stream that has ended: another replica has not
    /// heard of these rejections. [`Self::begin`] repeats those that count on the new stream.
    pub(super) fn end(&mut self) {
        self.changed.clear();
        self.is_due = false;
    }

    /// Drops all rejections of received resources, except those of the Node. The caller calls this
    /// function when the first snapshot of a stream is complete: this snapshot contains every
    /// rejected resource that still differs. The caller must not drop the rejections earlier,
    /// because the stream may break and the next stream may resume by log.
    pub(super) fn resumed(&mut self) {
        self.received.retain(|resource, _| is_node(resource));
        self.is_due |= !self.received.is_empty();
        (self.forgotten, self.is_resuming) = (0, false);
    }

    /// True if a received resource is rejected.
    #[cfg(test)]
    pub(super) fn contains(&self, resource: &str) -> bool {
        self.received.contains_key(resource)
    }

    /// True if rejections that are not remembered may be in force.
    pub(super) fn has_forgotten(&self) -> bool {
        self.forgotten > 0
    }

    /// True if a rejection is in force for a resource that a resume by log does not send again.
    /// Rejections of the agent's own Node are ignored, because every stream sends the Node.
    pub(super) fn has_resources(&self) -> bool {
        self.has_forgotten() || self.received.keys().any(|resource| !is_node(resource))
    }

    /// Records a step that leads to `version`. Rejections end if the step contains a usable value,
    /// or removes the resource. The cost is negligible while no rejection is in force.
    pub(super) fn step(
        &mut self,
        version: u64,
        rejections: &[v1::Rejection],
        changes: &[Change],
        snapshot: Option<&Snapshot>,
    ) {
        self.version = version;
        let ended = if self.received.is_empty() { BTreeSet::new() } else { self.ended(changes, snapshot) };
        self.replace(ended, rejections);
    }

    /// Records whether the agent can use its own Node.
    pub(super) fn node(&mut self, rejection: Option<&v1::Rejection>) {
        let earlier = self.received.keys().filter(|resource| is_node(resource)).cloned().collect();
        self.replace(earlier, rejection.map(std::slice::from_ref).unwrap_or_default());
    }

    fn replace(&mut self, ended: BTreeSet<String>, rejections: &[v1::Rejection]) {
        for resource in ended {
            self.received.remove(&resource);
            self.change(resource);
        }
        for rejection in rejections {
            self.is_due = true;
            if self.received.len() < MAX_KEPT || self.received.contains_key(&rejection.resource) {
                self.received.insert(rejection.resource.clone(), rejection.clone());
                self.change(rejection.resource.clone());
            } else {
                self.forgotten += 1;
            }
        }
    }

    fn ended(&self, changes: &[Change], snapshot: Option<&Snapshot>) -> BTreeSet<String> {
        let named = changes.iter().flat_map(names).filter(|resource| self.received.contains_key(resource));
        let mut ended: BTreeSet<String> = named.collect();
        if let Some(Snapshot { buckets, .. }) = snapshot {
            // A snapshot contains everything in its buckets. A resource that is not in the snapshot
            // no longer exists.
            let is_replaced = |resource: &&String| match bucket(resource) {
                Some(bucket) => buckets.contains(&bucket),
                None => buckets.len() == digest::BUCKETS,
            };
            ended.extend(self.received.keys().filter(is_replaced).cloned());
        }
        ended
    }

    /// Records the Services that this node does not program as a whole at this version. If a
    /// Service has several rejections, the last one counts.
    pub(super) fn set_by_node(&mut self, version: u64, rejections: &[v1::Rejection]) {
        if rejections.is_empty() && self.by_node.is_empty() {
            return;
        }
        let now = rejections.iter().map(|rejection| (rejection.resource.clone(), rejection.clone())).collect();
        let before = mem::replace(&mut self.by_node, now);
        let is_other = |(resource, rejection): &(&String, &v1::Rejection)| before.get(*resource) != Some(*rejection);
        let is_over = |resource: &&String| !self.by_node.contains_key(*resource);
        let new = self.by_node.iter().filter(is_other).map(|(resource, _)| resource);
        let changed: Vec<String> = new.chain(before.keys().filter(is_over)).cloned().collect();
        for resource in changed {
            self.version = version;
            self.change(resource);
        }
    }

    fn change(&mut self, resource: String) {
        self.is_due = true;
        if self.changed.len() < MAX_CHANGED {
            self.changed.insert(resource);
        } else if !self.changed.contains(&resource)
            && !self.received.contains_key(&resource)
            && !self.by_node.contains_key(&resource)
        {
            self.lost_withdrawals += 1;
        }
    }

    /// The number of rejections in force on this stream. If it is not exact, it is too high.
    fn in_force(&self) -> u64 {
        if self.is_resuming {
            return 0;
        }
        let only_by_node = self.by_node.keys().filter(|resource| !self.received.contains_key(*resource));
        self.forgotten + self.lost_withdrawals + self.received.len() as u64 + only_by_node.count() as u64
    }

    /// True if [`Self::pop`] returns a message.
    pub(super) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Takes out the next message, with as many resources as fit.
    pub(super) fn pop(&mut self) -> Option<v1::Nack> {
        if !self.is_due {
            return None;
        }
        let mut nack = v1::Nack { version: self.version, in_force: self.in_force(), ..v1::Nack::default() };
        let mut room = NACK_BYTES;
        while let Some(mut resource) = self.changed.pop_first() {
            let rejection = self.received.get(&resource).or_else(|| self.by_node.get(&resource));
            let rejection = rejection.cloned().map(|mut rejection| {
                let v1::Rejection { resource, field, reason } = &mut rejection;
                [resource, field, reason].into_iter().for_each(|text| shorten(text, MAX_TEXT_BYTES));
                rejection
            });
            let bytes = rejection.as_ref().map_or(resource.len().min(MAX_TEXT_BYTES), v1::Rejection::encoded_len) + 8;
            let Some(left) = room.checked_sub(bytes) else {
                self.changed.insert(resource);
                break;
            };
            room = left;
            match rejection {
                Some(rejection) => nack.rejections.push(rejection),
                None => {
                    shorten(&mut resource, MAX_TEXT_BYTES);
                    nack.withdrawn.push(resource);
                }
            }
        }
        self.is_due = !self.changed.is_empty();
        Some(nack)
    }
}

/// Cuts a text that is too long, at a character boundary.
pub(super) fn shorten(text: &mut String, max_bytes: usize) {
    if text.len() > max_bytes {
        text.truncate(text.floor_char_boundary(max_bytes));
        text.push('…');
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
    #![allow(clippy::unwrap_used)]
    use std::{collections::HashSet, slice};

    use super::*;
    use crate::{
        state::held::all_buckets,
        testing::{endpoint, key, no_endpoint, service, service_cidr},
    };

    fn rejection(resource: &str) -> v1::Rejection {
        v1::Rejection { resource: resource.into(), field: "ports".into(), reason: "port 0".into() }
    }

    fn named(number: usize) -> v1::Rejection {
        rejection(&format!("Service ns/s{number}"))
    }

    /// Rejections of which the replica has heard.
    fn rejected(resources: &[&str]) -> Rejections {
        let mut rejected = Rejections::default();
        let rejections: Vec<_> = resources.iter().map(|resource| rejection(resource)).collect();
        rejected.step(1, &rejections, &[], None);
        assert_eq!(rejected.pop().unwrap().rejections.len(), resources.len());
        rejected
    }

    /// The withdrawals after a step without rejections.
    fn withdrawn(rejected: &mut Rejections, changes: &[Change], snapshot: Option<&Snapshot>) -> Vec<String> {
        rejected.step(2, &[], changes, snapshot);
        rejected.pop().map(|nack| nack.withdrawn).unwrap_or_default()
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
            assert_eq!(withdrawn(&mut rejected, slice::from_ref(&change), None), [resource]);
            assert!(!rejected.contains(resource) && rejected.contains(&db));
            assert!(withdrawn(&mut rejected, &[change], None).is_empty(), "the rejection is withdrawn only once");
        }
        let Change::Endpoint(_, held) = endpoint("web", 1, 80) else { unreachable!() };
        let named = format!("Endpoint {} {}", key("web"), held.address);
        for change in [endpoint("web", 1, 80), no_endpoint("web", 1)] {
            assert_eq!(withdrawn(&mut rejected(&[&named, &web]), &[change], None), [named.as_str()]);
        }
    }

    #[test]
    fn a_resource_that_is_rejected_again_stays_rejected_with_the_newer_reason() {
        let web = format!("Service {}", key("web"));
        let mut rejected = rejected(&[&web]);
        let newer = v1::Rejection { reason: "port 70000".into(), ..rejection(&web) };
        rejected.step(2, slice::from_ref(&newer), &[Change::RemoveService(key("web"))], None);
        let nack = rejected.pop().unwrap();
        assert_eq!((nack.version, &nack.rejections[..], nack.withdrawn.len()), (2, slice::from_ref(&newer), 0));
        rejected.begin(ResumeMode::Log, 2);
        let repeated = rejected.pop().unwrap();
        assert_eq!((repeated.rejections, repeated.in_force), (vec![newer], 1), "the log does not send it again");
        rejected.begin(ResumeMode::Digests, 2);
        assert_eq!(rejected.pop(), None, "a resume by digests sends the resource again");
        assert!(rejected.contains(&web), "the stream may break before the snapshot is complete");
        rejected.resumed();
        assert!(!rejected.contains(&web) && rejected.pop().is_none());
    }

    #[test]
    fn a_snapshot_ends_the_rejections_in_the_buckets_that_it_replaces() {
        let (web, db) = (format!("Service {}", key("web")), format!("Endpoint {} 10.1.0.1", key("db")));
        let snapshot = |buckets| Snapshot { buckets, rejected: HashSet::new() };
        let only_web = snapshot([digest::service_bucket(&key("web"))].into());
        let mut rejected = rejected(&[&web, &db, "removed Service"]);
        assert_eq!(withdrawn(&mut rejected, &[], Some(&only_web)), [web.as_str()]);
        let left = withdrawn(&mut rejected, &[], Some(&snapshot(all_buckets())));
        assert_eq!(left, [db.as_str(), "removed Service"]);
    }

    #[test]
    fn the_number_of_remembered_rejections_is_bounded() {
        let rejections: Vec<_> = (0..MAX_KEPT + 100).map(named).collect();
        let mut rejected = Rejections::default();
        rejected.step(1, &rejections, &[], None);
        let all = std::iter::from_fn(|| rejected.pop()).map(|nack| (nack.rejections.len(), nack.in_force));
        let (named, in_force): (Vec<usize>, Vec<u64>) = all.unzip();
        assert_eq!(named.iter().sum::<usize>(), MAX_KEPT);
        assert!(in_force.iter().all(|count| *count == rejections.len() as u64));
        // All remembered rejections end. The rejections that are not remembered are still in force.
        let changes: Vec<_> =
            (0..MAX_KEPT + 50).map(|i| Change::RemoveService(ServiceKey::new("ns", &format!("s{i}")))).collect();
        rejected.step(2, &[], &changes, None);
        let last = std::iter::from_fn(|| rejected.pop()).last().unwrap();
        assert!(rejected.has_forgotten() && rejected.has_resources() && last.in_force == 100);
        rejected.resumed();
        assert!(!rejected.has_forgotten() && !rejected.has_resources() && rejected.in_force() == 0);
    }

    #[test]
    fn a_lost_withdrawal_counts_until_the_stream_ends() {
        let mut rejected = Rejections::default();
        let all: Vec<_> = (0..MAX_KEPT).map(named).collect();
        rejected.step(1, &all, &[], None);
        while rejected.pop().is_some() {}
        // The kernel rejects as many others, so that no name of an ended rejection fits.
        let others: Vec<_> = (0..MAX_CHANGED).map(|number| rejection(&format!("Service other/s{number}"))).collect();
        rejected.set_by_node(2, &others);
        rejected.step(3, &[], &[Change::RemoveService(ServiceKey::new("ns", "s1"))], None);
        let in_force = (MAX_KEPT + MAX_CHANGED) as u64;
        assert_eq!(rejected.pop().unwrap().in_force, in_force, "the replica still remembers ns/s1");
        rejected.begin(ResumeMode::Log, 3);
        assert_eq!(rejected.pop().unwrap().in_force, MAX_KEPT as u64 - 1);
    }

    #[test]
    fn a_new_stream_hears_only_what_begin_repeats() {
        let mut rejected = Rejections::default();
        rejected.step(1, &[named(1)], &[], None);
        rejected.end();
        assert!(rejected.pop().is_none(), "nothing is sent before Welcome");
        rejected.begin(ResumeMode::Log, 1);
        assert_eq!(rejected.pop().unwrap().rejections, [named(1)]);
    }

    #[test]
    fn messages_have_a_limited_size() {
        let long = "é".repeat(1_000);
        let rejections: Vec<_> = (0..900)
            .map(|number| v1::Rejection { field: long.clone(), reason: long.clone(), ..named(number) })
            .collect();
        let mut rejected = Rejections::default();
        rejected.step(7, &rejections, &[], None);
        let mut sent = 0;
        while let Some(nack) = rejected.pop() {
            assert!(nack.encoded_len() <= MAX_AGENT_MESSAGE_BYTES);
            assert_eq!((nack.version, nack.in_force), (7, 900));
            sent += nack.rejections.len();
        }
        assert_eq!(sent, 900);
    }

    #[test]
    fn a_resource_that_agent_and_kernel_reject_counts_once() {
        let [api, db, web] = ["api", "db", "web"].map(|name| rejection(&format!("Service {}", key(name))));
        let mut rejected = Rejections::default();
        let nack = |rejected: &mut Rejections| {
            rejected.pop().map(|nack| (nack.rejections.len(), nack.withdrawn.len(), nack.in_force))
        };
        rejected.set_by_node(5, &[api.clone(), web.clone()]);
        assert_eq!(nack(&mut rejected), Some((2, 0, 2)));
        rejected.step(6, &[web, db], &[], None);
        assert_eq!(nack(&mut rejected), Some((2, 0, 3)), "api, db, web");
        // The kernel accepts both. The agent still rejects one of them.
        rejected.set_by_node(6, &[]);
        assert_eq!(nack(&mut rejected), Some((1, 1, 2)));
        rejected.step(7, &[], &[service("web", 80), service("db", 80)], None);
        assert_eq!(nack(&mut rejected), Some((0, 2, 0)));
        // The agent can use the Service again, and its kernel still rejects it.
        rejected.step(8, slice::from_ref(&api), &[], None);
        rejected.set_by_node(8, slice::from_ref(&api));
        rejected.step(9, &[], &[service("api", 80)], None);
        assert_eq!(nack(&mut rejected), Some((1, 0, 1)));
    }
}
