//! Descriptions of all metrics. Each metric is described when it is registered.
//! `docs/control-plane-metrics.md` is generated from these descriptions.

use std::hash::Hash;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{MetricType, TypedMetric, counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry},
};

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

/// The descriptions of all registered metrics.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    rows: Vec<String>,
}

impl Catalogue {
    /// Registers a metric and adds its row to the catalogue.
    pub(super) fn register<M: Described + Metric>(
        &mut self,
        registry: &mut Registry,
        name: &str,
        help: &str,
        metric: M,
    ) {
        let suffix = if matches!(M::KIND, MetricType::Counter) { "_total" } else { "" };
        let (kind, labels) = (M::KIND.as_str(), M::LABELS);
        self.rows.push(format!("| `headgate_{name}{suffix}` | {kind} | {labels} | {help} |\n"));
        registry.register(name, help, metric);
    }

    /// Returns the text of `docs/control-plane-metrics.md`.
    #[must_use]
    pub(super) fn page(&self) -> String {
        let mut rows: Vec<&str> = self.rows.iter().map(String::as_str).collect();
        rows.sort_unstable();
        let mut page = HEAD.to_owned();
        rows.into_iter().for_each(|row| page.push_str(row));
        page
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs, path::Path};

    use crate::metrics::Metrics;

    /// `make docs` sets `HEADGATE_WRITE_DOCS`. If this variable is set, the test writes the file
    /// before it compares the file with the page.
    #[test]
    fn documents_are_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/control-plane-metrics.md");
        let page = Metrics::default().page();
        if std::env::var_os("HEADGATE_WRITE_DOCS").is_some() {
            fs::write(&path, &page).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == page, "docs/control-plane-metrics.md is stale: run `make docs`");
    }
}
