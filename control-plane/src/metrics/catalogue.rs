//! Descriptions of all metrics. Each metric is described when it is registered.
//! `docs/control-plane-metrics.md` is generated from these descriptions.

use std::hash::Hash;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{MetricType, TypedMetric, counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry},
};

/// A set of labels with the names of the labels.
pub(super) trait Labelled {
    /// The names of the labels in the order of the fields, separated by commas.
    const LABELS: &str;
}

/// The part of a metric's description that follows from its Rust type.
pub(super) trait Described {
    /// `counter`, `gauge` or `histogram`.
    const KIND: MetricType;
    /// The names of the labels (see [`Labelled`]); empty for a metric without labels.
    const LABELS: &str = "";
}

impl<N, A> Described for Counter<N, A> {
    const KIND: MetricType = <Self as TypedMetric>::TYPE;
}

impl<N, A> Described for Gauge<N, A> {
    const KIND: MetricType = <Self as TypedMetric>::TYPE;
}

impl Described for Histogram {
    const KIND: MetricType = <Self as TypedMetric>::TYPE;
}

impl<L: Labelled + EncodeLabelSet + Clone + Hash + Eq, M: Described> Described for Family<L, M> {
    const KIND: MetricType = M::KIND;
    const LABELS: &str = L::LABELS;
}

/// Registers metrics, and describes each of them.
pub(super) struct Adder<'a> {
    pub(super) registry: Registry,
    /// The rows of `docs/control-plane-metrics.md`.
    pub(super) rows: &'a mut Vec<String>,
}

impl Adder<'_> {
    /// Registers a metric and adds its row.
    pub(super) fn register<M: Described + Metric>(&mut self, name: &str, help: &str, metric: M) {
        let suffix = if matches!(M::KIND, MetricType::Counter) { "_total" } else { "" };
        let (kind, labels) = (M::KIND.as_str(), M::LABELS);
        self.rows.push(format!("| `headgate_{name}{suffix}` | {kind} | {labels} | {help} |\n"));
        self.registry.register(name, help, metric);
    }

    /// Registers a metric with its initial value, and returns it.
    pub(super) fn add<M: Default + Clone + Described + Metric>(&mut self, name: &str, help: &str) -> M {
        let metric = M::default();
        self.register(name, help, metric.clone());
        metric
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs, path::Path};

    use crate::metrics::Metrics;

    const HEAD: &str = "\
# Metrics of the control plane

<!-- `make docs` writes this page from control-plane/src/metrics.rs; edit that file instead. -->

`GET /metrics` of each replica (`--metrics-listen`) answers in the Prometheus text format, or in the
OpenMetrics format if the request asks for it. A metric with labels appears once it has a value. The
number of label values is bounded: names of nodes and services are never label values.
`headgatectl agents` and `headgatectl status` show these names.

| name | type | labels | meaning |
| --- | --- | --- | --- |
";

    /// `make docs` sets `HEADGATE_WRITE_DOCS`. If this variable is set, the test writes the file
    /// before it compares the file with the page.
    #[test]
    fn documents_are_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/control-plane-metrics.md");
        let mut rows = Vec::new();
        drop(Metrics::described(&mut rows));
        rows.sort_unstable();
        let page = [HEAD, &rows.concat()].concat();
        if std::env::var_os("HEADGATE_WRITE_DOCS").is_some() {
            fs::write(&path, &page).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == page, "docs/control-plane-metrics.md is stale: run `make docs`");
    }
}
