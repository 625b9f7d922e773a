//! The kinds that the stand-in serves, with their real names, groups and paths.

use serde_json::Value;

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

    /// The resource as messages name it: `services`, or `endpointslices.discovery.k8s.io`.
    pub fn qualified_plural(self) -> String {
        match self.group() {
            "" => self.plural().to_owned(),
            group => format!("{}.{group}", self.plural()),
        }
    }

    /// The path of the collection: of one namespace where `namespace` is given, else of the whole cluster.
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

    /// The kind of an object by its `apiVersion` and `kind`; `None` if it is none of those served.
    pub fn of(object: &Value) -> Option<Self> {
        let text = |field: &str| object.get(field).and_then(Value::as_str);
        Self::ALL
            .into_iter()
            .find(|kind| text("kind") == Some(kind.name()) && text("apiVersion") == Some(kind.api_version()))
    }

    /// The required fields of this kind at their zero values. The real server encodes whole Go structs, so the
    /// object in a BOOKMARK event carries these beside its resourceVersion.
    pub(super) fn zero_fields(self) -> Value {
        match self {
            Self::Service => serde_json::json!({"spec": {}, "status": {"loadBalancer": {}}}),
            Self::Node => serde_json::json!({
                "spec": {},
                "status": {
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
                    "nodeInfo": {
                        "machineID": "", "systemUUID": "", "bootID": "", "kernelVersion": "", "osImage": "",
                        "containerRuntimeVersion": "", "kubeletVersion": "", "kubeProxyVersion": "",
                        "operatingSystem": "", "architecture": ""
                    }
                }
            }),
            Self::EndpointSlice => serde_json::json!({"addressType": "", "endpoints": null, "ports": null}),
            Self::ServiceCidr => serde_json::json!({"spec": {}, "status": {}}),
        }
    }
}

/// A place a request path points at.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A collection; of one namespace or of all.
    Collection { kind: Kind, namespace: Option<String> },
    /// One object.
    Object { kind: Kind, namespace: String, name: String },
    /// `/version`.
    Version,
    /// `/readyz`, `/livez` or `/healthz`.
    Health,
}

impl Target {
    /// Finds what a path points at; `None` where the server has nothing there.
    pub(super) fn parse(path: &str) -> Option<Self> {
        let segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
        let (group, rest) = match segments.as_slice() {
            ["version"] => return Some(Self::Version),
            ["readyz" | "livez" | "healthz", ..] => return Some(Self::Health),
            ["api", "v1", rest @ ..] => ("", rest),
            ["apis", group, "v1", rest @ ..] => (*group, rest),
            _ => return None,
        };
        let kind_of = |plural: &str, namespaced: bool| {
            Kind::ALL
                .into_iter()
                .find(|kind| kind.group() == group && kind.plural() == plural && (kind.is_namespaced() || !namespaced))
        };
        match rest {
            ["namespaces", namespace, plural] => {
                Some(Self::Collection { kind: kind_of(plural, true)?, namespace: Some((*namespace).to_owned()) })
            }
            ["namespaces", namespace, plural, name] => Some(Self::Object {
                kind: kind_of(plural, true)?,
                namespace: (*namespace).to_owned(),
                name: (*name).to_owned(),
            }),
            [plural] => Some(Self::Collection { kind: kind_of(plural, false)?, namespace: None }),
            [plural, name] => {
                let kind = kind_of(plural, false)?;
                (!kind.is_namespaced()).then(|| Self::Object {
                    kind,
                    namespace: String::new(),
                    name: (*name).to_owned(),
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_leads_back_to_its_kind() {
        for kind in Kind::ALL {
            let all = Target::Collection { kind, namespace: None };
            assert_eq!(Target::parse(&kind.collection_path(None)), Some(all));
            let namespace = kind.is_namespaced().then(|| "shop".to_owned());
            let within = Target::Collection { kind, namespace: namespace.clone() };
            assert_eq!(Target::parse(&kind.collection_path(Some("shop"))), Some(within));
            let object = Target::Object { kind, namespace: namespace.unwrap_or_default(), name: "web".to_owned() };
            assert_eq!(Target::parse(&kind.object_path("shop", "web")), Some(object));
        }
    }

    #[test]
    fn paths_that_the_real_server_lacks_lead_nowhere() {
        for path in ["/api/v1/services/web", "/api/v1/namespaces/shop/nodes", "/apis/apps/v1/services", "/api/v2/nodes"]
        {
            assert_eq!(Target::parse(path), None, "{path}");
        }
    }
}
