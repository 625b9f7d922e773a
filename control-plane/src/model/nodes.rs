//! Nodes: what each node's own agent needs to know of it.

use std::net::IpAddr;

use headgate_core::Node;

use super::{intern::Interner, parse, problems::Findings, table::Reading};
use crate::source::objects;

/// The taint by which the cluster autoscaler says that a node is about to go.
const TO_BE_DELETED_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// Reads a Node.
pub(super) fn read(object: &objects::Node, interner: &mut Interner) -> Reading<Node> {
    let mut findings = Findings::default();
    let metadata = &object.metadata;
    let Some(name) = interner.string(&metadata.name) else { return Reading { value: None, findings } };
    let zone = metadata.labels.zone.as_deref().and_then(|zone| interner.string(zone));
    let single = std::slice::from_ref(&object.spec.pod_cidr);
    let (field, texts) = match object.spec.pod_cidrs.as_slice() {
        [] => ("spec.podCIDR", single),
        several => ("spec.podCIDRs", several),
    };
    let mut pod_cidrs = Vec::new();
    for text in texts.iter().filter(|text| !text.is_empty()) {
        match parse::range(text) {
            Ok(range) => pod_cidrs.push(range),
            Err(message) => findings.object(field, message),
        }
    }
    let mut addresses: Vec<IpAddr> = Vec::new();
    for wanted in ["InternalIP", "ExternalIP"] {
        for (index, written) in object.status.addresses.iter().enumerate().filter(|(_, a)| a.address_type == wanted) {
            match parse::address(&written.address) {
                Ok(address) if !addresses.contains(&address) => addresses.push(address),
                Ok(_) => {}
                Err(message) => findings.entry(format!("status.addresses[{index}].address"), message),
            }
        }
    }
    let is_tainted = object.spec.taints.iter().any(|taint| taint.key == TO_BE_DELETED_TAINT);
    let going_away = is_tainted || !metadata.deletion_timestamp.is_empty();
    Reading { value: Some(Node { name, zone, pod_cidrs, addresses, going_away }), findings }
}
