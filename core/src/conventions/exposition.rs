//! The two formats in which metrics are told. Prometheus asks for OpenMetrics by its name; whoever
//! does not gets what kube-proxy gives: the older text format, in which a counter is described
//! under the name that it is counted by.

use std::collections::HashSet;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The page and its content type, from OpenMetrics text, as the request's `Accept` headers ask for
/// it.
pub fn page<'a>(accept: impl IntoIterator<Item = &'a str>, open_metrics: String) -> (&'static str, String) {
    let mut accepted = accept.into_iter().flat_map(|value| value.split(','));
    if accepted.any(|one| one.trim().starts_with("application/openmetrics-text")) {
        return (OPEN_METRICS, open_metrics);
    }
    (TEXT, older_text(&open_metrics))
}

/// The same samples with descriptions as of text format 0.0.4.
fn older_text(open_metrics: &str) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_for_open_metrics_gets_it() {
        let asked = |accept: &[&str]| page(accept.iter().copied(), "# EOF\n".to_owned());
        assert_eq!(
            asked(&["text/html, application/openmetrics-text; version=1.0.0;q=0.5"]),
            (OPEN_METRICS, "# EOF\n".to_owned())
        );
        assert_eq!(asked(&["text/html", "application/openmetrics-text"]).0, OPEN_METRICS);
        for accept in [&[][..], &["*/*"], &["text/plain;version=0.0.4"]] {
            assert_eq!(asked(accept), (TEXT, String::new()));
        }
    }

    #[test]
    fn counters_are_described_by_the_name_that_they_are_counted_by() {
        let open_metrics = "# HELP a_b Words of it.\n# TYPE a_b counter\na_b_total{x=\"# y\"} 1\n# HELP c_seconds C.\n# TYPE c_seconds gauge\n\
                            # UNIT c_seconds seconds\nc_seconds 0.5\n# EOF\n";
        let expected = "# HELP a_b_total Words of it.\n# TYPE a_b_total counter\na_b_total{x=\"# y\"} 1\n# HELP c_seconds C.\n\
                        # TYPE c_seconds gauge\nc_seconds 0.5\n";
        assert_eq!(older_text(open_metrics), expected);
    }
}
