//! Descriptions of all metrics, kept while they are registered: `docs/control-plane-metrics.md` is
//! written from them.

use std::hash::Hash;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{MetricType, TypedMetric, counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry},
};

const HEAD: &str = "\
# Metrics of the control plane

<!-- Written by `make docs` from what control-plane/src/metrics.rs registers; edit that. -->

`GET /metrics` of each replica (`--metrics-listen`) answers in Prometheus' text format, or in OpenMetrics to those who
ask for it. A metric with labels appears with its first value. Labels are
bounded: no name of a node or a service is one; `headgatectl agents` and `headgatectl status` name them.

| name | type | labels | meaning |
| --- | --- | --- | --- |
";

/// The names of a set of labels.
pub(super) trait Labelled {
    /// In the order of the fields, with commas between them.
    const LABELS: &str;
}

/// What a metric is, as far as its type tells.
pub(super) trait Described {
    /// `counter`, `gauge` or `histogram`.
    const KIND: MetricType;
    /// See [`Labelled`]; empty without labels.
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

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    rows: Vec<String>,
}

impl Catalogue {
    /// Registers a metric, and describes it.
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

    /// The page.
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

    /// `make docs` sets `HEADGATE_WRITE_DOCS`, and then the page is written instead of compared.
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
