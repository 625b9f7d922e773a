//! Compares kube-proxy on node-b with Headgate's agent on node-a, at one real API server. See
//! [`crate::mirrored`].
//!
//! The tests need `kube-proxy` beside `etcd` and `kube-apiserver` in the folder that
//! `KUBEBUILDER_ASSETS` names. If `kube-proxy` is missing, the tests print a message and pass.

use std::{
    collections::BTreeSet,
    env, fmt,
    path::{Path, PathBuf},
    process::Command,
};

use headgate_tests::{
    apiserver::{ASSETS_VARIABLE, Kind, RealApiServer},
    testbed::{
        Backend, Machines, Manifests,
        manifests::{NAMESPACE, Service, ServiceType, Via},
        plan::{self, CLUSTER_CIDR, CONTROL, CONTROL_PORT},
        process::{Process, program},
    },
};
use http::Method;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};

use crate::mirrored::{self, Question, Seen};

/// The number of random Services. Each random Service also has a mirror image.
const PAIRS: usize = 24;

/// Creates objects at an API server. Call this function in the network namespace of the server.
async fn create(kubeconfig: &str, objects: Vec<Value>) {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).unwrap();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let client = kube::Client::try_from(config).unwrap();
    let send = async |method: Method, path: String, content_type: &str, body: &Value| {
        let request = http::Request::builder().method(method).uri(&path).header("content-type", content_type);
        let sent = client.request::<Value>(request.body(body.to_string().into_bytes()).unwrap()).await;
        sent.unwrap_or_else(|error| panic!("{path}: {error}: {body}"))
    };
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
    send(Method::POST, "/api/v1/namespaces".into(), "application/json", &namespace).await;
    for object in objects {
        let kind = Kind::of(&object).unwrap();
        send(Method::POST, kind.collection_path(Some(NAMESPACE)), "application/json", &object).await;
        // The API server ignores the status when it creates a Service, so a second request sets it.
        if let (Kind::Service, Some(status)) = (kind, object.get("status")) {
            let path = kind.object_path(NAMESPACE, object["metadata"]["name"].as_str().unwrap()) + "/status";
            send(Method::PATCH, path, "application/merge-patch+json", &json!({ "status": status })).await;
        }
    }
}

/// Returns the folder with all three binaries. If the variable is unset or `kube-proxy` is missing,
/// prints the reason and returns `None`.
fn assets() -> Option<PathBuf> {
    let Some(folder) = env::var_os(ASSETS_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from) else {
        println!("{ASSETS_VARIABLE} is unset: skipping the comparison with kube-proxy");
        return None;
    };
    if !folder.join("kube-proxy").is_file() {
        println!("{} is not a file: skipping the comparison with kube-proxy", folder.join("kube-proxy").display());
        return None;
    }
    Some(folder)
}

struct Programs {
    agent: Process,
    kube_proxy: Process,
    control_plane: Process,
    // Fields are dropped in order, so the API server stops last.
    _api: RealApiServer,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Programs").finish_non_exhaustive()
    }
}

impl Programs {
    fn start(machines: &Machines, assets: &Path, manifests: &Manifests, backend: Backend) -> Self {
        let control = machines.machine(CONTROL).unwrap();
        let address = plan::address(CONTROL).unwrap().v4;
        let api = control.run(|| Ok(RealApiServer::start_at(assets, address)?)).unwrap();
        let kubeconfig = api.kubeconfig();
        let objects = manifests.documents().unwrap();
        control
            .run(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(create(&kubeconfig, objects));
                Ok(())
            })
            .unwrap();
        let path = machines.folder().join("kubeconfig");
        std::fs::write(&path, &kubeconfig).unwrap();
        let start = |name: &str, machine: &str, command: Command| {
            let log = machines.folder().join(format!("{name}.log"));
            Process::start(name, machines.machine(machine).unwrap(), command, &log).unwrap()
        };
        let mut command = Command::new(program("headgate-control-plane").unwrap());
        command.arg("--source=kubernetes").arg("--kubeconfig").arg(&path);
        command.args(["--listen", &format!("{address}:{CONTROL_PORT}"), "--insecure-loopback"]);
        let control_plane = start("headgate-control-plane", CONTROL, command);
        let mut command = Command::new(program("headgate-node-agent").unwrap());
        command.args(["--node-name", "node-a", "--state-dir=", "--insecure-loopback", "--cluster-cidr", CLUSTER_CIDR]);
        command.args(["--control-plane", &format!("http://{address}:{CONTROL_PORT}")]);
        command.args(backend.agent_arguments());
        let agent = start("headgate-node-agent", "node-a", command);
        let mut command = Command::new(assets.join("kube-proxy"));
        command.arg("--kubeconfig").arg(&path).args(["--hostname-override=node-b", "--proxy-mode=iptables"]);
        command.args(["--cluster-cidr", CLUSTER_CIDR, "--detect-local-mode=ClusterCIDR"]);
        command.args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"]);
        command.arg("--conntrack-tcp-timeout-close-wait=0");
        command.env("XTABLES_LOCKFILE", machines.xtables_lock("node-b"));
        let kube_proxy = start("kube-proxy", "node-b", command);
        Self { agent, kube_proxy, control_plane, _api: api }
    }

    fn check_running(&mut self) {
        for process in [&mut self.agent, &mut self.kube_proxy, &mut self.control_plane] {
            process.check_running().unwrap();
        }
    }
}

#[test]
fn random_services_are_served_as_kube_proxy_serves_them() {
    compare_random_services(Backend::IptablesLegacy);
}

#[test]
fn random_services_are_served_as_kube_proxy_serves_them_in_the_compact_layout() {
    compare_random_services(Backend::IptablesNftCompact);
}

fn compare_random_services(backend: Backend) {
    let Some(assets) = assets() else { return };
    let mut rng = mirrored::rng();
    let mut manifests = Manifests::default();
    // The API server assigns the first address of the range to the Service `kubernetes`. The first
    // Service of the test has no address, so no Service of the test requests the assigned address.
    let first = Service { service_type: ServiceType::ExternalName, ..Service::new("first", &[]) };
    manifests.add(first).unwrap();
    let names = mirrored::add_pairs(&mut manifests, PAIRS, &mut rng);
    let machines = Machines::start().unwrap();
    let mut programs = Programs::start(&machines, &assets, &manifests, backend);
    mirrored::compare_all(&machines, &manifests, &names, &mut rng, is_refused_to_the_node);
    programs.check_running();
}

/// Headgate refuses a node's own connection to an external address without endpoints. kube-proxy in
/// iptables mode has no rule for this connection, so the connection times out.
fn is_refused_to_the_node(_: &Service, question: Question, ours: &BTreeSet<Seen>, theirs: &BTreeSet<Seen>) -> bool {
    let is_own = question.from == "node-a" && matches!(question.via, Via::ExternalIp | Via::LoadBalancerIp);
    is_own && *ours == [Seen::Refused].into() && *theirs == [Seen::TimedOut].into()
}
