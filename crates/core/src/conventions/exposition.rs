//! The two exposition formats of metrics pages.
//!
//! A client that accepts OpenMetrics, such as Prometheus, gets OpenMetrics. Every other client gets
//! the Prometheus text format 0.0.4, which kube-proxy serves. The formats differ in counters: for
//! the counter `a_total`, OpenMetrics describes `a` and the text format describes `a_total`.

use std::collections::HashSet;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns the content type and the text of a metrics page, in the format that the values of the
/// request's `Accept` headers select. `open_metrics` is the page in OpenMetrics format.
pub fn page<'a>(accept: impl IntoIterator<Item = &'a str>, open_metrics: String) -> (&'static str, String) {
    let mut accepted = accept.into_iter().flat_map(|value| value.split(','));
    if accepted.any(|one| one.trim().starts_with("application/openmetrics-text")) {
        return (OPEN_METRICS, open_metrics);
    }
    (TEXT, text_format(&open_metrics))
}

/// Converts a page from OpenMetrics to text format 0.0.4.
fn text_format(open_metrics: &str) -> String {
    let counters: HashSet<&str> =
        open_metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut out = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("EOF" | "UNIT"), ..) => continue,
            (Some("#"), Some(what), Some(name), Some(rest)) if counters.contains(name) => {
                out.extend(["# ", what, " ", name, "_total ", rest]);
            }
            _ => out.push_str(line),
        }
        out.push('\n');
    }
    out
}
