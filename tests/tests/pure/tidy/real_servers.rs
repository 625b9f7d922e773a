//! CONTRIBUTING.md lists each watch test that needs the stand-in API server, with the reason.

use std::{collections::BTreeSet, fs};

/// The section of CONTRIBUTING.md with the list.
const SECTION: &str = "## Tests against real API servers";

/// The names of the asynchronous tests in a file.
fn tests_in(path: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(super::root().join(path)).unwrap();
    let mut after_attribute = false;
    let mut names = BTreeSet::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("async fn ").filter(|_| after_attribute) {
            names.insert(name.split('(').next().unwrap().to_owned());
        }
        after_attribute = line.starts_with("#[tokio::test");
    }
    assert!(!names.is_empty(), "{path} has no tests");
    names
}

#[test]
fn tests_that_need_the_stand_in_api_server_are_listed() {
    let text = fs::read_to_string(super::root().join("CONTRIBUTING.md")).unwrap();
    let section = text.split(SECTION).nth(1).unwrap().split("\n## ").next().unwrap();
    let names = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).map(str::to_owned);
    let listed: BTreeSet<String> = names.collect();
    let needed = tests_in("tests/tests/streams/watch/mod.rs");
    let differing: Vec<_> = listed.symmetric_difference(&needed).collect();
    assert!(
        differing.is_empty(),
        "move these tests of tests/tests/streams/watch/mod.rs to watch/alike.rs, so that they run on real servers too, \
         or correct their list in CONTRIBUTING.md: {differing:?}"
    );
}
