//! Patches of the conditions of pods.

use http::Method;
use serde_json::{Value, json};

use super::{
    kinds::Kind,
    status::{self, Failure, failure},
    store::{Store, key},
};

/// Returns the key of the pod whose conditions a request patches, and `None` for other requests.
pub(super) fn patched_pod(method: &Method, path: &str) -> Option<String> {
    let status = path.strip_suffix("/status").filter(|_| *method == Method::PATCH)?;
    let (kind, namespace, name) = Kind::of_object_path(status)?;
    (kind == Kind::Pod).then(|| key(kind, namespace, name))
}

/// Patches the conditions of a pod, and returns the pod.
pub(super) fn patch_conditions(store: &Store, pod: String, content_type: &str, body: &[u8]) -> Result<Value, Failure> {
    if content_type != "application/strategic-merge-patch+json" {
        return Err(failure(415, "UnsupportedMediaType", "write a strategic merge patch"));
    }
    let patch = serde_json::from_slice(body).map_err(|error| status::bad_request(&error.to_string()))?;
    let change = |before: Option<&Value>| patched(before.ok_or_else(status::not_found)?, &patch);
    Ok((*store.update(Kind::Pod, pod, change)?).clone())
}

/// Merges conditions by their type. With another UID than the pod's, the patch is refused.
fn patched(pod: &Value, patch: &Value) -> Result<Value, Failure> {
    let uid = &patch["metadata"]["uid"];
    if !uid.is_null() && *uid != pod["metadata"]["uid"] {
        return Err(failure(422, "Invalid", &format!("metadata.uid: Invalid value: {uid}: field is immutable")));
    }
    let mut pod = pod.clone();
    let conditions = &mut pod["status"]["conditions"];
    let mut merged = conditions.as_array().cloned().unwrap_or_default();
    for condition in patch["status"]["conditions"].as_array().into_iter().flatten() {
        match merged.iter_mut().find(|old| old["type"] == condition["type"]) {
            Some(old) => condition.as_object().into_iter().flatten().for_each(|(key, value)| old[key] = value.clone()),
            None => merged.push(condition.clone()),
        }
    }
    *conditions = json!(merged);
    Ok(pod)
}
