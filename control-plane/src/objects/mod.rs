//! The fields of Kubernetes objects that a service proxy reads. Both sources use these types.
//!
//! Decoding these types costs a fraction of decoding the full types: `managedFields`, most labels
//! and annotations, and selectors are skipped in the text, so no memory is allocated for them.
//! Values are stored as written: an address is text, and a port is any number. So [`crate::model`]
//! can report one invalid field of an object and use the other fields. A list that is `null` is
//! empty, because Go writes empty lists as `null`.

/// Defines types of the API. A field that is missing or `null` has the default value of its type.
macro_rules! api_types {
    ($($(#[$about:meta])* pub struct $name:ident { $($(#[$of_field:meta])* pub $field:ident: $type:ty,)+ })+) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, Default, serde::Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub struct $name {$(
            $(#[$of_field])*
            #[serde(default, deserialize_with = "crate::objects::metadata::nullable")]
            pub $field: $type,
        )+}
    )+};
}

mod gate;
mod kinds;
mod metadata;
mod pod;

use std::fmt;

use serde::{Deserialize, Deserializer};

pub use self::{
    gate::{GATE, GateState},
    kinds::*,
    metadata::{Annotations, Metadata, keys},
    pod::PodId,
};

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

    /// The kind that `apiVersion` and `kind` name together; `None` for all other kinds, such as a
    /// `Service` of another API group, and for pods.
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
    /// Creates a key. An object of a namespaced kind that gives no namespace is in `default`, as
    /// with `kubectl apply`.
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
