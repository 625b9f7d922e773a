//! The alerts and the dashboard in `deploy/monitoring` use metrics that exist, and the alerts pass
//! their own tests.

use std::{collections::BTreeSet, fs, process::Command};

use headgate_tests::testbed::process::tool;

/// The generated pages that list all metrics.
const PAGES: [&str; 2] = ["docs/metrics.md", "docs/control-plane-metrics.md"];

/// The series that Prometheus makes from one histogram.
const HISTOGRAM_SUFFIXES: [&str; 3] = ["_bucket", "_sum", "_count"];

/// The words of `text` that begin like the name of a metric of Headgate's programs.
fn metrics(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| ["headgate_", "kubeproxy_", "process_"].iter().any(|prefix| word.starts_with(prefix)))
        .collect()
}

#[test]
fn alerts_and_dashboard_use_metrics_that_exist() {
    let pages = PAGES.map(|page| fs::read_to_string(super::root().join(page)).unwrap());
    let documented: BTreeSet<&str> = pages.iter().flat_map(|page| metrics(page)).collect();
    for file in ["alerts.yaml", "alerts_test.yaml", "dashboard.json"] {
        let text = fs::read_to_string(super::root().join("deploy/monitoring").join(file)).unwrap();
        let used = metrics(&text);
        assert!(!used.is_empty(), "{file} uses no metric");
        let unknown: Vec<_> = used
            .into_iter()
            .filter(|name| {
                let histogram = HISTOGRAM_SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix));
                !documented.contains(name) && !histogram.is_some_and(|name| documented.contains(name))
            })
            .collect();
        assert!(unknown.is_empty(), "deploy/monitoring/{file} uses metrics that no page lists: {unknown:?}");
    }
}

#[test]
fn alerts_pass_their_tests() {
    let output = Command::new(tool("promtool"))
        .args(["test", "rules", "deploy/monitoring/alerts_test.yaml"])
        .current_dir(super::root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
}
