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
}

impl Kind {
    /// The kinds that a service proxy always reads.
    pub const ALL: [Self; 4] = [Self::Service, Self::Node, Self::EndpointSlice, Self::ServiceCidr];

    /// All kinds that the stand-in serves.
    pub const SERVED: [Self; 5] = [Self::Service, Self::Node, Self::EndpointSlice, Self::ServiceCidr, Self::Pod];

    /// The `kind` field of an object, such as `ServiceCIDR`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::Node => "Node",
            Self::EndpointSlice => "EndpointSlice",
            Self::ServiceCidr => "ServiceCIDR",
            Self::Pod => "Pod",
        }
    }

    /// The resource name used in paths and in messages, such as `endpointslices`.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Service => "services",
            Self::Node => "nodes",
            Self::EndpointSlice => "endpointslices",
            Self::ServiceCidr => "servicecidrs",
            Self::Pod => "pods",
        }
    }

    /// The API group; empty for the core group.
    pub fn group(self) -> &'static str {
        match self {
            Self::Service | Self::Node | Self::Pod => "",
            Self::EndpointSlice => "discovery.k8s.io",
            Self::ServiceCidr => "networking.k8s.io",
        }
    }

    /// The `apiVersion` field of an object, such as `discovery.k8s.io/v1`.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::Service | Self::Node | Self::Pod => "v1",
            Self::EndpointSlice => "discovery.k8s.io/v1",
            Self::ServiceCidr => "networking.k8s.io/v1",
        }
    }

    /// Whether objects of this kind live in a namespace.
    pub fn is_namespaced(self) -> bool {
        !matches!(self, Self::Node | Self::ServiceCidr)
    }

    /// The path of the collection in `namespace`, or in the whole cluster if `namespace` is `None`.
    /// The namespace is ignored for cluster-scoped kinds.
    pub fn collection_path(self, namespace: Option<&str>) -> String {
        let root = match self.group() {
            "" => "/api/v1".to_owned(),
            group => format!("/apis/{group}/v1"),
        };
        match namespace {
            Some(namespace) if self.is_namespaced() => {
                format!("{root}/namespaces/{namespace}/{}", self.plural())
            }
            _ => format!("{root}/{}", self.plural()),
        }
    }

    /// The path of one object. The namespace is ignored for cluster-scoped kinds.
    pub fn object_path(self, namespace: &str, name: &str) -> String {
        format!("{}/{name}", self.collection_path(Some(namespace)))
    }

    /// The kind of an object, from its `apiVersion` and `kind`. `None` for kinds that the stand-in
    /// does not serve.
    pub fn of(object: &Value) -> Option<Self> {
        let text = |field: &str| object.get(field).and_then(Value::as_str);
        Self::SERVED
            .into_iter()
            .find(|kind| text("kind") == Some(kind.name()) && text("apiVersion") == Some(kind.api_version()))
    }

    /// The kind and the namespace, if any, of the collection with this path.
    pub(super) fn of_path(path: &str) -> Option<(Self, Option<&str>)> {
        Self::SERVED.into_iter().find_map(|kind| {
            let all = kind.collection_path(None);
            if path == all {
                return Some((kind, None));
            }
            let (root, plural) = all.rsplit_once('/')?;
            let within = path.strip_prefix(root)?.strip_prefix("/namespaces/")?;
            let namespace = within.strip_suffix(plural)?.strip_suffix('/')?;
            (kind.is_namespaced() && !namespace.contains('/')).then_some((kind, Some(namespace)))
        })
    }

    /// The kind, the namespace and the name of the object with this path. The kind is namespaced.
    pub(super) fn of_object_path(path: &str) -> Option<(Self, &str, &str)> {
        let (collection, name) = path.rsplit_once('/')?;
        let (kind, namespace) = Self::of_path(collection)?;
        Some((kind, namespace?, name))
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_is_found_from_every_collection_path() {
        for kind in Kind::SERVED {
            assert_eq!(Kind::of_path(&kind.collection_path(None)), Some((kind, None)));
            let namespace = kind.is_namespaced().then_some("shop");
            assert_eq!(Kind::of_path(&kind.collection_path(Some("shop"))), Some((kind, namespace)));
            assert_eq!(Kind::of_path(&kind.object_path("shop", "web")), None);
            let found = namespace.map(|namespace| (kind, namespace, "web"));
            assert_eq!(Kind::of_object_path(&kind.object_path("shop", "web")), found);
        }
    }
}
