//! The `metadata` of objects: names, times, and the few labels and annotations that Headgate reads.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

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
    /// The namespace of a namespaced object: `default` if the object gives no namespace, as with
    /// `kubectl apply`.
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
pub(super) type Labels = Marks<true>;

/// The annotations that are read.
pub type Annotations = Marks<false>;

/// The labels or annotations that are read ([`keys`]). All others are ignored, whatever their
/// values are.
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
pub(super) struct Text<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// Reads a value, where `null` means the default value.
pub(super) fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads a list, where `null` means an empty list, and frees its spare capacity.
pub(super) fn nullable_fitting<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let mut list: Vec<T> = nullable(deserializer)?;
    list.shrink_to_fit();
    Ok(list)
}

/// Reads the first entry of a list that may be `null`.
pub(super) fn first<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    Ok(nullable::<D, Vec<T>>(deserializer)?.into_iter().next())
}

#[cfg(test)]
mod tests {
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
