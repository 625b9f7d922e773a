//! Requests for one object: Leases can be read, created and replaced, and conditions of pods
//! patched.

use http::Method;
use serde_json::{Value, json};

use super::{
    kinds::Kind,
    status::{self, Failure, failure},
    store::{Store, key},
};

/// What a request does with an object.
pub(super) enum Request {
    Get(Kind, String),
    Create(Kind, String),
    Replace(Kind, String),
    PatchConditions(String),
}

impl Request {
    /// Reads the request line. `None` if the request is not for one object that clients may use.
    pub(super) fn of(method: &Method, path: &str) -> Option<Self> {
        if *method == Method::PATCH {
            let (kind, namespace, name) = Kind::of_object_path(path.strip_suffix("/status")?)?;
            return (kind == Kind::Pod).then(|| Self::PatchConditions(key(kind, namespace, name)));
        }
        if *method == Method::POST {
            let (kind, namespace) = Kind::of_path(path)?;
            return Some(Self::Create(kind, namespace?.to_owned())).filter(|_| kind == Kind::Lease);
        }
        let (kind, namespace, name) = Kind::of_object_path(path).filter(|(kind, ..)| *kind == Kind::Lease)?;
        let key = key(kind, namespace, name);
        match *method {
            Method::GET => Some(Self::Get(kind, key)),
            Method::PUT => Some(Self::Replace(kind, key)),
            _ => None,
        }
    }

    /// Does what the request says. Returns the HTTP code and the object.
    pub(super) fn answer(self, store: &Store, content_type: &str, body: &[u8]) -> Result<(u16, Value), Failure> {
        let read = || serde_json::from_slice::<Value>(body).map_err(|error| status::bad_request(&error.to_string()));
        let (code, object) = match self {
            Self::Get(kind, key) => (200, store.get_by_key(kind, &key).ok_or_else(status::not_found)?),
            Self::Create(kind, namespace) => {
                let mut object = read()?;
                object["metadata"]["namespace"] = json!(namespace);
                let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                let create = |before: Option<&Value>| match before {
                    Some(_) => Err(failure(409, "AlreadyExists", &format!("leases {name:?} already exists"))),
                    None => Ok(object),
                };
                (201, store.update(kind, key(kind, &namespace, &name), create)?)
            }
            Self::Replace(kind, key) => {
                let object = read()?;
                let replace = |before: Option<&Value>| {
                    let before = before.ok_or_else(status::not_found)?;
                    let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
                    if version(before) == version(&object) { Ok(object) } else { Err(conflict()) }
                };
                (200, store.update(kind, key, replace)?)
            }
            Self::PatchConditions(key) => {
                if content_type != "application/strategic-merge-patch+json" {
                    return Err(failure(415, "UnsupportedMediaType", "write a strategic merge patch"));
                }
                let patch = read()?;
                let change = |before: Option<&Value>| patched(before.ok_or_else(status::not_found)?, &patch);
                (200, store.update(Kind::Pod, key, change)?)
            }
        };
        Ok((code, (*object).clone()))
    }
}

fn conflict() -> Failure {
    failure(409, "Conflict", "the object has been modified; please apply your changes to the latest version")
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
