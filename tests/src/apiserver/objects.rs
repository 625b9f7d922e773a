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

/// Declares a builder with the methods that every builder has.
macro_rules! builder {
    ($name:ident, $what:literal) => {
        #[doc = $what]
        #[derive(Debug, Clone)]
        pub struct $name {
            value: Value,
        }

        impl $name {
            /// Sets a label.
            pub fn label(mut self, key: &str, value: &str) -> Self {
                self.value["metadata"]["labels"][key] = json!(value);
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
        }
    };
}

builder!(ServiceBuilder, "A builder of a Service. [`service`] creates it.");
builder!(EndpointSliceBuilder, "A builder of an EndpointSlice. [`endpoint_slice`] creates it.");
builder!(PodBuilder, "A builder of a pod. [`pod`] creates it.");
builder!(NodeBuilder, "A builder of a Node. [`node`] creates it.");
builder!(ServiceCidrBuilder, "A builder of a ServiceCIDR. [`service_cidr`] creates it.");

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
    /// Sets the IPv4 cluster IP. The text `None` makes the Service headless.
    pub fn cluster_ip(mut self, address: &str) -> Self {
        self.value["spec"]["clusterIP"] = json!(address);
        self.value["spec"]["clusterIPs"] = json!([address]);
        self
    }

    /// Adds a port. The protocol is `TCP`, `UDP` or `SCTP`. Endpoints listen on the target port.
    pub fn port(mut self, name: &str, protocol: &str, port: u16, target_port: u16) -> Self {
        let item = json!({"name": name, "protocol": protocol, "port": port, "targetPort": target_port});
        push(&mut self.value["spec"]["ports"], item);
        self
    }
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

/// Begins a pod without readiness gates and conditions.
pub fn pod(namespace: &str, name: &str, uid: &str) -> PodBuilder {
    let mut value = object(Kind::Pod, Some(namespace), name);
    value["metadata"]["uid"] = json!(uid);
    value["spec"] = json!({"containers": [{"name": "main", "image": "registry.example/main"}]});
    value["status"] = json!({});
    PodBuilder { value }
}

impl PodBuilder {
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

/// Begins a Node with its host name label.
pub fn node(name: &str) -> NodeBuilder {
    let mut value = object(Kind::Node, None, name);
    value["spec"] = json!({});
    value["status"] = json!({"addresses": [{"type": "Hostname", "address": name}]});
    NodeBuilder { value }.label("kubernetes.io/hostname", name)
}

impl NodeBuilder {
    /// Adds an address. `address_type` is `InternalIP` or `ExternalIP`.
    pub fn address(mut self, address_type: &str, address: &str) -> Self {
        push(&mut self.value["status"]["addresses"], json!({"type": address_type, "address": address}));
        self
    }

    /// Sets the pod CIDR.
    pub fn pod_cidr(self, cidr: &str) -> Self {
        self.field("spec.podCIDR", cidr).field("spec.podCIDRs", json!([cidr]))
    }
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
