//! Descriptions of all metrics, kept while they are registered: `docs/metrics.md` is written from them.

use std::fmt::Write as _;

use prometheus_client::registry::{Metric, Registry, Unit};

const HEAD: &str = "\
# Metrics of the node agent

<!-- Written by `make docs` from what node-agent/src/metrics.rs and node-agent/src/metrics/ register; edit those. -->

`GET /metrics` on the metrics port (127.0.0.1:10249, `--metrics-bind-address`) answers in Prometheus' text format, as kube-proxy does, or in OpenMetrics to those who ask for it.
Metrics with the prefixes `kubeproxy_` and `process_` have kube-proxy's names, labels and buckets; dashboards and alerts made for it keep working, but for what they show
of the Go runtime and of requests to the API server, since the agent has neither. Headgate's own have the prefix `headgate_agent_`, and base units. A metric with labels
appears with its first value.

`/metrics/slis` on the same port has `kubernetes_healthcheck{name,type}` and `kubernetes_healthchecks_total{name,type,status}`, which tell and count the results of
`/healthz` there, as in every component of Kubernetes; `DELETE` resets them. `kubernetes_build_info` has the labels that it has there, and tells of Headgate's own build.

Not served: what belongs to nftables, until that mode is built.
";

/// One metric.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Description {
    name: String,
    kind: &'static str,
    labels: &'static str,
    help: String,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Catalogue {
    descriptions: Vec<Description>,
}

/// Registers metrics and describes them.
pub(super) struct Adder<'a> {
    catalogue: &'a mut Catalogue,
    prefix: &'static str,
    registry: &'a mut Registry,
}

impl Catalogue {
    /// Registers into a registry, whose names begin with `prefix`.
    pub(super) fn adder<'a>(&'a mut self, prefix: &'static str, registry: &'a mut Registry) -> Adder<'a> {
        Adder { catalogue: self, prefix, registry }
    }

    /// Describes what somebody else registers, by its full name.
    pub(super) fn describe(&mut self, name: &str, kind: &'static str, labels: &'static str, help: &str) {
        self.descriptions.push(Description { name: name.to_owned(), kind, labels, help: help.to_owned() });
    }

    /// The page.
    #[must_use]
    pub fn page(&self) -> String {
        let mut page = HEAD.to_owned();
        for (title, prefix) in [
            ("Headgate's own", "headgate_agent_"),
            ("As kube-proxy's", "kubeproxy_"),
            ("Of the process", "process_"),
            ("Of the build", "kubernetes_"),
        ] {
            // Writing to a string does not fail.
            let _ = write!(page, "\n## {title}\n\n| name | type | labels | meaning |\n| --- | --- | --- | --- |\n");
            let mut listed: Vec<&Description> =
                self.descriptions.iter().filter(|d| d.name.starts_with(prefix)).collect();
            listed.sort_by(|a, b| a.name.cmp(&b.name));
            for Description { name, kind, labels, help } in listed {
                let _ = writeln!(page, "| `{name}` | {kind} | {labels} | {help} |");
            }
        }
        page
    }

    /// Names as they are served, without the suffixes of histograms.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.descriptions.iter().map(|description| description.name.as_str()).collect()
    }
}

impl Adder<'_> {
    /// A gauge.
    pub(super) fn gauge(&mut self, name: &str, labels: &'static str, help: &str, metric: impl Metric) {
        self.add(name, "", "gauge", labels, help, metric);
    }

    /// A gauge in a unit, which ends its name.
    pub(super) fn gauge_in(&mut self, unit: Unit, name: &str, labels: &'static str, help: &str, metric: impl Metric) {
        self.describe(&format!("{name}_{}", unit.as_str()), "gauge", labels, help);
        self.registry.register_with_unit(name, help, unit, metric);
    }

    /// A counter; `_total` ends its name.
    pub(super) fn counter(&mut self, name: &str, labels: &'static str, help: &str, metric: impl Metric) {
        self.add(name, "_total", "counter", labels, help, metric);
    }

    /// A histogram.
    pub(super) fn histogram(&mut self, name: &str, labels: &'static str, help: &str, metric: impl Metric) {
        self.add(name, "", "histogram", labels, help, metric);
    }

    fn add(
        &mut self,
        name: &str,
        suffix: &str,
        kind: &'static str,
        labels: &'static str,
        help: &str,
        metric: impl Metric,
    ) {
        self.describe(&format!("{name}{suffix}"), kind, labels, help);
        self.registry.register(name, help, metric);
    }

    fn describe(&mut self, name: &str, kind: &'static str, labels: &'static str, help: &str) {
        self.catalogue.describe(&format!("{}_{name}", self.prefix), kind, labels, help);
    }
}
