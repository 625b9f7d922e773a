//! The pod of an endpoint, in a form that needs little memory.

use std::{hash::BuildHasher as _, hash::RandomState, sync::LazyLock};

use serde::{Deserialize, Deserializer};

use super::metadata::Text;

/// The key of the hashes. It is random, so that nobody can choose names with equal hashes.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The UID and the name of a pod, as hashes that only this process understands. The default value
/// means that the endpoint belongs to no pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PodId {
    uid: u64,
    name: u64,
}

impl PodId {
    /// Creates the identity of a pod in a namespace that is not known yet.
    #[must_use]
    pub fn new(uid: &str, name: &str) -> Self {
        Self { uid: HASHER.hash_one(uid), name: HASHER.hash_one(name) }
    }

    /// The pod in this namespace. Objects of other namespaces cannot name it, whatever UID they
    /// give.
    #[must_use]
    pub fn in_namespace(self, namespace: &str) -> Self {
        let name = if self.is_none() { self.name } else { HASHER.hash_one((namespace, self.name)) };
        Self { name, ..self }
    }

    /// True if the endpoint belongs to no pod.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::default()
    }

    /// The hash of the pod's UID.
    #[must_use]
    pub fn uid(self) -> u64 {
        self.uid
    }

    /// The hash of the pod's namespace and name.
    #[must_use]
    pub fn name(self) -> u64 {
        self.name
    }

    /// The hash of a namespace and a name, to compare it with [`Self::name`].
    #[must_use]
    pub fn name_hash(namespace: &str, name: &str) -> u64 {
        Self::new("", name).in_namespace(namespace).name
    }
}

/// The fields of `targetRef` that are read. A `targetRef` without UID, as people write it, counts
/// too: the name then identifies the pod.
#[derive(Deserialize)]
struct TargetRef<'a> {
    #[serde(borrow, default)]
    kind: Option<Text<'a>>,
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default)]
    uid: Option<Text<'a>>,
}

/// Reads the pod in a `targetRef`, which may be `null`.
pub(super) fn pod<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PodId, D::Error> {
    let target = Option::<TargetRef<'de>>::deserialize(deserializer)?;
    let Some(TargetRef { kind: Some(Text(kind)), name: Some(Text(name)), uid }) = target else {
        return Ok(PodId::default());
    };
    let uid = uid.map(|Text(uid)| uid).unwrap_or_default();
    Ok(if kind == "Pod" { PodId::new(&uid, &name) } else { PodId::default() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::objects::SliceEndpoint;

    #[test]
    fn only_a_target_ref_of_a_pod_names_a_pod() {
        let read = |target: &str| {
            let text = format!(r#"{{"addresses": ["10.0.0.1"], "targetRef": {target}}}"#);
            serde_json::from_str::<SliceEndpoint>(&text).unwrap().pod
        };
        assert_eq!(read(r#"{"kind": "Pod", "name": "web-1", "uid": "u\u0031"}"#), PodId::new("u1", "web-1"));
        assert_eq!(read(r#"{"kind": "Pod", "name": "web-1"}"#), PodId::new("", "web-1"));
        for other in [r#"{"kind": "VirtualMachine", "name": "web-1", "uid": "u1"}"#, r#"{"kind": "Pod"}"#, "null"] {
            assert!(read(other).is_none(), "{other}");
        }
    }
}
