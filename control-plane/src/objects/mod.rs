//! The fields of Kubernetes objects that a service proxy reads. Both sources use these types.
//!
//! Decoding these types costs a fraction of decoding the full types: `managedFields`, most labels
//! and annotations, and selectors are skipped in the text, so no memory is allocated for them.
//! Values are stored as written: an address is text, and a port is any number. So [`crate::model`]
//! can report one invalid field of an object and use the other fields. A list that is `null` is
//! empty, because Go writes empty lists as `null`.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

/// Defines types of the API. A field that is missing or `null` has the default value of its type.
macro_rules! api_types {
    ($($(#[$about:meta])* pub struct $name:ident { $($(#[$of_field:meta])* pub $field:ident: $type:ty,)+ })+) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, Default, serde::Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub struct $name {$(
            $(#[$of_field])*
            #[serde(default, deserialize_with = "crate::objects::nullable")]
            pub $field: $type,
        )+}
    )+};
}

// The macro comes before the module that uses it.
mod kinds;

pub use kinds::*;

/// The kinds of objects that a source reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectKind {
    /// `v1` Service.
    Service,
    /// `discovery.k8s.io/v1` EndpointSlice.
    EndpointSlice,
    /// `v1` Node.
    Node,
    /// `networking.k8s.io/v1` ServiceCIDR.
    ServiceCidr,
    /// `v1` Pod.
    Pod,
}

impl ObjectKind {
    /// Every kind that each source reads. Pods are read only with `--ready-everywhere`.
    pub const ALL: [Self; 4] = [Self::Service, Self::EndpointSlice, Self::Node, Self::ServiceCidr];

    /// `kind`, the newest `apiVersion`, and the resource in the paths of the API.
    const fn api(self) -> [&'static str; 3] {
        match self {
            Self::Service => ["Service", "v1", "services"],
            Self::EndpointSlice => ["EndpointSlice", "discovery.k8s.io/v1", "endpointslices"],
            Self::Node => ["Node", "v1", "nodes"],
            Self::ServiceCidr => ["ServiceCIDR", "networking.k8s.io/v1", "servicecidrs"],
            Self::Pod => ["Pod", "v1", "pods"],
        }
    }

    /// `kind` as the API spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.api()[0]
    }

    /// The newest `apiVersion`.
    #[must_use]
    pub const fn api_version(self) -> &'static str {
        self.api()[1]
    }

    /// The path of all objects in the API.
    #[must_use]
    pub fn path(self) -> String {
        let [_, version, resource] = self.api();
        format!("/{}/{version}/{resource}", if version.contains('/') { "apis" } else { "api" })
    }

    /// The name of the resource in RBAC rules.
    #[must_use]
    pub fn rbac_resource(self) -> String {
        let [_, version, resource] = self.api();
        version.split_once('/').map_or_else(|| resource.to_owned(), |(group, _)| format!("{resource}.{group}"))
    }

    /// The kind of `apiVersion` and `kind`; `None` for all others, and for pods.
    #[must_use]
    pub fn of(api_version: &str, kind: &str) -> Option<Self> {
        let newest = if api_version == "networking.k8s.io/v1beta1" { "networking.k8s.io/v1" } else { api_version };
        Self::ALL.into_iter().find(|known| (known.name(), known.api_version()) == (kind, newest))
    }

    /// Whether a replica can serve only if it follows this kind.
    #[must_use]
    pub fn is_essential(self) -> bool {
        self != Self::Pod
    }

    /// Whether objects of this kind have namespaces.
    #[must_use]
    pub fn is_namespaced(self) -> bool {
        matches!(self, Self::Service | Self::EndpointSlice | Self::Pod)
    }
}

/// The kind and the name of an object. Displayed as `Service prod/web`, or `Node node-1`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// Kind.
    pub kind: ObjectKind,
    /// `metadata.namespace`; empty for kinds without namespaces.
    pub namespace: Box<str>,
    /// `metadata.name`.
    pub name: Box<str>,
}

impl ObjectKey {
    /// Creates a key, in the namespace `default` if a namespaced object gives none.
    #[must_use]
    pub fn new(kind: ObjectKind, namespace: &str, name: &str) -> Self {
        let namespace = match (kind.is_namespaced(), namespace) {
            (false, _) => "",
            (true, "") => "default",
            (true, namespace) => namespace,
        };
        Self { kind, namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.name();
        if self.namespace.is_empty() {
            write!(f, "{kind} {}", self.name)
        } else {
            write!(f, "{kind} {}/{}", self.namespace, self.name)
        }
    }
}

/// An object of any of the kinds. Events hold it in a box.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(clippy::large_enum_variant)]
pub enum Object {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    EndpointSlice(EndpointSlice),
    /// A Node.
    Node(Node),
    /// A ServiceCIDR.
    ServiceCidr(ServiceCidr),
    /// A pod.
    Pod(Pod),
}

impl Object {
    /// The kind, and namespace, name and resourceVersion as the metadata of the object gives them.
    #[must_use]
    pub fn names(&self) -> (ObjectKind, [&str; 3]) {
        fn of<L>(metadata: &Metadata<L>) -> [&str; 3] {
            [&metadata.namespace, &metadata.name, &metadata.resource_version]
        }
        match self {
            Self::Service(object) => (ObjectKind::Service, of(&object.metadata)),
            Self::EndpointSlice(object) => (ObjectKind::EndpointSlice, of(&object.metadata)),
            Self::Node(object) => (ObjectKind::Node, of(&object.metadata)),
            Self::ServiceCidr(object) => (ObjectKind::ServiceCidr, of(&object.metadata)),
            Self::Pod(object) => (ObjectKind::Pod, of(&object.metadata)),
        }
    }

    /// The key of the object.
    #[must_use]
    pub fn key(&self) -> ObjectKey {
        let (kind, [namespace, name, _]) = self.names();
        ObjectKey::new(kind, namespace, name)
    }

    /// Decodes an object of this kind.
    ///
    /// # Errors
    /// The error of the deserializer, if a field has a wrong type.
    pub fn deserialize<'de, D: Deserializer<'de>>(kind: ObjectKind, deserializer: D) -> Result<Self, D::Error> {
        Ok(match kind {
            ObjectKind::Service => Self::Service(Service::deserialize(deserializer)?),
            ObjectKind::EndpointSlice => Self::EndpointSlice(EndpointSlice::deserialize(deserializer)?),
            ObjectKind::Node => Self::Node(Node::deserialize(deserializer)?),
            ObjectKind::ServiceCidr => Self::ServiceCidr(ServiceCidr::deserialize(deserializer)?),
            ObjectKind::Pod => Self::Pod(Pod::deserialize(deserializer)?),
        })
    }
}

api_types! {
    /// The `apiVersion`, `kind` and names of an object. These fields identify an object whose other
    /// fields cannot be decoded.
    pub struct ManifestHeader {
        /// `apiVersion`, such as `discovery.k8s.io/v1`.
        pub api_version: String,
        /// `kind`, such as `EndpointSlice`.
        pub kind: String,
        /// The names in `metadata`.
        pub metadata: Names,
    }

    /// The names in `metadata`.
    pub struct Names {
        /// `metadata.name`.
        pub name: String,
        /// `metadata.namespace`.
        pub namespace: String,
        /// `metadata.resourceVersion`.
        pub resource_version: String,
    }
}

// The `metadata` of objects: names, times, and the few labels and annotations that Headgate reads.

/// `metadata`. A field that is missing or `null` has the default value of its type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, bound = "L: Default + Deserialize<'de>")]
pub struct Metadata<L = Labels> {
    /// Name.
    #[serde(deserialize_with = "nullable")]
    pub name: String,
    /// Namespace; empty if the object gives no namespace.
    #[serde(deserialize_with = "nullable")]
    pub namespace: String,
    /// UID; empty in files.
    #[serde(deserialize_with = "nullable")]
    pub uid: String,
    /// resourceVersion; empty in files.
    #[serde(deserialize_with = "nullable")]
    pub resource_version: String,
    /// Time of creation (RFC 3339), or empty.
    #[serde(deserialize_with = "nullable")]
    pub creation_timestamp: String,
    /// Time of deletion (RFC 3339); empty unless the object is being deleted.
    #[serde(deserialize_with = "nullable")]
    pub deletion_timestamp: String,
    /// The labels that are read.
    #[serde(deserialize_with = "nullable")]
    pub labels: L,
    /// The annotations that are read.
    #[serde(deserialize_with = "nullable")]
    pub annotations: Annotations,
}

impl Metadata {
    /// The namespace of a namespaced object, `default` if it gives none.
    #[must_use]
    pub fn namespace_or_default(&self) -> &str {
        if self.namespace.is_empty() { "default" } else { &self.namespace }
    }
}

/// The keys of the labels and annotations that are read.
pub mod keys {
    /// Label of a Service: another proxy serves it.
    pub const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
    /// Label of an EndpointSlice: it is for DNS only.
    pub const HEADLESS: &str = "service.kubernetes.io/headless";
    /// Label of an EndpointSlice: its Service.
    pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
    /// Annotation of an EndpointSlice: when its newest change was triggered.
    pub const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
    /// Annotation of an EndpointSlice: Cilium's weight of all its endpoints.
    pub const CILIUM_WEIGHT: &str = "service.cilium.io/weight";
    /// Annotation of an EndpointSlice: the weights of some endpoints.
    pub const WEIGHTS: &str = "headgate.io/weights";
    /// Annotation of a Service: the scheduler of IPVS.
    pub const SCHEDULER: &str = "headgate.io/scheduler";
    /// Annotation of a Service: the algorithm for load balancing.
    pub const LOAD_BALANCING: &str = "headgate.io/load-balancing";
    /// Annotation of a Service: the version of the PROXY protocol.
    pub const PROXY_PROTOCOL: &str = "headgate.io/proxy-protocol";
    /// Annotation of a Service: the limit of connections.
    pub const MAX_CONNECTIONS: &str = "headgate.io/max-connections";
    /// Annotation of a Service: the kind of health checks.
    pub const HEALTH_CHECK: &str = "headgate.io/health-check";
    /// Annotation of a Service: the interval of health checks.
    pub const HEALTH_CHECK_INTERVAL: &str = "headgate.io/health-check-interval";

    pub(super) const LABELS: &[&str] = &[SERVICE_PROXY_NAME, HEADLESS, SERVICE_NAME];
    pub(super) const ANNOTATIONS: &[&str] = &[
        TRIGGER_TIME,
        CILIUM_WEIGHT,
        WEIGHTS,
        SCHEDULER,
        LOAD_BALANCING,
        PROXY_PROTOCOL,
        MAX_CONNECTIONS,
        HEALTH_CHECK,
        HEALTH_CHECK_INTERVAL,
    ];
}

/// The labels that are read.
type Labels = Marks<true>;

/// The annotations that are read.
pub type Annotations = Marks<false>;

/// The labels or annotations that are read ([`keys`]). Others may have any value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Marks<const ARE_LABELS: bool>(Vec<(Box<str>, String)>);

impl<const ARE_LABELS: bool> Marks<ARE_LABELS> {
    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().rfind(|(known, _)| **known == *key).map(|(_, value)| value.as_str())
    }
}

impl<'de, const ARE_LABELS: bool> Deserialize<'de> for Marks<ARE_LABELS> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MarksVisitor)
    }
}

struct MarksVisitor<const ARE_LABELS: bool>;

impl<'de, const ARE_LABELS: bool> Visitor<'de> for MarksVisitor<ARE_LABELS> {
    type Value = Marks<ARE_LABELS>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let read = if ARE_LABELS { keys::LABELS } else { keys::ANNOTATIONS };
        let mut marks = Vec::new();
        while let Some(Text(key)) = map.next_key()? {
            if read.contains(&&*key) {
                marks.push((key.into(), map.next_value::<Option<String>>()?.unwrap_or_default()));
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Marks(marks))
    }
}

/// A text, borrowed from the document where possible.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Reads a value, where `null` means the default value.
fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads a list, where `null` means an empty list, and frees its spare capacity.
fn nullable_fitting<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let mut list: Vec<T> = nullable(deserializer)?;
    list.shrink_to_fit();
    Ok(list)
}

/// Reads the first entry of a list that may be `null`.
fn first<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    Ok(nullable::<D, Vec<T>>(deserializer)?.into_iter().next())
}

#[cfg(test)]
mod metadata_tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn only_known_labels_and_annotations_are_decoded_each_in_its_own_map() {
        let unknown = json!({"headgate.io/managed": true, "other": {"nested": [1]}});
        let mut metadata = json!({"labels": unknown, "annotations": unknown});
        metadata["labels"][keys::WEIGHTS] = json!(1);
        metadata["annotations"][keys::SERVICE_NAME] = json!(1);
        assert_eq!(Metadata::<Labels>::deserialize(&metadata).unwrap(), Metadata::default());
        for (map, known) in [("labels", keys::LABELS), ("annotations", keys::ANNOTATIONS)] {
            for key in known {
                let read = |value| Metadata::<Labels>::deserialize(json!({map: {*key: value}}));
                assert!(read(json!(true)).is_err(), "{key}");
                let read = read(json!("value")).unwrap();
                assert_eq!(read.labels.get(key).or(read.annotations.get(key)), Some("value"));
            }
        }
    }
}
