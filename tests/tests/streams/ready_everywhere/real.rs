//! The same with a real API server and a real kube-controller-manager, which writes the
//! EndpointSlices. The test does the work of the kubelet.

use std::{
    env,
    fs::File,
    path::Path,
    process::{Command, Stdio},
};

use headgate_core::ServiceKey;
use headgate_tests::{
    apiserver::{
        ASSETS_VARIABLE, ApiUnderTest, Kind,
        objects::{node, service},
    },
    testbed::process::KilledOnDrop,
};
use http::{Method, Request};
use serde_json::{Value, json};

use super::{ADDRESS, GATE, Replica, agent, condition_of, eventually, pod};

const POD: &str = "/api/v1/namespaces/shop/pods/web-1";

/// Starts the controller that writes EndpointSlices. `None` if there is no such program.
fn controller_manager(server: &ApiUnderTest, folder: &Path) -> Option<KilledOnDrop> {
    let program = Path::new(&env::var_os(ASSETS_VARIABLE)?).join("kube-controller-manager");
    if !program.is_file() {
        println!("{} is missing: this test does not run", program.display());
        return None;
    }
    let kubeconfig = folder.join("kubeconfig");
    std::fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    let mut command = Command::new(program);
    command.arg(format!("--kubeconfig={}", kubeconfig.display()));
    command.args(["--controllers=endpointslice", "--leader-elect=false", "--secure-port=0"]);
    command.arg(format!("--cert-dir={}", folder.display()));
    let log = File::create(folder.join("log")).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    Some(KilledOnDrop(command.spawn().unwrap()))
}

/// Writes conditions like the kubelet. Other conditions stay.
async fn set_conditions(server: &ApiUnderTest, conditions: &[(&str, &str, &str)]) {
    let mut pod = server.send(Method::GET, POD, None).await.unwrap();
    let mut merged = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    for (name, status, reason) in conditions {
        merged.retain(|condition| condition["type"] != *name);
        merged.push(json!({"type": name, "status": status, "reason": reason}));
    }
    let address = ADDRESS.to_string();
    pod["status"] = json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": merged});
    server.send(Method::PUT, &format!("{POD}/status"), Some(&pod)).await.unwrap();
}

/// Whether the EndpointSlice controller has written the endpoint, and its condition `ready`.
async fn slice_is_ready(server: &ApiUnderTest) -> Option<bool> {
    let path = Kind::EndpointSlice.collection_path(Some("shop"));
    let slices = server.send(Method::GET, &path, None).await.unwrap();
    slices["items"][0]["endpoints"][0]["conditions"]["ready"].as_bool()
}

async fn gate(server: &ApiUnderTest) -> Option<Value> {
    condition_of(&server.send(Method::GET, POD, None).await.unwrap(), GATE)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_endpoint_slice_controller_makes_the_pod_ready_without_another_change() {
    let Some(server) = ApiUnderTest::real().await.unwrap() else { return };
    let folder = tempfile::tempdir().unwrap();
    let Some(_controller) = controller_manager(&server, folder.path()) else { return };
    for namespace in ["shop", "headgate-system"] {
        server.ensure_namespace(namespace).await.unwrap();
    }
    let web = service("shop", "web").cluster_ip("10.96.7.7").port("http", "TCP", 80, 8080);
    let starting = pod("shop", "web-1", "").gate(GATE).label("app", "web").field("spec.nodeName", "a");
    let mut starting = starting.build();
    starting["metadata"]["uid"] = Value::Null;
    for object in [web.field("spec.selector", json!({"app": "web"})).build(), starting] {
        server.create(&object).await.unwrap();
    }
    for name in ["a", "b"] {
        server.create(&node(name).build()).await.unwrap();
    }
    let replica = Replica::start(0, &server.kubeconfig(), &["--ready-everywhere-timeout-seconds=3600"]).await;
    let only = Replica::start(1, &server.kubeconfig(), &["--ready-everywhere-timeout-seconds=3600"]).await;
    eventually("the replicas are synced", async || replica.store.is_synced() && only.store.is_synced()).await;
    let (mut a, mut b) = (agent(&replica, "a").await, agent(&only, "b").await);
    set_conditions(&server, &[("ContainersReady", "False", ""), ("Ready", "False", "ContainersNotReady")]).await;
    eventually("the controller writes the endpoint", async || slice_is_ready(&server).await == Some(false)).await;
    assert!(!replica.is_ready());
    // The containers are ready.
    set_conditions(&server, &[("ContainersReady", "True", ""), ("Ready", "False", "ReadinessGatesNotReady")]).await;
    super::program(&replica, &mut a).await;
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    assert_eq!(gate(&server).await, None);
    super::program(&only, &mut b).await;
    eventually("the condition is set", async || gate(&server).await.is_some()).await;
    let set = gate(&server).await.unwrap();
    assert_eq!((&set["status"], &set["reason"]), (&json!("True"), &json!("Programmed")), "{set}");
    // The kubelet makes the pod ready, and the controller follows.
    let key = ServiceKey::new("shop", "web");
    let since = [&replica, &only].map(|replica| replica.store.ready_since(&key, ADDRESS.into()));
    set_conditions(&server, &[("Ready", "True", "")]).await;
    eventually("the slice says so", async || slice_is_ready(&server).await == Some(true)).await;
    let after = node("after").build();
    server.create(&after).await.unwrap();
    for replica in [&replica, &only] {
        eventually("the next Node arrives", async || replica.store.node("after").node.is_some()).await;
        eventually("no pod waits", async || replica.metric("headgate_readiness_gates_waiting").await == 0).await;
    }
    assert_eq!([&replica, &only].map(|replica| replica.store.ready_since(&key, ADDRESS.into())), since);
    // The API server refuses a patch for an older pod.
    let patch = json!({"metadata": {"uid": "older"}, "status": {"conditions": [{"type": GATE, "status": "False"}]}});
    let request =
        Request::patch(format!("{POD}/status")).header("content-type", "application/strategic-merge-patch+json");
    let refused = server.client().request::<Value>(request.body(patch.to_string().into_bytes()).unwrap()).await;
    let refused = refused.unwrap_err();
    assert!(matches!(&refused, kube::Error::Api(status) if status.code == 422), "{refused:?}");
}
