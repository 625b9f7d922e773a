//! The modes of the chart and of the overlays, what an uninstallation does first, and what a change
//! of the settings restarts.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use headgate_tests::{apiserver::Rights, testbed::process::program};
use serde_json::{Value, json};

use super::{
    Objects, assert_valid, by_name, chart, deploy, object, objects, ready_everywhere::overlay_with, run, strings,
};

fn with(values: &[&str]) -> String {
    let mut command = chart(&object("ConfigMap", "headgate-settings"));
    command.arg("--values").arg(deploy().join("chart/values-production.yaml"));
    run(command.args(values.iter().flat_map(|value| ["--set", value])))
}

fn pod<'a>(objects: &'a Objects, kind: &str, name: &str) -> &'a Value {
    &objects[&(kind.to_owned(), name.to_owned())]["spec"]["template"]
}

#[test]
fn the_modes_of_the_chart_are_those_of_the_components() {
    for mode in ["standby", "cleanup"] {
        let yaml = overlay_with("production", mode);
        assert_valid(&yaml);
        let mut from_overlay = by_name(&yaml);
        from_overlay.remove(&("Namespace".to_owned(), "headgate-system".to_owned())).unwrap();
        let from_chart = by_name(&with(&[&format!("mode={mode}")]));
        assert_eq!(from_chart, from_overlay, "{mode}");
    }
    assert_eq!(by_name(&with(&["mode=run"])), by_name(&with(&[])));
}

#[test]
fn agents_of_mode_standby_never_take_over_and_mode_cleanup_has_none() {
    let standby = by_name(&with(&["mode=standby"]));
    let args = |objects: &Objects| {
        strings(&pod(objects, "DaemonSet", "headgate-node-agent")["spec"]["containers"][0]["args"])
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let (with_option, without) = (args(&standby), args(objects()));
    assert!(with_option.contains(&"--standby=always".to_owned()));
    assert_eq!(
        with_option.iter().filter(|arg| *arg != "--standby=always").collect::<Vec<_>>(),
        without.iter().collect::<Vec<_>>()
    );

    for (without_proxy, expected) in [("false", "--cleanup-stay=beside-proxy"), ("true", "--cleanup-stay=always")] {
        let cleanup = by_name(&with(&["mode=cleanup", &format!("cleanup.withoutProxy={without_proxy}")]));
        assert!(!cleanup.contains_key(&("DaemonSet".to_owned(), "headgate-node-agent".to_owned())));
        let container = &pod(&cleanup, "DaemonSet", "headgate-cleanup")["spec"]["containers"][0];
        let args: Vec<&str> = container["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap()).collect();
        assert!(args.contains(&expected), "{args:?}");
        // With --help, the program checks the options before it, and ends.
        run(Command::new(program("headgate-node-agent").unwrap()).args(&args).arg("--help"));
    }
}

/// The Job before an uninstallation may create DaemonSets in its namespace, and change one.
#[test]
fn the_job_before_an_uninstallation_has_few_rights_and_can_be_left_out() {
    let hooks = |values: &[&str]| {
        let mut command = chart(&object("ConfigMap", "headgate-settings"));
        let mut arguments: Vec<String> = command.get_args().map(|arg| arg.to_str().unwrap().to_owned()).collect();
        arguments.retain(|argument| argument != "--no-hooks");
        command = Command::new(command.get_program());
        command.args(arguments).args(values.iter().flat_map(|value| ["--set", value]));
        let yaml = run(&mut command);
        assert_valid(&yaml);
        let mut hooks = by_name(&yaml);
        hooks.retain(|_, object| object["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete");
        hooks
    };
    assert!(hooks(&["cleanup.onUninstall=false"]).is_empty() && hooks(&["mode=cleanup"]).is_empty());
    let hooks = hooks(&["cleanup.withoutProxy=true"]);
    let kinds: Vec<&str> = hooks.keys().map(|(kind, _)| kind.as_str()).collect();
    assert_eq!(kinds, ["Job", "Role", "RoleBinding", "ServiceAccount"]);
    let rights = Rights::of_objects(hooks.values());
    let namespace = "in headgate-system";
    let expected = ["create", "delete", "get", "patch"].map(|verb| format!("{verb} daemonsets.apps {namespace}"));
    let expected: BTreeSet<String> = expected.into_iter().chain([format!("list pods. {namespace}")]).collect();
    assert_eq!(rights.all().iter().cloned().collect::<BTreeSet<_>>(), expected);
    let role = &hooks[&("Role".to_owned(), "headgate-uninstall".to_owned())];
    let names: Vec<&Value> = role["rules"].as_array().unwrap().iter().map(|rule| &rule["resourceNames"]).collect();
    assert_eq!(names, [&Value::Null, &json!(["headgate-cleanup"]), &Value::Null]);

    let job = pod(&hooks, "Job", "headgate-uninstall");
    let container = &job["spec"]["containers"][0];
    assert_eq!(container["image"], "headgate/control-plane:0.1.0", "the image that has headgatectl");
    let args: Vec<&str> = container["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap()).collect();
    assert!(args.contains(&"--without-proxy") && args.contains(&"--image=headgate/node-agent:0.1.0"), "{args:?}");
    run(Command::new(program("headgatectl").unwrap()).args(&args).arg("--help"));
}

/// The pods have the settings that they read at their start as annotations.
#[test]
fn a_changed_setting_restarts_those_who_read_it_at_their_start_and_nobody_else() {
    let workloads = [("Deployment", "headgate-control-plane"), ("DaemonSet", "headgate-node-agent")];
    let before = by_name(&with(&[]));
    let restarted = |values: &[&str]| {
        let after = by_name(&with(values));
        let changed = workloads.iter().filter(|(kind, name)| pod(&before, kind, name) != pod(&after, kind, name));
        changed.map(|(_, name)| *name).collect::<Vec<_>>()
    };
    for (values, expected) in [
        (vec!["controlPlane.denied={headgate://node/lost}"], vec![]),
        (vec!["controlPlane.addresses={192.0.2.99}"], vec![]),
        (vec!["controlPlane.externalIPs=all"], vec!["headgate-control-plane"]),
        (vec!["apiServer.host=192.0.2.99"], vec!["headgate-control-plane"]),
        (vec!["clusterCIDRs={10.0.0.0/8}"], vec!["headgate-node-agent"]),
        (vec!["nodeAgent.drainAddress=0.0.0.0:10261"], vec!["headgate-node-agent"]),
    ] {
        assert_eq!(restarted(&values), expected, "{values:?}");
    }
    // Each setting that a container reads from the ConfigMap has an annotation, and no other has.
    // Addresses of replicas are only where agents without a list begin.
    let is_seed = |key: &&str| matches!(*key, "controlPlane" | "enrolment");
    for (kind, name) in workloads {
        let pod = pod(&before, kind, name);
        let env = pod["spec"]["containers"][0]["env"].as_array().unwrap().iter();
        let settings = &before[&("ConfigMap".to_owned(), "headgate-settings".to_owned())]["data"];
        let read: BTreeMap<String, &Value> = env
            .filter_map(|variable| variable["valueFrom"]["configMapKeyRef"]["key"].as_str())
            .filter(|key| !is_seed(key))
            .map(|key| (format!("settings.headgate.io/{key}"), &settings[key]))
            .collect();
        let annotations = pod["metadata"]["annotations"].as_object().unwrap();
        let annotations: BTreeMap<String, &Value> =
            annotations.iter().map(|(key, value)| (key.clone(), value)).collect();
        assert_eq!(annotations, read, "{name}");
    }
}
