//! The queries of `deploy/monitoring`, and what they find in the metrics of running programs.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::testbed::process::tool;

/// A range in place of Grafana's `$__rate_interval`.
const RANGE: &str = "5m";

/// The words of `text` that begin like the name of a metric of Headgate's programs.
#[must_use]
pub fn metrics(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| ["headgate_", "kubeproxy_", "process_"].iter().any(|prefix| word.starts_with(prefix)))
        .collect()
}

/// The text of a file of `deploy/monitoring`.
///
/// # Errors
/// The file cannot be read.
pub fn file(name: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/monitoring").join(name);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// The queries in a file: the values of `expr`, in YAML also over several lines.
///
/// # Errors
/// The file cannot be read, or a query has no end.
pub fn queries(name: &str) -> Result<Vec<String>> {
    let text = file(name)?;
    if name.ends_with(".json") {
        let lines = text.lines().filter_map(|line| line.trim().strip_prefix("\"expr\": "));
        return lines.map(|line| Ok(serde_json::from_str(line.trim_end_matches(','))?)).collect();
    }
    let begins = text.match_indices(" expr: ").map(|(index, found)| &text[index + found.len()..]);
    let end = |rest: &str| ["\n        for: ", "\n        labels:"].iter().filter_map(|end| rest.find(end)).min();
    begins.map(|rest| Ok(rest[..end(rest).context("a query has no end")?].to_owned())).collect()
}

/// The metrics of a running program, as text, and what Prometheus adds to them.
#[derive(Debug)]
pub struct Page {
    /// The label `job`.
    pub job: &'static str,
    /// The label `instance`.
    pub instance: String,
    /// The HTTP answer with the page.
    pub text: String,
}

impl Page {
    /// The samples as `promtool` reads them. They grow evenly for ten minutes, so a rate is
    /// positive only if the program has counted something.
    fn series(&self) -> impl Iterator<Item = Value> + '_ {
        let Self { job, instance, text } = self;
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        body.lines().filter(|line| !line.starts_with('#')).filter_map(move |line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let comma = if labels == "}" { "" } else { "," };
            let series = format!("{name}{{job=\"{job}\",instance=\"{instance}\"{comma}{labels}");
            // promtool reads no exponents.
            let value = value.parse::<f64>().ok().filter(|value| value.is_finite())?;
            Some(json!({ "series": series, "values": if value < 0.0 { format!("{value}x10") } else { format!("0+{value}x10") } }))
        })
    }
}

/// Ensures that each query finds a value in the pages. The queries run in Prometheus' own engine.
///
/// # Errors
/// A query finds nothing, or is none. The error has what `promtool` prints.
pub fn find_values(pages: &[Page], queries: &[String]) -> Result<()> {
    let series: Vec<Value> = pages.iter().flat_map(Page::series).collect();
    let test = |query: &String| {
        let query = query.replace("$__rate_interval", RANGE);
        let found = json!([{ "labels": "{}", "value": 1 }]);
        json!({ "expr": format!("count(({query}) >= -Inf) > bool 0"), "eval_time": "8m", "exp_samples": found })
    };
    let tests = json!([{
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": queries.iter().map(test).collect::<Vec<_>>(),
    }]);
    let file = tempfile::NamedTempFile::with_suffix(".yaml")?;
    fs::write(&file, json!({ "evaluation_interval": "1m", "tests": tests }).to_string())?;
    let output = Command::new(tool("promtool")).args(["test", "rules"]).arg(file.path()).output()?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success(), "queries without a value:\n{said}");
    Ok(())
}
