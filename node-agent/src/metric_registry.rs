//! Registers metrics with their descriptions. Each module owns its metrics and registers them here;
//! `docs/metrics.md` is generated from the descriptions.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
};

use headgate_core::Family;
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::histogram::{Histogram, exponential_buckets},
    registry::{Metric, Registry, Unit},
};

/// Prefix of Headgate's own metrics.
pub(crate) const AGENT: &str = "headgate_agent";
/// Prefix of the metrics that have kube-proxy's names, labels and buckets.
pub(crate) const KUBE_PROXY: &str = "kubeproxy";

/// Label `ip_family`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct FamilyLabel {
    pub(crate) ip_family: &'static str,
}

impl FamilyLabel {
    /// The label of a family: "IPv4" or "IPv6".
    pub(crate) fn of(family: Family) -> Self {
        Self { ip_family: if family == Family::V4 { "IPv4" } else { "IPv6" } }
    }
}

/// Label `kind`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct KindLabel {
    pub(crate) kind: &'static str,
}

/// Label `result`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ResultLabel {
    pub(crate) result: &'static str,
}

/// Buckets from 1 ms, doubled 15 times, as kube-proxy has them for syncs.
pub(crate) fn sync_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

const HEAD: &str = "\
# Metrics of the node agent

<!-- Written by `make docs` from what the agent registers, see node-agent/src/metric_registry.rs; edit that. -->

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
pub struct MetricRegistry {
    /// By prefix.
    registries: BTreeMap<&'static str, Registry>,
    descriptions: Vec<Description>,
}

/// Registers metrics whose names begin with one prefix.
pub(crate) struct Adder<'a> {
    prefix: &'static str,
    registry: &'a mut Registry,
    descriptions: &'a mut Vec<Description>,
}

impl MetricRegistry {
    /// Registers metrics whose names begin with `prefix`.
    pub(crate) fn adder(&mut self, prefix: &'static str) -> Adder<'_> {
        let registry = self.registries.entry(prefix).or_insert_with(|| Registry::with_prefix(prefix));
        Adder { prefix, registry, descriptions: &mut self.descriptions }
    }

    /// All metrics as OpenMetrics text.
    ///
    /// # Errors
    /// Only when formatting fails, which a `String` does not.
    pub(crate) fn encode(&self) -> Result<String, fmt::Error> {
        let mut out = String::new();
        self.registries.values().try_for_each(|registry| text::encode_registry(&mut out, registry))?;
        text::encode_eof(&mut out)?;
        Ok(out)
    }

    /// The text of `docs/metrics.md`.
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
    pub(crate) fn gauge(&mut self, name: &str, labels: &'static str, help: &str, metric: impl Metric) {
        self.add(name, "", "gauge", labels, help, metric);
    }

    /// A gauge in a unit, which ends its name.
    pub(crate) fn gauge_in(&mut self, unit: Unit, name: &str, labels: &'static str, help: &str, metric: impl Metric) {
        self.describe(&format!("{name}_{}", unit.as_str()), "gauge", labels, help);
        self.registry.register_with_unit(name, help, unit, metric);
    }

    /// A counter; `_total` ends its name.
    pub(crate) fn counter(&mut self, name: &str, labels: &'static str, help: &str, metric: impl Metric) {
        self.add(name, "_total", "counter", labels, help, metric);
    }

    /// A histogram.
    pub(crate) fn histogram(&mut self, name: &str, labels: &'static str, help: &str, metric: impl Metric) {
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
        let name = format!("{}_{name}", self.prefix);
        self.descriptions.push(Description { name, kind, labels, help: help.to_owned() });
    }
}
