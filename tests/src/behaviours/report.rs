//! Reads the results of the last test run from nextest's JUnit report.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};

use super::scan::ProvingTest;

/// The paths of nextest's reports, for each profile.
const PLACES: [&str; 2] = ["target/nextest/ci/junit.xml", "target/nextest/default/junit.xml"];

/// The tests of a run: binary, full name, and whether the test passed.
#[derive(Debug, Default)]
pub struct Report(Vec<(String, String, bool)>);

impl Report {
    /// Reads the newest report below `root`.
    ///
    /// # Errors
    /// No report exists, or the newest report cannot be read.
    pub fn newest(root: &Path) -> Result<Self> {
        let places = PLACES.map(|place| root.join(place));
        let age =
            |path: &PathBuf| path.metadata().and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let newest = places.iter().filter(|path| path.is_file()).max_by_key(|path| age(path));
        let path = newest.context("no report of a test run: run `make test` first")?;
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        Ok(Self::parse(&text))
    }

    /// Parses a JUnit document of nextest.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut tests = Vec::new();
        for element in text.split("<testcase ").skip(1) {
            let (head, rest) = element.split_once('>').unwrap_or((element, ""));
            let (Some(name), Some(binary)) = (attribute(head, "name"), attribute(head, "classname")) else { continue };
            let body = if head.ends_with('/') { "" } else { rest.split("</testcase>").next().unwrap_or_default() };
            let has_failed = body.contains("<failure") || body.contains("<error");
            tests.push((binary, name, !has_failed));
        }
        Self(tests)
    }

    /// The reason why a test does not count as passed, or `None` if all runs of the test passed.
    #[must_use]
    pub fn objection(&self, test: &ProvingTest) -> Option<&'static str> {
        let binary_id = test.binary_id();
        let module = test.module();
        let is_it = |binary: &str, name: &str| {
            binary == binary_id && name.rsplit("::").next() == Some(&test.name) && name.starts_with(&module)
        };
        let mut runs = self.0.iter().filter(|(binary, name, _)| is_it(binary, name)).peekable();
        if runs.peek().is_none() {
            return Some("did not run");
        }
        (!runs.all(|(_, _, passed)| *passed)).then_some("failed")
    }
}

fn attribute(head: &str, name: &str) -> Option<String> {
    let start = format!("{name}=\"");
    let value = head.split(' ').find_map(|word| word.strip_prefix(&start))?;
    Some(value.split('"').next()?.to_owned())
}
