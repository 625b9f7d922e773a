//! Nodes: the fields that the agent of each node needs.

use std::{net::IpAddr, sync::Arc};

use headgate_core::{Node, addresses::AddressUse};

use super::{
    endpoints::Interner,
    node_selector::NodeSelector,
    parse::{self, Findings, Reading},
};
use crate::objects;

/// The label with the zone of a Node.
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// The labels that name the pool of a Node, the first one that a Node has counts.
const POOL_LABELS: [&str; 9] = [
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
    "doks.digitalocean.com/node-pool",
    "kops.k8s.io/instancegroup",
    "node.cluster.x-k8s.io/pool",
    "node.kubernetes.io/pool",
    "node.kubernetes.io/instance-type",
];

/// The taint that the cluster autoscaler sets before it deletes a node.
const TO_BE_DELETED_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// A Node, whether it should have an agent, and its pool.
pub(super) type SelectedNode = (Node, bool, Option<Arc<str>>);

pub(super) fn read(object: &objects::Node, selector: &NodeSelector, interner: &mut Interner) -> Reading<SelectedNode> {
    let mut findings = Findings::default();
    let metadata = &object.metadata;
    let Some(name) = interner.string(&metadata.name) else { return Reading { value: None, findings } };
    if findings.checked("metadata.name", parse::subdomain(&metadata.name)).is_none() {
        return Reading { value: None, findings };
    }
    let zone = metadata.labels.get(ZONE_LABEL).and_then(|zone| {
        findings.checked(format_args!("metadata.labels[{ZONE_LABEL}]"), parse::zone(zone))?;
        interner.string(zone)
    });
    for (field, length) in
        [("spec.podCIDRs", object.spec.pod_cidrs.len()), ("status.addresses", object.status.addresses.len())]
    {
        if length > parse::MAX_LISTED {
            findings.object(field, format!("{length} entries are too many: give at most {}", parse::MAX_LISTED));
            return Reading { value: None, findings };
        }
    }
    let single = std::slice::from_ref(&object.spec.pod_cidr);
    let (field, texts) = match object.spec.pod_cidrs.as_slice() {
        [] => ("spec.podCIDR", single),
        several => ("spec.podCIDRs", several),
    };
    let texts = texts.iter().filter(|text| !text.is_empty());
    let pod_cidrs = texts.filter_map(|text| findings.checked(field, parse::range(text))).collect();
    let mut addresses: Vec<IpAddr> = Vec::new();
    for wanted in ["InternalIP", "ExternalIP"] {
        for (index, written) in object.status.addresses.iter().enumerate().filter(|(_, a)| a.address_type == wanted) {
            let field = format_args!("status.addresses[{index}].address");
            let address = findings.checked_entry(field, parse::reachable(&written.address, AddressUse::Node));
            addresses.extend(address.filter(|address| !addresses.contains(address)));
        }
    }
    let is_tainted = object.spec.taints.iter().any(|taint| taint.key == TO_BE_DELETED_TAINT);
    let going_away = is_tainted || !metadata.deletion_timestamp.is_empty();
    let node = Node { name, zone, pod_cidrs, addresses, going_away };
    let pool = POOL_LABELS.iter().find_map(|label| metadata.labels.get(*label));
    // A value that cannot be a label is not shown, and harms nobody.
    let pool = pool.filter(|pool| parse::zone(pool).is_ok()).and_then(|pool| interner.string(pool));
    Reading { value: Some((node, selector.selects(&metadata.labels), pool)), findings }
}
