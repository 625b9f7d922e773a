//! The manifests of `--ready-everywhere`, which are off by default.

use std::process::Command;

use clap::Parser as _;
use headgate_control_plane::{objects::GATE, options::Options};
use headgate_tests::{apiserver::Rights, testbed::process::tool};
use serde_json::json;

use super::{assert_valid, by_name, chart, control_plane_pod, deploy, object, objects, run, strings};

/// What `kubectl apply -k` creates from an overlay with a component, as YAML.
pub(super) fn overlay_with(name: &str, component: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    // kustomize accepts only relative paths.
    let path = folder.path().canonicalize().unwrap();
    let up = "../".repeat(path.components().count() - 1);
    let kustomize = deploy().join("kustomize").canonicalize().unwrap();
    let at = |name: &str| format!("{up}{}", kustomize.join(name).strip_prefix("/").unwrap().display());
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": [at(name)], "components": [at(component)],
    });
    std::fs::write(path.join("kustomization.yaml"), kustomization.to_string()).unwrap();
    run(Command::new(tool("kustomize")).arg("build").arg(path))
}

#[test]
fn ready_everywhere_adds_its_own_roles_and_options_only_if_it_is_on() {
    let yaml = overlay_with("production", "ready-everywhere");
    let mut from_overlay = by_name(&yaml);
    assert_valid(&yaml);
    from_overlay.remove(&("Namespace".to_owned(), "headgate-system".to_owned())).unwrap();
    let mut command = chart(&object("ConfigMap", "headgate-settings"));
    command.arg("--values").arg(deploy().join("chart/values-production.yaml"));
    let from_chart = by_name(&run(command.args(["--set", "controlPlane.readyEverywhere=true"])));
    assert_eq!(from_chart, from_overlay);
    let is_new = |key: &&(String, String)| !objects().contains_key(*key);
    let new: Vec<&str> = from_chart.keys().filter(is_new).map(|(kind, _)| kind.as_str()).collect();
    assert_eq!(new, ["ClusterRole", "ClusterRoleBinding"]);
    let of = |kind: &str| &from_chart[&(kind.to_owned(), "headgate-ready-everywhere".to_owned())];
    let rights = Rights::of_objects([of("ClusterRole")]);
    let expected = ["list pods.", "patch pods/status.", "watch pods."];
    assert_eq!(rights.all().iter().map(String::as_str).collect::<Vec<_>>(), expected);
    let binding = of("ClusterRoleBinding");
    assert_eq!(binding["roleRef"]["name"], "headgate-ready-everywhere");
    assert_eq!(binding["subjects"], object("ClusterRoleBinding", "headgate-control-plane")["subjects"]);
    let deployment = &from_chart[&("Deployment".to_owned(), "headgate-control-plane".to_owned())];
    let args = strings(&deployment["spec"]["template"]["spec"]["containers"][0]["args"]);
    let args: Vec<String> = args.iter().map(|arg| arg.replace("$(EXTERNAL_IPS)", "none")).collect();
    let options = Options::try_parse_from(std::iter::once("headgate-control-plane".to_owned()).chain(args)).unwrap();
    assert!(options.ready_everywhere);
    assert!(control_plane_pod().to_string().find("ready-everywhere").is_none(), "it is off by default");
}

/// The second block of docs/ready-everywhere.md is a part of the specification of a pod.
#[test]
fn the_gate_of_the_page_is_valid_by_the_schemas_of_kubernetes() {
    let page = std::fs::read_to_string(deploy().join("../docs/ready-everywhere.md")).unwrap();
    let block = page.split("```yaml\n").nth(2).unwrap().split_once("```").unwrap().0;
    let specification: String = block.lines().map(|line| format!("{}\n", line.strip_prefix(' ').unwrap())).collect();
    let container = "  containers:\n    - name: web\n";
    let pod = format!("apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\nspec:\n{container}{specification}");
    assert!(pod.contains(GATE));
    assert_valid(&pod);
}
