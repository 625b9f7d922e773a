//! EndpointSlices: the fields that a service proxy needs, and shared copies of their values.

use std::{net::IpAddr, sync::Arc};

use headgate_core::{
    Conditions, EndpointPort, Family, Hints, Placement, Pool, ServiceKey, Weight, addresses::AddressUse,
};

use super::parse::{self, Findings, Reading};
use crate::objects::{self, PodId, keys};

/// What a slice says about an address.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) conditions: Conditions,
    pub(super) placement: Arc<Placement>,
    pub(super) pod: PodId,
}

impl Facts {
    /// Whether only the order decides which of two different entries for a port counts.
    pub(super) fn conflicts_with(&self, other: &Self) -> bool {
        self.conditions == other.conditions && self.placement != other.placement
    }

    /// The pod and its node; `None` if the endpoint belongs to no pod.
    pub(super) fn pod(&self) -> Option<(PodId, Option<Arc<str>>)> {
        (!self.pod.is_none()).then(|| (self.pod, self.placement.node.clone()))
    }
}

/// Of two entries for a port, the higher one counts: two pods on a node may share the port.
fn precedence(Conditions { ready, serving, terminating }: Conditions) -> [bool; 3] {
    [ready, !terminating, serving]
}

/// Whether an entry replaces an earlier entry for the same address and port.
pub(super) fn replaces(later: Conditions, earlier: Conditions) -> bool {
    let (later, earlier) = (precedence(later), precedence(earlier));
    // Of two equal entries that terminate, the first counts.
    later > earlier || later == earlier && later[1]
}

#[derive(Debug)]
pub(super) struct Slice {
    pub(super) service: ServiceKey,
    /// The ports of each address; sorted, without duplicates.
    pub(super) ports: Arc<[EndpointPort]>,
    /// Each address once, sorted.
    pub(super) endpoints: Vec<(IpAddr, Facts)>,
    /// The trigger time of this version, in milliseconds since the Unix epoch; 0 if unknown.
    pub(super) trigger_unix_ms: u64,
}

impl Slice {
    /// The facts about an address; `None` if the slice does not contain the address.
    pub(super) fn facts(&self, address: IpAddr) -> Option<&Facts> {
        let place = self.endpoints.binary_search_by(|(other, _)| other.cmp(&address)).ok()?;
        Some(&self.endpoints[place].1)
    }
}

/// Reads a slice. It has no value if it is for DNS only, or contains names, not addresses.
pub(super) fn read(object: &objects::EndpointSlice, interner: &mut Interner) -> Reading<Slice> {
    let metadata = &object.metadata;
    if metadata.labels.get(keys::HEADLESS).is_some() || object.address_type == "FQDN" {
        return Reading::nothing();
    }
    let mut findings = Findings::default();
    let family = match object.address_type.as_str() {
        "IPv4" => Some(Family::V4),
        "IPv6" => Some(Family::V6),
        other => {
            let message = format!("{} is not a type of address: write IPv4, IPv6 or FQDN", parse::shown(other));
            findings.object("addressType", message);
            None
        }
    };
    let service = metadata.labels.get(keys::SERVICE_NAME).filter(|name| !name.is_empty());
    if service.is_none() {
        let message = "no label names the Service of this slice: add the label kubernetes.io/service-name";
        findings.object("metadata.labels", message);
    }
    let names = [
        ("metadata.namespace", Some(metadata.namespace_or_default())),
        ("metadata.labels[kubernetes.io/service-name]", service),
    ];
    let mut is_named = true;
    for (field, name) in names {
        is_named &= name.is_none_or(|name| findings.checked(field, parse::label(name)).is_some());
    }
    let mut ports = ports(object, &mut findings);
    if !parse::may_have(&ports) {
        findings.object("ports", "an endpoint may not have so many ports: give fewer ports, or shorter names");
        ports.clear();
    }
    let (Some(family), Some(service), true) = (family, service, is_named) else {
        return Reading { value: None, findings };
    };
    let slice = Slice {
        service: ServiceKey::new(metadata.namespace_or_default(), service),
        ports: interner.ports(ports),
        endpoints: endpoints(object, family, interner, &mut findings),
        trigger_unix_ms: metadata.annotations.get(keys::TRIGGER_TIME).map_or(0, parse::unix_ms),
    };
    Reading { value: Some(slice), findings }
}

/// The ports with a number. Ports without a number belong to selectors that match no pod yet; they
/// are ignored, as in kube-proxy. A port without a name has the name '', and a port without a
/// protocol has TCP, as the API server fills in (`pkg/apis/discovery/v1/defaults.go`).
fn ports(object: &objects::EndpointSlice, findings: &mut Findings) -> Vec<EndpointPort> {
    let mut ports = Vec::with_capacity(object.ports.len());
    for (index, written) in object.ports.iter().enumerate() {
        let Some(number) = written.port.filter(|number| *number != 0) else { continue };
        let name = &written.name;
        let port = findings.checked(format_args!("ports[{index}].port"), parse::port(number));
        let protocol = findings.checked(format_args!("ports[{index}].protocol"), parse::protocol(&written.protocol));
        let named = findings.checked(format_args!("ports[{index}].name"), parse::optional(parse::label, name));
        if let (Some(port), Some(protocol), Some(())) = (port, protocol, named) {
            ports.push(EndpointPort::new(name.as_str(), protocol, port));
        }
    }
    ports
}

/// Reads the endpoints, of equal addresses the one that [`replaces`] the others.
fn endpoints(
    object: &objects::EndpointSlice,
    family: Family,
    interner: &mut Interner,
    findings: &mut Findings,
) -> Vec<(IpAddr, Facts)> {
    let weights = parse::weights(&object.metadata.annotations, findings);
    let weight_of_all = parse::weight_of_all(&object.metadata.annotations, findings);
    let mut endpoints: Vec<(IpAddr, usize, Facts)> = Vec::with_capacity(object.endpoints.len());
    for (index, written) in object.endpoints.iter().enumerate() {
        let address = address(written, family);
        if let Some(address) = findings.checked_entry(format_args!("endpoints[{index}].addresses[0]"), address) {
            let weight = weights.get(&address).copied().unwrap_or(weight_of_all);
            let mut facts = facts(index, written, weight, interner, findings);
            facts.pod = facts.pod.in_namespace(object.metadata.namespace_or_default());
            endpoints.push((address, index, facts));
        }
    }
    endpoints.sort_unstable_by_key(|(address, index, _)| (*address, *index));
    endpoints.dedup_by(|later, kept| {
        let is_same = later.0 == kept.0;
        if is_same {
            if later.2.conflicts_with(&kept.2) {
                let message = format!("{} is also in endpoints[{}], with other values: list it once", later.0, kept.1);
                findings.entry(format!("endpoints[{}].addresses[0]", later.1), message);
            }
            if replaces(later.2.conditions, kept.2.conditions) {
                std::mem::swap(later, kept);
            }
        }
        is_same
    });
    for address in weights.keys() {
        if endpoints.binary_search_by_key(address, |(address, ..)| *address).is_err() {
            let message =
                format!("{address} is no address of this slice: write the weight in the slice of the endpoint");
            findings.annotation(keys::WEIGHTS, message, "the rest of the annotation is used");
        }
    }
    endpoints.into_iter().map(|(address, _, facts)| (address, facts)).collect()
}

fn address(written: &objects::SliceEndpoint, family: Family) -> Result<IpAddr, String> {
    let text = written.address.as_deref().ok_or("the endpoint has no address: give one")?;
    let address = parse::reachable(text, AddressUse::Other)?;
    if Family::of(address) == family {
        Ok(address)
    } else {
        Err(format!(
            "{address} is not an {family} address, but addressType is {family}: move the endpoint to a slice of its own family"
        ))
    }
}

/// Reads the conditions and the placement of an endpoint, without invalid names.
fn facts(
    index: usize,
    written: &objects::SliceEndpoint,
    weight: Weight,
    interner: &mut Interner,
    findings: &mut Findings,
) -> Facts {
    let conditions = &written.conditions;
    let mut known = |field: &str, text: &str, check: fn(&str) -> Result<(), String>| {
        findings.checked_entry(format_args!("endpoints[{index}].{field}"), parse::optional(check, text))?;
        interner.string(text)
    };
    let node = known("nodeName", &written.node_name.trim().to_lowercase(), parse::subdomain);
    let zone = known("zone", &written.zone, parse::zone);
    let mut names = |field: &str, list: &[objects::HintName], check: fn(&str) -> Result<(), String>| {
        list.iter().take(parse::MAX_HINTS).filter_map(|hint| known(field, &hint.name, check)).collect()
    };
    let (for_zones, for_nodes) =
        written.hints.as_deref().map(|hints| (&*hints.for_zones, &*hints.for_nodes)).unwrap_or_default();
    let hints = Hints {
        zones: names("hints.forZones", for_zones, parse::zone),
        nodes: names("hints.forNodes", for_nodes, parse::subdomain),
    };
    for (field, list) in [("hints.forZones", for_zones), ("hints.forNodes", for_nodes)] {
        if list.len() > parse::MAX_HINTS {
            let message = format!("only the first {} hints of an endpoint count: give fewer", parse::MAX_HINTS);
            findings.entry(format!("endpoints[{index}].{field}"), message);
        }
    }
    let placement = Placement { node, zone, hints: interner.hints(hints), weight };
    Facts {
        conditions: Conditions {
            ready: conditions.ready.unwrap_or(true),
            serving: conditions.serving.unwrap_or(true),
            terminating: conditions.terminating.unwrap_or(false),
        },
        placement: interner.placement(&placement),
        pod: written.pod,
    }
}

// Shared strings, lists and placements, of which the endpoints of a cluster have few.

/// Shared strings, port lists, hints and placements.
#[derive(Debug, Default)]
pub(super) struct Interner {
    strings: Pool<str>,
    ports: Pool<[EndpointPort]>,
    hints: Pool<Hints>,
    placements: Pool<Placement>,
}

impl Interner {
    /// The shared copy of a string; `None` for an empty string.
    pub(super) fn string(&mut self, text: &str) -> Option<Arc<str>> {
        (!text.is_empty()).then(|| self.strings.get(text, || text.into()))
    }

    /// The shared copy of a name, which may be empty.
    pub(super) fn name(&mut self, text: &str) -> Arc<str> {
        self.string(text).unwrap_or_default()
    }

    /// The shared copy of a port list, sorted and without duplicates.
    pub(super) fn ports(&mut self, mut ports: Vec<EndpointPort>) -> Arc<[EndpointPort]> {
        ports.sort_unstable();
        ports.dedup();
        self.ports.get(ports.as_slice(), || ports.as_slice().into())
    }

    /// The shared copy of sorted, distinct hints; `None` without any.
    pub(super) fn hints(&mut self, mut hints: Hints) -> Option<Arc<Hints>> {
        for list in [&mut hints.zones, &mut hints.nodes] {
            list.sort_unstable();
            list.dedup();
        }
        let is_empty = hints.zones.is_empty() && hints.nodes.is_empty();
        (!is_empty).then(|| self.hints.get(&hints, || Arc::new(hints.clone())))
    }

    pub(super) fn placement(&mut self, placement: &Placement) -> Arc<Placement> {
        self.placements.get(placement, || Arc::new(placement.clone()))
    }
}
