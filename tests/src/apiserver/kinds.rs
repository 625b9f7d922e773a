//! The kinds of objects that the stand-in serves, with the names, groups and paths of the real API.

use serde_json::{Value, json};

/// One of the four kinds that a service proxy reads from the Kubernetes API.
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
}

impl Kind {
    /// All kinds that the stand-in serves.
    pub const ALL: [Self; 4] = [Self::Service, Self::Node, Self::EndpointSlice, Self::ServiceCidr];

    /// The `kind` field of an object, such as `ServiceCIDR`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::Node => "Node",
            Self::EndpointSlice => "EndpointSlice",
            Self::ServiceCidr => "ServiceCIDR",
        }
    }

    /// The resource name used in paths and in messages, such as `endpointslices`.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Service => "services",
            Self::Node => "nodes",
            Self::EndpointSlice => "endpointslices",
            Self::ServiceCidr => "servicecidrs",
        }
    }

    /// The API group; empty for the core group.
    pub fn group(self) -> &'static str {
        match self {
            Self::Service | Self::Node => "",
            Self::EndpointSlice => "discovery.k8s.io",
            Self::ServiceCidr => "networking.k8s.io",
        }
    }

    /// The `apiVersion` field of an object, such as `discovery.k8s.io/v1`.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::Service | Self::Node => "v1",
            Self::EndpointSlice => "discovery.k8s.io/v1",
            Self::ServiceCidr => "networking.k8s.io/v1",
        }
    }

    /// Whether objects of this kind live in a namespace.
    pub fn is_namespaced(self) -> bool {
        matches!(self, Self::Service | Self::EndpointSlice)
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
        Self::ALL
            .into_iter()
            .find(|kind| text("kind") == Some(kind.name()) && text("apiVersion") == Some(kind.api_version()))
    }

    /// The kind and the namespace, if any, of the collection with this path.
    pub(super) fn of_path(path: &str) -> Option<(Self, Option<&str>)> {
        Self::ALL.into_iter().find_map(|kind| {
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

    /// The required fields of this kind with zero values. The real server encodes whole Go structs,
    /// so the object in a BOOKMARK event has these fields besides its resourceVersion.
    pub(super) fn zero_fields(self) -> Value {
        match self {
            Self::Service => json!({"spec": {}, "status": {"loadBalancer": {}}}),
            Self::Node => json!({"spec": {}, "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}}}),
            Self::EndpointSlice => json!({"addressType": "", "endpoints": null, "ports": null}),
            Self::ServiceCidr => json!({"spec": {}, "status": {}}),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_is_found_from_every_collection_path() {
        for kind in Kind::ALL {
            assert_eq!(Kind::of_path(&kind.collection_path(None)), Some((kind, None)));
            let namespace = kind.is_namespaced().then_some("shop");
            assert_eq!(Kind::of_path(&kind.collection_path(Some("shop"))), Some((kind, namespace)));
            assert_eq!(Kind::of_path(&kind.object_path("shop", "web")), None);
        }
    }
}
