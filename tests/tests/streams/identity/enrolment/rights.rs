//! The control plane uses exactly the rights that the manifests grant.

use std::{collections::BTreeSet, fs, path::Path};

use headgate_tests::apiserver::{ApiServer, Options, RecordedRequest, Token};
use serde_json::Value;

use super::{Cluster, add_node, outages::KEYS};
use crate::identity::server::eventually;

/// Rights as `VERB RESOURCE.GROUP` and `VERB URL`.
type Rights = BTreeSet<String>;

fn granted() -> Rights {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kustomize/base/rbac.yaml");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&fs::read_to_string(file).unwrap()).unwrap();
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let mut granted = Rights::new();
    for rule in documents.iter().filter_map(|document| document["rules"].as_array()).flatten() {
        let mut objects = strings(&rule["nonResourceURLs"]);
        for group in strings(&rule["apiGroups"]) {
            objects.extend(strings(&rule["resources"]).iter().map(|resource| format!("{resource}.{group}")));
        }
        let verbs = strings(&rule["verbs"]);
        granted.extend(objects.iter().flat_map(|object| verbs.iter().map(move |verb| format!("{verb} {object}"))));
    }
    granted
}

/// The right that a request needs (Kubernetes documentation, "Determine the Request Verb").
fn needed(request: &RecordedRequest) -> String {
    let parts: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
    let (group, object) = match parts[..] {
        ["api", _, ref object @ ..] => ("", object),
        ["apis", group, _, ref object @ ..] => (group, object),
        _ => return format!("get {}", request.path),
    };
    let (resource, is_named) = match object {
        ["namespaces", _, resource, rest @ ..] => (resource, !rest.is_empty()),
        [resource, rest @ ..] => (resource, !rest.is_empty()),
        [] => return format!("get {}", request.path),
    };
    let verb = match request.method.as_str() {
        "POST" => "create",
        "GET" if is_named => "get",
        "GET" if request.query.contains("watch=true") => "watch",
        "GET" => "list",
        other => other,
    };
    format!("{verb} {resource}.{group}")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_control_plane_uses_exactly_the_rights_of_the_manifests() {
    // Without streaming lists, the control plane lists first and then watches.
    let api = ApiServer::start_with(Options { streaming_lists: false, ..Options::default() }).unwrap();
    add_node(&api, "n1", "127.0.0.1");
    api.put_pod("agent-n1", "uid-of-agent-n1", "n1");
    let cluster = Cluster::with_api(api, &[]);
    let (agent, _) = cluster.agent("n1", Token { node: None, ..Token::of_agent("n1") }).await;
    agent.until_connected(true).await;
    eventually("the keys are read", || async { cluster.metric(KEYS) > 0 }).await;
    // Every authenticated client may read the version (ClusterRole system:public-info-viewer).
    let used = || cluster.api.recorded().iter().map(needed).filter(|right| right != "get /version").collect::<Rights>();
    eventually("all kinds are watched", || async { used().len() >= granted().len() }).await;
    assert_eq!(used(), granted());
}
