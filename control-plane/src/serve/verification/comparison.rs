//! Compares the answers of one agent with the store.
//!
//! A bucket is settled once its digests were equal in some answer. A bucket that changed meanwhile
//! stays open, and the next answer decides about it. A difference counts only if the store has not
//! changed the bucket since the version of the answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use headgate_core::{
    Node, ServiceKey,
    digest::{BUCKETS, BucketDigest, service_bucket},
};
use headgate_proto::{NodeView, ServiceDigests, digests_from_wire, node_from_wire, v1};

use crate::{
    serve::fleet::{Rejections, clip},
    store::{OwnNode, Store, positions_to_wire},
};

/// The maximum number of differences that are named.
const MAX_DRIFT: usize = 100;

/// The maximum number of buckets that an agent is asked to describe at once.
const MAX_DESCRIBED: usize = 32;

/// The maximum number of Services that one sentence names.
const MAX_NAMED: usize = 12;

/// The difference of a bucket with a ServiceCIDR whose Services are equal.
const CIDRS_DIFFER: &str = "the ServiceCIDRs that the agent holds differ from those of the control plane";

/// The difference of a bucket without a ServiceCIDR whose Services are equal.
const DIGEST_DIFFERS: &str = "the agent's digest of its resources differs from that of the control plane, and its description of its Services does not: read the log of the agent, and verify again";

/// What the replica knows.
pub(super) struct ReplicaState {
    pub(super) store: Arc<Store>,
    /// What the agent rejects.
    pub(super) rejections: Arc<Rejections>,
}

/// The comparison of one node over several answers.
#[derive(Default)]
pub(super) struct Comparison {
    node: String,
    /// The buckets whose digests have not been equal yet.
    resources: BTreeSet<u16>,
    table: BTreeSet<u16>,
    /// The buckets that differed in the last answer.
    suspects: BTreeSet<u16>,
    /// The buckets in which only the kernel differed, in an earlier answer. The agent's facts may
    /// have changed between its dump and its answer, so one answer proves nothing.
    doubted: BTreeSet<u16>,
    /// The buckets in which resources differ.
    differing: BTreeSet<u16>,
    /// Differences, as Service and sentence.
    drift: BTreeSet<(String, String)>,
    /// The number of differences that are not in `drift`.
    more_drift: u64,
    /// Whether the last answer named a difference that the agent found itself, or another Node.
    has_drift: bool,
    /// What the last answer could not verify.
    unverified: Vec<String>,
    /// The Services that are left out because they are rejected, as sentences.
    left_out: BTreeSet<String>,
    /// The number of answers whose digests were compared, and of those with a wrong Node.
    answers: usize,
    wrong_nodes: usize,
    /// What is wrong about the agent's Node in the last answer.
    wrong_node: Option<String>,
    /// Why the comparison ended early.
    failure: Option<String>,
    version: u64,
    services: u64,
    frontends: u64,
    /// The node is in standby.
    shadow: Option<v1::Shadow>,
}

impl Comparison {
    pub(super) fn new(node: &str) -> Self {
        let all = || (0..BUCKETS).filter_map(|bucket| u16::try_from(bucket).ok()).collect();
        Self { node: node.to_owned(), resources: all(), table: all(), ..Self::default() }
    }

    pub(super) fn node(&self) -> &str {
        &self.node
    }

    /// The buckets that the agent should describe.
    pub(super) fn suspects(&self) -> Vec<u32> {
        self.suspects.iter().take(MAX_DESCRIBED).copied().map(u32::from).collect()
    }

    /// The buckets that the replica should send again, because the agent's resources differ.
    pub(super) fn differing(&self) -> &BTreeSet<u16> {
        &self.differing
    }

    /// True if an answer was compared.
    pub(super) fn has_answer(&self) -> bool {
        self.answers > 0
    }

    /// Records why the next answer did not arrive. Differences that were found before stay.
    pub(super) fn fail(&mut self, reason: &str) {
        self.failure = Some(clip(reason).to_owned());
    }

    /// True if everything was equal in the end.
    pub(super) fn is_settled(&self) -> bool {
        self.resources.is_empty() && self.table.is_empty() && !self.has_drift
    }

    fn add(&mut self, service: &str, difference: impl Into<String>) {
        let drift = (service.to_owned(), difference.into());
        if self.drift.len() < MAX_DRIFT {
            self.drift.insert(drift);
        } else {
            self.more_drift = self.more_drift.saturating_add(u64::from(!self.drift.contains(&drift)));
        }
    }

    /// Compares the digests of an answer.
    pub(super) fn take(&mut self, known: &ReplicaState, answer: &v1::Verification) {
        self.suspects.clear();
        self.differing.clear();
        self.wrong_node = None;
        self.answers += 1;
        if let Some(shadow) = &answer.shadow {
            // Nobody repairs the other proxy's rules, so only the last answer counts.
            (self.more_drift, self.shadow) = (0, Some(shadow.clone()));
            self.drift.clear();
            self.table.clear();
        }
        self.unverified = answer.unverified.iter().take(MAX_DRIFT).map(|text| clip(text).to_owned()).collect();
        let drift = answer.drift.iter().take(MAX_DRIFT);
        drift.for_each(|v1::Drift { service, difference }| self.add(clip(service), clip(difference)));
        self.more_drift = self.more_drift.max(answer.drift_count.saturating_sub(answer.drift.len() as u64));
        self.has_drift = answer.drift_count > 0;
        (self.services, self.frontends) = (answer.services, answer.frontends);
        let store = &known.store;
        if answer.epoch != store.epoch() {
            let text = "the agent has not programmed a version of this replica yet: verify again";
            return self.unverified.push(text.to_owned());
        }
        self.version = answer.version;
        match answer.resources.as_ref().and_then(digests_from_wire) {
            Some(digests) => {
                for (bucket, ours) in store.digests_since(answer.resources_version, &self.resources) {
                    if digests.bucket(bucket) == ours {
                        self.resources.remove(&bucket);
                    } else {
                        self.suspects.insert(bucket);
                    }
                }
            }
            None => self.unverified.push("the agent sent no digests of its resources: upgrade the agent".to_owned()),
        }
        self.take_table(known, answer);
    }

    fn take_table(&mut self, ReplicaState { store, .. }: &ReplicaState, answer: &v1::Verification) {
        // Without a table, the agent has said why.
        let Some(table) = answer.table.as_ref().and_then(digests_from_wire) else { return };
        let Some(view) = self.view(answer) else { return };
        self.take_node(store, answer, &view);
        if answer.view.as_ref().is_some_and(|view| view.failing_left_out) {
            self.unverified.push("too many endpoints fail the health checks of the node, so the control plane cannot compute the forwarding table: look at these endpoints".to_owned());
            return;
        }
        let mut differing = self.table.clone();
        // A node without SCTP has reported this as a problem of its own.
        for has_sctp in [true, false] {
            let compared = store.table_digests_since(answer.version, &differing, &view, has_sctp);
            let (equal, others): (Vec<_>, Vec<_>) =
                compared.into_iter().partition(|(bucket, ours)| table.bucket(*bucket) == *ours);
            for (bucket, _) in equal {
                self.table.remove(&bucket);
            }
            differing = others.into_iter().map(|(bucket, _)| bucket).collect();
        }
        // While Services change, a frontend may have another owner in the agent's version.
        if !store.owners_changed_since(answer.version) {
            self.suspects.extend(differing);
        }
    }

    /// Compares what the agent holds of its Node. A Node may be on its way to the agent, so the
    /// next attempts decide, or to this replica.
    fn take_node(&mut self, store: &Store, answer: &v1::Verification, view: &NodeView) {
        let OwnNode { node: Some(ours), position } = store.node(&self.node) else { return };
        let held = answer.view.as_ref().and_then(|view| view.own_node.as_ref());
        let theirs = held.and_then(|held| node_from_wire(held.node.as_ref()?).ok());
        let Some(difference) = node_difference(&ours, theirs.as_ref(), view) else { return };
        self.has_drift = true;
        let ours_at = positions_to_wire(position).first().copied();
        let is_newer = |(theirs, ours): (v1::SourcePosition, v1::SourcePosition)| {
            theirs.kind == ours.kind && theirs.position > ours.position
        };
        if held.and_then(|held| held.position).zip(ours_at).is_some_and(is_newer) {
            let text = "the agent has a newer value of its Node than the control plane: verify again";
            self.unverified.push(text.to_owned());
        } else {
            self.wrong_nodes += 1;
            self.wrong_node = Some(format!("{difference}: verify again, and read the log of the agent"));
        }
    }

    fn view(&mut self, answer: &v1::Verification) -> Option<NodeView> {
        let view = answer.view.as_ref().ok_or_else(|| "no view".to_owned());
        match view.and_then(|view| NodeView::from_wire(&self.node, view)) {
            Ok(view) => Some(view),
            Err(problem) => {
                self.unverified.push(format!("the control plane cannot use the agent's description of its node ({}): upgrade the control plane or the agent", clip(&problem)));
                None
            }
        }
    }

    /// Names the Services that differ in the buckets that the agent has described.
    pub(super) fn describe(&mut self, known: &ReplicaState, answer: &v1::Verification) {
        if answer.epoch != known.store.epoch() {
            return;
        }
        let Some(view) = self.view(answer) else { return };
        let version = answer.version.min(answer.resources_version);
        let mut held: BTreeMap<u16, Sides> = BTreeMap::new();
        for (key, digests) in answer.held.iter().filter_map(ServiceDigests::from_wire) {
            held.entry(service_bucket(&key)).or_default().entry(key).or_default().1 = Some(digests);
        }
        let resources = answer.resources.as_ref().and_then(digests_from_wire);
        let described: BTreeSet<u16> = answer.buckets.iter().filter_map(|bucket| u16::try_from(*bucket).ok()).collect();
        for bucket in described.intersection(&self.suspects.clone()) {
            if let Some(ours) = known.store.services_since(version, *bucket, &view) {
                let mut sides = held.remove(bucket).unwrap_or_default();
                for (key, digests) in ours {
                    sides.entry((*key).clone()).or_default().0 = Some(digests);
                }
                let digest = resources.as_ref().map(|digests| digests.bucket(*bucket));
                self.describe_bucket(known, version, *bucket, &sides, digest);
            }
        }
        // Suspects that were too many to describe stay open.
        let left = self.suspects.difference(&described).count();
        if left > 0 {
            self.unverified.push(format!(
                "{left} more groups of Services differ and are not named: verify again when the named differences are repaired"
            ));
        }
    }

    /// `digest` is the agent's digest of the resources of the bucket.
    fn describe_bucket(
        &mut self,
        known: &ReplicaState,
        version: u64,
        bucket: u16,
        sides: &Sides,
        digest: Option<BucketDigest>,
    ) {
        let (differs, table_differs) = (self.resources.contains(&bucket), self.table.contains(&bucket));
        let (mut named, mut has_rejected) = (false, false);
        for (key, (ours, theirs)) in sides {
            if known.rejections.concern(key) {
                has_rejected = true;
            } else if let Some(difference) = resources_difference(ours.as_ref(), theirs.as_ref()).filter(|_| differs) {
                self.add(clip(&key.to_string()), difference);
                self.differing.insert(bucket);
                named = true;
            } else if table_differs && ours.map(|ours| ours.table) != theirs.map(|theirs| theirs.table) {
                self.add(clip(&key.to_string()), "the agent holds the resources that the control plane holds, and derives another forwarding table from them: run the same version of both programs");
                named = true;
            }
        }
        if has_rejected && !named {
            // The rejected resource, or the last good rules of the Service, are the difference. The
            // agent has reported both.
            self.left_out.insert(rejected(sides, known));
            self.resources.remove(&bucket);
            self.table.remove(&bucket);
        } else if !named && differs {
            // The agent may have repaired its resources since its first answer, or the store may
            // have changed the bucket. The next attempt decides.
            let present = known.store.digests_since(version, &BTreeSet::from([bucket]));
            let Some((_, present)) = present.first().filter(|(_, present)| Some(*present) != digest) else { return };
            // A bucket with more resources than those of its Services holds a ServiceCIDR.
            let count = |digests: Option<ServiceDigests>| digests.map_or(0, |digests| digests.resources.count);
            let ours = sides.values().fold(0, |sum, (ours, _)| count(*ours).saturating_add(sum));
            let theirs = sides.values().fold(0, |sum, (_, theirs)| count(*theirs).saturating_add(sum));
            let is_cidr = present.count > ours || digest.is_some_and(|digest| digest.count > theirs);
            self.add("", if is_cidr { CIDRS_DIFFER } else { DIGEST_DIFFERS });
            self.differing.insert(bucket);
        } else if !named && table_differs && !self.has_drift && !self.doubted.insert(bucket) {
            let names: Vec<String> = sides.keys().take(MAX_NAMED).map(ToString::to_string).collect();
            let text = "the kernel forwards otherwise than the control plane requires, for at least one Service of";
            let names =
                if names.is_empty() { "none: an address belongs to no Service".to_owned() } else { names.join(", ") };
            self.add("", format!("{text}: {names}"));
        }
    }

    /// Returns what all attempts together have found.
    pub(super) fn finish(mut self) -> v1::NodeVerification {
        let is_settled = self.is_settled();
        match self.wrong_node.take() {
            Some(text) if self.wrong_nodes == self.answers && self.failure.is_none() => self.add("", text),
            wrong_node => self.unverified.extend(wrong_node),
        }
        self.unverified.extend(std::mem::take(&mut self.left_out));
        self.unverified.extend(self.failure.take());
        let open = self.resources.union(&self.table).count();
        if self.drift.is_empty() && open > 0 && self.unverified.is_empty() {
            self.unverified.push(format!(
                "{open} of {BUCKETS} groups of Services could not be compared, because Services or the node changed in each attempt: verify again when fewer Services change"
            ));
        }
        let is_repaired = is_settled && !self.drift.is_empty();
        let drift_count = self.more_drift.saturating_add(self.drift.len() as u64);
        let drift = self.drift.into_iter().map(|(service, difference)| v1::Drift { service, difference }).collect();
        v1::NodeVerification {
            version: self.version,
            services: self.services,
            frontends: self.frontends,
            drift,
            drift_count,
            unverified: self.unverified,
            is_repaired,
            shadow: self.shadow,
            ..v1::NodeVerification::default()
        }
    }
}

/// The Services of a bucket: what the replica has, and what the agent has.
type Sides = BTreeMap<ServiceKey, (Option<ServiceDigests>, Option<ServiceDigests>)>;

/// Returns how a Node, as the agent holds and uses it, differs from ours.
fn node_difference(ours: &Node, theirs: Option<&Node>, view: &NodeView) -> Option<String> {
    fn names<T: ToString>(values: &[T]) -> String {
        let names: Vec<String> = values.iter().map(ToString::to_string).collect();
        if names.is_empty() { "none".to_owned() } else { clip(&names.join(" ")).to_owned() }
    }
    let Some(theirs) = theirs else { return Some("the agent does not hold its Node".to_owned()) };
    let zone = |zone: &Option<Arc<str>>| clip(zone.as_deref().unwrap_or("no zone")).to_owned();
    let pair = |what: &str, theirs: String, ours: String| {
        Some(format!("the agent holds the {what} {theirs} of its Node, and the Node has {ours}"))
    };
    if ours.zone != view.facts.zone {
        let (theirs, ours) = (zone(&view.facts.zone), zone(&ours.zone));
        Some(format!("the agent uses {theirs} as its zone, and the Node has {ours}"))
    } else if ours.addresses != theirs.addresses {
        pair("addresses", names(&theirs.addresses), names(&ours.addresses))
    } else if ours.pod_cidrs != theirs.pod_cidrs {
        pair("podCIDRs", names(&theirs.pod_cidrs), names(&ours.pod_cidrs))
    } else {
        None
    }
}

/// Returns how the resources of a Service differ.
fn resources_difference(ours: Option<&ServiceDigests>, theirs: Option<&ServiceDigests>) -> Option<String> {
    match (ours, theirs) {
        (Some(_), None) => Some("the agent does not hold the Service".to_owned()),
        (None, Some(_)) => Some("the agent holds the Service, which does not exist".to_owned()),
        (Some(ours), Some(theirs)) if ours.resources == theirs.resources => None,
        (Some(ours), Some(theirs)) if ours.resources.count == theirs.resources.count => {
            Some("the agent holds another value of the Service or of an endpoint than the control plane".to_owned())
        }
        (Some(ours), Some(theirs)) => Some(format!(
            "the agent holds {} resources of the Service (itself and its endpoints), and the control plane {}",
            theirs.resources.count, ours.resources.count
        )),
        (None, None) => None,
    }
}

fn rejected(sides: &Sides, known: &ReplicaState) -> String {
    let rejected = sides.keys().filter(|key| known.rejections.concern(key)).map(ToString::to_string);
    let names = rejected.collect::<Vec<_>>().join(", ");
    format!(
        "the agent or its kernel rejects {names}, so these Services are not compared: `headgatectl agents` shows the reasons"
    )
}
