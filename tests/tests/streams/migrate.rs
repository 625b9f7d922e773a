//! `headgatectl migrate run` and `cleanup`, against the stand-in API server and a replica. The
//! controller of DaemonSets, kube-proxy's pods and the agents are simulated.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use headgate_control_plane::model::NodeChange;
use headgate_core::{Change, Protocol, Service, ServiceKey, ServicePort};
use headgate_proto::v1::{self, agent_message::Body, node_answer, node_query};
use headgate_tests::apiserver::{ApiServer, Kind};
use serde_json::{Value, json};
use tokio::{task::JoinHandle, time::sleep};

use crate::{
    client::{Client, eventually},
    replica::{Printed, Replica, cluster, headgatectl, node},
    verify_nodes::truth,
};

const LABEL: &str = "headgate.io/node-agent";
const PODS: &str = "kube-system";
const INSTALLED: &str = "headgate-system";

/// What agents report instead of success, by node.
#[derive(Default)]
struct Faults {
    failing: BTreeSet<&'static str>,
    drifting: BTreeSet<&'static str>,
    /// The cluster DNS does not answer there.
    deaf: BTreeSet<&'static str>,
}

/// A cluster whose agents run on nodes with the label, and whose kube-proxy does what its DaemonSet
/// says.
struct Rig {
    api: Arc<ApiServer>,
    replica: Arc<Replica>,
    faults: Arc<Mutex<Faults>>,
    kubeconfig: tempfile::NamedTempFile,
    controller: JoinHandle<()>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.controller.abort();
    }
}

const NODES: [&str; 10] = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"];

fn node_object(name: &str, version: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": name, "labels": { "kubernetes.io/os": "linux" } },
        "status": { "nodeInfo": { "kubeletVersion": version } },
    })
}

fn daemon_set(namespace: &str, name: &str, pod: &Value) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": { "namespace": namespace, "name": name },
        "spec": {
            "selector": { "matchLabels": { "k8s-app": name } },
            "template": { "metadata": { "labels": { "k8s-app": name } }, "spec": pod },
        },
    })
}

fn port(name: &str, protocol: Protocol, port: u16) -> ServicePort {
    ServicePort { name: name.into(), protocol, port, node_port: 0 }
}

impl Rig {
    async fn start() -> Self {
        let api = Arc::new(ApiServer::start().unwrap());
        let replica = Arc::new(Replica::start().await);
        replica.put(cluster(5));
        let address = Ipv4Addr::new(10, 96, 0, 1).into();
        let https = vec![port("https", Protocol::Tcp, 443)];
        replica.put([Change::from(Service::new(ServiceKey::new("default", "kubernetes"), vec![address], https))]);
        replica.put_nodes(NODES.map(|name| NodeChange::Apply(node(name, None))));
        let kubeconfig = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(kubeconfig.path(), api.kubeconfig()).unwrap();
        let faults = Arc::new(Mutex::new(Faults::default()));
        let controller = tokio::spawn(control(Arc::clone(&api), Arc::clone(&replica), Arc::clone(&faults)));
        let rig = Self { api, replica, faults, kubeconfig, controller };
        for name in NODES {
            rig.api.apply(node_object(name, "v1.36.2")).unwrap();
        }
        rig
    }

    async fn with_kube_proxy() -> Self {
        let rig = Self::start().await;
        let pod = json!({ "affinity": { "podAffinity": {} }, "containers": [{ "name": "kube-proxy" }] });
        rig.api.apply(daemon_set(PODS, "kube-proxy", &pod)).unwrap();
        let pod = json!({ "nodeSelector": { LABEL: "true" }, "containers": [{ "image": "headgate/node-agent:1" }] });
        rig.api.apply(daemon_set(INSTALLED, "headgate-node-agent", &pod)).unwrap();
        eventually("kube-proxy runs on all nodes", async || rig.kube_proxies().len() == NODES.len()).await;
        rig
    }

    async fn run(&self, arguments: &str) -> Printed {
        let path: PathBuf = self.kubeconfig.path().into();
        let kubeconfig = format!("--kubeconfig {}", path.display());
        headgatectl(&[&self.replica], &format!("{arguments} {kubeconfig}")).await
    }

    fn set(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.faults.lock().unwrap());
    }

    fn labelled(&self) -> Vec<String> {
        let nodes = self.api.list(Kind::Node).into_iter();
        let labelled = nodes.filter(|node| node["metadata"]["labels"][LABEL] == "true");
        labelled.map(|node| node["metadata"]["name"].as_str().unwrap().to_owned()).collect()
    }

    fn kube_proxies(&self) -> Vec<String> {
        let pods = self.api.list(Kind::Pod).into_iter();
        pods.map(|pod| pod["spec"]["nodeName"].as_str().unwrap().to_owned()).collect()
    }

    fn kube_proxy(&self) -> Value {
        self.api.get(Kind::DaemonSet, PODS, "kube-proxy").unwrap()["spec"]["template"]["spec"].clone()
    }
}

/// Runs kube-proxy and agents where the API says so.
async fn control(api: Arc<ApiServer>, replica: Arc<Replica>, faults: Arc<Mutex<Faults>>) {
    let mut agents: BTreeMap<&str, JoinHandle<()>> = BTreeMap::new();
    loop {
        sleep(Duration::from_millis(20)).await;
        let Some(daemon_set) = api.get(Kind::DaemonSet, PODS, "kube-proxy") else { continue };
        let pod = &daemon_set["spec"]["template"]["spec"];
        let avoids = pod["affinity"].to_string().contains(LABEL);
        let is_stopped = pod["nodeSelector"]["headgate.io/kube-proxy"] == "wanted";
        for name in NODES {
            let node = api.get(Kind::Node, "", name).unwrap();
            let has_label = node["metadata"]["labels"][LABEL] == "true";
            let runs_proxy = !(is_stopped || has_label && avoids);
            let proxy = format!("kube-proxy-{name}");
            match (api.get(Kind::Pod, PODS, &proxy), runs_proxy) {
                (Some(_), false) => drop(api.delete(Kind::Pod, PODS, &proxy)),
                (None, true) => {
                    let conditions = [json!({ "type": "Ready", "status": "True" })];
                    let pod = json!({
                        "apiVersion": "v1", "kind": "Pod",
                        "metadata": { "namespace": PODS, "name": proxy, "labels": { "k8s-app": "kube-proxy" } },
                        "spec": { "nodeName": name }, "status": { "conditions": conditions },
                    });
                    api.apply(pod).unwrap();
                }
                _ => {}
            }
            if !has_label {
                if let Some(agent) = agents.remove(name) {
                    agent.abort();
                }
            } else if !agents.contains_key(name) {
                let mut client = replica.open(name).await;
                client.reach(replica.store.version()).await;
                agents.insert(name, tokio::spawn(agent(client, name, Arc::clone(&faults))));
            }
        }
    }
}

/// Answers queries truthfully, apart from the faults. At first, and each time the faults of the
/// node change, it reports a failure or success.
async fn agent(mut client: Client, name: &'static str, faults: Arc<Mutex<Faults>>) {
    let (mut answered, mut was_failing) = (0, None);
    loop {
        let is_failing = faults.lock().unwrap().failing.contains(name);
        if was_failing != Some(is_failing) {
            let error = "no permission".to_owned();
            match is_failing {
                true => {
                    let failed = v1::ApplyFailed { version: client.held.version, error, attempts: 3 };
                    client.send(Body::ApplyFailed(failed)).await;
                }
                false => client.ack().await,
            }
            was_failing = Some(is_failing);
        }
        let stepped = tokio::time::timeout(Duration::from_millis(20), client.step()).await;
        if stepped.is_ok_and(|stepped| !matches!(stepped, Ok(Some(())))) {
            return;
        }
        while let Some(v1::Query { id, query }) = client.queries.get(answered).cloned() {
            answered += 1;
            let kind = match query.unwrap().kind.unwrap() {
                node_query::Kind::Verify(query) => {
                    let mut answer = truth(&client, name, &query, answered as u64);
                    if faults.lock().unwrap().drifting.contains(name) {
                        answer.drift = vec![v1::Drift { service: "a/b".into(), difference: "is broken".into() }];
                        answer.drift_count = 1;
                    }
                    node_answer::Kind::Verification(answer)
                }
                node_query::Kind::Probe(v1::ProbeQuery {}) => {
                    let is_deaf = faults.lock().unwrap().deaf.contains(name);
                    let error = if is_deaf { "no answer within 1 s" } else { "" };
                    let probe = |service: &str, error: &str| v1::Probe {
                        service: service.into(),
                        destination: "10.96.0.1:443/TCP".into(),
                        error: error.into(),
                    };
                    let probes = vec![probe("default/kubernetes", ""), probe("kube-system/kube-dns", error)];
                    node_answer::Kind::Probes(v1::Probes { probes })
                }
                other => panic!("an unexpected query: {other:?}"),
            };
            let part = Some(v1::NodeAnswer { kind: Some(kind) });
            client.send(Body::Answer(v1::Answer { id, part, is_last: true, ..v1::Answer::default() })).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_nodes_move_in_batches_stop_at_a_failing_node_go_on_and_go_back() {
    let rig = Rig::with_kube_proxy().await;
    let before = rig.kube_proxy();

    let planned = rig.run("migrate run --batch 30% --dry-run").await;
    assert_eq!(planned.code, 0, "{}", planned.err);
    assert!(planned.out.contains("batch 1: n0 n1 n2\n") && planned.out.contains("batch 4: n9\n"), "{}", planned.out);
    assert!(rig.labelled().is_empty() && rig.kube_proxy() == before);

    rig.set(|faults| {
        faults.failing.insert("n4");
    });
    let stopped = rig.run("migrate run --batch 30% --timeout 15s").await;
    assert_eq!(stopped.code, 3, "{} {}", stopped.out, stopped.err);
    assert!(stopped.err.contains("stopped at n4: its agent is failing: version "), "{}", stopped.err);
    assert!(stopped.err.contains("headgatectl migrate run --back --nodes n4"), "{}", stopped.err);
    assert!(stopped.out.contains("n0  up to date and verified (6 Services) after "), "{}", stopped.out);
    assert!(stopped.out.contains("; default/kubernetes 3/3; kube-system/kube-dns 3/3\n"), "{}", stopped.out);
    assert!(stopped.out.ends_with("3 of 10 nodes run Headgate\n"), "{}", stopped.out);
    assert_eq!(rig.labelled(), &NODES[..6], "nothing moves after a doubt");
    let kept = rig.kube_proxies();
    assert_eq!(kept, &NODES[6..]);

    // A node of another batch that fails stops the move, too.
    let again = rig.run("migrate run --nodes n8 --timeout 5s").await;
    assert_eq!(again.code, 3, "{}", again.out);
    assert!(again.err.contains("stopped at n4") && rig.labelled() == NODES[..6], "{}", again.err);

    rig.set(|faults| {
        faults.failing.remove("n4");
    });
    eventually("the agent of n4 has succeeded", async || {
        rig.replica.agents().await.iter().any(|agent| agent.node == "n4" && agent.state == "up_to_date")
    })
    .await;
    let done = rig.run("migrate run --batch 5").await;
    assert_eq!(done.code, 0, "{} {}", done.out, done.err);
    assert!(done.out.contains("all 10 nodes run Headgate"), "{}", done.out);
    assert!(rig.labelled() == NODES && rig.kube_proxies().is_empty());
    assert_eq!(rig.kube_proxy()["nodeSelector"], json!({ "headgate.io/kube-proxy": "wanted" }));

    let idle = rig.run("migrate run").await;
    assert!(idle.code == 0 && idle.out.contains("all 10 nodes run Headgate"), "{} {}", idle.out, idle.err);

    let one = rig.run("migrate run --back --nodes n3").await;
    assert_eq!(one.code, 0, "{} {}", one.out, one.err);
    assert!(one.out.contains("n3  back at kube-proxy after ") && rig.kube_proxies() == ["n3"], "{}", one.out);
    let back = rig.run("migrate run --back --batch 50%").await;
    assert_eq!(back.code, 0, "{} {}", back.out, back.err);
    assert!(back.out.contains("headgatectl cleanup --all --wait"), "{}", back.out);
    assert!(rig.labelled().is_empty() && rig.kube_proxies() == NODES);
    let mut after = rig.kube_proxy();
    // A real API server leaves out an empty map.
    assert_eq!(after["nodeSelector"].take(), json!({}));
    after.as_object_mut().unwrap().remove("nodeSelector");
    assert_eq!(after, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_without_answers_or_with_differences_stop_the_move() {
    let rig = Rig::with_kube_proxy().await;
    rig.set(|faults| {
        faults.deaf.insert("n1");
        faults.drifting.insert("n2");
    });
    let deaf = rig.run("migrate run --batch 2").await;
    assert_eq!(deaf.code, 3, "{}", deaf.out);
    let sentence = "stopped at n1: kube-system/kube-dns answered 0 of 3 probes";
    assert!(deaf.err.contains(sentence), "{}", deaf.err);
    let still_deaf = rig.run("migrate run --nodes n1,n5").await;
    assert!(still_deaf.code == 3 && still_deaf.err.contains(sentence), "{}", still_deaf.err);
    assert_eq!(rig.labelled(), ["n0", "n1"]);
    rig.set(|faults| {
        faults.deaf.remove("n1");
    });
    let drifting = rig.run("migrate run --batch 1").await;
    assert_eq!(drifting.code, 3, "{}", drifting.out);
    assert!(drifting.err.contains("stopped at n2: its verification ended with \"drift\": a/b is broken"));
    let paused = rig.run("migrate run --nodes n7").await;
    assert!(paused.err.contains("stopped at n2: its last verification found differences"), "{}", paused.err);
    let unpaused = rig.run("migrate run --nodes n7 --pause-on failing").await;
    assert_eq!(unpaused.code, 0, "{} {}", unpaused.out, unpaused.err);
    let missing = rig.run("migrate run --nodes n10").await;
    assert!(missing.code == 1 && missing.err.contains("no Linux node n10"), "{}", missing.err);
}

/// `kubeadm upgrade` writes the DaemonSet anew, and kube-proxy comes back on moved nodes.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_to_which_kube_proxy_came_back_do_not_lose_it_all_at_once() {
    let rig = Rig::with_kube_proxy().await;
    assert_eq!(rig.run("migrate run --batch 10").await.code, 0);
    let pod = json!({ "containers": [{ "name": "kube-proxy" }] });
    rig.api.apply(daemon_set(PODS, "kube-proxy", &pod)).unwrap();
    eventually("kube-proxy is back", async || rig.kube_proxies().len() == NODES.len()).await;
    rig.set(|faults| {
        faults.deaf.insert("n0");
    });
    let stopped = rig.run("migrate run --batch 2").await;
    assert_eq!(stopped.code, 3, "{}", stopped.out);
    assert!(stopped.out.contains("n9  kube-proxy has come back: the node has to move again\n"), "{}", stopped.out);
    assert_eq!(rig.labelled(), ["n0", "n1"]);
    assert_eq!(rig.kube_proxies(), &NODES[2..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_kube_proxy_is_no_daemon_set_the_command_says_what_to_do() {
    let rig = Rig::start().await;
    let none = rig.run("migrate run").await;
    assert!(none.code == 5 && none.out.contains("no kube-proxy was found"), "{} {}", none.out, none.err);
    let mirror = json!({
        "apiVersion": "v1", "kind": "Pod", "spec": { "nodeName": "n0" },
        "metadata": { "namespace": PODS, "name": "kube-proxy-n0", "annotations": { "kubernetes.io/config.mirror": "x" } },
    });
    rig.api.apply(mirror).unwrap();
    let by_hand = rig.run("migrate run").await;
    assert_eq!(by_hand.code, 5, "{}", by_hand.err);
    assert!(by_hand.out.contains("mv /etc/kubernetes/manifests/kube-proxy* "), "{}", by_hand.out);
    assert!(by_hand.err.contains("0 of 10 nodes run Headgate. Go on by hand"), "{}", by_hand.err);
    rig.api.apply(node_object("n0", "v1.36.2+k3s1")).unwrap();
    let k3s = rig.run("migrate run --nodes n0").await;
    assert!(k3s.code == 5 && k3s.out.contains("/etc/rancher/k3s/config.yaml"), "{}", k3s.out);
    let mut agents = Vec::new();
    for name in NODES {
        agents.push(tokio::spawn(agent(rig.replica.agent(name).await, name, Arc::clone(&rig.faults))));
    }
    let done = rig.run("migrate run").await;
    assert!(done.code == 0 && done.out.ends_with("10 of 10 nodes run Headgate\n"), "{} {}", done.out, done.err);
    agents.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn cleanup_waits_for_its_pods_and_names_nodes_that_refuse() {
    let rig = Rig::with_kube_proxy().await;
    let created = || rig.api.get(Kind::DaemonSet, INSTALLED, "headgate-cleanup");
    let status =
        |ready: u64| json!({ "desiredNumberScheduled": 10, "updatedNumberScheduled": 10, "numberReady": ready });
    let refused = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": INSTALLED, "name": "c", "labels": { "app.kubernetes.io/name": "headgate-cleanup" } },
        "spec": { "nodeName": "n4" },
        "status": { "containerStatuses": [
            { "ready": false, "state": { "waiting": {} }, "lastState": { "terminated": { "message": "no other proxy\n" } } },
        ] },
    });
    rig.api.apply(refused).unwrap();
    for (ready, code, timeout) in [(9, 3, "6s"), (10, 0, "50s")] {
        let command = format!("cleanup --all --wait --timeout {timeout}");
        let running = rig.run(&command);
        let playing = async {
            eventually("the DaemonSet exists", async || created().is_some()).await;
            let mut daemon_set = created().unwrap();
            daemon_set["status"] = status(ready);
            let pod = daemon_set["spec"]["template"]["spec"].clone();
            rig.api.apply(daemon_set).unwrap();
            pod
        };
        let (printed, pod) = tokio::join!(running, playing);
        assert_eq!(printed.code, code, "{} {}", printed.out, printed.err);
        let expected = if code == 0 { "Nothing of Headgate is left on 10 nodes.\n" } else { "" };
        assert_eq!(printed.out, expected);
        assert!(code == 0 || printed.err.contains("1 of 1 nodes\n  n4: no other proxy"), "{}", printed.err);
        assert_eq!(pod["containers"][0]["image"], "headgate/node-agent:1");
        assert_eq!(pod["containers"][0]["args"][1], "--cleanup-stay=beside-proxy");
        assert!(created().is_none(), "the DaemonSet stays");
    }
    let always = rig.run("cleanup --all --without-proxy --image other:2").await;
    assert_eq!(always.code, 0, "{}", always.err);
    let container = created().unwrap()["spec"]["template"]["spec"]["containers"][0].clone();
    assert_eq!((&container["image"], &container["args"][1]), (&json!("other:2"), &json!("--cleanup-stay=always")));
    let all = rig.run("cleanup").await;
    assert_eq!(all.code, 2, "{}", all.err);
}
