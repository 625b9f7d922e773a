//! The manifests and the chart in `deploy/` create the same valid objects, grant only the
//! documented rights, and use only options that the programs have.

mod agents;
mod modes;
mod ready_everywhere;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use data_encoding::BASE64;
use headgate_tests::{
    apiserver::{ApiUnderTest, Rights},
    testbed::{
        control_plane::ControlPlane,
        process::{program, tool},
    },
};
use serde_json::{Value, json};

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy")
}

fn documents_of(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap();
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

type Objects = BTreeMap<(String, String), Value>;

/// The objects of a stream of YAML documents, by kind and name.
fn by_name(yaml: &str) -> Objects {
    let mut objects = BTreeMap::new();
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap_or_else(|error| panic!("{error}:\n{yaml}"));
    for object in documents.into_iter().filter(|object| !object.is_null()) {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let key = (text(&object["kind"]), text(&object["metadata"]["name"]));
        assert!(!object["apiVersion"].as_str().unwrap().is_empty());
        assert!(objects.insert(key.clone(), object).is_none(), "{key:?} is defined twice");
    }
    objects
}

/// What `kubectl apply -k` creates from an overlay, as YAML.
fn overlay(name: &str) -> String {
    run(Command::new(tool("kustomize")).arg("build").arg(deploy().join("kustomize").join(name)))
}

/// The objects of the overlay for production, which has every object.
fn objects() -> &'static Objects {
    static OBJECTS: LazyLock<Objects> = LazyLock::new(|| by_name(&overlay("production")));
    &OBJECTS
}

/// The command that renders the chart with the settings of an overlay.
fn chart(settings: &Value) -> Command {
    let text = |key: &str| settings["data"][key].as_str().unwrap();
    let hosts: Vec<&str> = text("controlPlane")
        .split(',')
        .map(|url| url.strip_prefix("https://").unwrap().strip_suffix(":7443").unwrap())
        .collect();
    let mut command = Command::new(tool("helm"));
    command.args(["template", "headgate", "--namespace", "headgate-system", "--no-hooks"]).arg(deploy().join("chart"));
    command.args(["--set".to_owned(), format!("controlPlane.addresses={{{}}}", hosts.join(","))]);
    command.args(["--set".to_owned(), format!("clusterCIDRs={{{}}}", text("clusterCidr"))]);
    command.args(["--set".to_owned(), format!("apiServer.host={}", text("apiServerHost"))]);
    command.args(["--set".to_owned(), format!("apiServer.port={}", text("apiServerPort"))]);
    command
}

/// The objects of the chart with the values that correspond to an overlay.
fn objects_of_chart(name: &str, from_overlay: &Objects) -> Objects {
    let settings = &from_overlay[&("ConfigMap".to_owned(), "headgate-settings".to_owned())];
    let mut command = chart(settings);
    if name == "production" {
        command.arg("--values").arg(deploy().join("chart/values-production.yaml"));
    }
    by_name(&run(&mut command))
}

#[test]
fn the_chart_and_the_overlays_create_the_same_objects() {
    for name in ["trial", "production"] {
        let mut from_overlay = by_name(&overlay(name));
        let from_chart = objects_of_chart(name, &from_overlay);
        // Helm cannot create the namespace that it stores the release in.
        from_overlay.remove(&("Namespace".to_owned(), "headgate-system".to_owned())).unwrap();
        let kinds = |objects: &Objects| objects.keys().cloned().collect::<Vec<_>>();
        assert_eq!(kinds(&from_chart), kinds(&from_overlay), "{name}");
        for (key, object) in &from_overlay {
            assert_eq!(&from_chart[key], object, "{name}: {key:?} of the chart, and of the overlay");
        }
    }
}

#[test]
fn the_chart_names_missing_and_wrong_values() {
    let settings = object("ConfigMap", "headgate-settings");
    for (value, reason) in [
        ("apiServer.host=", "set apiServer.host to an address of the API server"),
        ("controlPlane.addresses=null", "set controlPlane.addresses to the addresses of the nodes"),
        ("clusterCIDRs=null", "set clusterCIDRs to the ranges of pod addresses"),
        ("clusterCIDRs={10.244.0.0}", "clusterCIDRs.0"),
        ("apiServer.host=https://192.0.2.10", "apiServer.host"),
        ("apiServer.host=192.0.2.10:6443", "apiServer.host"),
        ("controlPlane.addresses={192.0.2.10:7443}", "controlPlane.addresses.0"),
        ("controlPlane.addresses={[fd00::10]}", "controlPlane.addresses.0"),
        ("controlPlane.addresses={192.0.2.10,192.0.2.10}", "controlPlane.addresses"),
        ("nodeAgent.drainAddress=:10261", "nodeAgent.drainAddress"),
        ("nodeAgent.nodeSelector.wanted=true", "nodeAgent.nodeSelector.wanted: Invalid type. Expected: string"),
        ("nodeAgent.proxyMode=nftable", "nodeAgent.proxyMode must be one of the following"),
        ("controlPlane.replica=3", "Additional property replica is not allowed"),
        ("mode=off", "mode must be one of the following"),
    ] {
        let output = chart(&settings).args(["--set", value]).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(reason), "{value}: {error}");
    }
}

#[test]
fn optional_parts_of_the_chart_can_be_left_out() {
    let mut command = chart(&object("ConfigMap", "headgate-settings"));
    command.args(["--set", "nodeAgent.setKernelParameters=false", "--set", "image.repository=registry.example/team"]);
    command.args(["--set", "nodeAgent.extraArgs={--v=4}", "--set", "image.tag=1.2.3"]);
    command.args(["--set", "nodeAgent.drainAddress=[::]:10261", "--set", "controlPlane.replicas=3"]);
    command.args(["--set", r"controlPlane.agentNodes=kubernetes.io/os=linux\,!example.com/virtual"]);
    command.args(["--set", "controlPlane.addresses={fd00::10,node.example}", "--set", "apiServer.host=fd00::1"]);
    let objects = by_name(&run(&mut command));
    let settings = &objects[&("ConfigMap".to_owned(), "headgate-settings".to_owned())]["data"];
    assert_eq!(settings["drainAddress"], "[::]:10261");
    assert_eq!(settings["controlPlane"], "https://[fd00::10]:7443,https://node.example:7443");
    assert_eq!(settings["enrolment"], "[fd00::10]:7445,node.example:7445");
    let replicas =
        &objects[&("Deployment".to_owned(), "headgate-control-plane".to_owned())]["spec"]["template"]["spec"];
    let args = strings(&replicas["containers"][0]["args"]);
    assert!(args.contains("--agent-nodes=kubernetes.io/os=linux,!example.com/virtual"), "{args:?}");
    let pod = &objects[&("DaemonSet".to_owned(), "headgate-node-agent".to_owned())]["spec"]["template"]["spec"];
    assert_eq!(pod["initContainers"], Value::Null);
    assert_eq!(pod["containers"][0]["image"], "registry.example/team/node-agent:1.2.3");
    assert!(strings(&pod["containers"][0]["args"]).contains("--v=4"));
    assert!(!objects.contains_key(&("PodDisruptionBudget".to_owned(), "headgate-control-plane".to_owned())));
}

/// Validates objects against the schemas that Kubernetes publishes. An unknown field is an error.
/// Returns whether the objects are valid, and the report.
fn validate(version: &str, yaml: &str) -> (bool, String) {
    let validator = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/kubernetes-validate");
    assert!(validator.exists(), "target/tools/kubernetes-validate is missing: run `make setup`");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("objects.yaml");
    std::fs::write(&file, yaml).unwrap();
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", &validator).args(["-m", "kubernetes_validate", "--strict", "-k", version]).arg(&file);
    let output = command.output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

const KUBERNETES: [&str; 3] = ["1.29.0", "1.33.0", "1.37.0"];

/// Asserts that objects are valid in each version, and returns the reports.
fn assert_valid(yaml: &str) -> [String; 3] {
    KUBERNETES.map(|version| {
        let (is_valid, report) = validate(version, yaml);
        assert!(is_valid, "Kubernetes {version}: {report}\n{yaml}");
        report
    })
}

#[test]
fn manifests_are_valid_by_the_schemas_of_kubernetes() {
    for name in ["trial", "production"] {
        let yaml = overlay(name);
        for report in assert_valid(&yaml) {
            assert_eq!(report.matches(" passed for resource ").count(), by_name(&yaml).len(), "{report}");
        }
    }
    let misspelt = overlay("trial").replace("terminationGracePeriodSeconds", "terminationGracePeriod");
    assert!(!validate("1.37.0", &misspelt).0, "the validator accepts a field that does not exist");
}

/// Also checks what the schemas do not say, such as names that occur twice and selectors that match
/// nothing.
#[tokio::test]
async fn a_real_api_server_accepts_the_manifests() {
    let Some(api) = ApiUnderTest::real().await.unwrap() else { return };
    let mut all = Vec::new();
    for name in ["trial", "production"] {
        let from_overlay = by_name(&overlay(name));
        all.extend(objects_of_chart(name, &from_overlay).into_values());
        all.extend(from_overlay.into_values());
    }
    let (namespaces, namespaced): (Vec<_>, Vec<_>) = all.into_iter().partition(|object| object["kind"] == "Namespace");
    assert!(namespaces.len() == 2 && namespaced.len() > 40, "{} other objects", namespaced.len());
    let accept = async |object: &Value| {
        let answer = api.would_create(object).await;
        answer.unwrap_or_else(|error| panic!("{} {}: {error}", object["kind"], object["metadata"]["name"]));
    };
    for namespace in &namespaces {
        accept(namespace).await;
    }
    api.ensure_namespace("headgate-system").await.unwrap();
    for object in &namespaced {
        accept(object).await;
    }
    let mut misspelt = object("DaemonSet", "headgate-node-agent");
    misspelt["spec"]["template"]["spec"]["terminationGracePeriod"] = json!(30);
    let error = api.would_create(&misspelt).await.unwrap_err().to_string();
    assert!(error.contains("unknown field \"spec.template.spec.terminationGracePeriod\""), "{error}");
}

/// The blocks of docs/drain.md are parts of the specification of a pod.
#[test]
fn pods_that_ask_before_they_stop_are_valid_by_the_schemas_of_kubernetes() {
    let page = std::fs::read_to_string(deploy().join("../docs/drain.md")).unwrap();
    let blocks: Vec<&str> = page.split("```yaml\n").skip(1).map(|rest| rest.split_once("```").unwrap().0).collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        let specification: String = block.lines().map(|line| format!("  {line}\n")).collect();
        let pod = format!("apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\nspec:\n{specification}");
        assert_valid(&pod);
        let misspelt = pod.replace("preStop", "prestop");
        assert!(misspelt != pod && !validate("1.37.0", &misspelt).0, "the validator accepts an unknown hook");
    }
}

fn object(kind: &str, name: &str) -> Value {
    objects().get(&(kind.to_owned(), name.to_owned())).unwrap_or_else(|| panic!("no {kind} {name}")).clone()
}

fn control_plane_pod() -> Value {
    object("Deployment", "headgate-control-plane")["spec"]["template"]["spec"].clone()
}

fn agent_pod() -> Value {
    object("DaemonSet", "headgate-node-agent")["spec"]["template"]["spec"].clone()
}

fn strings(value: &Value) -> BTreeSet<&str> {
    value.as_array().unwrap().iter().map(|item| item.as_str().unwrap()).collect()
}

#[test]
fn kustomizations_list_every_manifest() {
    for name in ["base", "trial", "production", "ready-everywhere", "labelled-nodes", "standby", "cleanup", "restarts"]
    {
        let folder = deploy().join("kustomize").join(name);
        let kustomization = documents_of(&folder.join("kustomization.yaml"));
        let entries = |field: &str| kustomization[0][field].as_array().into_iter().flatten();
        let listed: BTreeSet<&str> = entries("resources")
            .chain(entries("patches").map(|patch| &patch["path"]))
            .map(|path| path.as_str().unwrap())
            .filter(|path| *path != "../base")
            .collect();
        let files: BTreeSet<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "kustomization.yaml")
            .collect();
        assert_eq!(files.iter().map(String::as_str).collect::<BTreeSet<_>>(), listed, "{name}");
    }
}

#[test]
fn every_namespaced_object_is_in_the_namespace_of_headgate() {
    let cluster_wide = ["Namespace", "ClusterRole", "ClusterRoleBinding"];
    for ((kind, name), object) in objects() {
        let expected = if cluster_wide.contains(&kind.as_str()) { Value::Null } else { json!("headgate-system") };
        assert_eq!(object["metadata"]["namespace"], expected, "{kind} {name}");
    }
}

#[test]
fn the_only_rights_are_list_and_watch_of_four_kinds_and_what_enrolment_needs() {
    for ((kind, name), object) in objects().iter().filter(|((kind, _), _)| kind == "ClusterRole" || kind == "Role") {
        for rule in object["rules"].as_array().unwrap() {
            let fields: BTreeSet<&str> = rule.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(fields, BTreeSet::from(["apiGroups", "resources", "verbs"]), "{kind} {name}");
        }
    }
    let granted = Rights::of_objects(objects().values());
    let granted = granted.all().iter().map(|right| right.replace(" in headgate-system", ""));
    let kinds = ["services.", "nodes.", "endpointslices.discovery.k8s.io", "servicecidrs.networking.k8s.io"];
    let read = kinds.iter().flat_map(|kind| ["list", "watch"].map(|verb| format!("{verb} {kind}")));
    let enrolment = ["create tokenreviews.authentication.k8s.io", "get pods."].map(str::to_owned);
    assert_eq!(granted.collect::<BTreeSet<_>>(), read.chain(enrolment).collect());
    let pods = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["get"] }]);
    assert_eq!(object("Role", "headgate-control-plane")["rules"], pods, "only pods of the namespace can be read");
}

#[test]
fn only_the_control_plane_has_rights() {
    let bindings: Vec<&Value> =
        objects().iter().filter(|((kind, _), _)| kind.ends_with("RoleBinding")).map(|(_, object)| object).collect();
    assert_eq!(bindings.len(), 2);
    let subject = json!({ "kind": "ServiceAccount", "name": "headgate-control-plane", "namespace": "headgate-system" });
    for binding in bindings {
        assert_eq!(binding["roleRef"]["name"], "headgate-control-plane");
        assert_eq!(binding["subjects"], json!([subject]));
    }
    assert_eq!(control_plane_pod()["serviceAccountName"], "headgate-control-plane");
}

#[test]
fn agents_hold_no_api_credentials() {
    let pod = agent_pod();
    assert_eq!(pod["automountServiceAccountToken"], false);
    assert_eq!(pod["serviceAccountName"], "headgate-node-agent");
    assert_eq!(object("ServiceAccount", "headgate-node-agent")["automountServiceAccountToken"], false);
    let mut allowed = BTreeSet::from(["/run/xtables.lock", "/lib/modules", "/var/lib/headgate"]);
    for volume in pod["volumes"].as_array().unwrap() {
        match volume["name"].as_str().unwrap() {
            "authority" => assert_eq!(volume["configMap"]["name"], "headgate-authority"),
            // The API server rejects a token that has only this audience.
            "token" => {
                let token = json!({ "path": "token", "audience": "headgate", "expirationSeconds": 3600 });
                assert_eq!(volume["projected"]["sources"], json!([{ "serviceAccountToken": token }]));
            }
            "tls" => assert_eq!(volume["emptyDir"]["medium"], "Memory", "the key would be on the disk"),
            // Only these host paths may be mounted. Other paths, such as the kubelet's, could hold
            // credentials.
            _ => assert!(allowed.remove(volume["hostPath"]["path"].as_str().unwrap()), "{volume}"),
        }
    }
}

#[test]
fn only_the_control_plane_mounts_secrets_and_accepts_the_agents_account() {
    let secrets = |pod: &Value| -> BTreeSet<String> {
        let volumes = pod["volumes"].as_array().unwrap().iter();
        volumes.filter_map(|volume| Some(volume["secret"]["secretName"].as_str()?.to_owned())).collect()
    };
    assert_eq!(secrets(&agent_pod()), BTreeSet::new());
    // The key that signs for readers and replicas is in no pod.
    let expected = ["headgate-control-plane-tls", "headgate-node-authority"].map(str::to_owned);
    assert_eq!(secrets(&control_plane_pod()), BTreeSet::from(expected));
    let account =
        format!("--enrolment-service-account=headgate-system/{}", agent_pod()["serviceAccountName"].as_str().unwrap());
    assert!(strings(&control_plane_pod()["containers"][0]["args"]).contains(account.as_str()));
}

/// The schemas of cert-manager's kinds are not published with those of Kubernetes. This test
/// compares the manifests with what the programs expect.
#[test]
fn the_manifests_of_cert_manager_fill_the_secrets_of_the_control_plane() {
    let certificates = documents_of(&deploy().join("cert-manager/certificates.yaml"));
    let of = |secret: &str| {
        let is_its = |object: &&Value| object["kind"] == "Certificate" && object["spec"]["secretName"] == secret;
        certificates.iter().find(is_its).map(|object| object["spec"].clone()).unwrap()
    };
    for volume in control_plane_pod()["volumes"].as_array().unwrap() {
        volume["secret"]["secretName"].as_str().map(of);
    }
    let (authority, server) = (of("headgate-node-authority"), of("headgate-control-plane-tls"));
    assert!(of("headgate-authority")["isCA"] == true && server["issuerRef"]["name"] == "headgate-authority");
    assert_eq!((&authority["isCA"], &authority["privateKey"]["encoding"]), (&json!(true), &json!("PKCS8")));
    assert_eq!(strings(&server["uris"]), BTreeSet::from(["headgate://replica/headgate-control-plane"]));
    assert!(strings(&server["usages"]).is_superset(&BTreeSet::from(["server auth", "client auth"])));
    // cert-manager and `kubectl create secret tls` name the files alike.
    let args = control_plane_pod()["containers"][0]["args"].clone();
    for (option, file) in [("--tls-node-ca", "tls.crt"), ("--enrolment-ca-key", "tls.key")] {
        assert!(strings(&args).contains(format!("{option}=/etc/headgate/authority/{file}").as_str()), "{option}");
    }
}

#[test]
fn agents_have_two_capabilities_and_no_privileges() {
    let pod = agent_pod();
    let security = &pod["containers"][0]["securityContext"];
    assert_eq!(strings(&security["capabilities"]["add"]), BTreeSet::from(["NET_ADMIN", "NET_RAW"]));
    assert_eq!(strings(&security["capabilities"]["drop"]), BTreeSet::from(["ALL"]));
    assert_eq!(security["privileged"], Value::Null);
    assert_eq!(security["readOnlyRootFilesystem"], true);
    assert_eq!(pod["priorityClassName"], "system-node-critical");
    let [ready, alive] = ["readinessProbe", "livenessProbe"].map(|probe| &pod["containers"][0][probe]["httpGet"]);
    assert_eq!((&ready["path"], &alive["path"]), (&json!("/healthz"), &json!("/livez")));
    assert_eq!((&ready["port"], &ready["host"]), (&alive["port"], &alive["host"]));
    assert_eq!(pod["tolerations"], json!([{ "operator": "Exists" }]));
    // Only the container that sets kernel parameters and ends is privileged.
    let before = pod["initContainers"].as_array().unwrap();
    let [init] = &before[..] else { panic!("{} init containers", before.len()) };
    assert!(strings(&init["args"]).contains("--init-only"));
    assert_eq!(init["image"], pod["containers"][0]["image"]);
}

#[test]
fn the_control_plane_does_not_run_as_root_and_is_probed() {
    let pod = control_plane_pod();
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    let container = &pod["containers"][0];
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(strings(&container["securityContext"]["capabilities"]["drop"]), BTreeSet::from(["ALL"]));
    assert_eq!(container["readinessProbe"]["httpGet"]["path"], "/readyz");
    assert_eq!(container["livenessProbe"]["httpGet"]["path"], "/healthz");
    let budget = object("PodDisruptionBudget", "headgate-control-plane");
    let deployment = object("Deployment", "headgate-control-plane");
    assert_eq!(budget["spec"]["selector"], deployment["spec"]["selector"]);
    assert_eq!(deployment["spec"]["selector"]["matchLabels"], deployment["spec"]["template"]["metadata"]["labels"]);
}

#[test]
fn the_balance_service_selects_the_replicas() {
    let service = object("Service", "headgate-control-plane");
    let name = format!("{}/headgate-control-plane", service["metadata"]["namespace"].as_str().unwrap());
    let container = &control_plane_pod()["containers"][0];
    assert!(strings(&container["args"]).contains(format!("--balance-service={name}").as_str()));
    let deployment = object("Deployment", "headgate-control-plane");
    assert_eq!(service["spec"]["selector"], deployment["spec"]["selector"]["matchLabels"]);
    assert_eq!(service["spec"]["clusterIP"], Value::Null, "the Service is headless, so its slices are not watched");
    for port in service["spec"]["ports"].as_array().unwrap() {
        let is_there =
            |of_pod: &Value| (&of_pod["name"], &of_pod["containerPort"]) == (&port["targetPort"], &port["port"]);
        assert!(container["ports"].as_array().unwrap().iter().any(is_there), "{port}");
    }
}

#[test]
fn programs_know_the_options_and_references_resolve() {
    let settings = object("ConfigMap", "headgate-settings")["data"].clone();
    for (pod, name) in [(control_plane_pod(), "headgate-control-plane"), (agent_pod(), "headgate-node-agent")] {
        let output = Command::new(program(name).unwrap()).arg("--help").output().unwrap();
        assert!(output.status.success(), "{name} --help: {}", output.status);
        let help = String::from_utf8(output.stdout).unwrap();
        let known: BTreeSet<&str> = help
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
            .filter(|word| word.starts_with("--") && word.len() > 2)
            .collect();
        let container = &pod["containers"][0];
        let mut environment = BTreeSet::new();
        for variable in container["env"].as_array().unwrap() {
            environment.insert(variable["name"].as_str().unwrap());
            if let Some(key) = variable["valueFrom"]["configMapKeyRef"]["key"].as_str() {
                assert!(settings[key].is_string(), "settings.yaml has no {key}");
            }
        }
        let mounts = container["volumeMounts"].as_array().unwrap();
        for argument in strings(&container["args"]) {
            let (option, value) = argument.split_once('=').unwrap_or((argument, ""));
            assert!(known.contains(option), "{name} has no option {option}");
            for reference in value.split("$(").skip(1) {
                let variable = reference.split_once(')').unwrap().0;
                assert!(environment.contains(variable), "{name}: {argument}: no variable {variable}");
            }
            if option.starts_with("--tls-") || option.starts_with("--enrolment-ca-") || option == "--enrolment-token" {
                let mounted = mounts.iter().any(|mount| value.starts_with(mount["mountPath"].as_str().unwrap()));
                assert!(mounted, "{name}: nothing is mounted at {value}");
            }
        }
        let volumes: BTreeSet<&str> =
            pod["volumes"].as_array().unwrap().iter().map(|volume| volume["name"].as_str().unwrap()).collect();
        let mounted: BTreeSet<&str> = mounts.iter().map(|mount| mount["name"].as_str().unwrap()).collect();
        assert_eq!(volumes, mounted, "{name}");
    }
}

/// The commands in the `sh` blocks of a text, one a line.
fn commands(text: &str) -> String {
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split_once("```").unwrap().0.trim_end());
    blocks.collect::<Vec<_>>().join("\n").replace("\\\n", " ")
}

/// A configuration file of kube-proxy, for `printf` in a shell.
const CONFIGURATION: &str = r"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n";

/// Shows without a cluster that the programs of this repository accept the options in these
/// commands, and that Helm renders the chart. Returns the number of the commands that it ran.
fn run_without_cluster(commands: &str, folder: &Path) -> usize {
    let folders = [program("headgate").unwrap(), tool("helm")].map(|path| path.parent().unwrap().display().to_string());
    let path = format!("{}:{}", folders.join(":"), std::env::var("PATH").unwrap());
    let is_start = |line: &&str| !line.starts_with(' ');
    let lines = commands.lines().map(|line| line.strip_prefix("   ").unwrap_or(line)).filter(is_start);
    let mut run_commands = 0;
    for line in lines {
        let command = line.split_once(" #").map_or(line, |(command, _)| command.trim_end());
        let checked = match command.split_once(' ').unwrap().0 {
            // The configuration of kube-proxy exists only in a cluster.
            _ if command.ends_with(" | headgatectl migrate check -") => {
                format!("printf '{CONFIGURATION}' | headgatectl migrate check -")
            }
            "headgatectl" if command.contains(" migrate check /") => {
                format!("printf '{CONFIGURATION}' | headgatectl migrate check /dev/stdin")
            }
            "headgatectl" if command.contains(" migrate check") => command.to_owned(),
            // With --help, the programs check the options before it, and end.
            "headgate" | "headgatectl" | "headgate-control-plane" | "headgate-node-agent" => {
                format!("{command} --help")
            }
            "helm" if command.starts_with("helm install") => command.replace("helm install", "helm template"),
            "docker" | "helm" | "kubectl" | "mkdir" | "openssl" | "(umask" => continue,
            other => panic!("{other} is neither a known program nor a tool of clusters: {command}"),
        };
        run(Command::new("sh").args(["-ec", &checked]).env("PATH", &path).current_dir(folder));
        run_commands += 1;
    }
    run_commands
}

#[test]
fn programs_accept_the_commands_of_the_pages() {
    let repository = deploy().join("..");
    let page = |name: &str| std::fs::read_to_string(repository.join(name)).unwrap();
    let install = page("deploy/README.md");
    let section = install.split("\n## ").find(|section| section.starts_with("Install\n")).unwrap();
    assert!(section.contains("All commands of this section need a cluster."));
    assert_eq!(install.matches("```sh").count(), section.matches("```sh").count(), "commands outside of the section");
    let readme = page("README.md");
    let short = readme.split("\n## ").find(|section| section.starts_with("Try it in a cluster\n")).unwrap();
    let migration = page("docs/migration.md");
    assert!(migration.contains("The commands with `kubectl` and `helm` need a cluster."));
    for (text, count) in
        [(section, 7), (short, 3), (&migration, 6), (&page("docs/security.md"), 2), (&page("docs/tls.md"), 1)]
    {
        assert_eq!(run_without_cluster(&commands(text), &repository), count, "{text}");
    }
}

#[test]
fn images_carry_the_version_of_the_workspace() {
    let version = env!("CARGO_PKG_VERSION");
    let chart = documents_of(&deploy().join("chart/Chart.yaml"));
    assert_eq!((&chart[0]["version"], &chart[0]["appVersion"]), (&json!(version), &json!(version)));
    for (pod, image) in [(control_plane_pod(), "headgate/control-plane"), (agent_pod(), "headgate/node-agent")] {
        assert_eq!(pod["containers"][0]["image"], format!("{image}:{version}"));
        for overlay in ["trial", "production"] {
            let kustomization = documents_of(&deploy().join("kustomize").join(overlay).join("kustomization.yaml"));
            let images = kustomization[0]["images"].as_array().unwrap();
            let entry = images.iter().find(|entry| entry["name"] == image).unwrap();
            assert_eq!(entry["newTag"], version, "{overlay}");
        }
    }
}

/// The command `headgatectl certs` for a folder.
fn certs(folder: &Path) -> Command {
    let mut command = Command::new(program("headgatectl").unwrap());
    command.args(["certs", "--out"]).arg(folder);
    command
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error} (run `make setup`)"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {error}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn certificates_contain_the_identities_that_the_control_plane_expects() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let make = |arguments: &[&str]| run(certs(folder.path()).args(arguments));
    make(&[
        "--server-ip",
        "192.0.2.10,2001:db8::1",
        "--server-name",
        "headgate.example",
        "--node",
        "node-a,node-b.example",
    ]);
    let authority = std::fs::read(path("ca.crt")).unwrap();

    let verify = |file: &str, purpose: &str| {
        let authority = if file.starts_with("nodes/") { "node-ca.crt" } else { "ca.crt" };
        run(Command::new("openssl")
            .args(["verify", "-purpose", purpose, "-CAfile"])
            .arg(path(authority))
            .arg(path(file)))
    };
    let names = |file: &str| {
        run(Command::new("openssl").args(["x509", "-noout", "-ext", "subjectAltName", "-in"]).arg(path(file)))
    };
    verify("control-plane/tls.crt", "sslserver");
    let server = names("control-plane/tls.crt");
    assert!(server.contains("IP Address:192.0.2.10") && server.contains("DNS:headgate.example"), "{server}");
    assert!(server.contains("IP Address:2001:DB8:0:0:0:0:0:1"), "{server}");
    for node in ["node-a", "node-b.example"] {
        verify(&format!("nodes/{node}.crt"), "sslclient");
        let identity = names(&format!("nodes/{node}.crt"));
        assert!(identity.trim_end().ends_with(&format!("URI:headgate://node/{node}")), "{identity}");
    }

    // A certificate for a later node comes from the same authority. The authority's key is not in
    // the folders that are deployed.
    let commands = make(&["--node", "node-c"]);
    verify("nodes/node-c.crt", "sslclient");
    assert_eq!(std::fs::read(path("nodes/ca.crt")).unwrap(), authority);
    assert!(commands.contains("--node-name node-c") && !commands.contains("kubectl"), "{commands}");
    assert!(path("ca.key").is_file() && path("node-ca.key").is_file());
    for folder in ["nodes", "control-plane"] {
        assert!(!path(folder).join("ca.key").exists() && !path(folder).join("node-ca.key").exists());
    }
}

#[test]
fn the_control_plane_accepts_only_clients_with_its_certificates() {
    let folder = tempfile::tempdir().unwrap();
    run(certs(folder.path()).args(["--server-ip", "127.0.0.1", "--reader", "me"]));
    accepts_only_its_clients(&folder);
}

/// The chart makes an authority and the certificate of the control plane if `certificates.create`
/// is set. `headgatectl certs` continues with the files of this authority.
#[test]
fn certificates_of_the_chart_serve_the_programs() {
    let settings = json!({ "data": { "controlPlane": "https://127.0.0.1:7443", "apiServerHost": "192.0.2.10",
        "apiServerPort": "6443", "clusterCidr": "10.244.0.0/16" } });
    let rendered = |value: &str| {
        let output = chart(&settings).args(["--set", "certificates.create=true", "--set", value]).output().unwrap();
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let (is_rendered, error) = rendered("controlPlane.replicas=2");
    assert!(!is_rendered && error.contains("certificates.create serves one replica: make the certificates"), "{error}");

    let (is_rendered, yaml) = rendered("image.repository=registry.example/headgate");
    assert!(is_rendered, "{yaml}");
    assert_valid(&yaml);
    let objects = by_name(&yaml);
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("control-plane")).unwrap();
    let write = |secret: &str, key: &str, file: &str| {
        let text = objects[&("Secret".to_owned(), secret.to_owned())]["data"][key].as_str().unwrap();
        std::fs::write(folder.path().join(file), BASE64.decode(text.as_bytes()).unwrap()).unwrap();
    };
    write("headgate-authority", "tls.crt", "ca.crt");
    write("headgate-authority", "tls.key", "ca.key");
    write("headgate-node-authority", "tls.crt", "node-ca.crt");
    write("headgate-node-authority", "tls.key", "node-ca.key");
    assert_ne!(
        std::fs::read(folder.path().join("node-ca.crt")).unwrap(),
        std::fs::read(folder.path().join("ca.crt")).unwrap()
    );
    for key in ["ca.crt", "tls.crt", "tls.key"] {
        write("headgate-control-plane-tls", key, &format!("control-plane/{key}"));
    }
    let authority = &objects[&("ConfigMap".to_owned(), "headgate-authority".to_owned())]["data"]["ca.crt"];
    assert_eq!(authority.as_str().unwrap(), std::fs::read_to_string(folder.path().join("ca.crt")).unwrap());
    run(certs(folder.path()).args(["--reader", "me"]));
    accepts_only_its_clients(&folder);
}

/// `folder` has the certificates of an authority, of the control plane, and of the reader `me`.
fn accepts_only_its_clients(folder: &tempfile::TempDir) {
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::create_dir(folder.path().join("manifests")).unwrap();
    std::fs::write(path("manifests/none.yaml"), "apiVersion: v1\nkind: List\nitems: []\n").unwrap();
    let options = [
        format!("--source=files:{}", path("manifests")),
        format!("--tls-cert={}", path("control-plane/tls.crt")),
        format!("--tls-key={}", path("control-plane/tls.key")),
        format!("--tls-client-ca={}", path("control-plane/ca.crt")),
        format!("--tls-node-ca={}", path("node-ca.crt")),
    ];
    let control_plane = ControlPlane::start(folder.path(), &options).unwrap();
    let server = format!("--server=https://{}", control_plane.inspect);
    let ask = |tls: &[String]| {
        let mut command = Command::new(program("headgatectl").unwrap());
        command.arg(&server).args(tls).args(["status", "-o", "json"]);
        command.stdin(Stdio::null()).output().unwrap()
    };
    let authority = format!("--tls-ca={}", path("ca.crt"));
    let own = [format!("--tls-cert={}", path("readers/me.crt")), format!("--tls-key={}", path("readers/me.key"))];
    let deadline = Instant::now() + Duration::from_secs(60);
    let with_own = [std::slice::from_ref(&authority), &own[..]].concat();
    let mut answer = ask(&with_own);
    while !answer.status.success() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
        answer = ask(&with_own);
    }
    // If the name of the first server does not resolve, the next one answers.
    let mut agents = Command::new(program("headgatectl").unwrap());
    agents.arg("--server=https://nobody.invalid:7443").arg(&server);
    let agents = agents.args(&with_own).arg("agents").stdin(Stdio::null()).output().unwrap();
    let anonymous = ask(&[authority]);
    // The client refuses a server with a certificate of another authority.
    run(certs(&folder.path().join("other")).args(["--reader", "me"]));
    let elsewhere = ask(&[&[format!("--tls-ca={}", path("other/ca.crt"))], &own[..]].concat());
    let log = control_plane.log().unwrap();
    assert!(answer.status.success(), "{}\n{log}", String::from_utf8_lossy(&answer.stderr));
    let (shown, error) = (String::from_utf8_lossy(&agents.stdout), String::from_utf8_lossy(&agents.stderr));
    assert_eq!(shown, "No Node and no agent is known.\n", "{error}");
    assert!(agents.status.success(), "{error}");
    assert_eq!(anonymous.status.code(), Some(1), "the server accepted a client without a certificate");
    assert_eq!(elsewhere.status.code(), Some(1), "the client accepted a server of another authority");
    let error = String::from_utf8_lossy(&elsewhere.stderr);
    assert!(error.contains("TLS handshake failed"), "{error}");
}
