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

/// Labels that are read.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Labels {
    /// `service.kubernetes.io/service-proxy-name`: another proxy serves this Service.
    pub service_proxy_name: Option<String>,
    /// `service.kubernetes.io/headless`: a slice for DNS only.
    pub headless: Option<String>,
    /// `kubernetes.io/service-name`: the Service of a slice.
    pub service_name: Option<String>,
}

/// Annotations that are read.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Annotations {
    /// `headgate.io/scheduler`.
    pub scheduler: Option<String>,
    /// `headgate.io/health-check`.
    pub health_check: Option<String>,
    /// `headgate.io/health-check-interval`.
    pub health_check_interval: Option<String>,
    /// `headgate.io/load-balancing` of a Service.
    pub load_balancing: Option<String>,
    /// `headgate.io/proxy-protocol` of a Service.
    pub proxy_protocol: Option<String>,
    /// `headgate.io/max-connections` of a Service.
    pub max_connections: Option<String>,
    /// `headgate.io/weights` of an EndpointSlice.
    pub weights: Option<String>,
    /// `service.cilium.io/weight` of an EndpointSlice.
    pub cilium_weight: Option<String>,
    /// `endpoints.kubernetes.io/last-change-trigger-time`.
    pub last_change_trigger_time: Option<String>,
}

/// A map with a few known keys. All other keys are ignored.
trait Picked: Default {
    /// The place for the value of a key; `None` for keys that are not read.
    fn place(&mut self, key: &str) -> Option<&mut Option<String>>;
}

impl Picked for Labels {
    fn place(&mut self, key: &str) -> Option<&mut Option<String>> {
        match key {
            "service.kubernetes.io/service-proxy-name" => Some(&mut self.service_proxy_name),
            "service.kubernetes.io/headless" => Some(&mut self.headless),
            "kubernetes.io/service-name" => Some(&mut self.service_name),
            _ => None,
        }
    }
}

impl Picked for Annotations {
    fn place(&mut self, key: &str) -> Option<&mut Option<String>> {
        match key {
            "headgate.io/scheduler" => Some(&mut self.scheduler),
            "headgate.io/health-check" => Some(&mut self.health_check),
            "headgate.io/load-balancing" => Some(&mut self.load_balancing),
            "headgate.io/proxy-protocol" => Some(&mut self.proxy_protocol),
            "headgate.io/max-connections" => Some(&mut self.max_connections),
            "headgate.io/weights" => Some(&mut self.weights),
            "service.cilium.io/weight" => Some(&mut self.cilium_weight),
            "headgate.io/health-check-interval" => Some(&mut self.health_check_interval),
            "endpoints.kubernetes.io/last-change-trigger-time" => Some(&mut self.last_change_trigger_time),
            _ => None,
        }
    }
}

struct PickedVisitor<T>(std::marker::PhantomData<T>);

impl<'de, T: Picked> Visitor<'de> for PickedVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut picked = T::default();
        while let Some(key) = map.next_key::<Text<'de>>()? {
            match picked.place(&key.0) {
                Some(place) => *place = Some(map.next_value::<Option<String>>()?.unwrap_or_default()),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(picked)
    }
}

/// A key, borrowed from the text where possible.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Deserialize<'de> for Labels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PickedVisitor(std::marker::PhantomData))
    }
}

impl<'de> Deserialize<'de> for Annotations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PickedVisitor(std::marker::PhantomData))
    }
}

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
