//! The alerts and the dashboard in `deploy/monitoring` use metrics that exist, and the alerts pass
//! their own tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use headgate_control_plane::metrics::Metrics;
use headgate_tests::{
    monitoring::{self, metrics, queries},
    testbed::process::tool,
};

/// The generated pages that list all metrics.
const PAGES: [&str; 2] = ["docs/metrics.md", "docs/control-plane-metrics.md"];

/// The series that Prometheus makes from one histogram.
const HISTOGRAM_SUFFIXES: [&str; 3] = ["_bucket", "_sum", "_count"];

#[test]
fn alerts_and_dashboard_use_metrics_that_exist() {
    let pages = PAGES.map(|page| fs::read_to_string(super::root().join(page)).unwrap());
    let documented: BTreeSet<&str> = pages.iter().flat_map(|page| metrics(page)).collect();
    for file in ["alerts.yaml", "alerts_test.yaml", "dashboard.json", "podmonitor.yaml"] {
        let text = monitoring::file(file).unwrap();
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

/// The metrics with their types and labels, as the generated pages list them.
fn described() -> BTreeMap<String, (String, String)> {
    let mut described = BTreeMap::new();
    for page in PAGES {
        let text = fs::read_to_string(super::root().join(page)).unwrap();
        for row in text.lines().filter_map(|line| line.strip_prefix("| `")) {
            let [name, kind, labels] = row.splitn(4, " | ").take(3).collect::<Vec<_>>()[..] else { panic!("{row}") };
            described.insert(name.trim_end_matches('`').to_owned(), (kind.to_owned(), labels.to_owned()));
        }
    }
    described
}

/// What a query asks for that the metric `name` does not have. `rest` begins after the name.
fn misfit(name: &str, rest: &str, described: &BTreeMap<String, (String, String)>, output: &str) -> Option<String> {
    let base = HISTOGRAM_SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix));
    let base = base.filter(|base| described.get(*base).is_some_and(|(kind, _)| kind == "histogram"));
    let (kind, labels) = described.get(base.unwrap_or(name))?;
    if (kind == "histogram") != base.is_some() {
        return Some(format!("{name} is a {kind}"));
    }
    let is_rate = rest.trim_start_matches(|c| c != '[' && c != ')').starts_with('[');
    // A counter without a range says that something has been counted at all.
    let is_misused = if is_rate { kind == "gauge" } else { base.is_some() };
    if is_misused {
        return Some(format!("{name} is a {kind}, and is used the other way"));
    }
    let matchers = rest.strip_prefix('{').map(|rest| &rest[..rest.find('}').unwrap()]).unwrap_or_default();
    for matcher in matchers.split(", ").filter(|matcher| !matcher.is_empty()) {
        let label = &matcher[..matcher.find(['=', '!']).unwrap()];
        // The page of agents lists the values behind the name.
        let is_known = labels.split(", ").any(|known| known.split(' ').next() == Some(label))
            || ["job", "instance"].contains(&label);
        if label == "le" && base.is_some() {
            // Replicas have these bounds.
            let sample = format!("{name}{{{matcher}}}");
            if !output.contains(&sample) {
                return Some(format!("{sample} is no bound"));
            }
        } else if !is_known {
            return Some(format!("{name} has no label {label}"));
        }
    }
    None
}

#[test]
fn every_query_fits_the_types_labels_and_bounds_of_its_metrics() {
    let (described, output) = (described(), Metrics::default().render());
    for name in ["headgate_build_info{version=", "process_open_fds ", "process_cpu_seconds_total "] {
        assert!(output.contains(name), "{name} is missing: {output}");
    }
    for file in ["alerts.yaml", "dashboard.json"] {
        let queries = queries(file).unwrap();
        assert!(queries.len() > 15, "{file}: {queries:?}");
        for query in queries {
            for name in metrics(&query) {
                let uses = query.match_indices(name).map(|(index, _)| &query[index + name.len()..]);
                let uses = uses.filter(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_'));
                let wrong: Vec<_> = uses.filter_map(|rest| misfit(name, rest, &described, &output)).collect();
                assert!(wrong.is_empty(), "{file}: {query}: {wrong:?}");
            }
        }
    }
    let wrong = |query: &str| {
        let name = *metrics(query).first().unwrap();
        misfit(name, &query[query.find(name).unwrap() + name.len()..], &described, &output).is_some()
    };
    assert!(wrong("rate(headgate_fleet_programmed_everywhere_seconds_bucket{le=\"2\"}[5m])"));
    assert!(wrong("headgate_fleet_programmed_everywhere_seconds > 1"));
    assert!(wrong("headgate_streams{state=\"open\"}") && wrong("rate(headgate_streams[5m])"));
}

/// The keep list for large fleets has metrics that exist, and has all that the alerts need.
#[test]
fn the_keep_list_has_what_alerts_and_dashboard_need() {
    let text = monitoring::file("podmonitor.yaml").unwrap();
    let kept = metrics(&text);
    let described = described();
    let of_agents = fs::read_to_string(super::root().join(PAGES[0])).unwrap();
    for file in ["alerts.yaml", "dashboard.json"] {
        for query in queries(file).unwrap() {
            for name in metrics(&query) {
                let base = HISTOGRAM_SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix));
                let name = base.filter(|base| described.contains_key(*base)).unwrap_or(name);
                let is_needed = of_agents.contains(&format!("| `{name}`"));
                assert!(!is_needed || kept.contains(name), "{file} needs {name}, which the keep list lacks");
            }
        }
    }
    let is_known = |name: &str| described.contains_key(name.strip_suffix("_bucket").unwrap_or(name));
    let unknown: Vec<_> = kept.iter().filter(|name| !is_known(name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
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
