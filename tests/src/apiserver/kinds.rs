//! The kinds that the stand-in serves, with their real names, groups and paths.

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
    /// Every kind that is served.
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

    /// The path of the collection: of one namespace where `namespace` is given, else of the whole
    /// cluster. The namespace is ignored for cluster-scoped kinds.
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

    /// The kind of an object by its `apiVersion` and `kind`; `None` if it is none of those served.
    pub fn of(object: &Value) -> Option<Self> {
        let text = |field: &str| object.get(field).and_then(Value::as_str);
        Self::ALL
            .into_iter()
            .find(|kind| text("kind") == Some(kind.name()) && text("apiVersion") == Some(kind.api_version()))
    }

    /// The kind to whose collection a path leads, and the namespace that it names, if it names one.
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

    /// The required fields of this kind at their zero values. The real server encodes whole Go
    /// structs, so the object in a BOOKMARK event carries these beside its resourceVersion.
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
    fn every_path_leads_back_to_its_kind() {
        for kind in Kind::ALL {
            assert_eq!(Kind::of_path(&kind.collection_path(None)), Some((kind, None)));
            let namespace = kind.is_namespaced().then_some("shop");
            assert_eq!(Kind::of_path(&kind.collection_path(Some("shop"))), Some((kind, namespace)));
            assert_eq!(Kind::of_path(&kind.object_path("shop", "web")), None);
        }
    }
}
