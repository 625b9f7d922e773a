//! The kinds of objects that the stand-in serves, with the names, groups and paths of the real API.

use serde_json::{Value, json};

/// One of the kinds that Headgate reads from the Kubernetes API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `v1` Service, namespaced.
    Service,
    /// `v1` Node, cluster-scoped.
    Node,
    /// `discovery.k8s.io/v1` EndpointSlice, namespaced.
    EndpointSlice,
    /// `networking.k8s.io/v1` ServiceCIDR, cluster-scoped.
    ServiceCidr,
    /// `v1` Pod, namespaced. Clients may patch the conditions of pods.
    Pod,
    /// `apps/v1` DaemonSet, namespaced. No controller acts on it.
    DaemonSet,
    /// `v1` ConfigMap, namespaced.
    ConfigMap,
    /// `v1` Secret, namespaced.
    Secret,
}

impl Kind {
    /// The kinds that a service proxy always reads.
    pub const ALL: [Self; 4] = [Self::Service, Self::Node, Self::EndpointSlice, Self::ServiceCidr];

    /// All kinds that the stand-in serves.
    pub const SERVED: [Self; 8] = [
        Self::Service,
        Self::Node,
        Self::EndpointSlice,
        Self::ServiceCidr,
        Self::Pod,
        Self::DaemonSet,
        Self::ConfigMap,
        Self::Secret,
    ];

    /// The `apiVersion` and `kind` of objects, the path of the collection in the whole cluster, and
    /// whether objects live in a namespace.
    fn facts(self) -> (&'static str, &'static str, &'static str, bool) {
        match self {
            Self::Service => ("v1", "Service", "/api/v1/services", true),
            Self::Node => ("v1", "Node", "/api/v1/nodes", false),
            Self::EndpointSlice => {
                ("discovery.k8s.io/v1", "EndpointSlice", "/apis/discovery.k8s.io/v1/endpointslices", true)
            }
            Self::ServiceCidr => {
                ("networking.k8s.io/v1", "ServiceCIDR", "/apis/networking.k8s.io/v1/servicecidrs", false)
            }
            Self::Pod => ("v1", "Pod", "/api/v1/pods", true),
            Self::DaemonSet => ("apps/v1", "DaemonSet", "/apis/apps/v1/daemonsets", true),
            Self::ConfigMap => ("v1", "ConfigMap", "/api/v1/configmaps", true),
            Self::Secret => ("v1", "Secret", "/api/v1/secrets", true),
        }
    }

    /// The `apiVersion` field of an object, such as `discovery.k8s.io/v1`.
    pub fn api_version(self) -> &'static str {
        self.facts().0
    }

    /// The `kind` field of an object, such as `ServiceCIDR`.
    pub fn name(self) -> &'static str {
        self.facts().1
    }

    /// Whether objects of this kind live in a namespace.
    pub fn is_namespaced(self) -> bool {
        self.facts().3
    }

    /// The path of the collection in `namespace`, or in the whole cluster if `namespace` is `None`.
    /// The namespace is ignored for cluster-scoped kinds.
    pub fn collection_path(self, namespace: Option<&str>) -> String {
        let (.., path, is_namespaced) = self.facts();
        match (namespace.filter(|_| is_namespaced), path.rsplit_once('/')) {
            (Some(namespace), Some((root, plural))) => format!("{root}/namespaces/{namespace}/{plural}"),
            _ => path.to_owned(),
        }
    }

    /// The path of one object. The namespace is ignored for cluster-scoped kinds.
    pub fn object_path(self, namespace: &str, name: &str) -> String {
        format!("{}/{name}", self.collection_path(Some(namespace)))
    }

    /// The kind of an object, from its `apiVersion` and `kind`. `None` for kinds that the stand-in
    /// does not serve.
    pub fn of(object: &Value) -> Option<Self> {
        Self::SERVED
            .into_iter()
            .find(|kind| object["kind"] == kind.name() && object["apiVersion"] == kind.api_version())
    }

    /// The kind and the namespace, if any, of the collection with this path.
    pub(super) fn of_path(path: &str) -> Option<(Self, Option<&str>)> {
        let namespace = path.split_once("/namespaces/").and_then(|(_, within)| Some(within.split_once('/')?.0));
        let found = Self::SERVED.into_iter().find(|kind| kind.collection_path(namespace) == path);
        found.map(|kind| (kind, namespace))
    }

    /// The kind, the namespace and the name of the object with this path. The namespace is empty if
    /// the kind is cluster-scoped.
    pub(super) fn of_object_path(path: &str) -> Option<(Self, &str, &str)> {
        let (collection, name) = path.rsplit_once('/')?;
        let (kind, namespace) = Self::of_path(collection)?;
        Some((kind, namespace.unwrap_or_default(), name))
    }

    /// The required fields of this kind with zero values. The real server encodes whole Go structs,
    /// so the object in a BOOKMARK event has these fields besides its resourceVersion.
    pub(super) fn zero_fields(self) -> Value {
        match self {
            Self::Service => json!({"spec": {}, "status": {"loadBalancer": {}}}),
            Self::Node => json!({"spec": {}, "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}}}),
            Self::EndpointSlice => json!({"addressType": "", "endpoints": null, "ports": null}),
            Self::ServiceCidr => json!({"spec": {}, "status": {}}),
            Self::Pod => json!({"spec": {"containers": null}, "status": {}}),
            Self::DaemonSet => json!({"spec": {"selector": null, "template": {}}, "status": {}}),
            Self::ConfigMap | Self::Secret => json!({}),
        }
    }
}
