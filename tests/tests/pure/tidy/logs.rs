//! Log lines are for people and for programs that read JSON: no field is Rust's Debug text, and a
//! closed standard output or standard error ends no program.

/// The macros of log lines that everybody sees.
const MACROS: [&str; 3] = ["info!(", "warn!(", "error!("];

/// Whether a field before the message is Debug text. `after` follows the bracket of the macro.
fn has_debug_field(after: &str) -> bool {
    let fields = after.split('"').next().unwrap_or_default().split(',');
    fields
        .map(|field| field.split_once('=').map_or(field, |(_, value)| value))
        .any(|value| value.trim_start().starts_with('?'))
}

#[test]
fn fields_of_log_lines_are_no_debug_text() {
    assert!(has_debug_field("?inputs, \"changed\"") && has_debug_field("node = %node, mode = ?mode, \"a, ?b\""));
    assert!(!has_debug_field("%error, mode, \"is it so, ?maybe\""));
    let (mut wrong, mut lines) = (Vec::new(), 0);
    for (path, text) in super::products().iter().filter(|(path, _)| path.contains("/src/")) {
        let code = super::product_code(text);
        for (at, name) in MACROS.iter().flat_map(|name| code.match_indices(name)) {
            lines += 1;
            if has_debug_field(&code[at + name.len()..]) {
                wrong.push(format!("{path}:{}: Debug text: write words", code[..at].lines().count()));
            }
        }
        if ["println!(", "print!("].iter().any(|name| code.contains(name)) {
            wrong.push(format!("{path}: println! and eprintln! panic if the stream is closed; use writeln!"));
        }
    }
    assert!(lines > 100, "{lines}");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
