//! The form of all text: the width of lines, their ends, and no paths of machines.

/// The largest width of a line of comment or prose.
const COLUMNS: usize = 100;

/// Pages that `make docs` and `make behaviours` generate.
const GENERATED: [&str; 4] =
    ["docs/behaviours.md", "docs/configuration.md", "docs/metrics.md", "docs/control-plane-metrics.md"];

/// The numbers of the lines of comment or prose that are too wide. Tables, links and fenced code
/// may be wider.
fn wide_lines(path: &str, text: &str) -> Vec<usize> {
    let is_prose = path.ends_with(".md");
    let comment = if path.ends_with(".rs") || path.ends_with(".proto") { "//" } else { "#" };
    let mut is_fenced = false;
    let mut is_wide = |line: &str| {
        let trimmed = line.trim_start();
        is_fenced ^= is_prose && trimmed.starts_with("```");
        let is_text = if is_prose { !is_fenced } else { trimmed.starts_with(comment) };
        let may_be_wide = trimmed.starts_with('|') || line.contains("](") || line.contains("://");
        is_text && !may_be_wide && line.chars().count() > COLUMNS
    };
    text.lines().enumerate().filter(|(_, line)| is_wide(line)).map(|(index, _)| index + 1).collect()
}

#[test]
fn comments_and_prose_end_at_column_100() {
    let mut faults = Vec::new();
    for (path, text) in
        super::texts(&[".rs", ".proto", ".md", ".toml", ".yaml", ".yml", "Makefile", ".ci/run", ".ci/setup"])
    {
        if !GENERATED.contains(&path.as_str()) {
            faults.extend(wide_lines(&path, &text).into_iter().map(|line| format!("{path}:{line}")));
        }
    }
    assert!(faults.is_empty(), "wider than {COLUMNS} columns; wrap them:\n{}", faults.join("\n"));
    let wide = "x ".repeat(51);
    assert_eq!(wide_lines("a.rs", &format!("let a;\n    /// {wide}\nlet b = \"{wide}\";\n")), [2]);
    assert_eq!(wide_lines("a.md", &format!("{wide}\n| {wide}\n```\n{wide}\n```\nhttps://{wide}\n{wide}")), [1, 7]);
}

#[test]
fn text_names_no_machine_and_no_line_ends_with_spaces() {
    // The words are split, so that this file itself passes the test.
    let words = [["/wo", "rk/"], ["/ro", "ot/"], ["/ho", "me/"], ["/Us", "ers/"], ["#[ign", "ore]"]]
        .map(|parts| parts.concat());
    for (path, text) in super::texts(&[""]).iter().filter(|(path, text)| !text.is_empty() && !path.ends_with(".lock")) {
        assert!(text.ends_with('\n') && !text.ends_with("\n\n"), "{path} does not end with one newline");
        for (number, line) in text.lines().enumerate() {
            assert!(line.trim_end() == line, "{path}:{}: spaces at the end of the line", number + 1);
            let found = words.iter().find(|word| line.contains(word.as_str()));
            assert!(
                found.is_none(),
                "{path}:{}: {found:?}: a path of a machine, or a test that is ignored without a reason",
                number + 1
            );
        }
    }
}
