//! The rights of the stand-in's clients, as the RBAC rules of manifests grant them.
//!
//! The verb of a request follows the Kubernetes documentation, "Determine the Request Verb".

use std::collections::BTreeSet;

use http::Method;
use serde_json::Value;

use super::status::{Failure, failure};

/// The rights of all clients. A right is `VERB RESOURCE.GROUP` or `VERB RESOURCE.GROUP in
/// NAMESPACE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rights(BTreeSet<String>);

impl Rights {
    /// Reads the rights that the ClusterRoles and Roles among these objects grant. Other objects
    /// are ignored.
    pub fn of_objects<'a>(objects: impl IntoIterator<Item = &'a Value>) -> Self {
        let mut rights = BTreeSet::new();
        for object in objects {
            let scope = match object["kind"].as_str() {
                Some("ClusterRole") => String::new(),
                Some("Role") => format!(" in {}", object["metadata"]["namespace"].as_str().unwrap_or_default()),
                _ => continue,
            };
            for rule in object["rules"].as_array().into_iter().flatten() {
                let mut targets: Vec<String> = Vec::new();
                for group in strings(&rule["apiGroups"]) {
                    targets.extend(strings(&rule["resources"]).map(|resource| format!("{resource}.{group}{scope}")));
                }
                for verb in strings(&rule["verbs"]) {
                    rights.extend(targets.iter().map(|target| format!("{verb} {target}")));
                }
            }
        }
        Self(rights)
    }

    /// All rights.
    pub fn all(&self) -> &BTreeSet<String> {
        &self.0
    }

    /// The same rights without one of them.
    #[must_use]
    pub fn without(&self, right: &str) -> Self {
        Self(self.0.iter().filter(|other| *other != right).cloned().collect())
    }

    /// Returns the right that allows a request; `None` if no right does.
    pub fn allowing(&self, method: &Method, path: &str, query: &str) -> Option<&str> {
        let [everywhere, in_namespace] = needed(method, path, query);
        self.0.get(&everywhere).or_else(|| self.0.get(&in_namespace)).map(String::as_str)
    }

    /// Refuses a request without a right. Every client may read `/version`, as the ClusterRole
    /// `system:public-info-viewer` of a real server says.
    pub(super) fn check(&self, method: &Method, path: &str, query: &str) -> Result<(), Failure> {
        if path == "/version" || self.allowing(method, path, query).is_some() {
            return Ok(());
        }
        let [needed, _] = needed(method, path, query);
        let (verb, target) = needed.split_once(' ').unwrap_or_default();
        let message = match target.split_once('.') {
            Some((resource, group)) if !target.starts_with('/') => format!(
                "{resource} is forbidden: User \"stand-in\" cannot {verb} resource \"{resource}\" in API group \"{group}\""
            ),
            _ => format!("forbidden: User \"stand-in\" cannot {verb} path \"{target}\""),
        };
        Err(failure(403, "Forbidden", &message))
    }
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// The rights that a request needs, in the whole cluster or in the namespace of its path.
fn needed(method: &Method, path: &str, query: &str) -> [String; 2] {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (group, object) = match parts[..] {
        ["api", _, ref object @ ..] => ("", object),
        ["apis", group, _, ref object @ ..] => (group, object),
        _ => ("", &[][..]),
    };
    let (namespace, object) = match object {
        ["namespaces", namespace, object @ ..] if !object.is_empty() => (*namespace, object),
        object => ("", object),
    };
    let (resource, is_named) = match object {
        [] => return [(); 2].map(|()| format!("{} {path}", method.as_str().to_lowercase())),
        [resource] => ((*resource).to_owned(), false),
        [resource, _] => ((*resource).to_owned(), true),
        [resource, _, part @ ..] => (format!("{resource}/{}", part.join("/")), true),
    };
    let verb = match *method {
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if is_named => "delete",
        Method::DELETE => "deletecollection",
        _ if is_named => "get",
        _ if query.split('&').any(|pair| pair == "watch=true") => "watch",
        _ => "list",
    };
    let everywhere = format!("{verb} {resource}.{group}");
    let in_namespace = format!("{everywhere} in {namespace}");
    [everywhere, in_namespace]
}
