//! The manifests in `deploy/` are well-formed, grant only the documented rights, and use only
//! options that the programs have.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use headgate_tests::testbed::{
    port::ReservedPort,
    process::{KilledOnDrop, program},
};
use serde_json::{Value, json};

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy")
}

fn documents_of(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap();
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Every object that `kubectl apply -k deploy` would create, by kind and name.
fn objects() -> BTreeMap<(String, String), Value> {
    let kustomization = documents_of(&deploy().join("kustomization.yaml"));
    let mut objects = BTreeMap::new();
    for file in kustomization[0]["resources"].as_array().unwrap() {
        for object in documents_of(&deploy().join(file.as_str().unwrap())) {
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let key = (text(&object["kind"]), text(&object["metadata"]["name"]));
            assert!(!object["apiVersion"].as_str().unwrap().is_empty());
            assert!(objects.insert(key.clone(), object).is_none(), "{key:?} is defined twice");
        }
    }
    objects
}

fn object(kind: &str, name: &str) -> Value {
    objects().remove(&(kind.to_owned(), name.to_owned())).unwrap_or_else(|| panic!("no {kind} {name}"))
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
fn kustomization_lists_every_manifest() {
    let kustomization = documents_of(&deploy().join("kustomization.yaml"));
    let listed = strings(&kustomization[0]["resources"]);
    let files: BTreeSet<String> = std::fs::read_dir(deploy())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".yaml") && name != "kustomization.yaml")
        .collect();
    assert_eq!(files.iter().map(String::as_str).collect::<BTreeSet<_>>(), listed);
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
fn the_only_rights_are_list_and_watch_of_four_kinds() {
    let mut granted = BTreeSet::new();
    for ((kind, name), object) in objects() {
        if kind != "ClusterRole" && kind != "Role" {
            continue;
        }
        for rule in object["rules"].as_array().unwrap() {
            let fields: BTreeSet<&str> = rule.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(fields, BTreeSet::from(["apiGroups", "resources", "verbs"]), "{kind} {name}");
            for group in strings(&rule["apiGroups"]) {
                for resource in strings(&rule["resources"]) {
                    for verb in strings(&rule["verbs"]) {
                        granted.insert(format!("{verb} {resource}.{group}"));
                    }
                }
            }
        }
    }
    let kinds = ["services.", "nodes.", "endpointslices.discovery.k8s.io", "servicecidrs.networking.k8s.io"];
    let expected = kinds.iter().flat_map(|kind| ["list", "watch"].map(|verb| format!("{verb} {kind}"))).collect();
    assert_eq!(granted, expected);
}

#[test]
fn only_the_control_plane_has_rights() {
    let bindings: Vec<Value> = objects()
        .into_iter()
        .filter(|((kind, _), _)| kind.ends_with("RoleBinding"))
        .map(|(_, object)| object)
        .collect();
    let [binding] = &bindings[..] else { panic!("{} bindings", bindings.len()) };
    assert_eq!(binding["roleRef"]["name"], "headgate-control-plane");
    let subject = json!({ "kind": "ServiceAccount", "name": "headgate-control-plane", "namespace": "headgate-system" });
    assert_eq!(binding["subjects"], json!([subject]));
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
        assert_eq!(volume["projected"], Value::Null, "a projected volume may hold a token");
        match (volume["hostPath"]["path"].as_str(), volume["secret"]["secretName"].as_str()) {
            // Only these host paths may be mounted. Other paths, such as the kubelet's, could hold
            // credentials.
            (Some(path), None) => assert!(allowed.remove(path), "{path}"),
            (None, Some(secret)) => assert_eq!(secret, "headgate-node-agent-tls"),
            _ => panic!("an unexpected volume: {volume}"),
        }
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
    assert_eq!(pod["tolerations"], json!([{ "operator": "Exists" }]));
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
            if option.starts_with("--tls-") {
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

#[test]
fn images_carry_the_version_of_the_workspace() {
    let kustomization = documents_of(&deploy().join("kustomization.yaml"));
    let version = env!("CARGO_PKG_VERSION");
    for (pod, image) in [(control_plane_pod(), "headgate/control-plane"), (agent_pod(), "headgate/node-agent")] {
        assert_eq!(pod["containers"][0]["image"], format!("{image}:{version}"));
        let images = kustomization[0]["images"].as_array().unwrap();
        let entry = images.iter().find(|entry| entry["name"] == image).unwrap();
        assert_eq!(entry["newTag"], version);
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
        run(Command::new("openssl")
            .args(["verify", "-purpose", purpose, "-CAfile"])
            .arg(path("ca.crt"))
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
    assert!(commands.contains("headgate-node-agent-tls") && !commands.contains("headgate-control-plane-tls"));
    assert!(path("ca.key").is_file());
    assert!(!path("nodes/ca.key").exists() && !path("control-plane/ca.key").exists());
}

#[test]
fn the_control_plane_accepts_only_clients_with_its_certificates() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    run(certs(folder.path()).args(["--server-ip", "127.0.0.1", "--reader", "me"]));
    std::fs::create_dir(folder.path().join("manifests")).unwrap();
    let port = ReservedPort::reserve().unwrap();
    let control_plane = Command::new(program("headgate-control-plane").unwrap())
        .arg(format!("--source=files:{}", path("manifests")))
        .args([format!("--listen={}", port.address()), "--metrics-listen=127.0.0.1:0".to_owned()])
        .args([format!("--tls-cert={}", path("control-plane/tls.crt"))])
        .args([format!("--tls-key={}", path("control-plane/tls.key"))])
        .args([format!("--tls-client-ca={}", path("control-plane/ca.crt"))])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(path("log")).unwrap())
        .spawn()
        .unwrap();
    let control_plane = KilledOnDrop(control_plane);
    let ask = |tls: &[String]| {
        let mut command = Command::new(program("headgatectl").unwrap());
        command.arg(format!("--server=https://{}", port.address())).args(tls).args(["status", "-o", "json"]);
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
    // If the name of one server does not resolve, the agents of the other servers are still listed.
    let mut agents = Command::new(program("headgatectl").unwrap());
    agents.arg("--server=https://nobody.invalid:7443").arg(format!("--server=https://{}", port.address()));
    let agents = agents.args(&with_own).arg("agents").stdin(Stdio::null()).output().unwrap();
    let anonymous = ask(&[authority]);
    // The client refuses a server with a certificate of another authority.
    run(certs(&folder.path().join("other")).args(["--reader", "me"]));
    let elsewhere = ask(&[&[format!("--tls-ca={}", path("other/ca.crt"))], &own[..]].concat());
    drop(control_plane);

    let log = std::fs::read_to_string(path("log")).unwrap();
    assert!(answer.status.success(), "{}\n{log}", String::from_utf8_lossy(&answer.stderr));
    let (shown, error) = (String::from_utf8_lossy(&agents.stdout), String::from_utf8_lossy(&agents.stderr));
    assert_eq!(shown, format!("No agents are connected to https://{}.\n", port.address()), "{error}");
    assert!(agents.status.code() == Some(1) && error.contains("nobody.invalid does not resolve"), "{error}");
    assert_eq!(anonymous.status.code(), Some(1), "the server accepted a client without a certificate");
    assert_eq!(elsewhere.status.code(), Some(1), "the client accepted a server of another authority");
    let error = String::from_utf8_lossy(&elsewhere.stderr);
    assert!(error.contains("TLS handshake failed"), "{error}");
}

#[test]
fn manifests_have_only_fields_that_the_api_knows() {
    use k8s_openapi::api::{apps::v1 as apps, core::v1 as core, policy::v1 as policy, rbac::v1 as rbac};
    // A round trip through the API's types loses a misspelt field.
    fn round_trip<T: serde::de::DeserializeOwned + serde::Serialize>(object: &Value) -> Value {
        let typed: T = serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{error}: {object}"));
        serde_json::to_value(typed).unwrap()
    }
    for ((kind, name), object) in objects() {
        let known = match kind.as_str() {
            "Namespace" => round_trip::<core::Namespace>(&object),
            "ConfigMap" => round_trip::<core::ConfigMap>(&object),
            "Service" => round_trip::<core::Service>(&object),
            "ServiceAccount" => round_trip::<core::ServiceAccount>(&object),
            "ClusterRole" => round_trip::<rbac::ClusterRole>(&object),
            "ClusterRoleBinding" => round_trip::<rbac::ClusterRoleBinding>(&object),
            "Deployment" => round_trip::<apps::Deployment>(&object),
            "DaemonSet" => round_trip::<apps::DaemonSet>(&object),
            "PodDisruptionBudget" => round_trip::<policy::PodDisruptionBudget>(&object),
            other => panic!("{other} {name}: add this kind to the test"),
        };
        assert_eq!(known, object, "{kind} {name}");
    }
}
