//! Writes manifests as YAML documents.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Endpoint, MARKER, MARKER_ADDRESS, Manifests, NAMESPACE, Service, ServiceType, Slice};
use crate::testbed::client::Transport;
use crate::testbed::plan::{self, Family, NODES};

impl Service {
    /// Whether Headgate serves this Service.
    fn is_served(&self) -> bool {
        !matches!(self.service_type, ServiceType::ExternalName | ServiceType::Headless) && self.proxy_name.is_none()
    }

    /// The names of the endpoints in slices that Headgate reads. Headgate ignores headless slices.
    fn endpoint_names(&self) -> BTreeSet<&str> {
        let further = self.more_slices.iter().flat_map(|slice| &slice.endpoints);
        let all = self.endpoints.iter().chain(further).filter(|_| !self.headless_slices);
        all.map(|endpoint| endpoint.name.as_str()).collect()
    }

    pub(super) fn manifest(&self) -> Result<Value> {
        let mut manifest = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": self.name, "namespace": NAMESPACE },
            "spec": self.spec()?,
        });
        if let Some(name) = self.proxy_name {
            manifest["metadata"]["labels"] = json!({ "service.kubernetes.io/service-proxy-name": name });
        }
        if self.service_type == ServiceType::LoadBalancer {
            let ingress = Family::BOTH.map(|family| json!({ "ip": self.load_balancer_ip(family), "ipMode": "VIP" }));
            manifest["status"] = json!({ "loadBalancer": { "ingress": ingress } });
        }
        if let Some(patch) = self.patch {
            merge(&mut manifest, patch(self));
        }
        Ok(manifest)
    }

    fn spec(&self) -> Result<Value> {
        let service_type = match self.service_type {
            ServiceType::ExternalName => return Ok(json!({ "type": "ExternalName", "externalName": "example.com" })),
            ServiceType::ClusterIp | ServiceType::Headless => "ClusterIP",
            ServiceType::NodePort => "NodePort",
            ServiceType::LoadBalancer => "LoadBalancer",
        };
        let mut ports = Vec::new();
        for (index, port) in self.ports.iter().enumerate() {
            let mut written = json!({
                "name": port.name, "protocol": protocol(port.transport), "port": port.port, "targetPort": port.target_port,
            });
            if self.has_node_ports && service_type != "ClusterIP" {
                written["nodePort"] = json!(self.node_port(index)?);
            }
            ports.push(written);
        }
        let mut spec = json!({
            "type": service_type,
            "clusterIP": self.cluster_ip(Family::V4),
            "clusterIPs": Family::BOTH.map(|family| self.cluster_ip(family)),
            "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack",
            "externalIPs": Family::BOTH.map(|family| self.external_ip(family)),
            "externalTrafficPolicy": policy(self.external_local),
            "internalTrafficPolicy": policy(self.internal_local),
            "sessionAffinity": "None",
            "ports": ports,
        });
        if self.service_type == ServiceType::LoadBalancer {
            spec["allocateLoadBalancerNodePorts"] = json!(self.has_node_ports);
            if !self.source_ranges.is_empty() {
                spec["loadBalancerSourceRanges"] = json!(self.source_ranges);
            }
        }
        if self.service_type == ServiceType::Headless {
            (spec["clusterIP"], spec["clusterIPs"]) = (json!("None"), json!(["None"]));
        }
        if let Some(seconds) = self.affinity_timeout_seconds {
            spec["sessionAffinity"] = json!("ClientIP");
            spec["sessionAffinityConfig"] = json!({ "clientIP": { "timeoutSeconds": seconds } });
        }
        Ok(spec)
    }

    fn slices(&self, family: Family) -> Result<Vec<Value>> {
        let own = Slice { suffix: "own", ports: self.ports.clone(), endpoints: self.endpoints.clone() };
        [&own].into_iter().chain(&self.more_slices).map(|slice| self.slice(slice, family)).collect()
    }

    fn slice(&self, slice: &Slice, family: Family) -> Result<Value> {
        let ports: Vec<Value> = slice
            .ports
            .iter()
            .map(|port| json!({ "name": port.name, "protocol": protocol(port.transport), "port": port.target_port }))
            .collect();
        let endpoints: Result<Vec<Value>> = slice.endpoints.iter().map(|endpoint| endpoint.manifest(family)).collect();
        let family_suffix = if family == Family::V4 { "v4" } else { "v6" };
        let mut labels = json!({ "kubernetes.io/service-name": self.name });
        if self.headless_slices {
            labels["service.kubernetes.io/headless"] = json!("");
        }
        let weight = self.weight.filter(|_| slice.suffix == "own").map(|weight| weight.to_string());
        let annotations = weight.map_or_else(|| json!({}), |weight| json!({ "service.cilium.io/weight": weight }));
        Ok(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{}-{}-{family_suffix}", self.name, slice.suffix), "namespace": NAMESPACE,
                "labels": labels, "annotations": annotations,
            },
            "addressType": family.to_string(),
            "ports": ports,
            "endpoints": endpoints?,
        }))
    }
}

impl Endpoint {
    fn manifest(&self, family: Family) -> Result<Value> {
        let node = plan::node_of(&self.name).with_context(|| format!("no pod or node called {}", self.name))?;
        let address = plan::address(&self.name).with_context(|| format!("{} has no address", self.name))?;
        let mut addresses = vec![address.of(family)];
        if let Some(second) = self.second_address {
            addresses.push(plan::address(second).with_context(|| format!("{second} has no address"))?.of(family));
        }
        let mut endpoint = json!({ "addresses": addresses, "nodeName": node.name, "zone": node.zone });
        if node.name != self.name {
            let uid = format!("{}-{}", self.name, self.incarnation);
            endpoint["targetRef"] = json!({ "kind": "Pod", "namespace": NAMESPACE, "name": self.name, "uid": uid });
        }
        if !self.unconditional {
            endpoint["conditions"] =
                json!({ "ready": self.ready, "serving": self.serving, "terminating": self.terminating });
        }
        let named = |names: &[String]| names.iter().map(|name| json!({ "name": name })).collect::<Vec<Value>>();
        if !self.hint_zones.is_empty() {
            endpoint["hints"]["forZones"] = json!(named(&self.hint_zones));
        }
        if !self.hint_nodes.is_empty() {
            endpoint["hints"]["forNodes"] = json!(named(&self.hint_nodes));
        }
        Ok(endpoint)
    }
}

impl Manifests {
    /// The number of services that Headgate serves, including the marker, and the number of
    /// endpoint addresses.
    pub(in crate::testbed) fn counts(&self) -> (u64, u64) {
        let services = self.services.iter().filter(|service| service.is_served()).count();
        let endpoints: usize =
            self.services.iter().map(|service| Family::BOTH.len() * service.endpoint_names().len()).sum();
        (services as u64 + 1, endpoints as u64)
    }

    /// All Nodes, Services and EndpointSlices.
    pub fn documents(&self) -> Result<Vec<Value>> {
        let mut documents: Vec<Value> = NODES.iter().map(|node| self.node(node)).collect::<Result<_>>()?;
        for service in &self.services {
            documents.push(service.manifest()?);
            for family in Family::BOTH {
                documents.extend(service.slices(family)?);
            }
        }
        Ok(documents)
    }

    /// All documents as YAML. The marker is the last document, with `generation` as its port.
    pub(in crate::testbed) fn yaml(&self, generation: u16) -> Result<String> {
        let mut documents = self.documents()?;
        documents.extend(self.further.iter().cloned());
        documents.push(marker(generation));
        let mut yaml = String::new();
        for document in documents {
            yaml.push_str("---\n");
            yaml.push_str(&serde_saphyr::to_string(&document).context("writing YAML")?);
            if !yaml.ends_with('\n') {
                yaml.push('\n');
            }
        }
        Ok(yaml)
    }

    fn node(&self, node: &plan::NodePlan) -> Result<Value> {
        let address = plan::address(node.name).context("the plan has no address for a node")?;
        let pod_cidrs = plan::pod_networks(node.name).context("the plan has no pod networks for a node")?;
        let mut addresses: Vec<Value> =
            address.both().iter().map(|address| json!({ "type": "InternalIP", "address": address })).collect();
        addresses.push(json!({ "type": "Hostname", "address": node.name }));
        let mut labels = json!({ "kubernetes.io/hostname": node.name });
        if let Some(zone) = self.zones.get(node.name).copied().unwrap_or(Some(node.zone)) {
            labels["topology.kubernetes.io/zone"] = json!(zone);
        }
        Ok(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": node.name, "labels": labels },
            "spec": { "podCIDR": pod_cidrs[0], "podCIDRs": pod_cidrs },
            "status": { "addresses": addresses },
        }))
    }
}

fn marker(generation: u16) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": MARKER, "namespace": NAMESPACE },
        "spec": {
            "type": "ClusterIP", "clusterIP": MARKER_ADDRESS, "clusterIPs": [MARKER_ADDRESS], "ipFamilies": ["IPv4"],
            "ports": [{ "name": "generation", "protocol": "TCP", "port": generation }],
        },
    })
}

/// Applies a JSON Merge Patch (RFC 7386).
fn merge(target: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().map(|object| object.remove(&key));
        } else {
            merge(&mut target[key], value);
        }
    }
}

fn protocol(transport: Transport) -> &'static str {
    match transport {
        Transport::Tcp | Transport::Http => "TCP",
        Transport::Udp => "UDP",
        Transport::Sctp => "SCTP",
    }
}

fn policy(local: bool) -> &'static str {
    if local { "Local" } else { "Cluster" }
}
