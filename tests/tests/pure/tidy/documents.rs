//! The links and make targets in documents exist, and documents name only published images.

use std::{collections::BTreeSet, path::Path};

fn documents() -> Vec<(String, String)> {
    super::texts(&[".md"])
}

/// The targets of `[text](target)` outside of fenced code.
fn links(text: &str) -> Vec<String> {
    let mut links = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if !fenced {
            let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            links.extend(targets.map(|(target, _)| target.to_owned()));
        }
    }
    links
}

/// The tests that documents name, as a link with the name of the test to its file.
fn named_tests(text: &str) -> Vec<(String, String)> {
    let links = text.split("[`").skip(1).filter_map(|rest| rest.split_once("`]("));
    let tests = links.filter_map(|(name, rest)| Some((name, rest.split_once(')')?.0)));
    let is_test = |(name, target): &(&str, &str)| target.contains("/tests/") && !name.contains(['/', '.']);
    tests.filter(is_test).map(|(name, target)| (name.to_owned(), target.to_owned())).collect()
}

/// The anchors of a document's headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    headings
        .map(|heading| {
            let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            kept.collect::<String>().to_lowercase().replace(' ', "-")
        })
        .collect()
}

#[test]
fn every_link_has_a_target() {
    let mut seen = 0;
    for (path, text) in documents() {
        for link in links(&text) {
            if link.starts_with("https://") || link.starts_with("http://") {
                continue;
            }
            seen += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let page = Path::new(&path);
            let target = if file.is_empty() { page.to_owned() } else { page.parent().unwrap().join(file) };
            assert!(super::root().join(&target).exists(), "{path}: the target of link {link} does not exist");
            if !anchor.is_empty() {
                let anchors = anchors(&super::text(&target).unwrap());
                assert!(anchors.contains(anchor), "{path}: the target of link {link} has no such heading");
            }
        }
    }
    assert!(seen > 0, "no link was found: this test does not read links correctly");
}

#[test]
fn every_test_that_a_document_names_exists() {
    let mut seen = 0;
    for (path, text) in documents().iter().filter(|(path, _)| path != "docs/behaviours.md") {
        for (name, file) in named_tests(text) {
            let code = super::text(&Path::new(path).parent().unwrap().join(&file)).unwrap_or_default();
            assert!(code.contains(&format!("fn {name}()")), "{path}: {file} has no test {name}");
            seen += 1;
        }
    }
    assert!(seen > 0, "no document names a test");
}

#[test]
fn make_help_lists_every_target_and_documents_name_no_other() {
    let makefile = super::text(Path::new("Makefile")).unwrap();
    let phony = makefile.lines().find_map(|line| line.strip_prefix(".PHONY: ")).unwrap();
    let targets: BTreeSet<&str> = phony.split(' ').collect();
    for target in &targets {
        let described = makefile.lines().any(|line| line.starts_with(&format!("{target}: ")) && line.contains("## "));
        assert!(described, "make {target} has no description for make help");
    }
    let mut seen = 0;
    for (path, line) in documents().iter().flat_map(|(path, text)| text.lines().map(move |line| (path, line))) {
        let before = line.split("make ").next().unwrap();
        if before.ends_with('`') || before.trim() == "sudo" || before.trim().is_empty() {
            for rest in line.split("make ").skip(1) {
                let target: String = rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
                assert!(targets.contains(target.as_str()), "{path}: make {target} does not exist");
                seen += 1;
            }
        }
    }
    assert!(seen > 0, "no document names a make target");
}

/// Nobody publishes images, so each reader pushes them to a registry of their own.
#[test]
fn documents_name_no_image_that_is_not_published() {
    let mut seen = 0;
    for (path, text) in documents() {
        for image in text.split("image").filter_map(|rest| rest.strip_prefix(": ").or(rest.strip_prefix('='))) {
            seen += 1;
            let image = image.split_whitespace().next().unwrap_or_default();
            assert!(!image.starts_with("headgate/"), "{path}: write REGISTRY/ in front of {image}");
        }
    }
    assert!(seen > 0, "no document names an image");
}
