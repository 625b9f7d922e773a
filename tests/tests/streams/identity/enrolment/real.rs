//! Enrolment with a real `kube-apiserver`, which issues and reviews the tokens and enforces the
//! manifest's rights by RBAC.

use headgate_tests::apiserver::ApiUnderTest;
use http::Method;
use kube::Client;
use serde_json::{Value, json};

use super::{Cluster, node, rights::manifest};
use crate::identity::server::eventually;

const SYSTEM: &str = "/api/v1/namespaces/headgate-system";

/// A server with the manifest's accounts and roles, two Nodes and the agent's pod on each Node.
async fn installed() -> Option<ApiUnderTest> {
    let api = ApiUnderTest::real().await.unwrap()?;
    api.ensure_namespace("headgate-system").await.unwrap();
    for object in manifest() {
        api.create(&object).await.unwrap();
    }
    for (name, address) in [("n1", "127.0.0.1"), ("n2", "192.0.2.2")] {
        api.create(&node(name, address)).await.unwrap();
        create_agent_pod(&api, name).await;
    }
    Some(api)
}

async fn create_agent_pod(api: &ApiUnderTest, node: &str) {
    let spec = json!({
        "nodeName": node, "serviceAccountName": "headgate-node-agent",
        "containers": [{"name": "agent", "image": "headgate-node-agent"}],
    });
    let metadata = json!({"name": format!("agent-{node}"), "namespace": "headgate-system"});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
    api.create(&pod).await.unwrap();
}

/// Asks for a token of a ServiceAccount, as the kubelet does for a projected volume.
async fn token(api: &ApiUnderTest, account: &str, audience: Option<&str>, pod: Option<&str>) -> String {
    let audiences: Vec<&str> = audience.into_iter().collect();
    let mut spec = json!({"audiences": audiences, "expirationSeconds": 3600});
    if let Some(pod) = pod {
        spec["boundObjectRef"] = json!({"kind": "Pod", "apiVersion": "v1", "name": pod});
    }
    let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
    let path = format!("{SYSTEM}/serviceaccounts/{account}/token");
    let answer = api.send(Method::POST, &path, Some(&request)).await.unwrap();
    answer["status"]["token"].as_str().unwrap().to_owned()
}

/// The kubeconfig of the control plane's ServiceAccount.
async fn control_plane_kubeconfig(api: &ApiUnderTest) -> String {
    api.kubeconfig_with(&token(api, "headgate-control-plane", None, None).await)
}

/// The HTTP code of a request with a kubeconfig.
async fn code(client: &Client, method: Method, path: &str) -> u16 {
    let request = http::Request::builder().method(method).uri(path).header("content-type", "application/json");
    match client.request::<Value>(request.body(b"{}".to_vec()).unwrap()).await {
        Ok(_) => 200,
        Err(kube::Error::Api(status)) => status.code,
        Err(error) => panic!("{path}: {error}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_api_server_confirms_the_token_of_an_agent_and_no_other() {
    let Some(api) = installed().await else { return };
    let kubeconfig = control_plane_kubeconfig(&api).await;
    let cluster = Cluster::with_kubeconfig(api, &kubeconfig, &[]);
    let agent_token = |audience, pod| token(&cluster.api, "headgate-node-agent", Some(audience), Some(pod));
    let good = agent_token("headgate", "agent-n1").await;
    let (agent, _) = cluster.agent_with("n1", &good, &cluster.path("certs/ca.crt")).await;
    agent.until_connected(true).await;
    assert_eq!(cluster.enrolments("success"), 1);

    let other_account = token(&cluster.api, "headgate-control-plane", Some("headgate"), None).await;
    let no_pod = token(&cluster.api, "headgate-node-agent", Some("headgate"), None).await;
    for (name, token, result) in [
        ("other address", agent_token("headgate", "agent-n2").await, "address"),
        ("audience", agent_token("other", "agent-n1").await, "token_rejected"),
        ("account", other_account, "service_account"),
        ("no pod", no_pod, "no_pod"),
    ] {
        cluster.refuses_text(name, &token, result).await;
    }
    // The API server remembers for 10 s that a token is valid, so this token is a new one. No
    // kubelet runs, so only a deletion without a grace period removes the pod.
    let unknown = agent_token("headgate", "agent-n1").await;
    let pod = format!("{SYSTEM}/pods/agent-n1?gracePeriodSeconds=0");
    cluster.api.send(Method::DELETE, &pod, None).await.unwrap();
    cluster.refuses_text("pod gone", &unknown, "token_rejected").await;
    assert_eq!(cluster.enrolments("success"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_api_server_grants_the_control_plane_nothing_else() {
    let Some(api) = installed().await else { return };
    let account = control_plane_kubeconfig(&api).await;
    let client = headgate_tests::apiserver::client(&account).await.unwrap();
    for (method, path, expected) in [
        (Method::GET, "/api/v1/services", 200),
        (Method::GET, "/apis/discovery.k8s.io/v1/endpointslices", 200),
        (Method::GET, "/api/v1/namespaces/headgate-system/pods/agent-n1", 200),
        (Method::GET, "/api/v1/secrets", 403),
        (Method::GET, "/api/v1/pods", 403),
        (Method::GET, "/api/v1/namespaces/default/pods/web", 403),
        (Method::GET, "/api/v1/nodes/n1", 403),
        (Method::POST, "/api/v1/namespaces/default/services", 403),
        (Method::DELETE, "/api/v1/nodes/n1", 403),
    ] {
        assert_eq!(code(&client, method.clone(), path).await, expected, "{method} {path}");
    }
    let role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/headgate-control-plane";
    let mut changed = api.send(Method::GET, role, None).await.unwrap();
    let rules = changed["rules"].as_array_mut().unwrap();
    rules.retain(|rule| rule["resources"] != json!(["endpointslices"]));
    api.send(Method::PUT, role, Some(&changed)).await.unwrap();
    // The API server follows its roles by a watch.
    eventually("the right is gone", || async {
        code(&client, Method::GET, "/apis/discovery.k8s.io/v1/endpointslices").await == 403
    })
    .await;
    let cluster = Cluster::with_kubeconfig(api, &account, &[]);
    cluster
        .control_plane
        .as_ref()
        .unwrap()
        .until_logged("on endpointslices.discovery.k8s.io in the ClusterRole of this account")
        .unwrap();
}
