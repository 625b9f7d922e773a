//! What users set for agents: the chart, the overlays and the pages give the same result.

use serde_json::json;

use super::{KUBERNETES, by_name, chart, deploy, object, ready_everywhere::overlay_with, run, validate};

/// The page of the move installs agents that run only on nodes with a label from the start.
#[test]
fn agents_can_be_limited_to_nodes_with_a_label() {
    let yaml = overlay_with("production", "labelled-nodes");
    for version in KUBERNETES {
        let (is_valid, report) = validate(version, &yaml);
        assert!(is_valid, "Kubernetes {version}: {report}");
    }
    let mut from_overlay = by_name(&yaml);
    from_overlay.remove(&("Namespace".to_owned(), "headgate-system".to_owned())).unwrap();
    let value = r"nodeAgent.nodeSelector.headgate\.io/node-agent=true";
    let mut command = chart(&object("ConfigMap", "headgate-settings"));
    command.arg("--values").arg(deploy().join("chart/values-production.yaml"));
    let from_chart = by_name(&run(command.args(["--set-string", value])));
    assert_eq!(from_chart, from_overlay);
    let agents = &from_chart[&("DaemonSet".to_owned(), "headgate-node-agent".to_owned())];
    let selector = json!({ "kubernetes.io/os": "linux", "headgate.io/node-agent": "true" });
    assert_eq!(agents["spec"]["template"]["spec"]["nodeSelector"], selector);

    let page = std::fs::read_to_string(deploy().join("../docs/migration.md")).unwrap();
    let step = page.split("\n1. ").nth(1).unwrap().split("\n2. ").next().unwrap();
    assert!(step.contains(&format!("--set-string '{value}'")) && step.contains("- ../labelled-nodes"), "{step}");
}
