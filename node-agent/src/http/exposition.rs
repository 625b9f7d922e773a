//! The two formats in which metrics are told. Prometheus asks for OpenMetrics by its name; whoever does not gets what kube-proxy gives: the older text format, in
//! which a counter is described under the name that it is counted by.

use std::collections::HashSet;

use axum::{
    http::{HeaderMap, HeaderName, header},
    response::IntoResponse,
};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The page, from OpenMetrics text, as the request's headers ask for it.
pub(super) fn answer(request: &HeaderMap, open_metrics: String) -> impl IntoResponse + use<> {
    let accepted = request.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let asks =
        accepted.flat_map(|value| value.split(',')).any(|one| one.trim().starts_with("application/openmetrics-text"));
    let page = |content_type: &'static str, text: String| ([(header::CONTENT_TYPE, content_type)], text);
    let answer: ([(HeaderName, &'static str); 1], String) =
        if asks { page(OPEN_METRICS, open_metrics) } else { page(TEXT, older_text(&open_metrics)) };
    answer
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
    fn counters_are_described_by_the_name_that_they_are_counted_by() {
        let open_metrics = "# HELP a_b Words of it.\n# TYPE a_b counter\na_b_total{x=\"# y\"} 1\n# HELP c_seconds C.\n# TYPE c_seconds gauge\n\
                            # UNIT c_seconds seconds\nc_seconds 0.5\n# EOF\n";
        let expected = "# HELP a_b_total Words of it.\n# TYPE a_b_total counter\na_b_total{x=\"# y\"} 1\n# HELP c_seconds C.\n\
                        # TYPE c_seconds gauge\nc_seconds 0.5\n";
        assert_eq!(older_text(open_metrics), expected);
    }
}
