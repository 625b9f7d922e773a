//! The control plane uses exactly the rights that the manifests grant, and names a missing one.

use std::{collections::BTreeSet, fs, path::Path};

use headgate_tests::apiserver::{ApiServer, Options, Rights, Token};
use serde_json::Value;

use super::{Cluster, add_node, put_pod};
use crate::identity::server::eventually;

/// The objects of the manifest that grants rights.
pub(super) fn manifest() -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kustomize/base/rbac.yaml");
    serde_saphyr::from_multiple(&fs::read_to_string(file).unwrap()).unwrap()
}

/// The rights that the manifest grants.
pub(super) fn granted() -> Rights {
    Rights::of_objects(&manifest())
}

/// A cluster whose agent has a token without a node, so that the control plane reads the pod.
/// Without streaming lists, the control plane lists first and then watches.
fn cluster_with(rights: Rights) -> Cluster {
    let options = Options { streaming_lists: false, rights: Some(rights), ..Options::default() };
    let api = ApiServer::start_with(options).unwrap();
    add_node(&api, "n1", "127.0.0.1");
    put_pod(&api, "uid-of-agent-n1", "n1");
    Cluster::with_api(api, &[])
}

fn token() -> Token {
    Token { node: None, ..Token::of_agent("n1") }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_control_plane_uses_exactly_the_rights_of_the_manifests() {
    let rights = granted();
    let cluster = cluster_with(rights.clone());
    let (agent, _) = cluster.agent("n1", token()).await;
    agent.until_connected(true).await;
    let used = || {
        let requests = cluster.api.recorded();
        let used = requests.iter().filter_map(|r| rights.allowing(&r.method, &r.path, &r.query));
        used.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    eventually("all rights are used", || async { used() == *rights.all() }).await;
    assert!(cluster.api.recorded().iter().all(|request| request.answered != Some(403)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_to_read_a_kind_is_named_in_the_log() {
    for (right, message) in [
        ("list services.", "allow the verb \"list\" on services in the ClusterRole"),
        ("watch endpointslices.discovery.k8s.io", "allow the verb \"watch\" on endpointslices"),
    ] {
        assert!(granted().all().contains(right), "{right}");
        let cluster = cluster_with(granted().without(right));
        cluster.control_plane.as_ref().unwrap().until_logged(message).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_rights_to_verify_a_token_no_agent_enrols() {
    for (right, result) in
        [("create tokenreviews.authentication.k8s.io", "api_server"), ("get pods. in headgate-system", "api_server")]
    {
        assert!(granted().all().contains(right), "{right}");
        let cluster = cluster_with(granted().without(right));
        cluster.refuses(right, token(), result).await;
    }
}
