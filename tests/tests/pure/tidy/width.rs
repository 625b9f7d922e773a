//! No line of a comment or of prose is wider than 100 columns.

use std::path::Path;

/// The largest width of a line of comment or prose.
const COLUMNS: usize = 100;

/// Pages that `make docs` and `make behaviours` generate.
const GENERATED: [&str; 4] =
    ["docs/behaviours.md", "docs/configuration.md", "docs/metrics.md", "docs/control-plane-metrics.md"];

/// The numbers of the lines that are too wide. Tables, links and fenced code may be wider.
fn wide_lines(path: &Path, text: &str) -> Vec<usize> {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let is_prose = extension == "md";
    let comment = if matches!(extension, "rs" | "proto") { "//" } else { "#" };
    let mut is_fenced = false;
    let mut wide = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        is_fenced ^= is_prose && trimmed.starts_with("```");
        let is_text = if is_prose { !is_fenced } else { trimmed.starts_with(comment) };
        let may_be_wide = trimmed.starts_with('|') || line.contains("](") || line.contains("://");
        if is_text && !may_be_wide && line.chars().count() > COLUMNS {
            wide.push(index + 1);
        }
    }
    wide
}

#[test]
fn comments_and_prose_end_at_column_100() {
    let mut faults = Vec::new();
    let mut lines = 0;
    for path in super::files() {
        let kinds = ["rs", "proto", "md", "toml", "yaml", "yml", "sh"];
        let has_comments = path.extension().is_some_and(|extension| kinds.iter().any(|kind| extension == *kind))
            || ["Makefile", ".ci/run", ".ci/setup"].iter().any(|name| path == Path::new(name));
        let is_generated = GENERATED.iter().any(|page| path == Path::new(page));
        let text = super::text(&path).filter(|_| has_comments && !is_generated);
        let Some(text) = text else { continue };
        lines += text.lines().count();
        faults.extend(wide_lines(&path, &text).into_iter().map(|line| format!("{}:{line}", path.display())));
    }
    assert!(lines > 10_000, "only {lines} lines were read: this test does not find the files");
    assert!(faults.is_empty(), "wider than {COLUMNS} columns; wrap them:\n{}", faults.join("\n"));
}

#[test]
fn wide_lines_are_found() {
    let (wide, rust, prose) = ("x ".repeat(51), Path::new("a.rs"), Path::new("a.md"));
    assert_eq!(wide_lines(rust, &format!("let a;\n    /// {wide}\nlet b = \"{wide}\";\n")), [2]);
    assert_eq!(wide_lines(prose, &format!("{wide}\n| {wide}\n```\n{wide}\n```\nhttps://{wide}\n{wide}")), [1, 7]);
    assert_eq!(wide_lines(Path::new("a.yaml"), &format!("# {wide}\na: {wide}")), [1]);
    let umlauts = "ä".repeat(97);
    assert_eq!(wide_lines(rust, &format!("// {umlauts}")), [] as [usize; 0]);
}
