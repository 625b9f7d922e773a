//! Services: the fields that a service proxy needs.

use std::{collections::HashSet, net::IpAddr};

use headgate_core::{
    ClientIpAffinity, Family, Service, ServiceKey, ServicePort, TrafficPolicy,
    addresses::AddressUse::{ClusterIp, Other},
};
use ipnet::IpNet;

use super::{
    ModelSettings,
    parse::{self, Findings, Reading},
};
use crate::objects::{self, keys};

const DEFAULT_AFFINITY_TIMEOUT_SECONDS: u32 = 10_800;

const MAX_AFFINITY_TIMEOUT_SECONDS: i64 = 86_400;

/// Reads a Service. The result has no value for ExternalName Services and headless Services. The
/// result also has no value if the label `service.kubernetes.io/service-proxy-name` assigns the
/// Service to another proxy. Leaves out externalIPs that are not allowed.
pub(super) fn read(object: &objects::Service, settings: &ModelSettings) -> Reading<Service> {
    let spec = &object.spec;
    let is_headless = spec.cluster_ip == "None" || spec.cluster_ips.first().is_some_and(|first| first == "None");
    if object.metadata.labels.get(keys::SERVICE_PROXY_NAME).is_some()
        || spec.service_type == "ExternalName"
        || is_headless
    {
        return Reading::nothing();
    }
    let mut findings = Findings::default();
    let key = ServiceKey::new(object.metadata.namespace_or_default(), &object.metadata.name);
    for (field, name) in [("metadata.namespace", &key.namespace), ("metadata.name", &key.name)] {
        if findings.checked(field, parse::label(name)).is_none() {
            return Reading { value: None, findings };
        }
    }
    let cluster_ips = cluster_ips(spec, &mut findings);
    let ports = ports(spec, &mut findings);
    if cluster_ips.is_empty() || ports.is_empty() {
        return Reading { value: None, findings };
    }
    let mut service = Service::new(key, cluster_ips, ports);
    read_external_addresses(&object.status, spec, &mut service, &mut findings);
    let allowed = |address: &IpAddr| settings.external_ips.check(*address);
    service.external_ips.retain(|address| findings.checked_entry("spec.externalIPs", allowed(address)).is_some());
    read_policies(spec, &mut service, &mut findings);
    service.session_affinity = session_affinity(spec, &mut findings);
    service.created_unix_seconds = parse::unix_seconds(&object.metadata.creation_timestamp);
    parse::annotations(&object.metadata.annotations, &mut service, &mut findings);
    let fits = parse::fit_frontends(&mut service, settings.frontends(), &mut findings);
    let fits =
        findings.checked("spec.ports", fits).and_then(|()| findings.checked("spec", parse::check_service(&service)));
    let value = fits.map(|()| service);
    Reading { value, findings }
}

/// The ClusterIPs in the order of the spec, at most one of each IP family.
fn cluster_ips(spec: &objects::ServiceSpec, findings: &mut Findings) -> Vec<IpAddr> {
    let single = std::slice::from_ref(&spec.cluster_ip);
    let (field, texts) = match (spec.cluster_ips.is_empty(), spec.cluster_ip.is_empty()) {
        (false, _) => ("spec.clusterIPs", spec.cluster_ips.as_slice()),
        (true, false) => ("spec.clusterIP", single),
        (true, true) => {
            let remedy = "there is no address to serve: give spec.clusterIP, or \"None\" for a headless Service";
            findings.object("spec.clusterIP", remedy);
            return Vec::new();
        }
    };
    if spec.cluster_ips.first().is_some_and(|first| !spec.cluster_ip.is_empty() && *first != spec.cluster_ip) {
        findings.object("spec.clusterIP", "it differs from spec.clusterIPs[0]: give both fields the same address");
    }
    let families = admitted_families(&spec.ip_families);
    let mut addresses: Vec<IpAddr> = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        let field = if field == "spec.clusterIP" { field.to_owned() } else { format!("{field}[{index}]") };
        match parse::reachable(text, ClusterIp) {
            Err(message) => findings.object(field, message),
            Ok(address) if addresses.iter().any(|other| Family::of(*other) == Family::of(address)) => {
                findings.object(
                    field,
                    format!("it is a second {} address: give one address of each family", Family::of(address)),
                );
            }
            Ok(address) if !families.contains(&Family::of(address)) => {
                let message = format!("the family of {address} is missing in spec.ipFamilies: add the family");
                findings.object(field, message);
            }
            Ok(address) => addresses.push(address),
        }
    }
    addresses
}

/// The families that `spec.ipFamilies` admits; an empty list admits both.
fn admitted_families(texts: &[String]) -> Vec<Family> {
    Family::BOTH.into_iter().filter(|family| texts.is_empty() || texts.contains(&family.to_string())).collect()
}

/// The ports that can be served, in the order of the spec.
fn ports(spec: &objects::ServiceSpec, findings: &mut Findings) -> Vec<ServicePort> {
    if spec.ports.is_empty() {
        findings.object("spec.ports", "a Service needs at least one port: add one, or set clusterIP to \"None\"");
    }
    let mut ports: Vec<ServicePort> = Vec::new();
    let (mut numbers, mut names) = (HashSet::new(), HashSet::new());
    for (index, written) in spec.ports.iter().enumerate() {
        let field = |name: &str| format!("spec.ports[{index}].{name}");
        let port = findings.checked(field("port"), parse::port(written.port));
        let node_port = findings.checked(field("nodePort"), parse::port_or_none(written.node_port));
        let protocol = findings.checked(field("protocol"), parse::protocol(&written.protocol));
        let name = findings.checked(field("name"), parse::optional(parse::label, &written.name));
        let (Some(port), Some(node_port), Some(protocol), Some(())) = (port, node_port, protocol, name) else {
            continue;
        };
        let entry = ServicePort { name: written.name.as_str().into(), protocol, port, node_port };
        let clash = if numbers.contains(&(protocol, port)) {
            Some("port")
        } else {
            names.contains(&(protocol, written.name.as_str())).then_some("name")
        };
        if let Some(name) = clash {
            findings
                .object(field(name), "an earlier port of the same protocol has the same value: change one of the two");
            continue;
        }
        numbers.insert((protocol, port));
        names.insert((protocol, written.name.as_str()));
        ports.push(entry);
    }
    ports
}

/// Reads externalIPs, load balancer addresses, and the ranges of their clients.
fn read_external_addresses(
    status: &objects::ServiceStatus,
    spec: &objects::ServiceSpec,
    service: &mut Service,
    findings: &mut Findings,
) {
    let has_family = |address: IpAddr| service.cluster_ip(Family::of(address)).is_some();
    let mut routable = |field: &str, rest: &str, texts: &mut dyn Iterator<Item = (usize, &String)>| {
        let (mut addresses, mut seen) = (Vec::new(), HashSet::new());
        for (index, text) in texts {
            let field = format_args!("{field}[{index}]{rest}");
            let address = findings.checked_entry(field, parse::reachable(text, Other));
            addresses.extend(address.filter(|address| has_family(*address) && seen.insert(*address)));
        }
        addresses
    };
    let external_ips = routable("spec.externalIPs", "", &mut spec.external_ips.iter().enumerate());
    let is_vip = |ip_mode: &str| ip_mode.is_empty() || ip_mode == "VIP";
    let ingress = status.load_balancer.ingress.iter().enumerate().filter(|(_, one)| !one.ip.is_empty());
    let mut vips = ingress.filter(|(_, one)| is_vip(&one.ip_mode)).map(|(index, one)| (index, &one.ip));
    let mut load_balancer_ips = routable("status.loadBalancer.ingress", ".ip", &mut vips);
    match source_ranges(spec, findings) {
        Some(ranges) => service.load_balancer_source_ranges = ranges,
        // It is unknown which clients to allow, so there are no load balancer addresses.
        None => load_balancer_ips.clear(),
    }
    service.external_ips = external_ips;
    service.load_balancer_ips = load_balancer_ips;
}

/// The source ranges. If an IP family has a range with prefix length 0, all ranges of the family
/// are left out. The family is then open to all clients, like a family without ranges. `None` if a
/// range cannot be read.
fn source_ranges(spec: &objects::ServiceSpec, findings: &mut Findings) -> Option<Vec<IpNet>> {
    let texts = spec.load_balancer_source_ranges.iter().enumerate();
    let range = |(index, text): (usize, &String)| {
        findings.checked(format_args!("spec.loadBalancerSourceRanges[{index}]"), parse::range(text))
    };
    let mut ranges: Vec<IpNet> = texts.filter_map(range).collect();
    let are_all_valid = ranges.len() == spec.load_balancer_source_ranges.len();
    for family in Family::BOTH {
        let is_of_family = |range: &IpNet| Family::of(range.addr()) == family;
        if ranges.iter().any(|range| is_of_family(range) && range.prefix_len() == 0) {
            ranges.retain(|range| !is_of_family(range));
        }
    }
    are_all_valid.then_some(ranges)
}

/// Reads the traffic policies, and the health-check node port. The external policy is ignored for
/// Services that have neither external addresses nor NodePorts.
fn read_policies(spec: &objects::ServiceSpec, service: &mut Service, findings: &mut Findings) {
    service.internal_traffic_policy = policy("spec.internalTrafficPolicy", &spec.internal_traffic_policy, findings);
    let external = policy("spec.externalTrafficPolicy", &spec.external_traffic_policy, findings);
    let has_effect = match spec.service_type.as_str() {
        "LoadBalancer" | "NodePort" => true,
        "ClusterIP" | "" => !service.external_ips.is_empty(),
        other => {
            let known = "ClusterIP, NodePort, LoadBalancer or ExternalName";
            findings.object("spec.type", format!("{} is not a type of Service: write {known}", parse::shown(other)));
            false
        }
    };
    if has_effect {
        service.external_traffic_policy = external;
    }
    if spec.service_type == "LoadBalancer" && external.is_local() {
        let port = findings.checked("spec.healthCheckNodePort", parse::port_or_none(spec.health_check_node_port));
        service.health_check_node_port = port.unwrap_or_default();
    }
}

fn policy(field: &str, text: &str, findings: &mut Findings) -> TrafficPolicy {
    match text {
        "Local" => TrafficPolicy::Local,
        "" | "Cluster" => TrafficPolicy::Cluster,
        other => {
            findings.object(field, format!("{} is not a traffic policy: write Cluster or Local", parse::shown(other)));
            TrafficPolicy::Cluster
        }
    }
}

fn session_affinity(spec: &objects::ServiceSpec, findings: &mut Findings) -> Option<ClientIpAffinity> {
    match spec.session_affinity.as_str() {
        "" | "None" => return None,
        "ClientIP" => {}
        other => {
            let message = format!("{} is not a session affinity: write ClientIP or None", parse::shown(other));
            findings.object("spec.sessionAffinity", message);
            return None;
        }
    }
    let timeout_seconds = match spec.session_affinity_config.client_ip.timeout_seconds {
        None => DEFAULT_AFFINITY_TIMEOUT_SECONDS,
        Some(seconds) => {
            let in_range = (1..=MAX_AFFINITY_TIMEOUT_SECONDS).contains(&seconds).then(|| u32::try_from(seconds).ok());
            in_range.flatten().unwrap_or_else(|| {
                let message = format!("{seconds} is out of bounds: give 1 to {MAX_AFFINITY_TIMEOUT_SECONDS} seconds");
                findings.object("spec.sessionAffinityConfig.clientIP.timeoutSeconds", message);
                DEFAULT_AFFINITY_TIMEOUT_SECONDS
            })
        }
    };
    Some(ClientIpAffinity { timeout_seconds })
}
