//! Builders of JSON objects in the form in which the API server returns them. The builders do not
//! validate the objects, because tests also need invalid objects.

use serde_json::{Value, json};

use super::kinds::Kind;

fn object(kind: Kind, namespace: Option<&str>, name: &str) -> Value {
    let mut object = json!({"apiVersion": kind.api_version(), "kind": kind.name(), "metadata": {"name": name}});
    if let Some(namespace) = namespace {
        object["metadata"]["namespace"] = json!(namespace);
    }
    object
}

fn push(list: &mut Value, item: Value) {
    match list {
        Value::Array(items) => items.push(item),
        other => *other = json!([item]),
    }
}

/// Methods that every builder has.
macro_rules! common_methods {
    () => {
        /// Sets a label.
        pub fn label(mut self, key: &str, value: &str) -> Self {
            self.value["metadata"]["labels"][key] = json!(value);
            self
        }

        /// Sets an annotation.
        pub fn annotation(mut self, key: &str, value: &str) -> Self {
            self.value["metadata"]["annotations"][key] = json!(value);
            self
        }

        /// Sets any field; the path is dotted, such as `spec.internalTrafficPolicy`.
        pub fn field(mut self, path: &str, value: impl Into<Value>) -> Self {
            let place = path.split('.').fold(&mut self.value, |place, step| &mut place[step]);
            *place = value.into();
            self
        }

        /// The finished object.
        pub fn build(self) -> Value {
            self.value
        }
    };
}

/// A builder of a Service. [`service`] creates it.
#[derive(Debug, Clone)]
pub struct ServiceBuilder {
    value: Value,
}

/// Begins a Service of type ClusterIP without addresses and ports.
pub fn service(namespace: &str, name: &str) -> ServiceBuilder {
    let mut value = object(Kind::Service, Some(namespace), name);
    value["spec"] = json!({
        "type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
        "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
    });
    value["status"] = json!({"loadBalancer": {}});
    ServiceBuilder { value }
}

impl ServiceBuilder {
    common_methods!();

    /// Adds a cluster IP. The first cluster IP is also the value of `clusterIP`. The text `None`
    /// makes the Service headless.
    pub fn cluster_ip(mut self, address: &str) -> Self {
        let spec = &mut self.value["spec"];
        if spec["clusterIP"].is_null() {
            spec["clusterIP"] = json!(address);
        } else {
            spec["ipFamilies"] = json!(["IPv4", "IPv6"]);
            spec["ipFamilyPolicy"] = json!("RequireDualStack");
        }
        if spec["clusterIPs"].is_null() && address.contains(':') {
            spec["ipFamilies"] = json!(["IPv6"]);
        }
        push(&mut spec["clusterIPs"], json!(address));
        self
    }

    /// Adds a port. The protocol is `TCP`, `UDP` or `SCTP`. Endpoints listen on the target port.
    pub fn port(mut self, name: &str, protocol: &str, port: u16, target_port: u16) -> Self {
        let item = json!({"name": name, "protocol": protocol, "port": port, "targetPort": target_port});
        push(&mut self.value["spec"]["ports"], item);
        self
    }

    /// Adds a node port to the last port. Sets the type to NodePort, except for a Service of type
    /// LoadBalancer.
    pub fn node_port(mut self, node_port: u16) -> Self {
        let spec = &mut self.value["spec"];
        if let Some(port) = spec["ports"].as_array_mut().and_then(|ports| ports.last_mut()) {
            port["nodePort"] = json!(node_port);
        }
        if spec["type"] != "LoadBalancer" {
            spec["type"] = json!("NodePort");
        }
        self
    }

    /// Sets the type to LoadBalancer, and adds an ingress address to the status.
    pub fn load_balancer_ip(mut self, address: &str) -> Self {
        self.value["spec"]["type"] = json!("LoadBalancer");
        push(&mut self.value["status"]["loadBalancer"]["ingress"], json!({"ip": address, "ipMode": "VIP"}));
        self
    }

    /// Adds an external IP.
    pub fn external_ip(mut self, address: &str) -> Self {
        push(&mut self.value["spec"]["externalIPs"], json!(address));
        self
    }

    /// Sets ClientIP affinity with this time-out in seconds.
    pub fn client_ip_affinity(mut self, timeout_seconds: u32) -> Self {
        self.value["spec"]["sessionAffinity"] = json!("ClientIP");
        self.value["spec"]["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": timeout_seconds}});
        self
    }
}

/// A builder of an EndpointSlice. [`endpoint_slice`] creates it.
#[derive(Debug, Clone)]
pub struct EndpointSliceBuilder {
    value: Value,
}

/// Begins an IPv4 EndpointSlice of a Service, with the labels of the EndpointSlice controller.
pub fn endpoint_slice(namespace: &str, name: &str, service: &str) -> EndpointSliceBuilder {
    let mut value = object(Kind::EndpointSlice, Some(namespace), name);
    value["metadata"]["labels"] = json!({
        "kubernetes.io/service-name": service,
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
    });
    value["addressType"] = json!("IPv4");
    value["endpoints"] = json!([]);
    value["ports"] = json!([]);
    EndpointSliceBuilder { value }
}

impl EndpointSliceBuilder {
    common_methods!();

    /// Sets the address type to IPv6.
    pub fn ipv6(self) -> Self {
        self.field("addressType", "IPv6")
    }

    /// Adds a port of all endpoints.
    pub fn port(mut self, name: &str, protocol: &str, port: u16) -> Self {
        push(&mut self.value["ports"], json!({"name": name, "protocol": protocol, "port": port}));
        self
    }

    /// Adds a ready endpoint on a node.
    pub fn endpoint(self, address: &str, node: &str) -> Self {
        self.endpoint_json(json!({
            "addresses": [address], "nodeName": node,
            "conditions": {"ready": true, "serving": true, "terminating": false},
        }))
    }

    /// Adds an endpoint that still serves while its pod terminates.
    pub fn terminating_endpoint(self, address: &str, node: &str) -> Self {
        self.endpoint_json(json!({
            "addresses": [address], "nodeName": node,
            "conditions": {"ready": false, "serving": true, "terminating": true},
        }))
    }

    /// Adds an endpoint of a pod on a node. `is_ready` says whether the pod is ready.
    pub fn pod_endpoint(self, address: &str, node: &str, pod: (&str, &str), is_ready: bool) -> Self {
        let (name, uid) = pod;
        self.endpoint_json(json!({
            "addresses": [address], "nodeName": node,
            "conditions": {"ready": is_ready, "serving": is_ready, "terminating": false},
            "targetRef": {"kind": "Pod", "namespace": "shop", "name": name, "uid": uid},
        }))
    }

    /// Adds an endpoint given as JSON, for zones, hints, and unusual or invalid content.
    pub fn endpoint_json(mut self, endpoint: Value) -> Self {
        push(&mut self.value["endpoints"], endpoint);
        self
    }
}

/// A builder of a pod. [`pod`] creates it.
#[derive(Debug, Clone)]
pub struct PodBuilder {
    value: Value,
}

/// Begins a pod without readiness gates and conditions.
pub fn pod(namespace: &str, name: &str, uid: &str) -> PodBuilder {
    let mut value = object(Kind::Pod, Some(namespace), name);
    value["metadata"]["uid"] = json!(uid);
    value["spec"] = json!({"containers": [{"name": "main", "image": "registry.example/main"}]});
    value["status"] = json!({});
    PodBuilder { value }
}

impl PodBuilder {
    common_methods!();

    /// Adds a readiness gate.
    pub fn gate(mut self, condition_type: &str) -> Self {
        push(&mut self.value["spec"]["readinessGates"], json!({"conditionType": condition_type}));
        self
    }

    /// Adds a condition.
    pub fn condition(mut self, condition_type: &str, status: &str, reason: &str) -> Self {
        let condition = json!({"type": condition_type, "status": status, "reason": reason});
        push(&mut self.value["status"]["conditions"], condition);
        self
    }
}

/// A builder of a Node. [`node`] creates it.
#[derive(Debug, Clone)]
pub struct NodeBuilder {
    value: Value,
}

/// Begins a Node with its host name label.
pub fn node(name: &str) -> NodeBuilder {
    let mut value = object(Kind::Node, None, name);
    value["spec"] = json!({});
    value["status"] = json!({"addresses": [{"type": "Hostname", "address": name}]});
    NodeBuilder { value }.label("kubernetes.io/hostname", name)
}

impl NodeBuilder {
    common_methods!();

    /// Adds an address. `address_type` is `InternalIP` or `ExternalIP`.
    pub fn address(mut self, address_type: &str, address: &str) -> Self {
        push(&mut self.value["status"]["addresses"], json!({"type": address_type, "address": address}));
        self
    }

    /// Adds a pod CIDR. The first pod CIDR is also the value of `podCIDR`.
    pub fn pod_cidr(mut self, cidr: &str) -> Self {
        let spec = &mut self.value["spec"];
        if spec["podCIDR"].is_null() {
            spec["podCIDR"] = json!(cidr);
        }
        push(&mut spec["podCIDRs"], json!(cidr));
        self
    }

    /// Sets the zone label.
    pub fn zone(self, zone: &str) -> Self {
        self.label("topology.kubernetes.io/zone", zone)
    }
}

/// A builder of a ServiceCIDR. [`service_cidr`] creates it.
#[derive(Debug, Clone)]
pub struct ServiceCidrBuilder {
    value: Value,
}

/// Begins a ServiceCIDR that is ready, with one range for each IP family.
pub fn service_cidr(name: &str, cidrs: &[&str]) -> ServiceCidrBuilder {
    let mut value = object(Kind::ServiceCidr, None, name);
    value["spec"] = json!({"cidrs": cidrs});
    value["status"] = json!({"conditions": [{
        "type": "Ready", "status": "True", "reason": "", "message": "Kubernetes Service CIDR is ready",
        "lastTransitionTime": "2025-01-01T00:00:00Z",
    }]});
    ServiceCidrBuilder { value }
}

impl ServiceCidrBuilder {
    common_methods!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_with_two_cluster_ips_has_both_families() {
        let built =
            service("shop", "web").cluster_ip("10.0.0.1").cluster_ip("fd00::1").port("http", "TCP", 80, 8080).build();
        assert_eq!(built["spec"]["clusterIP"], "10.0.0.1");
        assert_eq!(built["spec"]["clusterIPs"], json!(["10.0.0.1", "fd00::1"]));
        assert_eq!(built["spec"]["ipFamilies"], json!(["IPv4", "IPv6"]));
        assert_eq!(built["spec"]["ports"][0]["targetPort"], 8080);
    }

    #[test]
    fn fields_are_set_by_path() {
        let built = service("shop", "web").field("spec.healthCheckNodePort", 31000).label("app", "web").build();
        assert_eq!(built["spec"]["healthCheckNodePort"], 31000);
        assert_eq!(built["metadata"]["labels"]["app"], "web");
    }
}
