//! Descriptions of all metrics. Each metric is described when it is registered.
//! `docs/control-plane-metrics.md` is generated from these descriptions.

use std::{fmt, ops::Deref};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder},
    metrics::{MetricType, TypedMetric, counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry},
};

/// Upper bounds of the histograms' buckets, in seconds. The smallest bounds suit a quiet fleet in
/// one rack, and the largest bounds suit nodes that are stuck.
const SECONDS: [f64; 14] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0];

/// Metrics that differ in the values of `N` labels. Every value is part of the program.
#[derive(Debug, Clone)]
pub(crate) struct Labelled<M, const N: usize = 1> {
    names: [&'static str; N],
    /// The metrics by the names and values of their labels.
    pub(crate) metrics: Family<[(&'static str, &'static str); N], M>,
}

impl<M: Clone + Default, const N: usize> Labelled<M, N> {
    /// Returns the metric with these values of the labels.
    pub(crate) fn of(&self, values: [&'static str; N]) -> impl Deref<Target = M> + '_ {
        let mut value = values.into_iter();
        self.metrics.get_or_create(&self.names.map(|name| (name, value.next().unwrap_or_default())))
    }
}

impl<M: EncodeMetric + TypedMetric, const N: usize> EncodeMetric for Labelled<M, N> {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        self.metrics.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        self.metrics.metric_type()
    }
}

/// A metric in its initial state, with labels of these names.
pub(super) trait Initial<const N: usize> {
    fn initial(labels: [&'static str; N]) -> Self;
}

impl<A: Default> Initial<0> for Counter<u64, A> {
    fn initial(_: [&'static str; 0]) -> Self {
        Self::default()
    }
}

impl<N, A: Default> Initial<0> for Gauge<N, A> {
    fn initial(_: [&'static str; 0]) -> Self {
        Self::default()
    }
}

impl Initial<0> for Histogram {
    fn initial(_: [&'static str; 0]) -> Self {
        Self::new(SECONDS)
    }
}

impl<M: Default, const N: usize> Initial<N> for Labelled<M, N> {
    fn initial(names: [&'static str; N]) -> Self {
        Self { names, metrics: Family::default() }
    }
}

/// Registers metrics, and describes each of them.
pub(super) struct Adder<'a> {
    pub(super) registry: Registry,
    /// The rows of `docs/control-plane-metrics.md`.
    pub(super) rows: &'a mut Vec<String>,
}

impl Adder<'_> {
    /// Registers a metric, adds its row, and returns it.
    pub(super) fn add<M: Initial<N> + Clone + Metric, const N: usize>(
        &mut self,
        name: &str,
        labels: [&'static str; N],
        meaning: &str,
    ) -> M {
        let metric = M::initial(labels);
        let kind = metric.metric_type();
        let suffix = if matches!(kind, MetricType::Counter) { "_total" } else { "" };
        let (kind, labels) = (kind.as_str(), labels.join(", "));
        self.rows.push(format!("| `headgate_{name}{suffix}` | {kind} | {labels} | {meaning} |\n"));
        self.registry.register(name, meaning, metric.clone());
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
