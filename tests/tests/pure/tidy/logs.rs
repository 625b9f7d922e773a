//! Log lines are for people and for programs that read JSON: no field is Rust's Debug text, and a
//! closed standard output or standard error ends no program.

use super::{files, text};

/// The macros of log lines that everybody sees.
const MACROS: [&str; 3] = ["info!(", "warn!(", "error!("];

/// The product code of a file, without its tests.
fn product(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text)
}

/// The arguments of a macro, up to the bracket that ends it. Strings may contain brackets.
fn arguments(after: &str) -> &str {
    let (mut depth, mut is_text, mut is_escaped) = (1, false, false);
    for (at, character) in after.char_indices() {
        match character {
            '"' if !is_escaped => is_text = !is_text,
            '(' if !is_text => depth += 1,
            ')' if !is_text => depth -= 1,
            _ => {}
        }
        is_escaped = character == '\\' && !is_escaped;
        if depth == 0 {
            return &after[..at];
        }
    }
    after
}

/// The fields before the message, and the fields after it.
fn has_debug_field(arguments: &str) -> bool {
    let outside = arguments.split('"').step_by(2);
    outside.flat_map(|part| part.split(',')).any(|field| {
        let value = field.split_once('=').map_or(field, |(_, value)| value);
        value.trim_start().starts_with('?')
    })
}

#[test]
fn fields_of_log_lines_are_no_debug_text() {
    assert!(has_debug_field("?inputs, \"changed\"") && has_debug_field("node = %node, mode = ?mode, \"a, ?b\""));
    assert!(!has_debug_field("%error, mode, \"is it so, ?maybe\""));
    let (mut wrong, mut lines) = (Vec::new(), 0);
    for path in files() {
        let shown = path.display().to_string();
        if !shown.contains("/src/") || shown.starts_with("tests/") || !shown.ends_with(".rs") || shown.contains("tests")
        {
            continue;
        }
        let text = text(&path).unwrap();
        let code = product(&text);
        for name in MACROS {
            for (at, _) in code.match_indices(name) {
                let arguments = arguments(&code[at + name.len()..]);
                lines += 1;
                if has_debug_field(arguments) {
                    wrong.push(format!("{shown}: {name}{arguments})"));
                }
            }
        }
        if ["println!(", "print!("].iter().any(|name| code.contains(name)) {
            wrong.push(format!("{shown}: println! and eprintln! panic if the stream is closed; use writeln!"));
        }
    }
    assert!(lines > 100, "{lines}");
    assert!(wrong.is_empty(), "write words in place of Debug text: {wrong:#?}");
}
