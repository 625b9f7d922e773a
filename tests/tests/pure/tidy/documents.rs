//! Checks that the links and make targets in documents exist, and that documents do not contradict
//! each other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn documents() -> impl Iterator<Item = (PathBuf, String)> {
    let files = super::files().into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    files.map(|path| (path.clone(), super::text(&path).unwrap()))
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
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(
                super::root().join(&target).exists(),
                "{}: the target of link {link} does not exist",
                path.display()
            );
            if !anchor.is_empty() {
                let anchors = anchors(&super::text(&target).unwrap());
                assert!(anchors.contains(anchor), "{}: the target of link {link} has no such heading", path.display());
            }
        }
    }
    assert!(seen > 0, "no link was found: this test does not read links correctly");
}

#[test]
fn every_make_target_that_documents_name_exists() {
    let makefile = super::text(Path::new("Makefile")).unwrap();
    let targets: BTreeSet<&str> = makefile
        .lines()
        .filter_map(|line| line.split_once(": ").or(line.split_once(":")).map(|(name, _)| name))
        .collect();
    let mut seen = 0;
    for (path, text) in documents() {
        for line in text.lines() {
            for rest in line.split("make ").skip(1) {
                let before = line.split("make ").next().unwrap();
                let is_command =
                    before.is_empty() || before.ends_with('`') || before.trim() == "sudo" || before.trim().is_empty();
                if !is_command {
                    continue;
                }
                let target: String = rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
                assert!(targets.contains(target.as_str()), "{}: make {target} does not exist", path.display());
                seen += 1;
            }
        }
    }
    assert!(seen > 0, "no document names a make target");
}

#[test]
fn make_help_lists_every_target() {
    let makefile = super::text(Path::new("Makefile")).unwrap();
    let phony = makefile.lines().find_map(|line| line.strip_prefix(".PHONY: ")).unwrap();
    for target in phony.split(' ') {
        let described = makefile.lines().any(|line| line.starts_with(&format!("{target}: ")) && line.contains("## "));
        assert!(described, "make {target} has no description for make help");
    }
}

/// A fact that stands on two pages differs sooner or later.
#[test]
fn the_table_of_resumes_and_the_table_of_failures_stand_on_one_page() {
    for cells in [&["resume"][..], &["what fails", "what stops"]] {
        let is_head = |line: &str| line.starts_with('|') && line.split('|').any(|cell| cells.contains(&cell.trim()));
        let pages = documents().filter(|(_, text)| text.lines().any(is_head)).map(|(path, _)| path);
        let pages: Vec<PathBuf> = pages.collect();
        assert_eq!(pages.len(), 1, "tables with {cells:?}: {pages:?}; keep one, and link to it");
    }
}

/// Nobody publishes images, so each reader pushes them to a registry of their own.
#[test]
fn documents_name_no_image_that_is_not_published() {
    let mut seen = 0;
    for (path, text) in documents() {
        for image in text.split("image").filter_map(|rest| rest.strip_prefix(": ").or(rest.strip_prefix('='))) {
            seen += 1;
            let image = image.split_whitespace().next().unwrap_or_default();
            assert!(!image.starts_with("headgate/"), "{}: write REGISTRY/ in front of {image}", path.display());
        }
    }
    assert!(seen > 0, "no document names an image");
}

/// The words of the documents and manifests agree with the roles of the control plane.
#[test]
fn the_number_of_kinds_that_the_control_plane_reads_is_that_of_its_roles() {
    const NUMBERS: [&str; 8] = ["no", "one", "two", "three", "four", "five", "six", "seven"];
    let roles = super::text(Path::new("deploy/kustomize/base/rbac.yaml")).unwrap();
    let (mut resources, mut read, mut listed) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for line in roles.lines().map(|line| line.trim().trim_end_matches(']')) {
        if let Some(list) = line.strip_prefix("resources: [") {
            resources = list.split(", ").collect();
        } else if let Some(verbs) = line.strip_prefix("verbs: [") {
            let has = |verb| verbs.split(", ").any(|other| other == verb);
            read.extend(resources.iter().copied().filter(|_| has("get") || has("list")));
            listed.extend(resources.iter().copied().filter(|_| has("list")));
        }
    }
    let mut seen = 0;
    for path in super::files() {
        let is_text = path.extension().is_some_and(|extension| extension == "md" || extension == "yaml");
        let Some(text) = super::text(&path).filter(|_| is_text) else { continue };
        for (verb, kinds) in [("reads ", &read), ("list and watch ", &listed)] {
            for rest in text.split(verb).skip(1) {
                let Some(number) = rest.split_once(" kinds").map(|(number, _)| number) else { continue };
                if NUMBERS.contains(&number) {
                    seen += 1;
                    let shown = path.display();
                    assert_eq!(number, NUMBERS[kinds.len()], "{shown}: {verb}{number} kinds, but {kinds:?}");
                }
            }
        }
    }
    assert!(seen > 0, "no document says how many kinds the control plane reads");
}
